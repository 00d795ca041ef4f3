"""What the adapter checks before anything runs."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoConfig
from verl.checkpoint_engine import base
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutMode

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError, RefitMismatch
from rlrefit.recipes.rollout.arguments import int4
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers.engines.sglang.loader import LOADER
from rlrefit.workers.frameworks.verl.contract import (
    UnsupportedVerl,
    require_supported,
    require_supported_server,
    require_supported_trainer,
    rollout_violations,
    violations,
)
from rlrefit.workers.frameworks.verl.engine import ShardCheckpointEngine
from rlrefit.workers.frameworks.verl.full_tensors import NcclXferCheckpointEngine
from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager
from rlrefit.workers.frameworks.verl.options import EXTENSION
from rlrefit.workers.frameworks.verl.served import asked_violations, served_violations
from rlrefit.workers.frameworks.verl.source import FSDPSide, source_of

ROOT = Path(__file__).resolve().parents[2]


def report(rank: int, held: str | None = None) -> dict[str, Any]:
    return {
        "protocol": NcclXferCheckpointEngine.protocol,
        "held": None if held is None else (held, rank),
        "address": ("127.0.0.1", 1234, 1) if rank == 0 else None,
    }


def test_a_verl_that_calls_in_another_way_is_refused_with_all_differences() -> None:
    class Engine(base.CheckpointEngine):
        async def send_weights(self, weights: Any, step: int) -> None:  # type: ignore[override]
            """As a later verl might ask."""

    class Extension:
        def update_weights_from_ipc(self, handle: str) -> None:
            """As a later verl might ask."""

    assert violations(base) == []
    other = SimpleNamespace(CheckpointEngine=Engine, CheckpointEngineManager=base.CheckpointEngineManager)
    with pytest.raises(UnsupportedVerl) as error:
        require_supported(other)
    assert "send_weights takes (self, weights, step), not (self, weights, global_steps)" in str(error.value)
    assert "there is no CheckpointEngineRegistry" in str(error.value)

    found = rollout_violations(Extension, SimpleNamespace())
    assert "update_weights_from_ipc takes (self, handle)" in found[0]
    assert "vLLMColocateWorkerExtension has no _get_zmq_handle" in found
    assert "BucketedWeightReceiver has no receive_weights" in found

    class Server:
        async def launch_server(self) -> None:
            """As a later verl might keep SGLang elsewhere."""

    with pytest.raises(UnsupportedVerl) as error:
        require_supported_server(Server, Server)
    for part in (
        "SGLangHttpServer.launch_server sets no tokenizer_manager",
        "SGLangHttpServer has no get_server_address",
        "ServerAdapter has no update_weights",
        "ServerAdapter._init_server_adapter sets no _engine, server_actor",
    ):
        assert part in str(error.value)

    class Trainer:
        def __init__(self, settings: Any) -> None:
            """As a later verl might call it."""

    with pytest.raises(UnsupportedVerl) as error:
        require_supported_trainer(Trainer)
    assert "PPOTrainer.__init__ takes (self, settings), not (self, config)" in str(error.value)
    assert "PPOTrainer has no _setup" in str(error.value)

    actor = SimpleNamespace(engine=SimpleNamespace())
    with pytest.raises(UnsupportedVerl) as error:
        source_of(SimpleNamespace(actor=actor, config=OmegaConf.create({"model": {}})), RefitConfig())
    for part in ("actor.engine.module", "actor.engine.is_param_offload_enabled", "config.rollout.dtype"):
        assert f"no {part}" in str(error.value)


ENGINES = {"nccl_xfer": NcclXferCheckpointEngine, "nccl_xfer_shards": ShardCheckpointEngine}
WRONG: dict[str, Any] = {
    "timeout_s": 0,
    "verify": "some",
    "port": -1,
    "kv_scales": True,
    "record_dir": "runs",
    "bucket_mb": 256,
}


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    "options",
    [WRONG, {"timeout_s": "300", "verify": None, "port": True, "records_dir": 3}],
    ids=["values", "types"],
)
def test_all_wrong_options_are_told_at_once_under_verls_keys(backend: str, options: dict[str, Any]) -> None:
    with pytest.raises(RefitError) as error:
        ENGINES[backend](0, **options)
    for key in options:
        assert f"checkpoint_engine.engine_kwargs.{backend}.{key}: " in str(error.value)
    assert "checkpoint_engine.update_weights_bucket_megabytes leaves no room" in str(error.value)


def test_of_the_transports_all_that_carry_refits_may_be_chosen() -> None:
    for transport in ("auto", "ipc", "pull", "p2p", "m2n", "golden"):
        made = ShardCheckpointEngine(1 << 20, trainer_quantize_fp8=True, transport=transport)
        assert (made.options.refit.transport, made.options.refit.trainer_quantize_fp8) == (transport, True)


def test_a_mask_is_refused_where_nobody_records_the_actors_steps() -> None:
    with pytest.raises(RefitError, match=r"nccl_xfer_shards\.delta_base: optimizer"):
        ShardCheckpointEngine(1 << 20, delta="auto", delta_base="optimizer")


@pytest.mark.parametrize("engine", ENGINES.values())
def test_a_folder_that_takes_no_records_is_refused_as_the_engine_is_made(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefitError, match="records_dir"):
        engine(1 << 20, records_dir=str(tmp_path / "file" / "refits"))


@pytest.mark.parametrize(
    "held",
    [
        ["a/2+1", "a/2+1", "a/2+1"],
        ["a/2+1", "a/2+1", None],  # a replica was added, or its process started anew
        ["a/2+2", "a/2+2", "a/2+2"],  # the last replica was removed
        ["a/2+1", "b/2+1", "a/2+1"],
        [None, None, None],
    ],
)
def test_a_group_serves_again_only_if_all_its_ranks_hold_it(held: list[str | None]) -> None:
    reports = [report(rank, name) for rank, name in enumerate(held)]
    actors, rollouts = NcclXferCheckpointEngine.build_topology(2, 1, reports)
    assert actors["rank"] + rollouts["rank"] == [0, 1, 2]
    meetings = actors["meeting"] + rollouts["meeting"]
    if held == ["a/2+1"] * 3:
        assert meetings == [None] * 3
    else:
        assert len({meeting["token"] for meeting in meetings}) == 1
        assert (meetings[0]["train_ranks"], meetings[0]["gen_ranks"]) == (2, 1)
    strangers = [*reports[:2], reports[2] | {"protocol": 0}]
    with pytest.raises(RefitMismatch, match=r"\[2\]"):
        NcclXferCheckpointEngine.build_topology(2, 1, strangers)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, whose modules are beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "verl"))
    return import_module("compare")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("grpo_qwen3_4b", None),
        ("grpo_qwen3_4b_shards", None),
        ("grpo_arithmetic", None),
        ("grpo_arithmetic", "nccl"),
        ("grpo_arithmetic", "nccl_xfer"),
        ("grpo_arithmetic", "nccl_xfer_shards"),
        ("grpo_arithmetic", "rlrefit_separate_async"),
        ("grpo_arithmetic", "rlrefit_sync"),
        ("grpo_arithmetic", "rlrefit_sync_fp8"),
        ("grpo_arithmetic", "sync"),
        ("grpo_arithmetic", "one_step_off_policy"),
        ("grpo_arithmetic", "fully_async_policy"),
    ],
)
def test_the_examples_make_the_backend_by_verls_own_keys(
    name: str, way: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compare: Any
) -> None:
    for variable in (
        "PWD",
        "RLREFIT_VERL_DATA",
        "RLREFIT_VERL_EXAMPLES",
    ):  # where the records go is the first
        monkeypatch.setenv(variable, str(tmp_path))
    overrides = [f"hydra.searchpath=[file://{Path(verl.__file__).parent}/trainer/config]"]
    if way is not None:  # as the comparison starts it
        overrides += compare.WAYS[way]
    with initialize_config_dir(str(ROOT / "examples" / "verl"), version_base=None):
        config = compose(name, overrides)
    rollout, asynchronous = config.actor_rollout_ref.rollout, config.trainer.v1.separate_async
    batch = asynchronous.parameter_sync_step * config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert config.data.train_batch_size == (0 if way == "fully_async_policy" else batch)  # as verl asserts
    asked = omega_conf_to_dataclass(rollout.checkpoint_engine)
    by_trainer = {"sync": "naive"} | dict.fromkeys(compare._MAINS, "nccl_xfer_shards")
    by_trainer |= {w: "nccl_xfer_shards" for w in compare.WAYS if w.startswith("rlrefit_")}
    assert asked.backend == by_trainer.get(way or "", way or asked.backend)
    is_shards = asked.backend == "nccl_xfer_shards"
    assert rollout.engine_kwargs.get("vllm", {}).get("worker_extension_cls") == (
        EXTENSION if is_shards else None
    )
    if asked.backend in ("nccl", "naive"):
        return
    import_module(asked.custom_backend_module)
    made: Any = base.CheckpointEngineRegistry.new(
        asked.backend,
        bucket_size=asked.update_weights_bucket_megabytes << 20,
        **asked.engine_kwargs[asked.backend],
    )
    assert isinstance(made, ENGINES[asked.backend])
    if way is None:
        assert Path(made.options.records_dir).is_relative_to(tmp_path)
    if is_shards:
        assert config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_V2_MODEL_RUNNER == "0"
        assert made.options.refit.bucket_mb == asked.update_weights_bucket_megabytes
        assert asked_violations(rollout, made.options.refit, config.actor_rollout_ref.model, "fsdp2") == []
        quantizes = made.options.refit.trainer_quantize_fp8
        assert quantizes == (way == "rlrefit_sync_fp8") == (rollout.quantization == "fp8")


def test_a_comparison_tells_where_the_time_of_an_update_went(
    tmp_path: Path, compare: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {"timing_s/update_weights_refit": 0.2, "timing_s/update_weights_wake_kv_cache": 0.25}
    told = {"timing_s/update_weights": 0.5, **stages, "checkpoint_engine/seconds": 0.1}
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step, "data": told}) + "\n" for step in (1, 2)))
    assert compare._show("a way", metrics, 1) == 2
    assert "step 2" in (line := capsys.readouterr().out)
    assert "(refit 0.200, wake_kv_cache 0.250, the engine itself 0.100)" in line
    assert compare._medians([told, {name: 3 * value for name, value in told.items()}, told]) == told
    assert compare.main(["--cpu", "rlrefit_sync_fp8"]) == 2
    assert "needs --model" in capsys.readouterr().err


def test_a_comparison_with_a_killed_run_fails_and_tells_no_older_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compare: Any
) -> None:
    killed, fine = tmp_path / "killed", tmp_path / "fine"
    killed.write_text('#!/bin/sh\ncase "$*" in *"backend=nccl "*) kill -9 $$;; esac\n')
    fine.write_text("#!/bin/sh\n")
    (tmp_path / "nccl.jsonl").write_text('{"step": 1, "data": {}}\n')
    for python, code in ((killed, 1), (fine, 0)):
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        assert compare.main(["--cpu", "--folder", str(tmp_path), "nccl", "nccl_xfer"]) == code
        found = json.loads((tmp_path / "compare.json").read_text())
        assert [one["exit_code"] for one in found] == ([-9, 0] if code else [0, 0])
        assert found[0]["steps"] == []


def test_a_comparison_takes_a_model_of_the_shapes_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compare: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = make_checkpoint("qwen3-moe", tmp_path / "shapes")
    monkeypatch.setitem(compare.WAYS, "none", [])
    monkeypatch.setattr(compare, "run", lambda way, *_: {"way": way, "exit_code": 0, "steps": []})
    folder = tmp_path / "run"
    assert compare.main(["--cpu", "--folder", str(folder), "--model", str(shapes), "none"]) == 0
    made = AutoConfig.from_pretrained(folder / "model")
    assert (made.model_type, made.num_experts) == ("qwen3_moe", 8)
    held = load_file(folder / "model" / "model.safetensors")
    asked = load_file(shapes / "model.safetensors")
    assert {name: (w.shape, w.dtype) for name, w in held.items()} == {
        name: (w.shape, w.dtype) for name, w in asked.items()
    }
    assert compare.main(["--cpu", "--folder", str(tmp_path / "other"), "--model", "qwen3-5b", "none"]) == 2
    assert "qwen3" in capsys.readouterr().err


def test_examples_tell_at_once_all_that_the_host_lacks(
    monkeypatch: pytest.MonkeyPatch, compare: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = import_module("missing")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    lacking = {"verl", "vllm"}
    monkeypatch.setattr(missing, "find_spec", lambda name: None if name in lacking else object())
    assert compare.main(["nccl"]) == 2
    told = capsys.readouterr().err
    # Found, and without the class that verl takes from it.
    head = "AutoModelForCausalLMWithValueHead"
    assert all(part in told for part in ("package verl", "package vllm", head, "needs 2 GPUs", "finds 1"))
    lacking = {"trl"}
    for variable in ("HOME", "PWD"):
        monkeypatch.setenv(variable, "/nowhere")
    monkeypatch.setattr(
        sys, "argv", ["missing.py", "--config-name", "grpo_qwen3_4b", "trainer.n_gpus_per_node=3"]
    )
    assert missing.main() == 2
    told = capsys.readouterr().err
    assert "needs 7 GPUs" in told
    for wrong in (["--config-name", "nowhere"], ["--config-name", "grpo_qwen3_4b", "trainer.gpus=3"]):
        monkeypatch.setattr(sys, "argv", ["missing.py", *wrong])
        assert missing.main() == 2
        assert wrong[-1].partition("=")[0] in capsys.readouterr().err
    for key, name in (("train_files", "train"), ("val_files", "test")):
        assert any(f"data.{key}" in line and f"gsm8k/{name}.parquet" in line for line in told.splitlines())


def test_a_run_that_has_no_shards_to_send_is_refused_with_all_reasons() -> None:
    engine = SimpleNamespace(module=None, is_param_offload_enabled=False, _qat_enabled=True)
    asked = {
        "actor": {"strategy": "veomni"},
        "rollout": {
            "name": "vllm",
            "dtype": "bfloat16",
            "quantization": "fp8",
            "qat": {"enable": True},
            "engine_kwargs": {"vllm": {"quantization": "awq"}},
        },
        "model": {"path": "p", "lora_rank": 8, "lora": {"merge": False}, "mtp": DRAFTS},
    }
    with pytest.raises(RefitError) as error:
        source_of(
            SimpleNamespace(actor=SimpleNamespace(engine=engine), config=OmegaConf.create(asked)),
            RefitConfig.unchecked(trainer_quantize_mxfp4=True, trainer_quantize_int4=True),
        )
    for part in (
        "nccl_xfer_shards.trainer_quantize_mxfp4 is true",
        "nccl_xfer_shards.trainer_quantize_int4 is true",
        *("veomni", "quantization-aware", "lora.merge", EXTENSION),
        *("quantization is fp8", "nccl_xfer_shards.trainer_quantize_fp8=true", "megatron.qat"),
        *("vllm.quantization is awq", "enable_rollout: it drafts with MTP layers", "backend=nccl_xfer"),
    ):
        assert part in str(error.value)


def test_an_adapter_that_is_not_merged_is_refused_and_full_tensors_are_not_named_in_its_place() -> None:
    asked = {
        "actor": {"strategy": "fsdp2"},
        "rollout": {"name": "vllm", "dtype": "bfloat16", "engine_kwargs": {"vllm": EXTENDED}},
        "model": {"lora": {"rank": 8}},
    }
    engine = SimpleNamespace(module=None, is_param_offload_enabled=False)
    worker = SimpleNamespace(actor=SimpleNamespace(engine=engine), config=OmegaConf.create(asked))
    for refused in (
        lambda: source_of(worker, RefitConfig()),
        lambda: NcclXferCheckpointEngine(1 << 20, timeout_s=1.0, verify="off").introduce(worker),
    ):
        with pytest.raises(RefitError, match=r"lora\.merge=true") as error:
            refused()
        assert "backend=nccl_xfer" not in str(error.value)


def test_an_engine_that_builds_its_model_anew_is_not_refitted_from_the_old_one() -> None:
    model = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(module=model)
    side = FSDPSide(engine, RefitConfig(), torch.bfloat16)
    before = side._prepared_source()
    assert side._prepared_source() is before
    engine.module = torch.nn.Linear(2, 2)
    assert side.model is engine.module
    ((weight, _), _) = side._prepared_source().fragments()
    assert weight.view.data_ptr() == engine.module.weight.data_ptr()


def test_a_megatron_engine_is_asked_which_of_its_kinds_it_is() -> None:
    engine = SimpleNamespace(module=None, is_param_offload_enabled=False, bridge=None, vanilla_bridge=True)
    rollout = {
        "name": "vllm",
        "dtype": "bfloat16",
        "engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION}},
    }
    config = OmegaConf.create({"actor": {"strategy": "megatron"}, "rollout": rollout, "model": {}})
    worker = SimpleNamespace(actor=SimpleNamespace(engine=engine), config=config)
    with pytest.raises(UnsupportedVerl, match=r"no actor\.engine\.engine_config\.use_megatron_fsdp"):
        source_of(worker, RefitConfig())
    engine.engine_config = SimpleNamespace(use_megatron_fsdp=True)
    with pytest.raises(RefitError) as error:
        source_of(worker, RefitConfig())
    for part in ("vanilla_mbridge=false", "use_megatron_fsdp=false"):
        assert part in str(error.value)


QUANTIZES = RefitConfig(trainer_quantize_fp8=True)
MAKES_INT4 = RefitConfig(trainer_quantize_int4=True)


EXTENDED = {"worker_extension_cls": EXTENSION}
# As verl's model.mtp, whose sizes are not asked for.
TRAINS = {"enable": True, "enable_rollout": False, "method": "mtp", "speculative_algorithm": "EAGLE"}
DRAFTS = TRAINS | {"enable_rollout": True}


def speculating(config: Any) -> dict[str, Any]:
    return {"engine_kwargs": {"vllm": {**EXTENDED, "speculative_config": config}}}


def in_int4(**changes: str) -> dict[str, Any]:
    overrides = {"quantization_config": int4(32) | changes}
    return {"engine_kwargs": {"vllm": {**EXTENDED, "hf_overrides": overrides}}}


def of_sglang(loader: str = LOADER, **more: Any) -> dict[str, Any]:
    return {"name": "sglang", "engine_kwargs": {"sglang": {"custom_weight_loader": [loader], **more}}}


@pytest.mark.parametrize(
    ("rollout", "config", "told"),
    [
        (speculating({"method": "ngram"}), RefitConfig(), None),
        (speculating({"model": "ngram"}), RefitConfig(), None),
        (speculating({"method": "suffix"}), RefitConfig(), None),
        ({"quantization": "fp8", "qat": {"enable": False}}, QUANTIZES, None),
        ({"quantization": None}, QUANTIZES, None),  # the checkpoint's own may be FP8
        ({"quantization": "torchao"}, QUANTIZES, "rollout.quantization is torchao"),
        ({"quantization": "ascend"}, RefitConfig(), "rollout.quantization is ascend"),
        (
            {"engine_kwargs": {"vllm": {**EXTENDED, "quantization": "fp8"}}},
            QUANTIZES,
            "vllm.quantization is fp8",
        ),
        (in_int4(), MAKES_INT4, None),
        (in_int4(), RefitConfig(), None),  # its worker tells
        (in_int4() | {"quantization": "fp8"}, MAKES_INT4, "rollout.quantization is fp8, which is another"),
        (in_int4(format="float-quantized"), MAKES_INT4, "has no quantization_config"),
        ({}, MAKES_INT4, "has no quantization_config"),
        (of_sglang(), MAKES_INT4, "sglang has not run in INT4"),
        ({"name": "trtllm"}, RefitConfig(), "rollout.name is trtllm; vllm and sglang have"),
        (of_sglang(), RefitConfig(), None),
        (of_sglang() | {"quantization": "fp8"}, QUANTIZES, None),
        (of_sglang("another"), RefitConfig(), f"custom_weight_loader=[{LOADER}]"),
        (of_sglang(speculative_algorithm="NGRAM"), RefitConfig(), None),
        (of_sglang(quantization="w8a8_int8"), RefitConfig(), "sglang.quantization is w8a8_int8"),
        (of_sglang() | {"data_parallel_size": 2}, RefitConfig(), "rollout.data_parallel_size is 2"),
        (
            of_sglang() | {"pipeline_model_parallel_size": 2},
            RefitConfig(),
            "pipeline_model_parallel_size is 2",
        ),
        (
            of_sglang() | {"disaggregation": {"enabled": True}},
            RefitConfig(),
            "disaggregation.enabled is true",
        ),
    ],
)
def test_a_rollout_of_another_engine_or_format_is_refused(
    rollout: dict[str, Any], config: RefitConfig, told: str | None
) -> None:
    of_vllm = {"name": "vllm", "engine_kwargs": {"vllm": EXTENDED}}
    found = asked_violations(OmegaConf.create(of_vllm | rollout), config, OmegaConf.create({}), "fsdp2")
    assert len(found) == (told is not None)
    assert (told or "") in "".join(found)


OF_VLLM = {"name": "vllm", "engine_kwargs": {"vllm": EXTENDED}}


@pytest.mark.parametrize(
    ("rollout", "mtp", "strategy", "told"),
    [
        (OF_VLLM, DRAFTS, "megatron", None),
        (OF_VLLM, DRAFTS, "fsdp2", "these actors don't have"),
        (OF_VLLM, DRAFTS | {"enable": False}, "fsdp2", None),  # verl reads the rest only with it
        (speculating({"num_speculative_tokens": 2}), DRAFTS, "megatron", None),
        (speculating({"method": "eagle3", "model": "eagle"}), DRAFTS, "megatron", "names a drafter (eagle)"),
        (speculating({"method": "mtp", "model": "policy"}), TRAINS, "megatron", None),
        (speculating('{"method": "mtp"}'), TRAINS, "megatron", None),
        (speculating('{"method": "mtp"}'), TRAINS | {"enable": False}, "megatron", "these actors don't have"),
        (speculating({"method": "mtp", "model": "another"}), TRAINS, "megatron", "names a drafter (another)"),
        (speculating({"model": "eagle"}), TRAINS, "megatron", "names a drafter (eagle)"),
        (of_sglang(), DRAFTS, "megatron", None),
        (of_sglang(), DRAFTS, "fsdp2", "these actors don't have"),
        (of_sglang(speculative_algorithm="NGRAM"), DRAFTS, "fsdp2", "these actors don't have"),  # verl's wins
        (of_sglang(speculative_algorithm="EAGLE"), TRAINS, "megatron", None),
        (of_sglang(speculative_algorithm="EAGLE3"), TRAINS, "megatron", "names a drafter (EAGLE3)"),
        (
            of_sglang(speculative_algorithm="EAGLE", speculative_draft_model_path="another"),
            TRAINS,
            "megatron",
            "names a drafter (another)",
        ),
    ],
)  # fmt: skip
def test_a_rollout_may_draft_with_mtp_layers_that_the_actors_have_and_with_no_other_weights(
    rollout: dict[str, Any], mtp: dict[str, Any], strategy: str, told: str | None
) -> None:
    model = OmegaConf.create({"path": "policy", "mtp": mtp})
    found = asked_violations(OmegaConf.create({"name": "vllm"} | rollout), RefitConfig(), model, strategy)
    assert len(found) == (told is not None)
    assert (told or "") in "".join(found)


def test_codes_and_scales_for_a_drafter_are_refused() -> None:
    model = OmegaConf.create({"path": "policy", "mtp": DRAFTS})
    rollout = OmegaConf.create(OF_VLLM | {"quantization": "fp8"})
    (found,) = asked_violations(rollout, QUANTIZES, model, "megatron")
    assert "trainer_quantize_fp8=false" in found
    (found,) = asked_violations(OmegaConf.create(OF_VLLM | in_int4()), MAKES_INT4, model, "megatron")
    assert "trainer_quantize_int4=false" in found


def quant_config(name: str, block: list[int] | None = None, *, serialized: bool = True) -> SimpleNamespace:
    """What vLLM made of a rollout's and a checkpoint's quantization."""
    return SimpleNamespace(
        get_name=lambda: name, weight_block_size=block, is_checkpoint_fp8_serialized=serialized
    )


@pytest.mark.parametrize(
    ("served", "config", "told"),
    [
        (None, RefitConfig(), ""),
        (None, QUANTIZES, "not quantized"),
        (quant_config("fp8", [128, 128]), QUANTIZES, ""),
        (quant_config("fp8", [128, 128]), RefitConfig(), "nccl_xfer_shards.trainer_quantize_fp8=true"),
        (quant_config("fp8", [128, 64]), QUANTIZES, "fp8 in blocks of 128x64"),
        (quant_config("fp8"), QUANTIZES, "a scale for each weight"),
        (quant_config("fp8", serialized=False), RefitConfig(), "a scale for each weight"),
        (None, MAKES_INT4, "trainer_quantize_int4 is true, and its weights are not quantized"),
        (quant_config("compressed-tensors"), MAKES_INT4, ""),
        (quant_config("compressed-tensors"), RefitConfig(), "(compressed-tensors, by"),
        (quant_config("compressed-tensors"), QUANTIZES, "(compressed-tensors, by"),
        (quant_config("fp8", [128, 128]), MAKES_INT4, "trainer_quantize_fp8=true in its place"),
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


HYBRID, STANDALONE = RolloutMode.HYBRID, RolloutMode.STANDALONE


@pytest.mark.parametrize(
    ("backend", "modes", "data_parallel", "told"),
    [
        ("nccl", [HYBRID], 1, "backend is nccl"),
        ("nccl_xfer_shards", [HYBRID, STANDALONE], 1, "a manager of its own"),
        ("nccl_xfer_shards", [HYBRID], 2, "data_parallel_size is above 1"),
    ],
)
def test_the_manager_for_shared_gpus_refuses_what_it_cannot_reach(
    backend: str, modes: list[RolloutMode], data_parallel: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base.CheckpointEngineRegistry._registry, "nccl", ShardCheckpointEngine)
    of_each = SimpleNamespace(data_parallel_size=data_parallel)
    replicas = [SimpleNamespace(rollout_mode=mode, config=of_each) for mode in modes]
    with pytest.raises(RefitError, match=told):
        RefitCheckpointManager(CheckpointEngineConfig(backend=backend), None, replicas)
