"""What an SGLang engine can be asked, by the driver: its own steps, and commands to its workers; and how it has to be started."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

from ....integration.errors import RefitError
from ..common.answers import raise_refit_errors
from .callers import Answer, Caller, Step
from .compat import VERSION, is_supported
from .loader import LOADER
from .standing import Standing
from .stores import stores_of


class EngineCalls:
    """Calls of one engine that was started with ``custom_weight_loader=[LOADER]``.

    Args:
        caller: the way to the engine.

    Attributes:
        settings: of the engine, as :data:`~.callers.SETTINGS`, when it was last asked.

    Raises:
        RefitError: how the engine was started; everything that is wrong with it.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.settings: dict[str, Any] = caller.call(Step("settings")).value
        self._require_settings()

    def step(self, name: str, **fields: Any) -> Answer:
        """Do a step.

        Raises:
            RefitError: SGLang refused it.
        """
        answer = self._caller.call(Step(name, fields))
        if not answer.success:
            raise RefitError(f"SGLang refused {name}: {answer.message}", stage="transfer")
        return answer

    def update(self, payloads: list[str], load_format: str = LOADER) -> Answer:
        """One request of SGLang's ``update_weights_from_tensor``; caches are flushed by a step of their own."""
        nothing = [_pickled([])] * self.settings["tp_size"]
        return self.step(
            "update_weights_from_tensor",
            serialized_named_tensors=payloads or nothing,
            load_format=load_format,
            flush_cache=False,
            disable_draft_model=True,
        )

    def extend(self, loader: str) -> None:
        """Have all workers call another of the engine's ``custom_weight_loader``, which adds commands (``also_serve``)."""
        self.update([], loader)

    def ask(self, command: str, *arguments: Any) -> list[dict[str, Any]]:
        """Answers of all workers to a command, whose arguments are plain data.

        Raises:
            RefitError: of the kind that a worker raised.
        """
        payload = _pickled([(command, json.dumps(arguments))])
        return self._answers(command, self.update([payload] * self.settings["tp_size"]))

    def deliver(self, payloads: list[str]) -> list[dict[str, Any]]:
        """A flattened bucket for each worker, which rlrefit's loader takes in the place of SGLang's own. As :meth:`ask`."""
        return self._answers("load", self.update(payloads))

    def _answers(self, command: str, answer: Answer) -> list[dict[str, Any]]:
        try:
            found, _ = json.JSONDecoder().raw_decode(answer.message)
        except ValueError as error:
            raise RefitError(
                f"SGLang's workers did not answer {command} but said {answer.message!r}: rlrefit's loader found no place in "
                f"them; the engine's log says why. Start an engine of SGLang {VERSION}",
                stage="settings",
            ) from error
        return raise_refit_errors(found, "SGLang worker")

    def standing(self) -> Standing:
        """What sleeps and whether the engine is paused, whoever did it; no running request is waited for."""
        found: Standing = self.step("standing").value
        return found

    def flush(self, seconds: float | None = None) -> Answer:
        """Flush the caches; batches that are on their way out get some seconds."""
        return self._caller.call(Step("flush_cache", {} if seconds is None else {"timeout_s": seconds}))

    def require_no_store(self) -> None:
        """To be called before a refit: SGLang attaches a store to an engine that runs, if it has host memory for its cache.

        Raises:
            RefitError: it has one now.
        """
        if not self.settings["enable_hierarchical_cache"]:
            return
        self.settings = self._caller.call(Step("settings")).value
        if found := stores_of(self.settings):
            raise RefitError(
                f"SGLang was given a store that rlrefit can't empty: {'; '.join(found)}. Nothing was written; detach it (DELETE "
                "/hicache/storage-backend) and don't attach again what it holds",
                stage="settings",
            )

    def _require_settings(self) -> None:
        settings = self.settings
        problems = []
        if not is_supported(settings["version"]):
            problems.append(f"it is version {settings['version']}, and rlrefit is written for {VERSION}")
        if LOADER not in (settings["custom_weight_loader"] or []):
            problems.append(f"custom_weight_loader lacks {LOADER!r}")
        for name in ("pp_size", "dp_size"):
            if settings[name] != 1:
                problems.append(
                    f"{name} is {settings[name]}; refits of one tensor-parallel group are what there is"
                )
        if settings["enable_eplb"]:
            problems.append(
                "enable_eplb moves experts between ranks, and a refit would overwrite other experts"
            )
        if settings["weight_cache_mode"] != "off":
            problems.append(f"weight_cache_mode is {settings['weight_cache_mode']!r}: its weights are shared")
        if settings["disaggregation_mode"] != "null":
            problems.append(
                f"disaggregation_mode is {settings['disaggregation_mode']!r}: its queues are not flushed"
            )
        problems += stores_of(settings)
        if problems:
            raise RefitError(
                f"SGLang was started in a way that rlrefit does not refit: {'; '.join(problems)}. Nothing was written; start it "
                "otherwise",
                stage="settings",
            )


def _pickled(command: list[Any]) -> str:
    """What SGLang's safe unpickler reads: lists, tuples and text, so that it holds on any host."""
    return base64.b64encode(pickle.dumps(command)).decode()
