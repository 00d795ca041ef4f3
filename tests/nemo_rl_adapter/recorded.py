"""NeMo-RL's interfaces as they were read at commit 7ea279abfbeb698b092856d0dab61e7cf39bc909: names and parameters alone.

Where NeMo-RL itself can be imported, :mod:`.test_contract` holds it against the same contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class CheckpointEngine(ABC):
    def get_target_weight_layout(self):
        return None

    @abstractmethod
    def prepare(self): ...

    @abstractmethod
    def init_policy_process_group(self, *, worker_rank, train_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata): ...

    def finalize(self):
        return None

    @abstractmethod
    async def send_weights(self, weights): ...

    @abstractmethod
    def receive_weight_batches(self): ...


class WeightSynchronizer(ABC):
    @abstractmethod
    def sync_weights(self, *, timer=None, kv_scales=None): ...

    @property
    @abstractmethod
    def is_stale(self): ...

    @abstractmethod
    def init_communicator(self): ...

    @abstractmethod
    def shutdown(self): ...


class RayWorkerGroup:
    def run_all_workers_single_data(self, method_name, *args, run_rank_0_only_axes=None, **kwargs): ...

    def run_all_workers_multiple_data(
        self, method_name, *args, run_rank_0_only_axes=None, common_kwargs=None, **kwargs
    ): ...


class VllmGeneration:
    def prepare_for_generation(self, *args, **kwargs): ...


class VllmCheckpointEngineRpcMixin:
    def checkpoint_engine_rpc(self, checkpoint_method, method_args=()): ...


class VllmAsyncCheckpointEngineRpcMixin:
    async def checkpoint_engine_rpc_async(self, checkpoint_method, method_args=()): ...


class Policy:
    def offload_before_refit(self): ...

    def offload_after_refit(self): ...


_NAMES = """
    _build_hf_to_gen_backend_mapping _get_drafter_model _get_named_parameters _get_sparse_delta_applier
    _load_draft_weights _load_full_hf_weights _load_hf_weights _load_weights _maybe_process_fp8_kv_cache
    _maybe_process_mtp_drafter_after_loading _maybe_refit_mtp_drafter _mtp_drafter_from_disk
    _mtp_drafter_refit_enabled _receive_and_load_misc_params _sparse_delta_applier _split_policy_and_draft_weights
    _synchronize_before_ipc_data_ack _trim_vocab_padding _uses_fp8_kv_cache _weight_update_errors_are_fatal
    _weight_update_lifecycle bind_numa build_hf_to_local_param_map cleanup finish_sparse_delta_refit get_zmq_address
    init_collective init_nccl_reshard_comm_group load_mtp_weights_from_disk maybe_init_zmq nccl_reshard_refit
    prepare_nccl_reshard_refit_info prepare_refit_info prepare_sparse_delta_refit_info report_device_id
    report_node_hostname start_gpu_profiling stop_gpu_profiling synchronize_device update_weights_from_collective
    update_weights_from_decoded_sparse_payload update_weights_via_ipc_zmq
    _checkpoint_engine_weight_layout _is_sharded_refit_weight _load_destination_local_expert_group
    _load_sharded_expert_weight_groups _load_sharded_expert_weights _local_expert_id _sharded_refit_param_names
    _update_weights_from_checkpoint_engine_async _validate_expert_storage checkpoint_engine_total_memory_bytes
    finalize_checkpoint_engine init_checkpoint_engine init_checkpoint_engine_process_group prepare_checkpoint_engine
    update_weights_from_checkpoint_engine
"""
# Of VllmInternalWorkerExtensionWithCheckpointEngine; vLLM lets no worker class have one of them, too.
EXTENSION = _NAMES.split()


def _unused(self: Any, *args: Any, **kwargs: Any) -> None:
    raise AssertionError("NeMo-RL's own refit must not be called")


VllmInternalWorkerExtension = type("VllmInternalWorkerExtension", (), dict.fromkeys(EXTENSION, _unused))
