"""``rlrefit bench`` on GPUs: every transport and the peers that run anywhere, bit for bit."""

from __future__ import annotations

import json

import torch

from rlrefit.recipes.cli import main

from .needs import needs

pytestmark = needs(gpus=2)


def test_the_refit_over_each_transport_and_the_peers_are_exact(tmp_path, capsys):
    figures, picture = tmp_path / "bench.json", tmp_path / "timeline.png"
    half = torch.cuda.device_count() // 2
    code = main(
        [
            "bench", "--model", "qwen3-30b-a3b", "--layers", "2", "--train", f"ep={half}", "--gen", f"tp={half}",
            "--transport", "ipc,p2p,golden", "--refits", "3", "--peer-refits", "1", "--verify", "full",
            "--json", str(figures), "--timeline", str(picture),
        ]
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    records = json.loads(figures.read_text())
    assert [record["transport"] for record in records] == ["ipc", "p2p", "golden"]
    assert all(record["bit_exact"] for record in records)
    assert records[0]["peers"]["broadcast"] > 0
    assert records[0]["peers"]["per-tensor"] > 0
    assert picture.stat().st_size > 0
