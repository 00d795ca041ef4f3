"""A double of SGLang's tokenizer manager and scheduler, with the ways in which the real ones fail.

As read in 0.5.17: the scheduler process ends where memory is released under requests, where memory is resumed that has not been
released, and where a flush fails that an update asked for; torch_memory_saver ends it where memory is released that is released
already; ``flush_cache`` fails while requests run or wait, retracted ones included; a paused engine starts none, and ends none that
run. Of a pause with ``abort`` the scheduler hears nothing but aborts, and the pause waits until no request is left. An update
waits for running requests unless the engine is paused. Its one worker is a real :class:`DestinationRefitMixin` over plain tensors.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, make_dataclass
from typing import Any

import torch

from rlrefit.integration.colocated.memory import MemoryWatch
from rlrefit.integration.errors import PlanError
from rlrefit.integration.layout import Fragment
from rlrefit.integration.quantize.formats import Format, to_json
from rlrefit.integration.weights.endpoints import storage_key
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.answers import answer
from rlrefit.workers.engines.common.destination_mixin import DestinationRefitMixin
from rlrefit.workers.engines.sglang.callers import SETTINGS
from rlrefit.workers.engines.sglang.engine_state import STATE, state_of
from rlrefit.workers.engines.sglang.loader import LOADER

from .recorded import REQUESTS, REQUESTS_WITH_SESSIONS, VERSION, VERSION_WITH_SESSIONS

CPU = torch.device("cpu")
# What a release or a resume without tags is of.
EVERYTHING = ("kv_cache", "weights", "cuda_graph")
SHAPES = {"a.weight": (8, 6), "b.weight": (5,), "c.weight": (4, 4), "d.weight_scale": (3,)}
DTYPES = {"b.weight": torch.float8_e4m3fn, "d.weight_scale": torch.float32}


class SchedulerEnded(BaseException):
    """SGLang's scheduler process would have ended."""


def weights(index: int) -> dict[str, torch.Tensor]:
    """Those of one version; a byte-wide one before wider ones, as exports may have them."""
    generator = torch.Generator().manual_seed(index)
    return {
        name: torch.randn(shape, generator=generator).to(DTYPES.get(name, torch.bfloat16))
        for name, shape in SHAPES.items()
    }


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in SHAPES)


