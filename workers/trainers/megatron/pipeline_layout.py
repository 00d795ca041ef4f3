"""Megatron's notation for pipeline stages of one's own (``pipeline_model_parallel_layout``), read without Megatron.

``Ettt|(tt|)*29,m|L``: ``|`` ends a stage, ``E`` is the embedding, ``t`` a decoder layer, ``m`` a multi-token-prediction
layer, ``L`` the loss; ``x*n`` and ``(…)*n`` repeat, and commas mean nothing. With virtual stages the list goes through
all ranks once for each chunk.
"""

from __future__ import annotations

import re

_LETTERS = "EtmL"


def pipeline_stages(layout: str) -> list[str]:
    """The letters of each stage, repetitions written out as Megatron-core does it."""
    text = layout.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), text)
    return text.split("|")


def pipeline_layout_violations(layout: str, stages: int, layers: int | None = None) -> list[str]:
    """What Megatron would refuse, one clause each; empty if nothing.

    Args:
        layout: in Megatron's notation.
        stages: pipeline ranks times virtual stages.
        layers: of the model; None where it isn't known.
    """
    found = pipeline_stages(layout)
    letters = "".join(found)
    wrong = sorted(set(letters) - set(_LETTERS))
    if wrong:
        return [f"{''.join(wrong)!r} is none of E, t, m and L; repeat with x*n or (…)*n"]
    problems = []
    if len(found) != stages:
        problems.append(f"it has {len(found)} stages where PP x virtual stages = {stages}")
    if not (
        letters.startswith("E") and letters.endswith("L") and letters.count("E") == letters.count("L") == 1
    ):
        problems.append("it must begin with the only E and end with the only L")
    if "m" in letters:
        problems.append("it has multi-token-prediction layers (m), which the policy is built without")
    if layers is not None and letters.count("t") != layers:
        problems.append(f"it has {letters.count('t')} layers (t) where the model has {layers}")
    return problems
