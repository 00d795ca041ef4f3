"""Configuration of the refit, as it stands under ``policy.refit`` of a recipe or in a trainer's own section; read and checked.

:class:`RefitConfig` is a plain dataclass that OmegaConf reads as a structured schema: unknown keys and wrong types are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from .errors import RefitMismatch

TRANSPORTS = ("auto", "ipc", "pull", "p2p", "m2n", "golden")
_VERIFY_MODES = ("off", "sampled", "full")
_DELTA_MODES = ("off", "auto", "always")
_HAVE_OFF = ("verify", "delta")
DELTA_BASES = ("gpu", "host", "optimizer")
INT4_SCALES = ("amax/7.5", "amax/7")
_LORA_MODES = ("merge", "adapter")
# Each stream has a communicator, whose kernels take up to 32 of a GPU's multiprocessors.
_MOST_STREAMS = 4
_LONGEST_TIMEOUT_S = 7 * 86400.0


@dataclass
class RefitConfig:
    """How weights travel.

    Attributes:
        transport: ``p2p`` sends each shard straight to the shards that want it, over NCCL or gloo; ``ipc``
            writes straight into the engines' parameters, on GPUs of one host, and has engines whose memory can't be
            mapped read the trainer's; ``pull`` has all engines read; ``golden`` broadcasts every
            held fragment to everyone (slow, the oracle); ``auto`` takes ``ipc`` where it can work, else
            ``p2p``, and says why; ``m2n`` hands whole tensors to NVIDIA's ``nccl.m2n``, which has to be installed, and the
            others to ``p2p``.
        bucket_mb: size of a bucket in MiB. ``p2p`` stages through two of them for each direction and stream,
            so that packing, wire and unpacking overlap; ``ipc`` needs none. The packed misc path uses two. ``m2n`` has one for
            each stream, and nccl.m2n another.
        streams: rounds of ``p2p`` that are on the wire of GPUs at a time, each with a communicator of its own.
        timeout_s: seconds that any wait of a refit may take before it fails with the rank and stage, and that opening
            a session may take as a whole.
        verify: position-sensitive checksums of the landed bytes against the sent ones: ``off``,
            ``sampled`` (one message per pair of ranks and refit, another one each time, beginning anywhere;
            docs/verify.md says what may escape) or ``full``.
        delta: ``always`` sends only what differs from the version that both sides hold, wherever they hold one; ``auto`` does so
            as long as it is faster than a dense refit; ``off`` sends all weights each time.
        delta_base: where each trainer rank keeps what it last sent, as much again as it sends: ``gpu``, or ``host`` for
            page-locked host memory, which a GPU reads at the rate of PCIe. ``optimizer`` keeps one bit for each element, which is
            set where a step within ``recording_changes()`` changes it; for the time of that step a copy of what is sent is on the GPU.
        trainer_quantize_fp8: the trainer quantizes what the engine stores as block-scaled FP8 (E4M3 in 128 by 128
            blocks, or MXFP8), as it packs it: half the bytes travel, and the engine does not quantize again.
        trainer_quantize_mxfp4: the trainer packs GPT-OSS's experts in MXFP4 before each refit, as OpenAI's checkpoints have them,
            for an engine that holds them so: 17/64 of their bytes travel.
        trainer_quantize_int4: the trainer quantizes what the engine stores as INT4 (W4A16: symmetric codes of four bits with a scale for
            each group of a row, as compressed-tensors packs them), as it packs it: 9/32 of the bytes travel in groups of 32.
        int4_scale: by which rule it makes their scales: ``amax/7.5``, compressed-tensors' own, or ``amax/7``, Megatron-Bridge's
            (docs/int4.md).
        lora: what travels of a model under LoRA: ``merge`` merges the adapters into each shard as it is sent, under
            the names of the base model, for any engine; ``adapter`` sends the active adapter's factors alone, into an
            engine that serves LoRA and already holds the base model. A model without adapters is sent as it is.
        port: TCP port of the rendezvous on trainer rank 0; 0 takes any free one.
        kv_scales: calibrated scales of the engine's FP8 KV cache travel with the weights, over the misc path; the
            trainer gives them with ``refit(version, kv_scales)``.

    Raises:
        ValueError: lists all that is wrong with the values.
    """

    transport: str = "auto"
    bucket_mb: int = 512
    streams: int = 2
    timeout_s: float = 300.0
    verify: str = "sampled"
    delta: str = "off"
    delta_base: str = "gpu"
    trainer_quantize_fp8: bool = False
    trainer_quantize_mxfp4: bool = False
    trainer_quantize_int4: bool = False
    int4_scale: str = "amax/7.5"
    lora: str = "merge"
    port: int = 0
    kv_scales: bool = False

    def __post_init__(self) -> None:
        if found := self.violations():
            raise ValueError("; ".join(found))

    @classmethod
    def unchecked(cls, **values: Any) -> RefitConfig:
        """One of any values, for callers that tell its :meth:`violations` together with what else is wrong."""
        config = cls()
        for name, value in values.items():
            setattr(config, name, value)
        return config

    @property
    def call_limit_s(self) -> float:
        """Seconds that a driver waits for a call to a worker.

        A refit is several waits in a row. Each may take ``timeout_s`` and then names its rank and stage; the driver gives up
        after all of them.
        """
        return 2 * self.timeout_s + 30.0

    @property
    def _quantizing(self) -> list[str]:
        """The keys by which the trainer quantizes."""
        keys = ("trainer_quantize_fp8", "trainer_quantize_mxfp4", "trainer_quantize_int4")
        return [key for key in keys if getattr(self, key)]

    @property
    def quantized_in_transit(self) -> str:
        """The one of them by which weights become codes as they are packed, in the format of which the engine tells; empty if there is
        none."""
        return next((key for key in self._quantizing if key != "trainer_quantize_mxfp4"), "")

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mb`` in bytes."""
        return self.bucket_mb << 20

    def violations(self, prefix: str = "policy.refit") -> list[str]:
        """All that is wrong with the values, one sentence each, with the remedy; empty if nothing is."""
        # A text of another type is told below with those that it may be.
        wrong = {
            name: wrong_type(f"{prefix}.{name}", getattr(self, name), wanted)
            for name, wanted in _TYPES.items()
            if wanted is not str and not _is(getattr(self, name), wanted)
        }
        if wrong:
            rest = {name: getattr(self, name) for name in _TYPES.keys() - wrong.keys()}
            return [*wrong.values(), *RefitConfig.unchecked(**rest).violations(prefix)]
        found = []
        if self.transport not in TRANSPORTS:
            found.append(f"{prefix}.transport: {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.verify not in _VERIFY_MODES:
            found.append(f"{prefix}.verify: {self.verify!r} is not one of {', '.join(_VERIFY_MODES)}")
        if self.delta not in _DELTA_MODES:
            found.append(f"{prefix}.delta: {self.delta!r} is not one of {', '.join(_DELTA_MODES)}")
        elif self.delta != "off" and self.transport == "golden":
            found.append(
                f"{prefix}.delta: golden sends all weights to everyone; give off, or another {prefix}.transport"
            )
        if self.delta_base not in DELTA_BASES:
            found.append(f"{prefix}.delta_base: {self.delta_base!r} is not one of {', '.join(DELTA_BASES)}")
        elif self.delta != "off" and self.delta_base == "optimizer" and (codes := self._quantizing):
            found.append(
                f"{prefix}.delta_base: optimizer tells what a step changed of the weights, and with {prefix}.{codes[0]} codes "
                "travel, which each step would quantize twice; give gpu or host"
            )
        if len(self._quantizing) > 1:
            first, *others = self._quantizing
            found += [
                f"{prefix}.{key}: no engine that has run holds weights in this format beside those of {prefix}.{first}; give false for "
                "one of both"
                for key in others
            ]
        if self.int4_scale not in INT4_SCALES:
            found.append(f"{prefix}.int4_scale: {self.int4_scale!r} is not one of {', '.join(INT4_SCALES)}")
        elif self.int4_scale != RefitConfig.int4_scale and not self.trainer_quantize_int4:
            found.append(
                f"{prefix}.int4_scale: it is of {prefix}.trainer_quantize_int4 alone; give true there, or leave it out"
            )
        if self.lora not in _LORA_MODES:
            found.append(f"{prefix}.lora: {self.lora!r} is not one of {', '.join(_LORA_MODES)}")
        if self.bucket_mb < 1:
            found.append(
                f"{prefix}.bucket_mb: {self.bucket_mb} leaves no room for a segment; give at least 1"
            )
        if not 1 <= self.streams <= _MOST_STREAMS:
            found.append(
                f"{prefix}.streams: {self.streams} is not between 1 and {_MOST_STREAMS}; more communicators at a time "
                "would not fit on a GPU together"
            )
        if not 0 <= self.port < 65536:
            found.append(f"{prefix}.port: {self.port} is no TCP port; give 0 for any free one, or 1 to 65535")
        if self.kv_scales and self.lora == "adapter":
            found.append(
                f"{prefix}.kv_scales: with {prefix}.lora=adapter the weights of attention layers don't travel, and their scales "
                f"are not found; give false, or {prefix}.lora=merge"
            )
        if not 0 < self.timeout_s <= _LONGEST_TIMEOUT_S:
            found.append(
                f"{prefix}.timeout_s: {self.timeout_s} is not above 0 and at most {_LONGEST_TIMEOUT_S:.0f} seconds (a week)"
            )
        return found


_TYPES: Mapping[str, Any] = get_type_hints(RefitConfig)
REFIT_KEYS = tuple(_TYPES)
# Types that settings may have, in words.
_WANTED: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    int | None: "a whole number or null",
    float | None: "a number or null",
    str | None: "a string or null",
    list[str]: "a list of strings",
    dict[str, str]: "a mapping of strings to strings",
    dict[str, Any]: "a mapping with string keys",
}