class Holder:
    """Whole tensors by name: a source, or the destination of an engine."""

    device = CPU

    def __init__(self, index: int) -> None:
        self.held = weights(index)

    def take_on(self, index: int) -> None:
        for name, tensor in weights(index).items():
            self.held[name].copy_(tensor)

    def poison(self) -> None:
        for tensor in self.held.values():
            tensor.view(torch.uint8).fill_(0xFF)  # not a number in all of the dtypes

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self.held.items()]

    def fragments(self, specs: Sequence[TensorSpec] = ()) -> tuple[list[Fragment], dict[str, str]]:
        return [
            Fragment(n, tuple(t.shape), tuple((0, d) for d in t.shape), t) for n, t in self.held.items()
        ], {}

    def export(self, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, self.held[name]) for name in names)

    def load_weights(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in loaded:
            self.held[name].copy_(tensor)

    def prepare(self) -> None:
        pass

    def finish(self, version: int) -> None:
        pass

    def abandon(self) -> None:
        pass

    @property
    def kept_bytes(self) -> int:
        return sum(t.nbytes for t in self.held.values())

    def storage_key(self) -> Any:
        return storage_key(self.held.values())


class WorkerDouble(DestinationRefitMixin):
    """Commands as :class:`WorkerRefit` has them."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.undefined = ""
        # That it was begun anew with.
        self.seeds: list[int] = []
        # Weights that are held in blocks, and whether the refit has to write them in SGLang's place.
        self.blocks: dict[str, Format] = {}
        self.placing = False
        self._watch = MemoryWatch(CPU, interval_s=0)

    def _make_refit_destination(self) -> Holder:
        return self.holder

    def hold_in_blocks(self, formats: dict[str, Format]) -> None:
        self.blocks = formats
        for name, format in formats.items():
            codes, scales = format.encode(self.holder.held[name])
            self.holder.held |= {name: codes, name + format.scale_name_end: scales}

    def do(self, method: str, arguments: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self, method)(*arguments)
        return found

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu"}

    def join(self, rendezvous: Any, first: int, config: Any, engine: str) -> dict[str, Any]:
        return self.join_refit(rendezvous, first, config, engine)

    def refit(self, version: int) -> dict[str, Any]:
        record = super().refit(version)
        self.undefined = ""
        return record

    def close(self) -> dict[str, Any]:
        self.close_refit()
        return {}

    def serving_version(self) -> dict[str, Any]:
        from rlrefit.integration.errors import EngineDirty

        self.refit_state.require_clean()
        if self.undefined:
            raise EngineDirty(self.undefined)
        return {"version": self.refit_state.version}

    def formats(self, specs: Any) -> dict[str, Any]:
        weights = {name: i for i, name in enumerate(self.blocks)}
        assert weights.keys() <= {TensorSpec.from_json(spec).name for spec in specs}
        return {"weights": weights, "formats": [to_json(format) for format in self.blocks.values()]}

    def begin(self, version: int, specs: Any, as_asked: bool = False) -> dict[str, Any]:
        told = {TensorSpec.from_json(spec) for spec in specs}
        if told != set(self.holder.specs()):
            raise PlanError("the weights don't fill the model")
        assert as_asked or not self.blocks
        self.refit_state.mark_dirty(version)
        return {"placing": self.placing}

    def load(self, bucket: dict[str, Any]) -> dict[str, Any]:
        self.holder.load_weights(unpacked(bucket))
        return {}

    def synchronize(self) -> dict[str, Any]:
        return {}

    def finish(self, version: int) -> dict[str, Any]:
        return {}

    def commit(self, version: int) -> dict[str, Any]:
        self.refit_state.commit(version)
        self.undefined = ""
        return {}

    def discard(self, why: str) -> dict[str, Any]:
        self.undefined = why
        self.holder.poison()
        return {}

    def seed(self, seed: int) -> dict[str, Any]:
        self.seeds.append(seed)
        return {}

    def memory(self, restart: bool) -> dict[str, Any]:
        return asdict(self._watch.read("engine rank 0"))

    def empty_cache(self) -> dict[str, Any]:
        return {}


@dataclass
class Flushed:
    success: bool
    message: str = ""


class ManagerDouble:
    """``TokenizerManager``, and what its scheduler does."""

    def __init__(self, **settings: Any) -> None:
        plain: dict[str, Any] = {
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "device": "cpu",
            "enable_eplb": False,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": False,
            "custom_weight_loader": [LOADER],
            "weight_cache_mode": "off",
            "disaggregation_mode": "null",
            "disable_radix_cache": False,
            "enable_hierarchical_cache": False,
            "model_path": "policy",
            "speculative_algorithm": None,
            "speculative_draft_model_path": None,
            "speculative_token_map": None,
            "enable_multi_layer_eagle": False,
            "hicache_storage_backend": None,
            "enable_lmcache": False,
            "enable_flexkv": False,
            "radix_cache_backend": None,
        }
        assert set(plain) == set(SETTINGS)
        self.server_args = types.SimpleNamespace(**(plain | settings))
        self.holder = Holder(0)
        self.worker = WorkerDouble(self.holder)
        self.running = 0
        self.aborted = 0
        self.retracted = 0
        self.is_pause = False
        self.stale_prefixes = False
        self.asleep: set[str] = set()
        # What the scheduler keeps of itself.
        self.scheduler = types.SimpleNamespace(
            weight_updater=types.SimpleNamespace(offload_tags=self.asleep), _engine_paused=False
        )
        self.calls: list[str] = []
        self.attached = False
        self.fail_bucket = -1
        self._buckets = 0
        # What SGLang overlays on its arguments while it runs.
        self.updates: dict[str, Any] = {"weight_version": "default"}

    @property
    def paused(self) -> bool:
        return self.is_pause or self.scheduler._engine_paused

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state(self) -> list[dict[str, Any]]:
        told = {STATE: state_of(self.scheduler)} if self.attached else {}
        return [vars(self.server_args) | told]

    def config_value(self, name: str) -> Any:
        return self.updates[name] if name in self.updates else getattr(self.server_args, name)

    def record_config_updates(self, source: str, *, weight_version: str) -> None:
        self.calls.append("update_weight_version")
        self.updates["weight_version"] = weight_version

    async def flush_cache(self, timeout_s: float | None = None) -> Flushed:
        self.calls.append("flush_cache")
        if self.running or self.retracted:
            return Flushed(False, "Timed out waiting for idle state." if timeout_s else "")
        self.stale_prefixes = False
        return Flushed(True)

    async def pause_generation(self, obj: Any) -> None:
        self.calls.append(f"pause {obj.mode}")
        self.is_pause = True
        if obj.mode == "abort":
            self.aborted, self.retracted = self.aborted + self.retracted, 0
            while self.running:
                await asyncio.sleep(0.005)
                if not self.scheduler._engine_paused:
                    self.aborted, self.running = self.aborted + self.running, 0
            return
        self.scheduler._engine_paused = True
        if obj.mode == "retract":
            self.running, self.retracted = 0, self.retracted + self.running

    async def continue_generation(self, obj: Any) -> None:
        self.calls.append("continue")
        self.is_pause = self.scheduler._engine_paused = False
        self.running, self.retracted = self.running + self.retracted, 0

    async def release_memory_occupation(self, obj: Any, request: Any) -> None:
        tags = set(obj.tags or EVERYTHING)
        self.calls.append(f"release {','.join(sorted(tags))}")
        if self.running or self.retracted:
            raise SchedulerEnded("release_memory_occupation should be called only when server is idle.")
        if tags & self.asleep:
            raise SchedulerEnded("Cannot pause allocation that is not active.")
        self.asleep |= tags

    async def resume_memory_occupation(self, obj: Any, request: Any) -> None:
        tags = set(obj.tags or EVERYTHING)
        self.calls.append(f"resume {','.join(sorted(tags))}")
        if not tags <= self.asleep:
            raise SchedulerEnded("KeyError: offload_tags.remove")
        self.asleep -= tags

    async def update_weights_from_tensor(self, obj: Any, request: Any) -> tuple[bool, str]:
        await asyncio.sleep(0)
        while self.running and not self.is_pause:
            await asyncio.sleep(0.005)
        assert not obj.flush_cache
        [payload] = obj.serialized_named_tensors
        named = pickle.loads(base64.b64decode(payload))
        if obj.load_format == "flattened_bucket":
            return self._load_bucket(named)
        assert obj.load_format == LOADER
        if not named:
            self.attached = True
            return True, "Success"
        assert self.attached
        if isinstance(named, dict):
            return await self._done("load", [named])
        [(method, arguments)] = named
        return await self._done(method, json.loads(arguments))

    async def _done(self, method: str, arguments: Sequence[Any]) -> tuple[bool, str]:
        self.calls.append(method)
        # The real one answers from its own process, while this one's loop goes on.
        found = await asyncio.to_thread(answer, lambda: self.worker.do(method, arguments))
        return True, json.dumps([found])

    def _load_bucket(self, bucket: dict[str, Any]) -> tuple[bool, str]:
        self.calls.append("bucket")
        if self.running or "weights" in self.asleep:
            raise SchedulerEnded("an update of weights that are used, or not there")
        self._buckets += 1
        if self._buckets == self.fail_bucket:
            return False, "Failed to update parameter online. Please discard the whole weights."
        self.stale_prefixes = True
        self.holder.load_weights(unpacked(bucket))
        return True, "Success"


class ManagerWithSessions(ManagerDouble):
    """As from 0.5.21 on: an update outside of a session is refused, and so is a session inside of another."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.session = False

    async def begin_weight_update(self, obj: Any, request: Any) -> tuple[bool, str]:
        assert obj.selector == "draft"  # else SGLang would process the target's weights
        begun, self.session = not self.session, True
        return begun, "Success" if begun else "a weight-update session is already open"

    async def end_weight_update(self, obj: Any, request: Any) -> tuple[bool, str]:
        ended, self.session = self.session, False
        return ended, "Success" if ended else "no weight-update session is open"

    async def update_weights_from_tensor(self, obj: Any, request: Any) -> tuple[bool, str]:
        assert obj.selector == "target"
        if not self.session:
            return (
                False,
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()",
            )
        return await super().update_weights_from_tensor(obj, request)


class EngineDouble:
    """``sglang.Engine``; ``sessions`` as from 0.5.21 on."""

    def __init__(self, sessions: bool = False, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = (ManagerWithSessions if sessions else ManagerDouble)(**settings)

    def close(self) -> None:
        """As if the engine's processes ended: they hold the connections of a refit."""
        self.tokenizer_manager.worker.close_refit()
        self.loop.close()


@dataclass
class Metadata:
    """``FlattenedTensorMetadata`` of sglang/srt/weight_sync/tensor_bucket.py."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class BucketDouble:
    """``FlattenedTensorBucket``: bytes after bytes, in the order in which they are given."""

    def __init__(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        flat = [(name, tensor, tensor.flatten().view(torch.uint8)) for name, tensor in named_tensors]
        self._metadata: list[Metadata] = []
        start = 0
        for name, tensor, data in flat:
            stop = start + data.numel()
            self._metadata.append(Metadata(name, tensor.shape, tensor.dtype, start, stop, data.numel()))
            start = stop
        self._flattened = torch.cat([data for *_, data in flat])

    def get_flattened_tensor(self) -> torch.Tensor:
        return self._flattened

    def get_metadata(self) -> list[Metadata]:
        return self._metadata


def unpacked(bucket: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """As ``FlattenedTensorBucket.reconstruct_tensors``."""
    for meta in bucket["metadata"]:
        flat = bucket["flattened_tensor"][meta.start_idx : meta.end_idx]
        yield meta.name, flat.view(meta.dtype).reshape(meta.shape)


def modules(sessions: bool = False) -> dict[str, types.ModuleType]:
    """Doubles of the modules that a driver and a sender import; ``sessions`` as from 0.5.21 on."""
    found = {
        name: types.ModuleType(name)
        for name in (
            "sglang",
            "sglang.srt",
            "sglang.srt.managers",
            "sglang.srt.managers.io_struct",
            "sglang.srt.utils",
            "sglang.srt.utils.patch_torch",
            "sglang.srt.weight_sync",
            "sglang.srt.weight_sync.tensor_bucket",
        )
    }
    found["sglang"].__version__ = VERSION_WITH_SESSIONS if sessions else VERSION  # type: ignore[attr-defined]
    defaults = {"flush_cache": True, "load_format": None, "torch_empty_cache": True}
    for structure, names in (REQUESTS_WITH_SESSIONS if sessions else REQUESTS).items():
        fields = [(name, Any, defaults.get(name)) for name in names]
        setattr(
            found["sglang.srt.managers.io_struct"], structure, make_dataclass(structure, fields, kw_only=True)
        )
    found["sglang.srt.managers"].io_struct = found["sglang.srt.managers.io_struct"]  # type: ignore[attr-defined]
    found["sglang.srt.weight_sync.tensor_bucket"].FlattenedTensorBucket = BucketDouble  # type: ignore[attr-defined]
    return found
