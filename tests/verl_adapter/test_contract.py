"""What the adapter checks before anything runs."""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.checkpoint_engine import base
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutMode

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError, RefitMismatch
from rlrefit.workers.frameworks.verl.contract import (
    UnsupportedVerl,
    require_supported,
    rollout_violations,
    violations,
)
from rlrefit.workers.frameworks.verl.engine import ShardCheckpointEngine
from rlrefit.workers.frameworks.verl.full_tensors import NcclXferCheckpointEngine
from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager
from rlrefit.workers.frameworks.verl.options import EXTENSION
from rlrefit.workers.frameworks.verl.orders import Order
from rlrefit.workers.frameworks.verl.served import asked_violations, served_violations
from rlrefit.workers.frameworks.verl.source import source_of

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = ("127.0.0.1", 1234, 1)


def report(rank: int, held: str | None = None) -> dict[str, Any]:
    return {
        "protocol": NcclXferCheckpointEngine.protocol,
        "held": None if held is None else (held, rank),
        "address": ADDRESS if rank == 0 else None,
    }


def test_the_installed_verl_is_supported() -> None:
    assert violations(base) == []


def test_a_verl_that_calls_in_another_way_is_refused_with_all_differences() -> None:
    class Engine(base.CheckpointEngine):
        async def send_weights(self, weights: Any, step: int) -> None:  # type: ignore[override]
            """As a later verl might ask."""

    other = SimpleNamespace(
        CheckpointEngine=Engine, CheckpointEngineManager=base.CheckpointEngineManager, version="0.9.1"
    )
    with pytest.raises(UnsupportedVerl) as error:
        require_supported(other)
    assert "send_weights takes (self, weights, step), not (self, weights, global_steps)" in str(error.value)
    assert "there is no CheckpointEngineRegistry" in str(error.value)
    assert "install verl==0.9.1" in str(error.value)


def test_all_wrong_options_are_told_at_once() -> None:
    with pytest.raises(RefitError) as error:
        NcclXferCheckpointEngine(
            0, timeout_s=0, verify="some", port=-1, rebuild_group=True, record_dir="runs", streams=2
        )
    section = "checkpoint_engine.engine_kwargs.nccl_xfer"
    keys = f"the keys of {section} are timeout_s, verify, port, records_dir"
    wrong = [
        f"{section}.rebuild_group: there is no such key; {keys}",
        f"{section}.record_dir: there is no such key; did you mean {section}.records_dir?",
        f"{section}.streams: there is no such key; {keys}",
        f"{section}.verify: 'some' is not one of off, sampled, full",
        f"{section}.port: -1 is no TCP port; give 0 for any free one, or 1 to 65535",
        f"{section}.timeout_s: 0 is not above 0 and at most 604800 seconds (a week)",
        "checkpoint_engine.update_weights_bucket_megabytes leaves no room for a weight; give at least 1",
    ]
    assert str(error.value) == "; ".join(wrong) + " [stage settings]"


