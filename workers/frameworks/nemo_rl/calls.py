"""Calls from NeMo-RL's driver to the workers of both sides, and their answers within a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ....integration.errors import PeerLost, RefitError, RefitTimeout
from ...engines.common.answers import REFIT_ERROR, raise_refit_errors

Answer = dict[str, Any]
# Who stands behind each object: ranks of the refit world.
Pending = Sequence[tuple[Any, Sequence[int]]]


class Workers:
    """Both worker groups of a NeMo-RL run.

    Args:
        policy: NeMo-RL's ``Policy``.
        generation: NeMo-RL's ``VllmGeneration``.
        limit_s: seconds in which all workers have to answer a call.

    Attributes:
        missing: refit ranks that were late or had ended when their answers were asked for.
    """

    def __init__(self, policy: Any, generation: Any, limit_s: float) -> None:
        self._policy, self._generation = policy.worker_group, generation.worker_group
        self._limit_s = limit_s
        self.missing: set[int] = set()
        self._rpc = (
            "checkpoint_engine_rpc_async"
            if generation.cfg["vllm_cfg"]["async_engine"]
            else "checkpoint_engine_rpc"
        )
        self.train_ranks = len(self._policy.workers)
        self.gen_ranks = len(self._generation.workers)
        self._per_engine = self.gen_ranks // generation.dp_size

    @property
    def first_ranks(self) -> list[int]:
        """Refit ranks of the engines' first workers."""
        return list(range(self.train_ranks, self.train_ranks + self.gen_ranks, self._per_engine))

    def policy(self, call: Callable[..., Answer], **arguments: Any) -> Pending:
        """Begin ``call(worker, …)`` in every policy worker's process."""
        refs = self._policy.run_all_workers_single_data("__ray_call__", fn=call, **arguments)
        return [(ref, [rank]) for rank, ref in enumerate(refs)]

    def first_policy(self, call: Callable[..., Answer], **arguments: Any) -> Pending:
        """Begin ``call(worker, …)`` on policy rank 0 alone."""
        return [(self._policy.workers[0].__ray_call__.remote(call, **arguments), [0])]

    def engines(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """Begin ``method`` on every worker of the engines, with a tuple of arguments for each engine."""
        refs = self._generation.run_all_workers_multiple_data(
            self._rpc,
            method_args=list(arguments),
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
            common_kwargs={"checkpoint_method": method},
        )
        ranks = [range(first, first + self._per_engine) for first in self.first_ranks]
        return list(zip(refs, ranks, strict=True))

    def answers(self, pending: Pending, stage: str, limit_s: float | None = None) -> list[Answer]:
        """All answers, by refit rank.

        Args:
            pending: calls that were begun.
            stage: of the refit, for errors.
            limit_s: another limit than all calls have.

        Raises:
            RefitTimeout: somebody has not answered in time; says who.
            RefitError: of the kind that a worker raised; of several the one with the cause.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        refs = [ref for ref, _ in pending]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        found: list[Answer] = []
        for ref, ranks in pending:
            if ref in late:
                self.missing.update(ranks)
                continue
            try:
                given: Answer | list[Answer] = ray.get(ref)
            except RayActorError as error:
                self.missing.update(ranks)
                given = _failed(PeerLost, f"the worker's process has ended ({error})", blamed=ranks[0])
            except RayError as error:
                given = _failed(RefitError, str(error))
            found += given if isinstance(given, list) else [given] * len(ranks)
        if late:
            who = [rank for ref, ranks in pending if ref in late for rank in ranks]
            timeout = RefitTimeout(
                f"{self._named(who)} did not answer within {limit_s:.0f} s. The engines may hold weights in part and refuse "
                "to generate; see what those workers do (py-spy dump), and sync again or start anew",
                stage=stage,
            )
            for told in dict.fromkeys(given[REFIT_ERROR]["text"] for given in found if REFIT_ERROR in given):
                timeout.add_note(f"Another worker answered: {told}")
            raise timeout
        return raise_refit_errors(found, "refit rank")

    def present(self, pending: Pending) -> Pending:
        """Those of ``pending`` for whose answers it is worth waiting."""
        return [(ref, ranks) for ref, ranks in pending if not self.missing.intersection(ranks)]

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(
            f"policy worker {rank}" if rank < self.train_ranks else f"vLLM worker {rank - self.train_ranks}"
            for rank in ranks
        )


def within(limit_s: float, call: Callable[[], Any], what: str, stage: str) -> Any:
    """What ``call`` returns: one of NeMo-RL's, which wait for their workers for ever.

    It runs in a thread of its own, which is left behind if it is late; the process may end in spite of it.

    Raises:
        RefitTimeout: it has not returned after ``limit_s`` seconds.
    """
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"rlrefit-{stage}").start()
    if not wait([result], limit_s).done:
        raise RefitTimeout(
            f"{what} did not return within {limit_s:.0f} s: a worker does not answer. See what the workers do (py-spy dump), "
            "and start them anew",
            stage=stage,
        )
    return result.result()


def _failed(kind: type[RefitError], text: str, blamed: int = -1) -> Answer:
    return {REFIT_ERROR: {"type": kind.__name__, "text": text, "blamed": blamed}}
