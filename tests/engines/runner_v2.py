"""A vLLM with Model Runner V2 on the CPU, in a process of its own: ``python -m tests.engines.runner_v2 RUNNER CHECKPOINT…``.

It prints what it generated as JSON. vLLM has V2 where it has Triton, whose kernels are interpreted here.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

PROMPT, TOKENS, BEFORE = [5, 17, 33, 90, 7, 8, 9], 8, 3


def interpret_triton() -> None:
    """Before vLLM is imported, which takes Triton only where it has a backend for the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def engine_of(path: str, **more: Any) -> Any:
    """A driver of an engine in this process."""
    import torch
    from vllm import LLM

    from rlrefit.workers.engines.vllm.driver import EXTENSION, VllmDriver

    torch.compiler.set_stance("force_eager")
    llm = LLM(
        path,
        worker_extension_cls=EXTENSION,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
        max_model_len=64,
        **more,
    )
    return llm, VllmDriver(llm)


def generated(driver: Any, prompt: list[int], tokens: int, **more: Any) -> list[int]:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    [found] = driver.generate([{"prompt_token_ids": prompt}], asked, **more)
    return list(found.output.outputs[0].token_ids)


def refit_while_it_runs(path: str, other: str) -> dict[str, Any]:
    """Start without weights, take those of ``path``, then those of ``other`` while a request runs, then the first again."""
    from rlrefit.integration.control import open_rendezvous
    from rlrefit.integration.errors import EngineDirty
    from rlrefit.integration.session import RefitSession
    from tests.engines.contract import CONFIG, Source

    llm, driver = engine_of(path, load_format="dummy")
    refused = ""
    try:
        generated(driver, PROMPT, 1)
    except EngineDirty as error:
        refused = type(error).__name__
    source = Source([path, other])
    server = open_rendezvous("127.0.0.1", 1, 1)
    with ThreadPoolExecutor(1) as trainer:
        opening = trainer.submit(RefitSession.open, server.rendezvous, 0, lambda: source, CONFIG)
        [routes] = driver.join_refit(server.rendezvous.to_json(), 1, CONFIG)
        session = opening.result()

        def refit(version: int, index: int) -> None:
            source.take_on(index)
            sending = trainer.submit(session.refit, version)
            driver.refit(version, mode="keep")
            sending.result()

        refit(0, 0)
        first = generated(driver, PROMPT, TOKENS)
        steps = 0

        def between() -> None:
            nonlocal steps
            steps += 1
            if steps == BEFORE:
                refit(1, 1)

        crossed = generated(driver, PROMPT, TOKENS, between_steps=between)
        continued = generated(driver, [*PROMPT, *crossed[:BEFORE]], TOKENS - BEFORE)
        second = generated(driver, PROMPT, TOKENS)
        refit(2, 0)
        again = generated(driver, PROMPT, TOKENS)
        trainer.submit(session.close).result()
    server.close()
    return {
        "runner": llm.collective_rpc(_runner)[0],
        "refused": refused,
        "misc": routes["misc"],
        "first": first,
        "crossed": crossed,
        "continued": continued,
        "second": second,
        "again": again,
    }


def _runner(worker: Any) -> str:
    return type(worker.model_runner).__module__


def main(runner: str, *paths: str) -> None:
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER=runner,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS="1",
    )
    interpret_triton()
    from tests import vllm_cpu

    vllm_cpu.show(vllm_cpu.PLAIN)
    if runner == "1":
        found = refit_while_it_runs(*paths)
    else:
        llm, driver = engine_of(paths[0])
        found = {"runner": llm.collective_rpc(_runner)[0], "loaded": generated(driver, PROMPT, TOKENS)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
