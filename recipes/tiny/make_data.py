"""Makes the tiny recipes' data: the larger and the smaller of two digits, ``max(3,8)=`` → ``8``.

The task is chosen for what it shows in a few minutes on CPUs, from random weights. Every answer is as
frequent as any other, so no constant answer beats chance (0.1) and exploration isn't drawn into one. What
is learned carries over to prompts that are held out, which sums of digits don't do at this size. A model
has to read both operands *and* the operator: picking either operand at random is right 55% of the time.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

OPERATORS = {"max": max, "min": min}
_HELD_OUT_PER_ANSWER = 4


def records() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All 200 prompts as 160 for training and 40 held out; each digit answers 16 and 4 of them.

    The order and the split follow the prompts' SHA-256, so they depend on no generator's version.
    """
    by_answer: dict[str, list[str]] = {str(digit): [] for digit in range(10)}
    for name, operator in OPERATORS.items():
        for a in range(10):
            for b in range(10):
                by_answer[str(operator(a, b))].append(f"{name}({a},{b})=")
    train: list[dict[str, str]] = []
    validation: list[dict[str, str]] = []
    for answer, prompts in by_answer.items():
        for position, prompt in enumerate(sorted(prompts, key=_digest)):
            part = validation if position < _HELD_OUT_PER_ANSWER else train
            part.append({"prompt": prompt, "answer": answer})
    for part in (train, validation):
        part.sort(key=lambda record: _digest(record["prompt"]))
    return train, validation


def write_data(folder: Path) -> None:
    """Writes ``train.jsonl`` and ``validation.jsonl`` into ``folder``; the same bytes each time."""
    for name, part in zip(("train", "validation"), records(), strict=True):
        lines = "".join(json.dumps(record) + "\n" for record in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def _digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


if __name__ == "__main__":
    write_data(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
