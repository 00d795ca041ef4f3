"""Configuration of the refit, as it stands under ``policy.refit`` of a recipe or trainer.

A plain dataclass that OmegaConf reads as a structured schema: unknown keys and wrong types are errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRANSPORTS = ("auto", "ipc", "p2p", "golden")
# NVIDIA's nccl.m2n, a peer of the bench: why it is no transport yet, installed or not.
_NO_M2N = (
    "m2n carries no refits; give auto, ipc, p2p or golden (nccl.m2n moves one tensor a call, knows only even meshes of two "
    "dimensions, and is not joined with the checksums of verify; 'rlrefit bench --peers m2n' times it)"
)
VERIFY_MODES = ("off", "sampled", "full")
LORA_MODES = ("merge", "adapter")
# Each stream has a communicator, whose kernels take up to 32 of a GPU's multiprocessors.
MOST_STREAMS = 4
LONGEST_TIMEOUT_S = 7 * 86400.0


@dataclass
class RefitConfig:
    """How weights travel.

    Attributes:
        transport: ``p2p`` sends each shard straight to the shards that want it, over NCCL or gloo; ``ipc``
            writes straight into the engines' parameters, on GPUs of one host; ``golden`` broadcasts every
            held fragment to everyone (slow, the oracle); ``auto`` takes ``ipc`` where it can work, else
            ``p2p``, and says why. ``m2n`` (NVIDIA's ``nccl.m2n``) is refused, since it carries no refits yet.
        bucket_mb: size of a bucket in MiB. ``p2p`` stages through two of them for each direction and stream,
            so that packing, wire and unpacking overlap; ``ipc`` needs none. The packed misc path uses one.
        streams: rounds of ``p2p`` that are on the wire of GPUs at a time, each with a communicator of its own.
        timeout_s: seconds that any wait of a refit may take before it fails with the rank and stage, and that opening
            a session may take as a whole.
        verify: position-sensitive checksums of the landed bytes against the sent ones: ``off``,
            ``sampled`` (one message per pair of ranks and refit, another one each time, beginning anywhere;
            docs/verify.md says what may escape) or ``full``.
        trainer_quantize_fp8: the trainer quantizes what the engine stores as block-scaled FP8 (E4M3 in 128 by 128
            blocks, or MXFP8), as it packs it: half the bytes travel, and the engine does not quantize again.
        lora: what travels of a model under LoRA: ``merge`` merges the adapters into each shard as it is sent, under
            the names of the base model, for any engine; ``adapter`` sends the active adapter's factors alone, into an
            engine that serves LoRA and already holds the base model. A model without adapters is sent as it is.
        port: TCP port of the rendezvous on trainer rank 0; 0 takes any free one.
        kv_scales: calibrated scales of the engine's FP8 KV cache travel with the weights, over the misc path; the
            trainer gives them with ``nccl_xfer_refit(version, kv_scales)``.

    Raises:
        ValueError: lists all that is wrong with the values.
    """

    transport: str = "auto"
    bucket_mb: int = 512
    streams: int = 2
    timeout_s: float = 300.0
    verify: str = "sampled"
    trainer_quantize_fp8: bool = False
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
    def bucket_bytes(self) -> int:
        """``bucket_mb`` in bytes."""
        return self.bucket_mb << 20

    def violations(self, prefix: str = "policy.refit") -> list[str]:
        """All that is wrong with the values, one sentence each, with the remedy; empty if nothing is."""
        found = []
        if self.transport == "m2n":
            found.append(f"{prefix}.transport: {_NO_M2N}")
        elif self.transport not in TRANSPORTS:
            found.append(f"{prefix}.transport: {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.verify not in VERIFY_MODES:
            found.append(f"{prefix}.verify: {self.verify!r} is not one of {', '.join(VERIFY_MODES)}")
        if self.lora not in LORA_MODES:
            found.append(f"{prefix}.lora: {self.lora!r} is not one of {', '.join(LORA_MODES)}")
        if self.bucket_mb < 1:
            found.append(
                f"{prefix}.bucket_mb: {self.bucket_mb} leaves no room for a segment; give at least 1"
            )
        if not 1 <= self.streams <= MOST_STREAMS:
            found.append(
                f"{prefix}.streams: {self.streams} is not between 1 and {MOST_STREAMS}; more communicators at a time "
                "would not fit on a GPU together"
            )
        if not 0 <= self.port < 65536:
            found.append(f"{prefix}.port: {self.port} is no TCP port; give 0 for any free one, or 1 to 65535")
        if self.kv_scales and self.lora == "adapter":
            found.append(
                f"{prefix}.kv_scales: with {prefix}.lora=adapter the weights of attention layers don't travel, and their scales "
                f"are not found; give false, or {prefix}.lora=merge"
            )
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            found.append(
                f"{prefix}.timeout_s: {self.timeout_s} is not above 0 and at most {LONGEST_TIMEOUT_S:.0f} seconds (a week)"
            )
        return found
