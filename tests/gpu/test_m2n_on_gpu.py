"""Refits that NVIDIA's ``nccl.m2n`` carries beside ``p2p``: one process a GPU, trainers on the first half."""

from __future__ import annotations

import os
import signal
import time
import traceback
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.transport.m2n import unavailable
from tests.spawn import free_port

from . import test_offload_on_gpu as offload
from .needs import needs
from .spawned import spawned

LACKING = unavailable(torch.device("cuda"), 1 << 20, 2) if torch.cuda.is_available() else ""
pytestmark = [*needs(gpus=2), pytest.mark.skipif(bool(LACKING), reason=LACKING)]

HIDDEN, INTERMEDIATE, EXPERTS = 512, 768, 8
LIMIT_S = 20.0
# Of an epoch that a new process joins, which takes its time to start.
NEXT_LIMIT_S = 90.0


def world_size() -> int:
    return min(4, torch.cuda.device_count()) // 2 * 2


@dataclass(frozen=True)
class Case:
    """What happens to a world.

    Attributes:
        transport: that carries the weights.
        verify: as in the configuration.
        moves: rank whose weights come to lie elsewhere before the third refit; -1 for none.
        damage: whether the last rank's weights are changed as they land, in the second refit.
        dies: where rank 0 is killed in its second refit: ``before`` its reshards, or ``within`` them.
        bucket_mb: as in the configuration.
    """

    transport: str = "m2n"
    verify: str = "full"
    moves: int = -1
    damage: bool = False
    dies: str = ""
    bucket_mb: int = 8


def specs_and_layout(rank: int, size: int) -> tuple[list[Any], dict[str, Any], dict[str, str]]:
    """Experts and dense weights that meshes express, and others that they don't; what a rank holds or wants; what it refuses."""
    from rlrefit.integration.weights.manifest import TensorSpec

    half = size // 2
    bf16 = torch.bfloat16
    experts = [f"layers.{i}.mlp.experts.{e}" for i in range(2) for e in range(EXPERTS)]
    specs = [
        *(TensorSpec(f"{e}.gate_proj.weight", (INTERMEDIATE, HIDDEN), bf16) for e in experts),
        *(TensorSpec(f"{e}.down_proj.weight", (HIDDEN, INTERMEDIATE), bf16) for e in experts),
        *(TensorSpec(f"layers.{i}.q_proj.weight", (1024, HIDDEN), bf16) for i in range(6)),
        *(TensorSpec(f"layers.{i}.norm.weight", (HIDDEN,), torch.float32) for i in range(3)),
        TensorSpec("conv", (4, 3, 5, 7), bf16),
        TensorSpec("large", (9 * 1024, HIDDEN), bf16),
        TensorSpec("gaps", (12, HIDDEN), bf16),
        TensorSpec("odd", (257, 31), torch.float16),
        TensorSpec("router", (EXPERTS, HIDDEN), bf16),
    ]
    whole = {s.name: [tuple((0, n) for n in s.shape)] for s in specs}
    if rank < half:  # expert parallelism, all else is replicated
        mine = range(rank * EXPERTS // half, (rank + 1) * EXPERTS // half)
        held = {
            name: boxes
            for name, boxes in whole.items()
            if ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) in mine
        }
        held["odd"] = [((0, 100), (0, 31)), ((100, 257), (0, 31))]
        return specs, held, {"router": "MoE router"}
    index = rank - half

    def cut(name: str, dim: int) -> list[Any]:
        box = list(whole[name][0])
        step = box[dim][1] // half
        box[dim] = (index * step, (index + 1) * step)
        return [tuple(box)]

    wanted = dict(whole)
    for name in whole:
        if "gate_proj" in name or "q_proj" in name:
            wanted[name] = cut(name, 0)
        elif "down_proj" in name:
            wanted[name] = cut(name, 1)
    wanted["gaps"] = [((0, 3), (0, HIDDEN)), ((7, 12), (0, HIDDEN))]
    return specs, wanted, {}


def some_without_gaps(endpoint: Any) -> None:
    """Dense weights of even layers lie without gaps, where the library reads or writes them in place; so does a large one."""
    from tests.refit.synthetic import held_by

    held = held_by(endpoint)
    held.update(
        {
            key: view.contiguous()
            for key, view in held.items()
            if key[0] == "large" or ("q_proj" in key[0] and int(key[0].split(".")[1]) % 2 == 0)
        }
    )


