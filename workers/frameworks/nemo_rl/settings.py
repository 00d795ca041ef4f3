"""What ``policy.generation.refit_cfg.rlrefit`` holds: ``RefitConfig`` and where records go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....integration.config import RefitConfig, read_settings, records_no_steps
from ....integration.errors import RefitError

KEY = "rlrefit"
# Of policy.generation.refit_transport, in the place of NeMo-RL's own such as nccl_reshard.
SELECTOR = "rlrefit"
# The checkpoint engine where policy and vLLM share GPUs.
TAKING_TURNS = "colocated_ipc"
PREFIX = f"policy.generation.refit_cfg.{KEY}"


@dataclass(frozen=True)
class NemoRlRefit:
    """The settings of one run.

    Attributes:
        config: how weights travel; the same on all ranks.
        records_dir: folder for ``refits.jsonl``, a line a refit and rank; None for none.
        colocated: whether policy and vLLM take turns on the same GPUs.
    """

    config: RefitConfig
    records_dir: str | None = None
    colocated: bool = False

    @property
    def engine(self) -> str:
        """The checkpoint engine: NCCL admits no two ranks of one GPU, so these meet in shared memory."""
        return TAKING_TURNS if self.colocated else "nccl_xfer"

    @staticmethod
    def of(generation: Mapping[str, Any]) -> NemoRlRefit:
        """From NeMo-RL's ``policy.generation``.

        Raises:
            RefitError: lists all that is wrong.
        """
        section = generation.get("refit_cfg") or {}
        # NeMo-RL makes a pydantic model of it, which keeps what it does not know.
        given = getattr(section, "model_extra", section).get(KEY)
        read = read_settings(given, PREFIX, own={"records_dir": str | None})
        wrong = [*read.wrong, *records_no_steps(read.refit, PREFIX, "NeMo-RL's policy worker")]
        backend = generation.get("backend")
        if backend != "vllm":
            wrong.append(
                f"policy.generation.backend: {backend!r}; shard to shard reaches vLLM's workers alone, set it to vllm"
            )
        vllm_kwargs = generation.get("vllm_kwargs") or {}
        worker_cls = vllm_kwargs.get("worker_cls")
        if worker_cls != WORKER_CLS:
            wrong.append(
                f"policy.generation.vllm_kwargs.worker_cls: {worker_cls!r}; vLLM's workers have no refit, set it to {WORKER_CLS}"
            )
        if generation.get("refit_transport") is not None:
            wrong.append(
                f"policy.generation.refit_transport: {generation['refit_transport']!r}; NeMo-RL would set up that transport "
                f"beside this one, set it to null, or to {SELECTOR} where rlrefit.workers.frameworks.nemo_rl.install.around is used"
            )
        # NeMo-RL's own note that the policy trains its MTP layers; its refits then load them into the drafter too.
        if generation.get("_mtp_weights_from_refit") and vllm_kwargs.get("speculative_config"):
            wrong.append(
                "policy.generation.vllm_kwargs.speculative_config: the policy trains its MTP layers "
                "(policy.megatron_cfg.mtp_num_layers above 0), and refits of vLLM's drafter shard to shard have not run with "
                "NeMo-RL, which prepares its weights in ways of its own. Take speculative_config out, or set "
                f"policy.generation.refit_transport to {FULL_TENSORS} and leave rlrefit.workers.frameworks.nemo_rl.install out"
            )
        if wrong:
            raise RefitError("; ".join(wrong), stage="settings")
        return NemoRlRefit(read.refit, colocated=bool(generation["colocated"]["enabled"]), **read.own)


FULL_TENSORS = "rlrefit.workers.frameworks.nemo_rl.checkpoint_engine:NcclXferCheckpointEngine"
WORKER_CLS = "rlrefit.workers.frameworks.nemo_rl.vllm_worker.RefitWorker"
