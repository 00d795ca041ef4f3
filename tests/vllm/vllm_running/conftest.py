"""One start of either engine for all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_checkpoints import write_checkpoint

from tests.megatron_trainers import Trainers
from tests.vllm_processes import forked_engines

from .scene import CONFIGS, ENGINES, Scene


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: tuple(str(write_checkpoint(root / f"{name}-{seed}", config, seed)) for seed in (1, 2))
        for name, config in CONFIGS.items()
    }


@pytest.fixture(scope="package")
def trainers(checkpoints: dict[str, tuple[str, str]]) -> Iterator[Trainers]:
    trainers = Trainers(checkpoints)
    yield trainers
    trainers.close()


@pytest.fixture(scope="package", params=list(CONFIGS))
def scene(
    request: pytest.FixtureRequest, trainers: Trainers, checkpoints: dict[str, tuple[str, str]]
) -> Iterator[Scene]:
    model, paths = request.param, checkpoints[request.param]
    for index, path in enumerate(paths):
        trainers.do("export", model, index, path)
    with pytest.MonkeyPatch.context() as patch, forked_engines():
        for key, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }.items():
            patch.setenv(key, value)
        started = Scene(model, trainers, ENGINES[model](paths[0]), paths)
        started.guarded = started.engine.call("probe_guarded")
        started.sampled_a, started.digests_a = started.engine.generate(), started.digests()
        started.meet()
        yield started
        started.engine.shutdown()
        trainers.do("close", model)
