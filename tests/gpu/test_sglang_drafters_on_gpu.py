"""SGLang whose MTP layers draft, on one GPU that the trainer shares: after each refit it drafts with the new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlrefit.workers.engines.common.bucket_sender import own_device
from rlrefit.workers.engines.sglang.sender import SglangSender
from tests.families.chains import write_chain
from tests.sglang.drafting_engine import Drafting

from .needs import needs
from .test_drafters_on_gpu import GLM
from .vllm_trainer import CheckpointSource

pytestmark = [
    *needs("sglang"),
    # SGLang compiles kernels for its first batch.
    pytest.mark.timeout(400),
]
# name → settings of the engine
CASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "CUDA graphs": {"disable_cuda_graph": False, "cuda_graph_max_bs_decode": 2},
    "sleep": {"enable_memory_saver": True},
}


@pytest.fixture(scope="module", params=CASES)
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tell: Callable[[str], None]
) -> Iterator[Drafting]:
    folder = tmp_path_factory.mktemp("drafting")
    paths = [folder / str(index) for index in (0, 1)]
    chains = [
        write_chain("glm4_moe", path, index, drafts=index == 1, changes=GLM)
        for index, path in enumerate(paths)
    ]
    tell(f"starting SGLang: {request.param}")
    found = Drafting([str(path) for path in paths], chains, "cuda", **CASES[request.param])
    yield found
    found.engine.shutdown()


def _sender(scene: Drafting) -> tuple[SglangSender, CheckpointSource]:
    source = CheckpointSource(scene.paths, torch.device("cuda", 0))
    return SglangSender(source, scene.refit, own_device(), 1 << 20), source


def test_the_drafter_follows_each_refit_and_tokens_are_the_models(scene: Drafting) -> None:
    assert scene.drafts(0) == 0
    sender, source = _sender(scene)
    for version, index in enumerate((1, 0, 1, 0)):
        scene.poison()
        source.take_on(index)
        sender.refit(version)
        assert scene.digests() == scene.expected[index]
        assert scene.drafts(index) == index


@pytest.mark.parametrize("scene", ["sleep"], indirect=True)
def test_a_drafter_that_slept_is_woken_and_refitted_with_its_model(scene: Drafting) -> None:
    sender, source = _sender(scene)
    for version, index in enumerate((1, 0), 10):
        free, _ = torch.cuda.mem_get_info()
        scene.refit.sleep()
        assert torch.cuda.mem_get_info()[0] > free
        scene.refit.wake(["weights"])
        source.take_on(index)
        sender.refit(version)
        scene.refit.wake(["kv_cache"])
        assert scene.digests() == scene.expected[index]
        assert scene.drafts(index) == index