@pytest.mark.parametrize("engine", [NcclXferCheckpointEngine, ShardCheckpointEngine])
def test_options_of_a_wrong_type_are_refused(engine: Any) -> None:
    with pytest.raises(RefitError) as error:
        engine(1 << 20, timeout_s="300", verify=None, port=True, records_dir=3)
    for part in (
        "timeout_s: '300' is not a number; give one",
        "verify: null is not a string; give one",
        "port: True is not a whole number; give one",
        "records_dir: 3 is not a string or null; give one",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("engine", [NcclXferCheckpointEngine, ShardCheckpointEngine])
def test_options_that_are_left_out_are_those_of_a_recipe(engine: Any) -> None:
    made, recipe = engine(1 << 20).options, RefitConfig(bucket_mb=1)
    held = getattr(made, "refit", made)
    assert (held.timeout_s, held.verify, held.port) == (recipe.timeout_s, recipe.verify, recipe.port)
    assert made.records_dir is None


def test_workers_of_another_protocol_are_refused_by_their_ranks() -> None:
    reports = [report(0), report(1), report(2) | {"protocol": 0}]
    with pytest.raises(RefitMismatch, match=r"another rlrefit than the driver's: \[2\]"):
        NcclXferCheckpointEngine.build_topology(1, 2, reports)


@pytest.mark.parametrize(
    ("held", "goes_on"),
    [
        (["a/2+1", "a/2+1", "a/2+1"], True),
        (["a/2+1", "a/2+1", None], False),  # a replica was added, or its process started anew
        (["a/2+2", "a/2+2", "a/2+2"], False),  # the last replica was removed
        (["a/2+1", "b/2+1", "a/2+1"], False),
        ([None, None, None], False),
    ],
)
def test_a_group_serves_again_only_if_all_its_ranks_hold_it(held: list[str | None], goes_on: bool) -> None:
    reports = [report(rank, name) for rank, name in enumerate(held)]
    actors, rollouts = NcclXferCheckpointEngine.build_topology(2, 1, reports)
    meetings = actors["meeting"] + rollouts["meeting"]
    assert [meeting is None for meeting in meetings] == [goes_on] * 3
    assert actors["rank"] + rollouts["rank"] == [0, 1, 2]
    if not goes_on:
        assert len({meeting["token"] for meeting in meetings}) == 1
        assert (meetings[0]["train_ranks"], meetings[0]["gen_ranks"]) == (2, 1)


def test_the_example_makes_the_backend_by_verls_own_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))  # where the records go
    overrides = [f"hydra.searchpath=[file://{Path(verl.__file__).parent}/trainer/config]"]
    with initialize_config_dir(str(ROOT / "examples" / "verl"), version_base=None):
        config = compose("grpo_qwen3_4b", overrides)
    asynchronous = config.trainer.v1.separate_async
    batch = asynchronous.parameter_sync_step * config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert config.data.train_batch_size == batch  # as verl asserts
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    assert engine.backend == import_module(engine.custom_backend_module).BACKEND
    made = base.CheckpointEngineRegistry.new(
        engine.backend,
        is_master=True,
        bucket_size=engine.update_weights_bucket_megabytes << 20,
        **engine.engine_kwargs[engine.backend],
    )
    assert made.options.records_dir == f"{tmp_path}/runs/verl/refits"


def composed(name: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch, data: Path) -> Any:
    """A configuration of the examples, as verl's entry point reads it."""
    for variable in ("RLREFIT_VERL_DATA", "RLREFIT_VERL_EXAMPLES"):
        monkeypatch.setenv(variable, str(data))
    verls_own = f"hydra.searchpath=[file://{Path(verl.__file__).parent}/trainer/config]"
    with initialize_config_dir(str(ROOT / "examples" / "verl"), version_base=None):
        return compose(name, [verls_own, *overrides])


@pytest.mark.parametrize("name", ["grpo_qwen3_4b_shards", "grpo_arithmetic"])
def test_the_examples_of_shards_name_the_backend_and_the_extension(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))  # where the records go
    config = composed(name, [], monkeypatch, tmp_path)
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_V2_MODEL_RUNNER == "0"
    rollout = config.actor_rollout_ref.rollout
    engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
    import_module(engine.custom_backend_module)
    made = base.CheckpointEngineRegistry.new(
        engine.backend,
        bucket_size=engine.update_weights_bucket_megabytes << 20,
        **engine.engine_kwargs[engine.backend],
    )
    assert made.options.refit.bucket_mb == engine.update_weights_bucket_megabytes
    assert Path(made.options.records_dir).is_relative_to(tmp_path)
    assert rollout.engine_kwargs.vllm.worker_extension_cls == EXTENSION
    asynchronous = config.trainer.v1.separate_async
    batch = asynchronous.parameter_sync_step * config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert config.data.train_batch_size == batch


@pytest.mark.parametrize("engine", ["nccl", "nccl_xfer", "nccl_xfer_shards"])
def test_the_comparison_of_engines_overrides_keys_that_exist(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = runpy.run_path(str(ROOT / "examples" / "verl" / "compare.py"))
    backend = f"{compare['_ROLLOUT']}.checkpoint_engine.backend={engine}"
    config = composed("grpo_arithmetic", [backend, *compare["ENGINES"][engine]], monkeypatch, tmp_path)
    named = "worker_extension_cls" in config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert named == (engine == "nccl_xfer_shards")


@pytest.mark.parametrize("engine", [NcclXferCheckpointEngine, ShardCheckpointEngine])
def test_a_folder_that_takes_no_records_is_refused_as_the_engine_is_made(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefitError, match=r"records_dir: no record can be written to .*file/refits"):
        engine(1 << 20, records_dir=str(tmp_path / "file" / "refits"))


def test_a_comparison_with_a_killed_run_fails_and_tells_no_older_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = runpy.run_path(str(ROOT / "examples" / "verl" / "compare.py"))
    killed, fine = tmp_path / "killed", tmp_path / "fine"
    killed.write_text('#!/bin/sh\ncase "$*" in *"backend=nccl "*) kill -9 $$;; esac\n')
    fine.write_text("#!/bin/sh\n")
    (tmp_path / "nccl.jsonl").write_text('{"step": 1, "data": {}}\n')
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path), "nccl", "nccl_xfer"])
    for python, code in ((killed, 1), (fine, 0)):
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        assert compare["main"]() == code
        found = json.loads((tmp_path / "compare.json").read_text())
        assert [one["exit_code"] for one in found] == ([-9, 0] if code else [0, 0])
        assert found[0]["steps"] == []