def rank_main(rank: int, meetings: list[Rendezvous], case: Case, results: Any) -> None:
    try:
        refits(rank, meetings, case, results)
    except Exception as error:
        results.put((rank, "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    if case.dies:
        # A reshard that never ends would hold the exit up as well.
        os._exit(0)


def refits(rank: int, meetings: list[Rendezvous], case: Case, results: Any) -> None:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.session import RefitSession
    from tests.refit.synthetic import SyntheticDestination, SyntheticSource, move, refit_changed

    meeting, *later = meetings
    torch.cuda.set_device(rank)
    device, size = f"cuda:{rank}", meeting.size
    specs, layout, refused = specs_and_layout(rank, size)
    endpoint: Any = (
        SyntheticSource(specs, layout, refused, device)
        if rank < size // 2
        else SyntheticDestination(specs, layout, device)
    )
    some_without_gaps(endpoint)
    config = RefitConfig(
        transport=case.transport,
        bucket_mb=case.bucket_mb,
        verify=case.verify,
        timeout_s=LIMIT_S if case.dies else 60.0,
    )
    session = RefitSession.open(meeting, rank, lambda: endpoint, config)
    for version in (1, 2, 3):
        if version == 2 and case.dies and rank == 0:
            die(case.dies)
        if version == 2 and case.damage and rank == size - 1:
            damage(endpoint)
        if version == 3 and case.moves == rank:
            move(endpoint)
        start = time.monotonic()
        try:
            record, wrong = refit_changed(session, endpoint, version)
        except RefitError as error:
            seconds = time.monotonic() - start
            results.put((rank, "ended", (type(error).__name__, error.parameter, seconds, str(error))))
            break
        results.put((rank, "refitted", (version, wrong, record.to_json(), session.engine.transport_reason)))
    session.close()
    config = replace(config, timeout_s=NEXT_LIMIT_S)
    for again in later:
        start = time.monotonic()
        try:
            session = RefitSession.open(again, rank, lambda: endpoint, config)
            record, wrong = refit_changed(session, endpoint, 4)
            session.close()
            results.put((rank, "again", ("", wrong, time.monotonic() - start, record.to_json())))
        except RefitError as error:
            results.put((rank, "again", (type(error).__name__, [], time.monotonic() - start, str(error))))


def newcomer_main(rank: int, meeting: Rendezvous, case: Case, results: Any) -> None:
    """A rank that takes the place of one that was killed."""
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.session import RefitSession
    from tests.refit.synthetic import SyntheticSource, refit_changed

    torch.cuda.set_device(rank)
    specs, layout, refused = specs_and_layout(rank, meeting.size)
    endpoint = SyntheticSource(specs, layout, refused, f"cuda:{rank}")
    try:
        config = RefitConfig(
            transport=case.transport, bucket_mb=case.bucket_mb, verify=case.verify, timeout_s=NEXT_LIMIT_S
        )
        session = RefitSession.open(meeting, rank, lambda: endpoint, config)
        refit_changed(session, endpoint, 4)
        session.close()
        results.put((rank, "joined", ""))
    except Exception as error:
        results.put((rank, "joined", f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)


def die(where: str) -> None:
    """Kill this process as it comes to its next refit's reshards: before the ranks meet for them, or after."""
    from rlrefit.integration.transport.m2n import Communicators, M2nTransport

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "before":
        M2nTransport._reshard = killed  # type: ignore[method-assign, assignment]
    else:
        Communicators.reshard = killed  # type: ignore[method-assign]


def damage(endpoint: Any) -> None:
    """Change a weight of this engine behind a batch's reshards, and before what landed is added up."""
    from rlrefit.integration.transport.m2n import Communicators
    from tests.refit.synthetic import held_by

    whole = next(view for (name, _), view in held_by(endpoint).items() if name == "layers.2.q_proj.weight")
    reshard = Communicators.reshard

    def reshard_and_damage(communicators: Any, lane: int, pairs: Any, stream: int) -> None:
        reshard(communicators, lane, pairs, stream)
        whole.view(torch.int16)[0, :1].bitwise_xor_(1)

    Communicators.reshard = reshard_and_damage  # type: ignore[method-assign]


def run_world(case: Case, rows: int, meetings: int = 1) -> list[Any]:
    """What the ranks report, ``rows`` of it."""
    size = world_size()
    servers = [open_rendezvous("127.0.0.1", size // 2, size // 2) for _ in range(meetings)]
    ranks = [(r, [server.rendezvous for server in servers], case) for r in range(size)]
    try:
        with spawned(rank_main, ranks) as results:
            found = [results.get(timeout=200) for _ in range(rows)]
    finally:
        for server in servers:
            server.close()
    assert [row for row in found if row[1] == "failed"] == []
    return found


def checked(rows: list[Any]) -> list[dict[str, Any]]:
    """The engines' records of refits that all landed bit for bit."""
    engines = [row for row in rows if row[0] >= world_size() // 2]
    assert [row[2][1] for row in engines if row[2][1]] == []
    return [row[2][2] for row in engines]


@pytest.mark.parametrize("verify", ["full", "sampled", "off"])
def test_three_changed_refits_land_bit_for_bit_by_both_ways(verify: str) -> None:
    rows = run_world(Case(verify=verify), 3 * world_size())
    for record in checked(rows):
        assert record["transport"] == "m2n"
        assert 0 < record["bytes_resharded"] < record["bytes_bulk"]
        share = record["bytes_verified"] / (record["bytes_bulk"] + record["bytes_misc"])
        assert share == {"full": 1.0, "off": 0.0}.get(verify, share)
        assert verify != "sampled" or 0 < share < 1
    reasons = {row[2][3] for row in rows}
    assert len(reasons) == 1, "all ranks tell the same"
    assert "4 dimensions" in reasons.pop()


def test_the_golden_transport_gives_the_same_bits() -> None:
    checked(run_world(Case("golden"), 3 * world_size()))


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_weights_that_have_moved_are_followed(side: str) -> None:
    moves = 0 if side == "trainer" else world_size() - 1
    checked(run_world(Case(moves=moves), 3 * world_size()))


def test_bytes_that_changed_as_they_landed_are_found() -> None:
    rows = run_world(Case(damage=True), 2 * world_size())
    ended = {row[0]: row[2] for row in rows if row[1] == "ended"}
    kind, parameter, _, _ = ended[world_size() - 1]
    assert kind == "VerificationError"
    assert parameter
    assert set(ended) == set(range(world_size()))


@pytest.mark.parametrize("gapless", [False, True])
def test_parameters_travel_from_wherever_they_are(gapless: bool) -> None:
    journey = ("gpu", "pinned", "gpu", "pageable", "mixed", "gpu")
    case = offload.Case("m2n", journey, 6, 4096, gapless=gapless, bucket_mb=4)
    trainer, engine = offload.run(case)
    assert isinstance(trainer, list), trainer
    assert isinstance(engine, list), engine
    assert [row["wrong"] for row in engine] == [[] for _ in journey]
    assert all(row["verified"] >= case.nbytes for row in engine)


def fp8_main(rank: int, meeting: Rendezvous, results: Any) -> None:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.session import RefitSession
    from rlrefit.integration.weights.quantizing import wire_specs
    from tests.quantize.test_quantized_refit import FP8, QUANTIZED, SPECS, QuantizedDestination
    from tests.refit.synthetic import SyntheticSource, refit_changed, whole

    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    formats: Any = {spec.name: FP8 for spec in QUANTIZED}
    layout = whole(SPECS)
    if rank == 0:
        endpoint: Any = SyntheticSource(SPECS, layout, device=device)
    else:
        scales = [wire_specs(spec, FP8)[1] for spec in QUANTIZED]
        endpoint = QuantizedDestination(formats, layout | whole(scales), device)
    config = RefitConfig(transport="m2n", bucket_mb=4, verify="full", trainer_quantize_fp8=True)
    session = RefitSession.open(meeting, rank, lambda: endpoint, config)
    for version in (1, 2, 3):
        record, wrong = refit_changed(session, endpoint, version)
        results.put((rank, "refitted", (version, wrong, record.to_json(), session.engine.transport_reason)))
    session.close()


def test_weights_that_the_trainer_quantizes_go_by_p2p_beside_the_others() -> None:
    server = open_rendezvous("127.0.0.1", 1, 1)
    with closing(server), spawned(fp8_main, [(r, server.rendezvous) for r in range(2)]) as results:
        rows = [results.get(timeout=200) for _ in range(6)]
    engines = [row for row in rows if row[0] == 1]
    assert [row[2][1] for row in engines if row[2][1]] == []
    assert all(0 < row[2][2]["bytes_resharded"] < row[2][2]["bytes_bulk"] for row in engines)
    assert all("quantized" in row[2][3] for row in engines)


def xferdtensor_main(rank: int, port: int, results: Any) -> None:
    import torch.distributed as dist

    from rlrefit.integration.comm.torch_group import TorchGroup
    from rlrefit.integration.layout import Shard
    from rlrefit.integration.xferdtensor import xferdtensor

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    group = TorchGroup.open(store, "group", rank, 2, device, 60.0, lambda stage: None)
    for shape in ((96, 64), (3, 4, 5, 6)):
        for seed in range(3):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            src = values.to(device) if rank == 0 else None
            dst = torch.full(shape, float("nan"), device=device) if rank == 1 else None
            moved = xferdtensor(
                src, [0], [Shard(0)], dst, [1], [Shard(1)], group, transport="m2n", verify="full", shape=shape
            )
            right = dst is None or torch.equal(dst.cpu(), values)
            results.put((rank, len(shape), right, moved.resharded_bytes, values.nbytes))


def test_xferdtensor_goes_by_reshards_where_meshes_express_it_and_else_by_p2p() -> None:
    port = free_port()
    with spawned(xferdtensor_main, [(rank, port) for rank in range(2)]) as results:
        rows = [results.get(timeout=100) for _ in range(12)]
    assert all(row[2] for row in rows), rows
    assert all(resharded == (nbytes if dims == 2 else 0) for _, dims, _, resharded, nbytes in rows)


def test_a_rank_that_dies_before_its_reshards_ends_the_refit_and_survivors_meet_again() -> None:
    case, size = Case(dies="before"), world_size()
    first, second = (open_rendezvous("127.0.0.1", size // 2, size // 2) for _ in range(2))
    ranks = [
        (r, [first.rendezvous, second.rendezvous] if r else [first.rendezvous], case) for r in range(size)
    ]
    with closing(first), closing(second), spawned(rank_main, ranks) as results:
        rows = [results.get(timeout=200) for _ in range(size + size - 1)]  # the first refits, and their ends
        with spawned(newcomer_main, [(0, second.rendezvous, case)]) as joined:
            rows += [results.get(timeout=200) for _ in range(size - 1)]
            assert joined.get(timeout=200)[2] == ""
    assert [row for row in rows if row[1] == "failed"] == []
    ended = [row[2] for row in rows if row[1] == "ended"]
    assert len(ended) == size - 1
    for kind, _, seconds, message in ended:
        assert kind in ("PeerLost", "RefitTimeout"), message
        assert seconds < 2 * LIMIT_S
    again = [row for row in rows if row[1] == "again"]
    assert [(row[2][0], row[2][1]) for row in again] == [("", [])] * (size - 1), again


# Of many batches, and of so few that all have been enqueued before the first has to land.
@pytest.mark.parametrize("bucket_mb", [8, 64])
def test_a_rank_that_dies_within_its_reshards_ends_the_refit_and_survivors_say_that_they_must_restart(
    bucket_mb: int,
) -> None:
    case, size = Case(dies="within", bucket_mb=bucket_mb), world_size()
    first, second = (open_rendezvous("127.0.0.1", size // 2, size // 2) for _ in range(2))
    ranks = [
        (r, [first.rendezvous, second.rendezvous] if r else [first.rendezvous], case) for r in range(size)
    ]
    with closing(first), closing(second), spawned(rank_main, ranks) as results:
        rows = [results.get(timeout=200) for _ in range(size + size - 1)]
        with spawned(newcomer_main, [(0, second.rendezvous, case)]) as joined:
            rows += [results.get(timeout=200) for _ in range(size - 1)]
            refused = joined.get(timeout=200)[2]
    assert [row for row in rows if row[1] == "failed"] == []
    ended = [row[2] for row in rows if row[1] == "ended"]
    for kind, _, seconds, message in ended:
        assert kind in ("PeerLost", "RefitTimeout"), message
        assert seconds < 3 * LIMIT_S
    again = [row[2] for row in rows if row[1] == "again"]
    assert [kind for kind, *_ in again] == ["TransportUnavailable"] * (size - 1), again
    assert all("restart" in message for *_, message in again)
    assert refused.startswith("TransportUnavailable")
