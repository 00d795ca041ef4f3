"""What 512 ranks cost the rendezvous as they agree: ``python -m tests.refit.agreement_bench``.

DeepSeek-V3 from PP 16 x EP 16 to eight engines of TP 32, with what each of its ranks really tells. One process plays all
ranks over real connections: it sends all requests of a meeting, and then reads all answers. So the seconds of a meeting
are what the server takes; its thread's CPU time is given beside them. What a rank reads is given for one of them.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

from rich.console import Console

from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.control.channel import Channel
from rlrefit.integration.control.frames import (
    Op,
    Status,
    pack_body,
    pack_json,
    pack_numbers,
    pack_wait,
    unpack_body,
)
from rlrefit.integration.control.world import RefitWorld
from rlrefit.integration.plan import analyse
from rlrefit.integration.transport.messages import LocalMessages
from rlrefit.integration.weights.holdings import Holdings, HoldingsReader, SpecTable
from rlrefit.recipes.plan.catalog import all_holdings, exported_specs, open_model, parse_gen, parse_train

LIMIT_S = 120.0


say = Console(highlight=False, soft_wrap=True).print


class Ranks:
    """All ranks of a world in one process, a connection each."""

    def __init__(self, meeting: Rendezvous):
        start = time.monotonic()
        worlds = [RefitWorld(rank, meeting.train_ranks, meeting.gen_ranks) for rank in range(meeting.size)]
        self.channels = [Channel(meeting, world, LIMIT_S) for world in worlds]
        self.joined = time.monotonic() - start

    def meet(self, topic: str, told: list[list[Any]], direct: list[dict[int, Any]] | None = None) -> Any:
        """(Seconds, bytes of rank 1's answer, CPU seconds in which it reads them, what it reads)."""
        frames = []
        for rank, channel in enumerate(self.channels):
            own = direct[rank] if direct is not None else {}
            values = [pack_json(data) for data in (*own.values(), *told[rank])]
            fields = [topic.encode(), pack_wait(LIMIT_S), b"\0", b"\0", pack_numbers(list(own)), *values]
            frames.append(channel._connection._ours.frame(pack_body(Op.MEET, fields)))
        start = time.monotonic()
        for channel, frame in zip(self.channels, frames, strict=True):
            channel._connection._send(frame)
        answers = [channel._connection._receive_frame() for channel in self.channels]
        seconds = time.monotonic() - start
        start = time.process_time()
        channel = self.channels[1]
        status, fields = unpack_body(answers[1])
        channel._ask = lambda *_: (Status(status), fields)  # type: ignore[method-assign]
        read = channel.exchange(topic, [], {})
        return seconds, len(answers[1]), time.process_time() - start, read


def serve(pipe: Any) -> None:
    """The rendezvous in a process of its own; tells its thread's CPU seconds when asked."""
    server = open_rendezvous("127.0.0.1", 256, 256)
    pipe.send(server.rendezvous.to_json())
    clock = time.pthread_getcpuclockid(server._thread.ident or 0)
    while pipe.recv():
        pipe.send(time.clock_gettime(clock))


def _turns_of_relays(messages: LocalMessages) -> dict[int, Any]:
    """What ``p2p`` tells each peer of its storage, most of it; masks of contiguous messages come on top."""
    return {
        peer: {"turns": turns}
        for peer, items in messages.outgoing.items()
        if (turns := [messages.turns[item] for item in items if item.message.is_relay])
    }


def main() -> None:
    model, train, gen = open_model("deepseek-v3"), parse_train("pp=16,ep=16"), parse_gen("tp=32,dp=8")
    specs = exported_specs(model, train)
    table = SpecTable(specs)
    sources, destinations = all_holdings(model, train, gen, table.positions)
    holdings: list[Holdings] = [*sources, *destinations]
    analysis = analyse(specs, sources, destinations, bucket_bytes=256 << 20)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    ranks = Ranks(Rendezvous.from_json(pipe.recv()))

    def cpu() -> float:
        pipe.send(True)
        return float(pipe.recv())

    before, total = cpu(), 0.0
    say(f"{'joined':10} {ranks.joined:6.3f} s, CPU of the server {before:6.3f} s")
    settings = {
        "engine": "nccl_xfer",
        "transport": "auto",
        "bucket_mb": 256,
        "streams": 2,
        "verify": "sampled",
    }
    gpus = []
    for rank in range(512):
        host, seen = f"node-{rank // 8}/{'0' * 36}", [f"GPU-{rank // 8 * 8 + i:036d}" for i in range(8)]
        gpu = {"lacks": "", "device": f"GPU-{rank:036d}", "visible": seen, "reaches": seen}
        gpus.append({"host": host, "gpu": {"host": host, **gpu}})
    # Every rank's direct data is as large as those of the first of its side.
    direct = [_turns_of_relays(LocalMessages(analysis.compile(first))) for first in (0, 256)]
    both = [direct[rank // 256] for rank in range(512)]
    meetings: list[tuple[str, list[list[Any]], list[dict[int, Any]] | None]] = [
        ("settings", [[settings]] * 512, None),
        ("specs", [[[spec.to_json() for spec in specs]], *[[None]] * 511], None),
        ("holdings", [[gpus[rank], *holdings[rank].to_parts()] for rank in range(512)], None),
        ("plan", [[["a" * 64, f"{rank:064x}", f"{-rank % (1 << 256):064x}"]] for rank in range(512)], None),
        ("wire", [[gpus[rank]] for rank in range(512)], None),
        ("bound", [[{"turns": {}}, ""]] * 512, both),
        ("connected", [[""]] * 512, None),
        ("ready", [[None]] * 512, None),
    ]
    for topic, told, own in meetings:
        seconds, nbytes, reading, read = ranks.meet(topic, told, own)
        now = cpu()
        say(
            f"{topic:10} {seconds:6.3f} s, CPU of the server {now - before:6.3f} s; a rank is told {nbytes:8d} bytes and "
            f"reads them in {reading:5.3f} s"
        )
        total, before = total + now - before, now
        if topic == "holdings":
            start = time.process_time()
            reader = HoldingsReader(table)
            found = [reader.holdings(rank, row[1:]) for rank, row in enumerate(read[0])]
            assert [len(f.groups) for f in found] == [len(h.groups) for h in holdings]
            say(f"{'':10} {time.process_time() - start:6.3f} s in which a rank makes holdings of them")
    say(f"CPU of the server in all meetings {total:6.3f} s")
    pipe.send(False)
    process.join()


if __name__ == "__main__":
    main()
