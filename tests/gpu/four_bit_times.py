"""Times refits in NVFP4 and INT4 beside refits in BF16: a transformers model of a true shape, and a vLLM that holds Marlin's layouts.

    python -m tests.gpu.four_bit_times --model qwen3-8b --refits 8

Trainer and engine are two processes, the engine on the first GPU and the trainer on the last, which may be the same. Weights are random,
and all change before each refit. It prints a JSON line for each format with the medians of the slowest side's milliseconds, by stage
too, and the share of BF16's time. ``--transport pull`` or ``p2p`` takes another way. INT4 is in groups of 32, which vLLM 0.26 gives to
Marlin on Hopper. ``tests/gpu/test_nvfp4_on_gpu.py`` and ``test_int4_on_gpu.py`` compare what arrives.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rlrefit.integration.config import TRANSPORTS, RefitConfig
from rlrefit.integration.control import Rendezvous

from .vllm_live import EAGER, LiveEngine, engine_environment
from .vllm_trainer import Trainer

FORMATS = ("bf16", "nvfp4", "int4")
_GROUP = 32


def _config(format: str, transport: str) -> RefitConfig:
    return RefitConfig(timeout_s=300.0, transport=transport, trainer_quantize_int4=format == "int4")


def trainer_main(device: int, commands: Any, answers: Any) -> None:
    """Obey until told None: build (folder, format, transport), join (a rendezvous), change the weights ("change") and send (index, version)."""
    import traceback

    torch.cuda.set_device(device)
    worker: Any = None
    try:
        while (command := commands.get()) is not None:
            try:
                if isinstance(command, Rendezvous):
                    answers.put(worker.join_refit(command.to_json(), 0)["misc"])
                elif command == "change":
                    # Apart, or the engine's refit would count what this takes as a wait for the trainer.
                    worker.change()
                    answers.put("changed")
                elif isinstance(command[0], str):
                    worker = _worker(*command, torch.device("cuda", device))
                    answers.put("built")
                else:
                    answers.put(worker.refit(command[1]))
            except RuntimeError as error:
                answers.put(str(error))
        if worker is not None:
            worker.close_refit()
    except BaseException:
        answers.put(traceback.format_exc())
        raise


def _worker(folder: str, format: str, transport: str, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
    from rlrefit.workers.trainers.qat.config import QATConfig
    from rlrefit.workers.trainers.qat.fsdp import quantize_module
    from rlrefit.workers.trainers.qat.mixin import QATRefitMixin

    class Plain(FSDPRefitMixin):
        refit_config = _config(format, transport)
        refit_dtype = torch.bfloat16

        def __init__(self) -> None:
            with device:
                config = AutoConfig.from_pretrained(folder)
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

        def change(self) -> None:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.copy_(torch.roll(parameter, 1))
            torch.cuda.synchronize(device)

    class Packed(QATRefitMixin, Plain):
        def __init__(self) -> None:
            super().__init__()
            self.qat = quantize_module(self.model, QATConfig(activations=False))
            self.qat.refresh()

        def change(self) -> None:
            super().change()
            self.qat.refresh()
            torch.cuda.synchronize(device)

    return Packed() if format == "nvfp4" else Plain()


def _folder(into: Path, model: str, layers: int | None) -> str:
    from rlrefit.recipes.bench.live.checkpoint import write_weightless
    from rlrefit.recipes.plan.catalog import open_model

    found = open_model(model)
    path = write_weightless(into / "model", found, torch.bfloat16)
    if layers is not None:
        config = json.loads((path / "config.json").read_text())
        config["num_hidden_layers"] = layers
        config.pop("layer_types", None)
        (path / "config.json").write_text(json.dumps(config))
    return str(path)


def _overrides(format: str) -> dict[str, Any]:
    from rlrefit.integration.quantize.nvfp4_checkpoint import quantization_config
    from rlrefit.recipes.rollout.arguments import int4
    from rlrefit.workers.trainers.qat.config import QATConfig

    if format == "bf16":
        return {"load_format": "dummy"}
    if format == "int4":
        overrides = {"quantization_config": int4(_GROUP)}
        return {"load_format": "dummy", "hf_overrides": overrides, "moe_backend": "marlin"}
    excluded = QATConfig(activations=False).exclude
    made = quantization_config((), [f"{module}.weight" for module in excluded], "", activations=False)
    return {"load_format": "dummy", "hf_overrides": {"quantization_config": made.quantization_config}}


def measure(folder: str, format: str, transport: str, refits: int) -> dict[str, Any]:
    """Seconds of warm refits of one format."""
    trainer = Trainer(trainer_main)
    trainer.commands.put((folder, format, transport))
    built = trainer.answer(300.0)
    assert built == "built", built
    engine = LiveEngine(folder, trainer, _config(format, transport), {**EAGER, **_overrides(format)})
    try:
        misc = engine.meet()
        found = []
        for index in range(refits + 2):
            trainer.commands.put("change")
            changed = trainer.answer(300.0)
            assert changed == "changed", changed
            engine.send(index)
            received = engine.driver.refit(engine.version)
            sent = trainer.answer(300.0)
            assert isinstance(sent, dict), sent
            if index > 1:
                found.append((sent, received[0]))
        stages = {
            f"{side} {stage}": 1e3 * median(record["seconds"].get(stage, 0.0) for record in records)
            for side, records in zip(("trainer", "engine"), zip(*found, strict=True), strict=True)
            for stage in sorted({stage for record in records for stage in record["seconds"]})
        }
        return {
            "format": format,
            "devices": [torch.cuda.get_device_name(at) for at in sorted({0, torch.cuda.device_count() - 1})],
            "transport": found[-1][1]["transport"],
            "misc": misc,
            "bytes_bulk": found[-1][1]["bytes_bulk"],
            "bytes_misc": found[-1][1]["bytes_misc"],
            "ms": 1e3 * median(max(s["seconds_total"], r["seconds_total"]) for s, r in found),
            "stages_ms": {name: round(value, 2) for name, value in stages.items()},
            "peak_extra_mb": [round(record["peak_extra_bytes"] / 1e6) for record in found[-1]],
        }
    finally:
        engine.close()
        trainer.close()


def _formats(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(FORMATS):
        raise argparse.ArgumentTypeError(f"{text}: give some of {', '.join(FORMATS)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--refits", type=int, default=8)
    parser.add_argument(
        "--formats", type=_formats, default=FORMATS, help=f"some of {', '.join(FORMATS)}, by commas"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as into, engine_environment({}):
        folder = _folder(Path(into), arguments.model, arguments.layers)
        found = [measure(folder, one, arguments.transport, arguments.refits) for one in arguments.formats]
    lines = [json.dumps(one) for one in found]
    times = {one["format"]: one["ms"] for one in found}
    if "bf16" in times:
        others = {format: ms / times["bf16"] for format, ms in times.items() if format != "bf16"}
        lines += [f"{format} takes {share:.3f} of bf16's time" for format, share in others.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
