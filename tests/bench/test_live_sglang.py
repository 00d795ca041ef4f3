"""``rlrefit bench --live --backend sglang``: a live Megatron, a live SGLang, and the trainer's part in SGLang's own update."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlrefit.integration.errors import RefitError
from rlrefit.recipes.bench.live.sglang_engine import SglangEngine
from rlrefit.recipes.bench.live.trainer import agree_with_engine
from rlrefit.recipes.bench.live.update_group import flattened, in_buckets, join_update_group
from rlrefit.recipes.cli import main
from tests.sglang.engine_double import BucketDouble, EngineDouble, modules, weights
from tests.sglang.recorded import VERSION, VERSION_WITH_SESSIONS
from tests.spawn import free_port, run_alone, run_ranks

from .test_live import run_of, write_moe

HAS_SGLANG = importlib.util.find_spec("sglang") is not None


def run_live_sglang(folder):
    # On CPUs SGLang pads experts to 32 rows.
    return run_of(folder, "--backend", "sglang", moe_intermediate_size=32)


AHEAD = (run_live_sglang,) if HAS_SGLANG else ()


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_SGLANG, reason="needs SGLang")
def test_a_live_megatron_refits_a_live_sglang_and_all_paths_leave_the_same_bytes(found_ahead):
    code, record, told, log = found_ahead.by(run_live_sglang)
    assert code == 0, told + log
    assert record["bit_exact"] is True
    assert (record["backend"], record["engine"].keys()) == ("sglang", {"sglang", "torch", "python"})
    sharded, broadcast, own = record["paths"]
    assert sharded["carrier"] == "p2p"
    assert sharded["weights"] == {"bulk": 43, "misc": 2, "unused": 0}
    assert list(sharded["misc_reasons"].values()) == [2]
    assert (
        sharded["bytes_bulk"] + sharded["bytes_misc"] == record["kept_bytes"] - 2 * 8 * 64 * 2
    )  # padded rows
    assert [len(path["seconds"]) for path in record["paths"]] == [3, 2, 2]
    # The third weights as well, which the first path left last.
    assert [[point["number"] for point in path["memory"]] for path in record["paths"]] == [[1, 2, 3]] * 3
    for whole in (broadcast, own):
        assert whole["weights"] == {"bulk": 0, "misc": 45, "unused": 0}
    assert own["carrier"] == "SGLang's update_weights_from_distributed, in flattened buckets"
    assert own["seconds_median"] > 0
    assert f"SGLang {importlib.metadata.version('sglang')} tp=1" in told


def test_peers_are_those_of_the_backend(tmp_path, capsys):
    layouts = ("--model", write_moe(tmp_path), "--train", "ep=2", "--gen", "tp=1,pp=2", "--device", "cpu")
    assert main(["bench", "--live", "--backend", "sglang", "--peers", "vllm", *layouts]) == 2
    told = capsys.readouterr().err
    assert "--peers: 'vllm' is not one of broadcast, sglang or none" in told
    assert "--gen: pp=2, and refits of SGLang are of one tensor-parallel group" in told
    assert main(["bench", "--live", "--peers", "sglang", *layouts, "--refits", "0"]) == 2
    told = capsys.readouterr().err
    assert "--peers: 'sglang' is not one of broadcast, vllm or none" in told
    assert "--gen: pp" not in told


def load_the_trainers_side():
    importlib.import_module("rlrefit.recipes.bench.live.run")
    importlib.import_module("rlrefit.recipes.bench.command")
    return {"sglang", "vllm"} & set(sys.modules)


def test_the_trainers_side_loads_no_engine():
    assert run_alone(load_the_trainers_side, environment={}) == set()


def test_buckets_hold_as_many_weights_as_fit_in_order_and_the_last_one_is_told():
    held = [
        (str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate((4, 4, 9, 1, 5, 3))
    ]
    found = [([name for name, _ in bucket], last) for bucket, last in in_buckets(iter(held), 8)]
    assert found == [(["0", "1"], False), (["2"], False), (["3", "4"], False), (["5"], True)]
    assert list(in_buckets([], 8)) == []


def test_a_bucket_lies_as_sglang_reads_it():
    [(bucket, last)] = in_buckets(weights(1).items(), 1 << 20)
    theirs = BucketDouble(bucket)
    assert last
    assert torch.equal(flattened(bucket), theirs.get_flattened_tensor())
    assert all(meta.start_idx % meta.dtype.itemsize == 0 for meta in theirs.get_metadata())


class Engine(EngineDouble):
    """``sglang.Engine`` as the benchmark calls it; its workers learn commands from the benchmark's loader."""

    sessions = False

    def __init__(self, **settings):
        super().__init__(self.sessions, custom_weight_loader=settings["custom_weight_loader"])
        self.settings, self.updates = settings, []
        update, manager = self.tokenizer_manager.update_weights_from_tensor, self.tokenizer_manager

        async def called(obj, request):
            if obj.load_format == settings["custom_weight_loader"][0]:
                return await update(obj, request)
            assert manager.session if self.sessions else not hasattr(obj, "selector")
            assert obj.load_format in settings["custom_weight_loader"]
            manager.worker.live_poison = lambda: {"bytes": manager.holder.kept_bytes}
            manager.worker.live_memory = lambda restart: {"rss": 7 + restart}
            return True, "Success"

        manager.update_weights_from_tensor = called

    def generate(self, input_ids, sampling_params):
        assert sampling_params["ignore_eos"]
        return [{"output_ids": prompt[: sampling_params["max_new_tokens"]]} for prompt in input_ids]

    def update_weights_from_distributed(self, names, dtypes, shapes, group, flush_cache, load_format):
        self.updates.append((names, flush_cache, load_format))
        return "unknown" not in names, "no such weight"


