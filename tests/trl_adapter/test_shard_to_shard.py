"""TRL's AsyncGRPOTrainer, its rollout worker and vLLM's own server, with weights from shard to shard."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from tests.spawn import free_port, run_alone, run_ranks
from tests.trl_adapter.ranks import STEPS, Case, run_example, train, train_alone
from tests.vllm.vllm_checkpoints import dense_config, write_checkpoint
from tests.vllm_processes import vllm_processes
from tests.vllm_servers import BACKEND, ENVIRONMENT, serving, write_tokenizer

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None,
        reason="needs TRL, which verl can't have beside it: make test-trl",
    ),
]


@dataclass(frozen=True)
class Server:
    url: str
    model: str

    def probe(self, method: str, *args: str) -> Any:
        body = {"method": method, "args": args}
        answered = requests.post(f"{self.url}/collective_rpc", json=body, timeout=60)
        answered.raise_for_status()
        return answered.json()["results"][0]

    def loaded(self, folder: str) -> Any:
        """Digests of what vLLM itself makes of a checkpoint."""
        self.probe("probe_poison")
        self.probe("probe_engine_load", folder)
        return self.probe("refit_parameter_digests")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = dense_config()
    config.vocab_size = 128  # without padding, which would keep the poison that it is given
    model = str(write_checkpoint(tmp_path_factory.mktemp("model"), config, 1))
    write_tokenizer(model)
    url = f"http://127.0.0.1:{free_port()}"
    probed = ["--worker-extension-cls", "tests.trl_adapter.probe.ServerProbe"]
    with pytest.MonkeyPatch.context() as patch:
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        with serving(model, url, *BACKEND, *probed):
            yield Server(url, model)


def _judged(server: Server, case: Case, ranks: list[dict[str, Any]]) -> None:
    """Each update of a training brought the server what vLLM itself loads of the trainer's weights, and TRL its version."""
    versions = list(range(1, STEPS + 2))
    updates = ranks[0]["updates"]
    assert [update["version"] for update in updates] == versions
    assert [update["served"] for update in updates] == versions
    expected = [server.loaded(f"{case.folder}/version-{version}") for version in versions]
    assert len({str(digests) for digests in expected}) == len(versions)  # each step changed the weights
    assert [update["digests"] for update in updates] == expected
    assert not any(rank["open"] for rank in ranks)
    losses = [entry for entry in ranks[0]["log"] if "perf/weight_sync_transfer_s" in entry]
    assert len(losses) == STEPS


def test_two_fsdp_ranks_send_their_shards_and_gather_nothing(server: Server, tmp_path: Path):
    case = Case(str(tmp_path), server.url, server.model, fsdp=True)
    ranks = run_ranks(train, 2, case, made_by=vllm_processes)
    _judged(server, case, ranks)
    for updates in zip(*(rank["updates"] for rank in ranks), strict=True):
        assert [update["gathered"] for update in updates] == [[], []]
        # Each rank sent what it holds, and no more.
        assert [u["record"]["bytes_bulk"] for u in updates] == [u["own_bytes"] for u in updates]
        assert [u["record"]["bytes_misc"] for u in updates] == [0, 0]
    # What TRL's own way would have been seen by.
    assert all("full_tensor" in rank["control"] and len(rank["control"]) > 1 for rank in ranks)


def test_two_ranks_that_each_hold_all_share_the_sending(server: Server, tmp_path: Path):
    case = Case(str(tmp_path), server.url, server.model, by_calls=True)
    ranks = run_ranks(train, 2, case, made_by=vllm_processes)
    _judged(server, case, ranks)
    for updates in zip(*(rank["updates"] for rank in ranks), strict=True):
        sent = [update["record"]["bytes_bulk"] for update in updates]
        assert all(sent)
        assert sum(sent) == updates[0]["own_bytes"]


def test_one_process_sends_what_its_adapters_make_of_the_base(server: Server, tmp_path: Path):
    case = Case(str(tmp_path), server.url, server.model, lora=True)
    alone = run_alone(train_alone, case, environment={"CUDA_VISIBLE_DEVICES": ""}, made_by=vllm_processes)
    _judged(server, case, [alone])


def test_the_example_trains(server: Server, tmp_path: Path):
    arguments = [
        "--model",
        server.model,
        "--server",
        server.url,
        "--steps",
        "2",
        "--cpu",
        "--out",
        str(tmp_path),
    ]
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    printed = run_alone(run_example, *arguments, environment=environment, made_by=vllm_processes)
    assert [line[:15] for line in printed.splitlines() if line.startswith("step")] == [
        "step 1: update ",
        "step 2: update ",
    ]
    assert printed.count("last update of the ") == 2
    assert server.probe("refit_serving_version") == {"version": 3}


def test_a_rank_that_fails_alone_ends_the_training_on_all_ranks_and_the_epoch(server: Server, tmp_path: Path):
    case = Case(str(tmp_path), server.url, server.model, fsdp=True, fails="alone")
    ranks = run_ranks(train, 2, case, made_by=vllm_processes)
    assert [rank["updates"] for rank in ranks] == [1, 1]
    assert max(rank["seconds"] for rank in ranks) < case.refit["timeout_s"] / 2
    main, other = (rank["error"] for rank in ranks)
    assert (type(main), main.stage, main.blamed) == (RefitError, "record", 1)
    assert type(other) is RefitTimeout
    # All had committed.
    assert server.probe("refit_serving_version") == {"version": 2}
    assert server.probe("probe_epoch") == {"open": False}


@pytest.mark.parametrize("fails", ["refuses", "killed"])
def test_a_server_that_fails_in_an_update_ends_the_training_on_all_ranks(
    server: Server, tmp_path: Path, fails: str
):
    """The server is lost by the last one."""
    case = Case(str(tmp_path), server.url, server.model, fsdp=True, fails=fails)
    ranks = run_ranks(train, 2, case, made_by=vllm_processes)
    assert [rank["updates"] for rank in ranks] == [1, 1]
    assert max(rank["seconds"] for rank in ranks) < case.refit["timeout_s"] / 2
    main, other = (rank["error"] for rank in ranks)
    assert type(other) is PeerLost
    if fails == "killed":  # though the server may tell of it before the connection to the worker breaks
        assert (type(main), main.blamed, other.blamed) == (PeerLost, 2, 2)
    else:
        assert (type(main), main.stage) == (RefitError, "http")
        assert any("PeerLost" in note for note in ranks[0]["notes"])
        assert server.probe("refit_serving_version") == {"version": 1}
