"""vLLM's own calls for weights beside rlrefit's."""

from __future__ import annotations

import pytest
from vllm_engines import GEN_RANKS, ScriptEngine

from tests.megatron_trainers import CONFIG, RANKS
from tests.vllm_cpu import PACKS_EXPERTS

from .scene import Scene


def test_vllms_own_weight_transfer_calls_drive_a_refit_by_the_backends_name(scene: Scene):
    if not isinstance(scene.engine, ScriptEngine):
        return  # the other engine was started without the backend
    llm, trainers = scene.engine.llm, scene.trainers
    scene.engine.close_refit()
    with pytest.raises(Exception, match="no trainer has been met"):
        llm.update_weights({"update_info": {"version": 0}})
    rendezvous = trainers.do("open", scene.model, GEN_RANKS)[0]
    joining = trainers.start("join", scene.model, rendezvous)
    init = {"rendezvous": rendezvous, "first_rank": RANKS, "refit_config": CONFIG}
    llm.init_weight_transfer_engine({"init_info": init})
    joining.result()
    for index in (1, 0):
        sending = scene.send(index)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": scene.version}})
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        sending.result()
        assert scene.engine.version() == scene.version
        assert (scene.digests() == scene.digests_a) == (index == 0)
    assert scene.serves_a()
    llm.start_weight_update()
    with pytest.raises(Exception, match="without update_weights"):
        llm.finish_weight_update()
    # Every worker's answer was read: the next call gets its own.
    assert [len(digests) for digests in scene.digests()] == [len(digests) for digests in scene.digests_a]
    scene.engine.close_refit()
    scene.meet()


def test_a_refit_gives_what_vllms_own_reload_gives(scene: Scene):
    """The last one of the last module: on the CPU, vLLM's reload leaves experts computing with copies."""
    if PACKS_EXPERTS and scene.model == "qwen3-moe":
        pytest.skip("vLLM's own reload fails on the experts that this release packs")
    scene.refit(1)
    digests_b = scene.digests()
    scene.engine.call("probe_poison")
    scene.engine.call("probe_engine_load", scene.paths[1])
    assert scene.digests() == digests_b
