"""The README's table of frameworks beside what the adapters themselves say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from rlrefit.integration.adapters import nemo_rl_contract, verl_contract

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
(TABLE,) = re.findall(r"<!-- frameworks -->\n(.*?)<!-- /frameworks -->", README, re.DOTALL)
HEAD, _, *ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()]
VERSIONS = {"verl": verl_contract.TESTED, "NeMo-RL": nemo_rl_contract.READ_AT[:9]}
ANSWERS = ("yes", "no", "not tried")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2]}")
def test_a_row_names_the_version_that_is_checked_a_module_that_exists_and_a_page(row: list[str]) -> None:
    told = dict(zip(HEAD, row, strict=True))
    name, page = re.fullmatch(r"\[(.+)\]\((.+)\)", told["framework"]).groups()
    text = (ROOT / page).read_text()
    assert VERSIONS[name] in told["version"]
    assert VERSIONS[name] in text
    for module in re.findall(r"`(rlrefit\.[\w.]+)`", told["what travels"]):
        assert importlib.util.find_spec(module), module
        assert module in text
    for column in ("colocated", "FP8 on the wire", "elastic"):
        assert told[column].startswith(ANSWERS), column
    assert told["ran on"] in ("CPUs", "CPUs, GPUs", "nothing yet")