def test_all_wrong_options_of_shards_are_told_at_once() -> None:
    with pytest.raises(RefitError) as error:
        ShardCheckpointEngine(0, timeout_s=0, verify="some", streams=True, kv_scales=True, bucket_mb=256)
    for part in (
        "timeout_s",
        "verify",
        "streams: True is not a whole number",
        "nccl_xfer_shards.kv_scales: there is no such key; the keys of",
        "nccl_xfer_shards.bucket_mb: there is no such key; the keys of",
        "; checkpoint_engine.update_weights_bucket_megabytes leaves no room for a weight; give at least 1",
    ):
        assert part in str(error.value)


def test_what_recipes_have_and_verl_has_not_is_refused_under_verls_key() -> None:
    with pytest.raises(RefitError) as error:
        ShardCheckpointEngine(1 << 20, transport="m2n")
    section = "checkpoint_engine.engine_kwargs.nccl_xfer_shards"
    assert f"{section}.transport: m2n carries no refits; give auto, ipc, p2p or golden" in str(error.value)
    for transport in ("auto", "ipc", "p2p", "golden"):
        made = ShardCheckpointEngine(1 << 20, trainer_quantize_fp8=True, transport=transport)
        assert made.options.refit.transport == transport
        assert made.options.refit.trainer_quantize_fp8


def test_a_run_that_has_no_shards_to_send_is_refused_with_all_reasons() -> None:
    worker = SimpleNamespace(
        actor=SimpleNamespace(
            engine=SimpleNamespace(
                module=None, is_param_offload_enabled=False, _qat_enabled=True, vanilla_bridge=True
            )
        ),
        config=OmegaConf.create(
            {
                "actor": {"strategy": "veomni"},
                "rollout": {
                    "name": "sglang",
                    "dtype": "bfloat16",
                    "quantization": "fp8",
                    "qat": {"enable": True},
                    "mtp": {"enable": True, "enable_rollout": True},
                    "engine_kwargs": {
                        "vllm": {"quantization": "awq", "speculative_config": {"method": "eagle"}}
                    },
                },
                "model": {"lora_rank": 8, "lora": {"merge": False}},
            }
        ),
    )
    with pytest.raises(RefitError) as error:
        source_of(worker, RefitConfig())
    for part in ("veomni", "mbridge", "quantization-aware", "sglang", "lora.merge", EXTENSION):
        assert part in str(error.value)
    for part in (
        "quantization is fp8; shard to shard, the trainer quantizes",
        "nccl_xfer_shards.trainer_quantize_fp8=true",
        "megatron.qat is enabled",
        "vllm.quantization is awq",
        "enable_rollout is true",
        "speculative_config",
    ):
        assert part in str(error.value)
    assert "backend=nccl_xfer with" in str(error.value)


def test_drafts_that_need_no_weights_are_no_reason_to_refuse_a_rollout() -> None:
    for speculative in ({"method": "ngram"}, {"model": "ngram"}, {"method": "suffix"}):
        rollout = OmegaConf.create({"engine_kwargs": {"vllm": {"speculative_config": speculative}}})
        assert asked_violations(rollout, RefitConfig()) == []
    for text in ('{"method": "mtp"}', {"model": "eagle"}):
        [told] = asked_violations({"engine_kwargs": {"vllm": {"speculative_config": text}}}, RefitConfig())
        assert "names a drafter; refits don't reach" in told


QUANTIZES = RefitConfig(trainer_quantize_fp8=True)


