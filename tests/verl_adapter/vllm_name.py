"""vLLM's version under the name by which verl asks the installed packages; the CPU's build has another one."""

from __future__ import annotations

from pathlib import Path


def named_vllm(folder: Path) -> str:
    """A folder for the path of modules."""
    named = folder / "named" / "vllm-0.21.0+cpu.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.21.0+cpu\n")
    return str(named.parent)