@dataclass(frozen=True)
class Settings:
    """What a section holds.

    Attributes:
        refit: with the default for each value that was not given or is of a wrong type.
        own: the caller's own keys, where they were given and are of the right type.
        wrong: all that is wrong, a sentence each.
    """

    refit: RefitConfig
    own: Mapping[str, Any]
    wrong: tuple[str, ...]


def read_settings(
    given: Any,
    prefix: str,
    *,
    keys: Collection[str] = REFIT_KEYS,
    own: Mapping[str, Any] = MappingProxyType({}),
    others: Collection[str] = (),
) -> Settings:
    """Read a section that holds fields of :class:`RefitConfig`, or some of them.

    Args:
        given: the section, as read from a file; nothing in it is trusted. None is an empty one.
        prefix: of the section, as it stands before its keys in messages.
        keys: fields of :class:`RefitConfig` that this section may have.
        own: types of further keys that the caller asks for, by name: bool, int, float or str, or one of them or None.
        others: further keys that somebody else reads; they may stand there and are not looked at.

    Returns:
        The settings, and all that is wrong with them.
    """
    if given is not None and not isinstance(given, Mapping):
        return Settings(RefitConfig(), {}, (not_a_section(prefix, given),))
    types = {**{key: _TYPES[key] for key in keys}, **own}
    known = [*types, *others]
    good, wrong = {}, []
    for key, value in (given or {}).items():
        if key not in known:
            wrong.append(unknown_key(prefix, str(key), known))
        elif key not in types:
            continue
        elif _is(value := as_written(key, value), types[key]):
            good[key] = value
        else:
            wrong.append(wrong_type(f"{prefix}.{key}", value, types[key]))
    refit = RefitConfig.unchecked(**{key: value for key, value in good.items() if key in keys})
    return Settings(
        refit, {key: good[key] for key in own if key in good}, (*wrong, *refit.violations(prefix))
    )