class EngineWithSessions(Engine):
    sessions = True

    def begin_weight_update(self):
        self.updates.append("begun")
        return True, "Success"

    def end_weight_update(self):
        self.updates.append("ended")
        return True, "Success"


@pytest.mark.parametrize("sessions", [False, True], ids=["", "in sessions"])
def test_the_engines_calls_reach_sglang(monkeypatch, sessions):
    for name, module in modules(sessions).items():
        monkeypatch.setitem(sys.modules, name, module)
    double = EngineWithSessions if sessions else Engine
    monkeypatch.setattr(sys.modules["sglang"], "Engine", double, raising=False)
    engine = SglangEngine(
        {"model": "m", "device": "cpu", "dtype": "bfloat16", "tp": 1, "ep": 1, "gpu_memory_utilization": 0.5}
    )
    started = engine._engine
    assert (started.settings["load_format"], started.settings["mem_fraction_static"]) == ("dummy", 0.5)
    # What SGLang will import by its name.
    *_, checks = started.settings["custom_weight_loader"]
    assert importlib.util.find_spec(checks.rpartition(".")[0]) is not None
    assert engine.versions()["sglang"] == (VERSION_WITH_SESSIONS if sessions else VERSION)
    assert engine.poison() == [started.tokenizer_manager.holder.kept_bytes]
    assert engine.memory(True) == [{"rss": 8}]
    calls = started.tokenizer_manager.calls
    calls.clear()
    assert engine.generate([[1, 2, 3], [4]], 2) == [[1, 2], [4]]
    assert calls == ["flush_cache"]
    engine.update(["a"], ["bfloat16"], [[2]], False)
    engine.update(["b"], ["bfloat16"], [[2]], True)
    buckets = [(["a"], False, "flattened_bucket"), (["b"], True, "flattened_bucket")]
    assert started.updates == (["begun", *buckets, "ended"] if sessions else buckets)
    with pytest.raises(RefitError, match="update_weights_from_distributed: no such weight"):
        engine.update(["unknown"], ["bfloat16"], [[2]], True)
    started.loop.close()


def _member(rank, port):
    """What rank 1 of the group receives in two updates; the world around it has other ranks and goes on."""
    group = join_update_group("127.0.0.1", port, 2, "gloo", timedelta(seconds=30), rank=1 - rank)
    received = []
    for number in (1.0, 2.0):
        tensor = torch.full((3,), number if rank == 1 else torch.nan)
        # The group's rank 0 is the world's rank 1.
        dist.broadcast(tensor, 0, group=group)
        received.append(tensor.tolist())
    dist.destroy_process_group(group)
    dist.barrier()
    return received


def test_the_group_of_the_update_counts_its_own_ranks_beside_the_trainers_world():
    port = free_port()
    assert run_ranks(_member, 2, port) == [[[1.0] * 3, [2.0] * 3]] * 2


def test_the_trainers_nccl_is_set_as_sglang_sets_its_own_and_a_users_setting_stays(monkeypatch):
    environment = {"NCCL_NVLS_ENABLE": "1"}
    monkeypatch.setattr(os, "environ", environment)
    agree_with_engine("vllm")
    assert environment == {"NCCL_NVLS_ENABLE": "1"}
    agree_with_engine("sglang")
    assert environment == {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