def test_an_fp8_rollout_is_taken_where_the_trainer_quantizes_and_no_other_format_is() -> None:
    assert asked_violations({"quantization": "fp8", "qat": {"enable": False}}, QUANTIZES) == []
    assert asked_violations({"quantization": None}, QUANTIZES) == []  # the checkpoint's own may be FP8
    for name in ("torchao", "ascend"):
        for config in (QUANTIZES, RefitConfig()):
            [told] = asked_violations({"quantization": name}, config)
            assert f"rollout.quantization is {name}; FP8 in blocks of 128x128 is the one format" in told
    [told] = asked_violations({"engine_kwargs": {"vllm": {"quantization": "fp8"}}}, QUANTIZES)
    assert "vllm.quantization is fp8, by which vLLM quantizes in a way of its own" in told


def quant_config(name: str, block: list[int] | None = None, *, serialized: bool = True) -> SimpleNamespace:
    """What vLLM made of a rollout's and a checkpoint's quantization."""
    return SimpleNamespace(
        get_name=lambda: name, weight_block_size=block, is_checkpoint_fp8_serialized=serialized
    )


@pytest.mark.parametrize(
    ("served", "config", "told"),
    [
        (None, RefitConfig(), ""),
        (None, QUANTIZES, "trainer_quantize_fp8 is true, and its weights are not quantized"),
        (quant_config("fp8", [128, 128]), QUANTIZES, ""),
        (
            quant_config("fp8", [128, 128]),
            RefitConfig(),
            "set checkpoint_engine.engine_kwargs.nccl_xfer_shards.trainer_quantize_fp8=true, or take "
            "checkpoint_engine.backend=nccl_xfer",
        ),
        (quant_config("fp8", [128, 64]), QUANTIZES, "fp8 in blocks of 128x64"),
        (quant_config("fp8"), QUANTIZES, "fp8 with a scale for each weight"),
        (quant_config("fp8", serialized=False), RefitConfig(), "fp8 with a scale for each weight"),
        (quant_config("torchao"), QUANTIZES, "(torchao, by rollout.quantization"),
        (SimpleNamespace(get_name=lambda: "modelopt_fp4"), QUANTIZES, "(modelopt_fp4, by"),
    ],
)
def test_a_worker_tells_whether_its_engine_and_the_options_agree_on_quantization(
    served: Any, config: RefitConfig, told: str
) -> None:
    found = served_violations(SimpleNamespace(quant_config=served, speculative_config=None), config)
    assert len(found) == bool(told)
    assert told in "".join(found)


def test_an_actor_that_is_made_in_another_way_is_refused_with_all_that_it_lacks() -> None:
    worker = SimpleNamespace(
        actor=SimpleNamespace(engine=SimpleNamespace()), config=OmegaConf.create({"model": {}})
    )
    with pytest.raises(UnsupportedVerl) as error:
        source_of(worker, RefitConfig())
    assert "its actor has no actor.engine.module, no actor.engine.is_param_offload_enabled" in str(
        error.value
    )
    assert "no config.rollout.dtype" in str(error.value)


def test_an_extension_that_is_called_in_another_way_is_refused_with_all_differences() -> None:
    class Extension:
        def update_weights_from_ipc(self, handle: str) -> None:
            """As a later verl might ask."""

    found = rollout_violations(Extension, SimpleNamespace())
    assert "update_weights_from_ipc takes (self, handle)" in found[0]
    assert "vLLMColocateWorkerExtension has no _get_zmq_handle" in found
    assert "BucketedWeightReceiver has no receive_weights" in found


def test_an_order_travels_as_a_tensor() -> None:
    order = Order({"host": "a"}, 2, 1, 7, {"bucket_mb": 1}, None)
    assert Order.from_tensor(order.to_tensor()) == order


@pytest.mark.parametrize(
    ("backend", "modes", "data_parallel", "told"),
    [
        ("nccl", [RolloutMode.HYBRID], 1, "backend is nccl"),
        ("nccl_xfer_shards", [RolloutMode.HYBRID, RolloutMode.STANDALONE], 1, "a manager of its own"),
        ("nccl_xfer_shards", [RolloutMode.HYBRID], 2, "data_parallel_size is above 1"),
    ],
)
def test_the_manager_for_shared_gpus_refuses_what_it_cannot_reach(
    backend: str, modes: list[RolloutMode], data_parallel: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base.CheckpointEngineRegistry._registry, "nccl", ShardCheckpointEngine)
    config = CheckpointEngineConfig(backend=backend)
    replicas = [
        SimpleNamespace(rollout_mode=mode, config=SimpleNamespace(data_parallel_size=data_parallel))
        for mode in modes
    ]
    with pytest.raises(RefitError, match=told):
        RefitCheckpointManager(config, None, replicas)