def records_no_steps(config: RefitConfig, prefix: str, who: str) -> list[str]:
    """What is wrong with the settings of a trainer whose steps are not recorded, a sentence; empty if nothing is.

    Args:
        config: of the refit.
        prefix: of its section.
        who: runs the optimizer's steps.
    """
    if config.delta == "off" or config.delta_base != "optimizer":
        return []
    return [
        f"{prefix}.delta_base: optimizer needs recording_changes() around the optimizer's step, which {who} does not enter; give gpu "
        "or host"
    ]


def as_written(key: str, value: Any) -> Any:
    """The value of a field of :class:`RefitConfig` as its file has it: YAML 1.1 reads ``off`` without quotes as false."""
    return "off" if value is False and key in _HAVE_OFF else value


def require_equal_settings(
    told: Sequence[Mapping[str, object]],
    describe: Callable[[int], str],
    *,
    remedy: str,
    stage: str,
    rank: int = -1,
) -> None:
    """Compare what the ranks were set up with. A difference would show later as a hang or a digest that differs.

    Args:
        told: each rank's values by name.
        describe: names the rank that told the values at a place of ``told``.
        remedy: what to do if they differ.
        stage: of the error.
        rank: that reports.

    Raises:
        RefitMismatch: names the first setting that differs as its ``parameter``, and each rank's value.
    """
    for name in dict.fromkeys(name for theirs in told for name in theirs):
        values = [theirs.get(name) for theirs in told]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{describe(place)}: {value!r}" for place, value in enumerate(values))
            raise RefitMismatch(
                f"the ranks were called with different values of {name}: {listed}. Nothing was written. {remedy}",
                stage=stage,
                rank=rank,
                parameter=name,
            )


