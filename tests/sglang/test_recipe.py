"""SGLang as the engine of a recipe: its configuration, its actor over a double, and real runs by ``make test-sglang``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from rlrefit.integration.colocated.stages import KV_CACHE, TAGS, WEIGHTS
from rlrefit.integration.config import TRANSPORTS, RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, RefitError, RefitMismatch
from rlrefit.integration.session import RefitSession
from rlrefit.recipes.config.engines import ENABLED
from rlrefit.recipes.config.load import ConfigError, load_config
from rlrefit.recipes.config.machine import gpu_violations
from rlrefit.recipes.plan.recipe import plan_of
from rlrefit.recipes.rollout.arguments import int4, sglang_arguments, with_sglang_environment
from rlrefit.recipes.rollout.base import Sampling
from rlrefit.recipes.rollout.sglang import AsyncSglangActor, SglangActor
from rlrefit.recipes.tiny.checkpoints import KINDS
from rlrefit.workers.engines.sglang.compat import STORES
from rlrefit.workers.engines.sglang.loader import LOADER
from tests.train.command import numbers

from .engine_double import EngineDouble, Holder, equal, modules, weights
from .recipe_run import STEPS, run

RECIPE = "grpo_tiny_sglang"
EOS = 1
# Another token that ends a completion, and comes first.
END = 0
SAMPLING = Sampling(max_new_tokens=3, temperature=0.7, seed=5)
CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full")


def violations(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as found:
        load_config(RECIPE, overrides)
    return found.value.violations


# Configuration


def test_all_that_sglang_can_not_do_is_told_at_once_with_its_remedy() -> None:
    found = violations(
        "generation.pipeline_parallel=2",
        "generation.tensor_parallel=2",
        "generation.temperature=0.5",
        "generation.sglang.context_length=20",
        "generation.sglang.ep_size=3",
        "generation.sglang.load_format=gguf",
        "generation.sglang.mem_fraction_static=1",
        "generation.sglang.server_args={quantization: fp8, tp_size: 2, log_level: info, hicache_storage_backend: file, "
        "enable_lmcache: true, enable_flexkv: true, radix_cache_backend: flexkv}",
        "policy.refit.kv_scales=true",
        "policy.refit.lora=adapter",
        "policy.refit.trainer_quantize_fp8=true",
        "ray.generation_env={SGLANG_RETURN_ORIGINAL_LOGPROB: '1'}",
        "model.path=tiny:qwen3-moe",
    )
    settings = "context_length", "ep_size", "load_format", "mem_fraction_static"
    arguments = "quantization", "tp_size", *STORES
    assert {text.partition(":")[0] for text in found} == {
        "generation.pipeline_parallel",
        *(f"generation.sglang.{name}" for name in settings),
        *(f"generation.sglang.server_args.{name}" for name in arguments),
        *(f"policy.refit.{name}" for name in ("kv_scales", "lora", "trainer_quantize_fp8")),
        "ray.generation_env.SGLANG_RETURN_ORIGINAL_LOGPROB",
    }


def test_shared_gpus_rule_out_expandable_segments_and_no_transport() -> None:
    shared = (f"{ENABLED}=true", "trainer.ranks=1", "trainer.tensor_parallel=1")
    expandable = "ray.generation_env={PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}"
    for transport in TRANSPORTS:
        (found,) = violations(*shared, f"policy.refit.transport={transport}", expandable)
        assert "SGLang refuses expandable segments where it sleeps" in found


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_either_algorithm_and_trainer_can_have_sglang_in_turns_or_apart(trainer: str) -> None:
    for recipe in ("grpo_tiny_moe", "dapo_tiny"):
        for colocated in ("true", "false"):
            chosen = ["generation.backend=sglang", f"trainer={trainer}", f"{ENABLED}={colocated}"]
            assert load_config(recipe, chosen).generation.backend == "sglang"


def test_a_context_has_to_leave_what_sglang_keeps_free_within_the_models_positions() -> None:
    (found,) = violations("generation.max_new_tokens=490")
    assert "with 8 tokens that SGLang keeps free, reach 514 tokens" in found
    (found,) = violations("generation.sglang.context_length=600")
    assert found.startswith("generation.sglang.context_length: 600 is more than the model's 512 positions")
    assert load_config(RECIPE, ["generation.max_new_tokens=488"])


FP8 = ("generation.weight_dtype=fp8", "policy.refit.trainer_quantize_fp8=true", "ray.address=auto")


@pytest.mark.parametrize("colocated", ["true", "false"])
def test_fp8_blocks_of_the_trainer_start_sglang_as_from_a_checkpoint_of_them(colocated: str) -> None:
    alone = ["trainer.ranks=1", "trainer.tensor_parallel=1"] if colocated == "true" else []
    config = load_config(RECIPE, [*FP8, f"{ENABLED}={colocated}", *alone])
    hf_config = {"num_hidden_layers": 2, "num_experts": 8}
    arguments = sglang_arguments(config, hf_config, 1, 0)
    assert arguments["load_format"] == "dummy"
    assert json.loads(arguments["json_model_override_args"]) == {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        }
    }
    itself = sglang_arguments(config, hf_config | {"quantization_config": {"quant_method": "fp8"}}, 1, 0)
    assert "json_model_override_args" not in itself
    assert itself["load_format"] == "auto"


INT4 = ("generation.weight_dtype=int4", "policy.refit.trainer_quantize_int4=true", "ray.address=auto")


@pytest.mark.parametrize("group", [32, 128])
def test_int4_of_the_trainer_starts_sglang_as_from_a_checkpoint_of_it(group: int) -> None:
    config = load_config(RECIPE, [*INT4, f"generation.weight_group={group}"])
    arguments = sglang_arguments(config, {"num_hidden_layers": 2, "num_experts": 8}, 1, 0)
    assert (arguments["load_format"], arguments["moe_runner_backend"]) == ("dummy", "marlin")
    assert json.loads(arguments["json_model_override_args"]) == {"quantization_config": int4(group)}


def test_experts_in_int4_are_shared_out_where_a_ranks_part_would_cut_groups() -> None:
    asked = [
        *INT4,
        "generation.backend=sglang",
        "generation.tensor_parallel=4",
        "generation.weight_group=128",
    ]
    with pytest.raises(ConfigError) as found:
        load_config("grpo_qwen3_30b_a3b", asked)
    assert [text.partition(":")[0] for text in found.value.violations] == ["generation.weight_group"]
    assert load_config("grpo_qwen3_30b_a3b", [*asked, "generation.sglang.ep_size=4"])


def test_int4_of_sglang_rules_out_an_fp8_cache_and_training_in_it() -> None:
    found = violations(*INT4, "generation.sglang.kv_cache_dtype=fp8", "policy.qat=int4", "trainer=fsdp")
    assert {text.partition(":")[0] for text in found} == {
        "generation.sglang.kv_cache_dtype",
        "generation.backend",
    }


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (FP8, "generation.weight_dtype"),
        (INT4, "generation.weight_dtype"),
        (
            ("generation.sglang.enable_deterministic_inference=true", "ray.address=auto"),
            "generation.sglang.enable_deterministic_inference",
        ),
    ],
    ids=["FP8 blocks", "INT4", "deterministic kernels"],
)
def test_what_a_cpu_lacks_is_refused_where_there_is_no_gpu_and_no_cluster(
    asked: tuple[str, ...], key: str
) -> None:
    config = load_config(RECIPE, asked)
    assert [*gpu_violations(config, 0)] == []
    alone = replace(config, ray=replace(config.ray, address=None))
    (found,) = gpu_violations(alone, 0)
    assert found.text.startswith(f"{key}: ")
    assert [*gpu_violations(alone, 8)] == []


@pytest.mark.parametrize("asked", [FP8, INT4], ids=["FP8 blocks", "INT4"])
def test_quantized_engines_need_sglangs_overrides_for_themselves(asked: tuple[str, ...]) -> None:
    overrides = "generation.sglang.server_args={json_model_override_args: '{}'}"
    (text,) = violations(*asked, overrides)
    assert text.startswith("generation.sglang.server_args.json_model_override_args: ")
    assert load_config(RECIPE, [overrides]).generation.sglang.server_args


def test_experts_that_ranks_share_need_experts_and_are_planned_so() -> None:
    shared = ["generation.tensor_parallel=2", "generation.sglang.ep_size=2"]
    (found,) = violations(*shared)
    assert found.startswith(
        "generation.sglang.ep_size: above 1, but the model (qwen3) has no experts; give 1"
    )
    config = load_config("grpo_qwen3_30b_a3b", ["generation.backend=sglang", *shared])
    assert plan_of(config).gen.ep == 2


def test_the_engines_arguments_are_the_recipes() -> None:
    turns = [f"{ENABLED}=true", "trainer.ranks=1", "trainer.tensor_parallel=1"]
    config = load_config(RECIPE, [*turns, "generation.sglang.server_args.log_level=info"])
    found = sglang_arguments(config, KINDS["qwen3-moe"], 1, 0)
    assert found["enable_memory_saver"]
    assert found["custom_weight_loader"] == [LOADER]
    assert found["context_length"] == 28
    assert (found["log_level"], found["moe_runner_backend"]) == ("info", "triton")
    assert "attention_backend" not in found
    other = sglang_arguments(config, KINDS["qwen3"], 0, 1)
    assert (other["device"], other["attention_backend"]) == ("cpu", "torch_native")
    assert other["random_seed"] != found["random_seed"]
    assert "enable_memory_saver" not in other
    assert "moe_runner_backend" not in other


def test_the_trainers_nccl_allocates_as_sglangs_does() -> None:
    key = "NCCL_CUMEM_ENABLE"
    assert with_sglang_environment(load_config(RECIPE)).ray.trainer_env == {key: "0"}
    given = load_config(RECIPE, [f"ray.generation_env={{{key}: '1'}}", "ray.trainer_env={A: b}"])
    assert with_sglang_environment(given).ray.trainer_env == {key: "1", "A": "b"}


# The actor, over a double


class GeneratingDouble(EngineDouble):
    """Says the last token of each prompt until it has said it as often as the prompt is long, and then ends."""

    def __init__(self, *, model_path: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.requests: list[tuple[Any, Any]] = []
        self.told: dict[str, Any] = {}
        self.closed = False

    def generate(
        self, *, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], return_logprob: bool
    ) -> list[dict[str, Any]]:
        self.requests.append((input_ids, sampling_params))
        return [
            self._output(prompt, each, return_logprob)
            for prompt, each in zip(input_ids, sampling_params, strict=True)
        ]

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], return_logprob: bool
    ) -> dict[str, Any]:
        self.requests.append((input_ids, sampling_params))
        return self._output(input_ids, sampling_params, return_logprob)

    def shutdown(self) -> None:
        self.closed = True

    def _output(self, prompt: list[int], parameters: dict[str, Any], logprobs: bool) -> dict[str, Any]:
        assert logprobs
        assert not self.tokenizer_manager.paused
        said = [prompt[-1]] * len(prompt) + parameters["stop_token_ids"][-1:]
        kept = said[: parameters["max_new_tokens"]]
        told = {
            "weight_version": self.tokenizer_manager.config_value("weight_version"),
            "output_token_logprobs": [(-0.5 * token, token, None) for token in kept],
            "finish_reason": {"type": "stop" if kept == said else "length"},
        }
        return {"output_ids": kept, "meta_info": told | self.told}


class Run:
    """An actor, refitted from a source in this process."""

    def __init__(self, kind: type[SglangActor]) -> None:
        self.actor = kind()
        self.actor.build("path", {"custom_weight_loader": [LOADER], "tp_size": 1}, (END, EOS))
        self.engine: GeneratingDouble = self.actor._engine
        self._source, self._server = Holder(0), open_rendezvous("127.0.0.1", 1, 1)
        self._pool = ThreadPoolExecutor(1)
        meeting = self._server.rendezvous
        joining = self._pool.submit(RefitSession.open, meeting, 0, lambda: self._source, CONFIG)
        self.actor.join_refit(meeting.to_json(), 1, CONFIG, "nccl_xfer")
        self._session = joining.result()

    def refit(self, index: int, version: int) -> None:
        manager = self.engine.tokenizer_manager
        self._source.take_on(index)
        manager.holder.poison()
        sending = self._pool.submit(self._session.refit, version)
        [record] = self.actor.refit(version)
        sending.result()
        assert record["version"] == version
        assert equal(manager.holder.held, weights(index))

    def close(self) -> None:
        self._session.close()
        self._server.close()
        self._pool.shutdown()
        self.actor.close()
        assert self.engine.closed
        self.engine.close()


@pytest.fixture(params=[SglangActor, AsyncSglangActor], ids=["blocking", "awaited"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["sglang"], "Engine", GeneratingDouble, raising=False)
    started = Run(request.param)
    yield started
    started.close()


def test_completions_have_the_sampled_tokens_their_probabilities_and_the_refits_version(served: Run) -> None:
    for version, index in enumerate((1, 2)):
        served.refit(index, version)
        short, long = served.actor.generate([[7, 4], [7, 8, 9, 6]], SAMPLING)
        assert (short.token_ids, short.finished, short.version) == ([4, 4, EOS], True, version)
        assert short.logprobs == [-2.0, -2.0, -0.5]
        assert (long.token_ids, long.finished, long.version) == ([6, 6, 6], False, version)


def test_requests_have_seeds_of_their_own_and_the_recipes_temperature(served: Run) -> None:
    served.refit(1, 0)
    served.actor.generate([[7, 4], [7, 4]], SAMPLING)
    asked = [found for _, found in served.engine.requests]
    parameters = [each for found in asked for each in (found if isinstance(found, list) else [found])]
    assert len(asked) == (2 if isinstance(served.actor, AsyncSglangActor) else 1)
    assert [each["temperature"] for each in parameters] == [0.7, 0.7]
    assert len({each["sampling_seed"] for each in parameters}) == 2


def test_each_call_begins_the_engines_generator_anew_by_its_seed_wherever_the_run_began(served: Run) -> None:
    served.refit(1, 0)
    for seed in (5, 6, 5):
        served.actor.generate([[7, 4]], replace(SAMPLING, seed=seed))
    first, other, again = served.engine.tokenizer_manager.worker.seeds
    assert first == again != other


def test_a_completion_that_sglang_cut_short_is_no_rollout(served: Run) -> None:
    served.refit(1, 0)
    for reason in ({"type": "length"}, {"type": "abort"}):
        served.engine.told = {"output_token_logprobs": [(-1.0, 4, None)], "finish_reason": reason}
        with pytest.raises(RefitError, match="1 of 3 tokens"):
            served.actor.generate([[7, 4]], SAMPLING)


def test_a_completion_of_other_weights_than_the_refits_is_no_rollout(served: Run) -> None:
    served.refit(1, 0)
    served.engine.told = {"weight_version": "4"}
    with pytest.raises(RefitMismatch, match="version 0"):
        served.actor.generate([[7, 4]], SAMPLING)


def test_an_actor_sleeps_and_wakes_by_stage_and_is_refitted_between(served: Run) -> None:
    served.refit(1, 0)
    served.actor.sleep(2)
    assert served.actor.asleep() == TAGS
    with pytest.raises(EngineDirty, match="are asleep"):
        served.actor.generate([[7, 4]], SAMPLING)
    served.actor.wake([WEIGHTS])
    served.refit(2, 1)
    assert served.actor.asleep() == {KV_CACHE}
    served.actor.empty_cache()
    assert [found.process for found in served.actor.memory(True)] == ["engine rank 0"]
    served.actor.wake([KV_CACHE])
    assert served.actor.generate([[7, 4]], SAMPLING)[0].version == 1


# Real runs


_SHORT = (
    "algorithm.prompts_per_step=16",
    "algorithm.minibatches=2",
    "validation.samples=8",
)
_TURNS = f"{ENABLED}=true"
_RUNS = {
    "apart": ("checkpoint.every=1", "checkpoint.keep=2"),
    "in_turns": (
        _TURNS,
        "generation.colocated.multi_stage_wake_up=false",
        "policy.nccl_xfer_refit=false",
    ),
    "awaited": (
        _TURNS,
        "generation.sglang.asynchronous=true",
        "trainer=fsdp",
        "algorithm.name=dapo",
        "algorithm.dynamic_sampling=true",
        "algorithm.max_sampling_rounds=2",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, Any]]]]:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang")
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        ran = {name: run(root, name, *_SHORT, *of, timeout_s=590) for name, of in _RUNS.items()}
        shutil.copytree(root / "apart", root / "resumed")
        shutil.rmtree(root / "resumed" / "checkpoints" / f"step_{STEPS:06d}")
        ran["resumed"] = run(root, "resumed", *_SHORT, *_RUNS["apart"], "resume=true", timeout_s=590)
        yield ran


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(_RUNS))
def test_two_steps_with_a_real_engine_follow_the_policy(
    runs: dict[str, list[dict[str, Any]]], name: str
) -> None:
    rows = runs[name]
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert max(row["generation_kl"] for row in rows) <= 1e-3
    assert len({row["train/grad_norm"] for row in rows}) == STEPS
    assert all(row["refit/bytes_verified"] > 0 for row in rows)
    assert ("stage/peak_bytes/wake_kv_cache" in rows[0]) == (name == "awaited")
    assert ("stage/peak_bytes/wake_all" in rows[0]) == (name == "in_turns")
    unused = "refit/bytes_bulk" if name == "in_turns" else "refit/bytes_misc"
    assert all(row[unused] == 0 for row in rows)


@pytest.mark.timeout(1800)
def test_no_number_of_a_blocking_run_depends_on_the_path_of_the_weights_or_on_whose_the_devices_are(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    assert numbers(runs["in_turns"]) == numbers(runs["apart"])


@pytest.mark.timeout(1800)
def test_a_blocking_run_that_resumes_draws_on_as_one_that_was_not_interrupted(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    assert numbers(runs["resumed"]) == numbers(runs["apart"])
