"""One training run, from a checked configuration to its report."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape

from .algorithms.losses import PolicyLossConfig
from .config.engines import needs_bfloat16
from .config.load import ConfigError
from .config.machine import name_violations
from .config.model import local_hf_config, packed_experts_violations, size_violations
from .config.schema import TrainConfig, TrainerConfig
from .loop import TrainingLoop
from .policy.group import TrainerGroup
from .policy.make import policy_config
from .refits import Refits
from .rewards.pool import RewardPool
from .rewards.scorer import Scorer
from .rollout.arguments import with_sglang_environment
from .rollout.base import RolloutGroup
from .rollout.experience import ExperienceCollector
from .rollout.sglang import AsyncSglangRollouts, SglangRollouts
from .rollout.transformers import TransformersRollouts
from .rollout.vllm import VllmRollouts
from .run.checkpoint import CheckpointStore
from .run.cluster import ActorGroup, RunError, gpus_per_rank, ray_cluster
from .run.colocated import ColocatedRefits
from .run.display import RunDisplay
from .run.files import FolderInUse, MetricsFile, alone_in, keep_json_lines, write_whole
from .run.inputs import RunInputs, on_all_hosts
from .run.report import write_report
from .terminal import under_way
from .tiny.checkpoints import resolve_model_path

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """The user stopped the run; the text says what is saved."""


def train(config: TrainConfig, console: Console, refits: Callable[..., Refits] | None = None) -> Path:
    """Run a recipe to its end.

    Args:
        config: checked by ``load_config``.
        console: where progress is shown.
        refits: makes the object that moves the weights; None for the recipe's.

    Returns:
        The run's folder, with ``metrics.jsonl``, ``refits.jsonl``, ``config.yaml`` and ``report.png``.

    Raises:
        ConfigError: all that is wrong with the model, its checkpoint, the data, the reward function and the run's name, or
            a folder that can't be written. Nothing has been started.
        RewardError: the reward function failed; names the record.
        RunError: a rank or resource failed, or another run has the folder; names it.
        Interrupted: stopped by the user; says what is saved.
    """
    if used := [violation.text for violation in name_violations(config)]:
        raise ConfigError(config.name, used)
    folder = config.folder
    with _told_where_it_writes(config):
        model_path = resolve_model_path(config.model.path, folder.parent / "models")
    inputs = RunInputs(config, model_path)
    with ExitStack() as held:
        try:
            with _told_where_it_writes(config):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(alone_in(folder))
        except FolderInUse as error:
            raise RunError(str(error)) from error
        with _told_where_it_writes(config):
            store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep, _layout(config))
        held.enter_context(_told_what_is_saved(store))
        return _train_in(folder, store, config, model_path, inputs, console, refits)


def _train_in(
    folder: Path,
    store: CheckpointStore,
    config: TrainConfig,
    model_path: str,
    inputs: RunInputs,
    console: Console,
    refits: Callable[..., Refits] | None,
) -> Path:
    """As :func:`train`, in a folder that no other run has."""
    resumed = _resume(store, config.resume, console)
    first_step = resumed.step + 1 if resumed else 1
    if first_step > config.algorithm.steps:
        console.print(f"all {config.algorithm.steps} steps are done; nothing was started", soft_wrap=True)
        return folder
    with _told_where_it_writes(config):
        try:
            if resumed:
                inputs.sampler.load_state_dict(resumed.extra["sampler"])
            metrics = MetricsFile(folder / "metrics.jsonl", after_step=first_step - 1)
            # Version k is moved at the start of step k + 1.
            keep_json_lines(folder / "refits.jsonl", lambda row: row["version"] < first_step - 1)
        except ValueError as error:
            raise RunError(str(error)) from error
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
    with ExitStack() as stack:
        console.print(_headline(config, model_path), soft_wrap=True)
        warmup = config.trainer.optimizer.warmup_steps
        if warmup >= config.algorithm.steps:
            console.print(
                f"the run ends in the warm-up of the learning rate, below lr (trainer.optimizer.warmup_steps={warmup})",
                soft_wrap=True,
            )
        model_path = on_all_hosts(model_path)
        ranks = config.trainer.ranks + config.generation.ranks
        with under_way(console, f"starting {ranks} ranks"):
            stack.enter_context(ray_cluster(config.ray, ranks))
            stack.enter_context(_ended_as_interrupted())
            gpus = gpus_per_rank()
            if not gpus:
                _require_for_cpus(config, model_path)
            config = _with_dtype(config, gpus)
            if gpus and config.generation.backend == "sglang":
                config = with_sglang_environment(config)
            trainers = TrainerGroup(config, policy_config(config, model_path, _loss(config)), gpus)
            stack.callback(trainers.shutdown)
            scorer: Scorer = inputs.scorer
            if config.reward.processes:
                settings = config.reward
                scorer = RewardPool(
                    settings.function, settings.kwargs, settings.processes, settings.timeout_s
                )
                stack.callback(scorer.close)
            colocated = config.generation.colocated.enabled
            if not colocated:
                trainers.start()
            engines = _engines(config, model_path, inputs, gpus, trainers.actors if colocated else None)
            stack.callback(engines.shutdown)
            engines.start()
            if not colocated:
                trainers.wait_until_built()
            engines.wait_until_built()
            refits = refits or (ColocatedRefits if colocated else Refits)
            mover = refits(config, trainers, engines, folder / "refits.jsonl")
            mover.begin(first_step, lambda routes: console.print(_routes(config, routes), soft_wrap=True))
            if resumed:
                trainers.load(resumed.folder)
                # Checkpoints of before have none.
                mover.load_state(resumed.extra.get("refits", {}))
            elif config.policy.qat == "w4a4":
                trainers.calibrate_inputs(inputs.first_prompts(config.algorithm.prompts_per_step))
        collector = ExperienceCollector(config, engines, inputs, scorer)
        display = stack.enter_context(RunDisplay(console, config.algorithm.steps, first_step))
        loop = TrainingLoop(config, trainers, mover, collector, store, metrics, display.on_step)
        with _stop_on_interrupt(console) as stop:
            done = loop.run(first_step, stop)
    if metrics.rows:
        console.print(display.table(metrics.rows, escape(f"{config.name}: {len(metrics.rows)} steps")))
        picture = folder / "report.png"
        try:
            write_report(
                metrics.rows, picture, f"{config.name}: {config.algorithm.name}, {config.model.path}"
            )
        except OSError as error:  # what was trained is worth more than its picture
            logger.error("%s can't be written: %s", picture, error)
        else:
            told = f"metrics {folder / 'metrics.jsonl'}, picture {picture}"
            console.print(told, markup=False, soft_wrap=True)
    if done < config.algorithm.steps:
        raise Interrupted(f"stopped after step {done}, which is saved; resume=true goes on from there")
    return folder


def _require_for_cpus(config: TrainConfig, model_path: str) -> None:
    lack, hf_config = "Ray finds no GPU", local_hf_config(model_path)
    found = [
        *size_violations(config, lack),
        *(() if hf_config is None else packed_experts_violations(config, hf_config, lack)),
    ]
    if found:
        raise ConfigError(config.name, [wrong.text for wrong in found])


def _with_dtype(config: TrainConfig, gpus: int) -> TrainConfig:
    """The configuration with ``model.dtype: auto`` resolved."""
    if config.model.dtype != "auto":
        return config
    # Codes are made of 16 bits, on CPUs too.
    refit = config.policy.refit
    made = refit.quantized_in_transit or refit.trainer_quantize_mxfp4
    in_bf16 = gpus or made or config.policy.qat != "off" or needs_bfloat16(config)
    return replace(config, model=replace(config.model, dtype="bfloat16" if in_bf16 else "float32"))


def _engines(
    config: TrainConfig, model_path: str, inputs: RunInputs, gpus: int, beside: ActorGroup | None
) -> RolloutGroup:
    stop, pad = inputs.stop_token_ids, inputs.pad_token_id
    if config.generation.backend == "vllm":
        return VllmRollouts(config, model_path, stop, gpus, beside)
    if config.generation.backend == "sglang":
        kind = AsyncSglangRollouts if config.generation.sglang.asynchronous else SglangRollouts
        return kind(config, model_path, stop, gpus, beside)
    return TransformersRollouts(config, model_path, stop, pad, gpus, beside)


def _loss(config: TrainConfig) -> PolicyLossConfig:
    algorithm = config.algorithm
    return PolicyLossConfig(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        aggregation=algorithm.aggregation,
        kl_coef=algorithm.kl_coef,
        tis_cap=algorithm.tis_cap,
    )


def _layout(config: TrainConfig) -> dict[str, Any]:
    trainer = config.trainer
    if trainer.backend == "fsdp":
        names = ("backend", "ranks", "tensor_parallel")
        return {**{name: getattr(trainer, name) for name in names}, "replicate": trainer.fsdp.replicate}
    names = ("ranks", "tensor_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    layout = {name: getattr(trainer, name) for name in (*names, "context_parallel", "distributed_optimizer")}
    # Only where they are given: checkpoints of runs without them stay as they were.
    uneven = (
        "virtual_pipeline",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    return layout | {name: getattr(trainer, name) for name in uneven if getattr(trainer, name) is not None}


def _resume(store: CheckpointStore, wanted: bool, console: Console) -> Any:
    if not wanted:
        return None
    found = store.latest_good()
    for skipped in found.skipped:
        problem = f"checkpoint {skipped.folder} is skipped: {skipped.reason}"
        console.print(problem, style="yellow", markup=False, soft_wrap=True)
        kept = f"it is kept as {store.set_aside(skipped)}"
        console.print(kept, style="yellow", markup=False, soft_wrap=True)
    told = (
        f"no checkpoint to resume from in {store.root}; starting at step 1"
        if found.checkpoint is None
        else f"resuming after step {found.checkpoint.step} from {found.checkpoint.folder}"
    )
    console.print(told, markup=False, soft_wrap=True)
    return found.checkpoint


def _headline(config: TrainConfig, model_path: str) -> str:
    generation = config.generation
    shared = ", colocated" if generation.colocated.enabled else ""
    return (
        f"[bold]{escape(config.name)}[/]: {config.algorithm.name} on {escape(model_path)}; trainer {config.trainer.ranks} ranks "
        f"({_trainer_text(config.trainer)}), {generation.backend} {generation.replicas} x TP{generation.tensor_parallel}{shared}"
    )


def _trainer_text(trainer: TrainerConfig) -> str:
    tp = trainer.tensor_parallel
    if trainer.backend != "fsdp":
        cp = f" CP{trainer.context_parallel}" if trainer.context_parallel > 1 else ""
        return f"TP{tp} PP{trainer.pipeline_parallel} EP{trainer.expert_parallel}{cp}"
    copies = trainer.fsdp.replicate
    shards = trainer.ranks // (copies * tp)
    return (f"HSDP{copies}x{shards}" if copies > 1 else f"FSDP{shards}") + (f" TP{tp}" if tp > 1 else "")


def _routes(config: TrainConfig, routes: Mapping[str, object]) -> str:
    how = "shard to shard" if config.policy.nccl_xfer_refit else "packed broadcast of everything"
    return f"refit: {how}; {routes['bulk']} weights bulk, {routes['misc']} misc, {routes['unused']} unused by the engine"


@contextmanager
def _told_where_it_writes(config: TrainConfig) -> Iterator[None]:
    """A folder or disk that takes no files is the configuration's matter, as long as nothing has been started."""
    try:
        yield
    except OSError as error:
        unwritable = (
            f"run_root: {config.run_root} does not take the run's files ({error}); give a folder that you may write, with room "
            "for checkpoints"
        )
        raise ConfigError(config.name, [unwritable]) from error


@contextmanager
def _told_what_is_saved(store: CheckpointStore) -> Iterator[None]:
    """An interrupt that ends the run at once says which checkpoint there is."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # the second by Ray's handler of SIGTERM, while Ray starts
        newest = store.newest()
        saved = "no step is saved" if newest is None else f"{newest} is saved; resume=true goes on from there"
        raise Interrupted(f"stopped at once; {saved}") from None


@contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """SIGTERM, by which SLURM and Kubernetes end a run, ends it as an interrupt does, once Ray runs.

    Of the handler that Ray installs as it starts, one sees a stack of C++ alone.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _stop_on_interrupt(console: Console) -> Iterator[Callable[[], bool]]:
    """The first interrupt asks the loop to stop after the step; the second one ends it at once."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        console.print(
            "[yellow]stopping after this step, and saving it; interrupt again to stop at once", soft_wrap=True
        )

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