def unknown_key(prefix: str, key: str, known: Collection[str], elsewhere: Sequence[str] = ()) -> str:
    """The message about an unknown key: names the key that may have been meant, or lists the known ones.

    Args:
        prefix: of the section; empty for the outermost one.
        key: as it was given.
        known: keys of the section.
        elsewhere: dotted keys of other sections that may have been meant, if no key of this section is similar.
    """
    within = f"{prefix}." if prefix else ""
    meant = [within + near for near in get_close_matches(key, known, n=1, cutoff=0.7)] or elsewhere
    if meant:
        remedy = f"did you mean {' or '.join(meant)}?"
    else:
        remedy = f"the keys{f' of {prefix}' if prefix else ''} are {', '.join(known)}"
    return f"{within}{key}: there is no such key; {remedy}"


def wrong_type(path: str, value: Any, wanted: Any) -> str:
    """The message about a value of the wrong type; ``wanted`` is one of the schema's types."""
    return f"{path}: {_shown(value)} is not {_WANTED[wanted]}; give one"


def not_a_section(path: str, value: Any) -> str:
    """The message about a single value where a section belongs."""
    return f"{path}: {_shown(value)} stands for a whole section; give its keys, {path}.KEY"


def check_nccl_xfer_refit_support(policy: Mapping[str, Any]) -> None:
    """Check a trainer's ``policy`` section before anything is started.

    Args:
        policy: with ``nccl_xfer_refit`` and ``refit``; what else it has is not looked at. Without ``nccl_xfer_refit``, or
            with false, the conventional path serves, by the same settings.

    Raises:
        ValueError: lists every violation, a line each.
    """
    wrong = []
    turned_on = policy.get("nccl_xfer_refit", False)
    if not isinstance(turned_on, bool):
        wrong.append(wrong_type("policy.nccl_xfer_refit", turned_on, bool))
    refit = policy.get("refit")
    if isinstance(refit, RefitConfig):
        wrong += refit.violations()
    else:
        wrong += read_settings(refit, "policy.refit").wrong
    if wrong:
        raise ValueError("the refit can't be set up:\n  " + "\n  ".join(wrong))


def _is(value: Any, wanted: Any) -> bool:
    # By the type itself: to isinstance() true is a whole number. numpy's float64 is a float.
    kinds = get_args(wanted) or (wanted,)
    return type(value) in kinds or (float in kinds and (isinstance(value, float) or type(value) is int))


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)
