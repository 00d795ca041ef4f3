"""A trainer and vLLM on one GPU, in two processes: a model that fits only where the engine wakes in stages.

vLLM has 0.9 of the GPU, and the model is a seventh of it: with all of the engine awake, the trainer's weights find no room.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from .needs import needs

pytestmark = [
    *needs("vllm", "transformers"),
    pytest.mark.timeout(420),
]

TURNS = 20
UTILIZATION = 0.9
# Of the GPU's memory; with UTILIZATION more than all of it.
MODEL_SHARE = 0.15
MIB = 1 << 20
# What may come and go from turn to turn: allocators' rounding, pinned staging of the driver.
FLAT = 128 * MIB
PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64]]
# Between log-probabilities of one token by vLLM's kernels and by transformers', in BF16.
SAME = 0.3
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 12288, 32, 8, 128, 1024
LAYER_BYTES = 2 * HIDDEN * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + 3 * INTERMEDIATE)


def write_config(folder: Path, total: int) -> None:
    """A Qwen3 of MODEL_SHARE of the GPU; its weights are made where they are needed."""
    import transformers

    transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=round(MODEL_SHARE * total / LAYER_BYTES),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    ).save_pretrained(folder)


class LateTrainer:
    """A trainer that comes to the GPU for the first time once the engine sleeps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rank: Any = None

    def onload(self) -> None:
        import transformers

        from rlrefit.workers.trainers.colocated import TorchRank

        if self.rank is not None:
            self.rank.onload()
            return
        config = transformers.AutoConfig.from_pretrained(self._folder)
        device = torch.device("cuda", 0)
        torch.manual_seed(7)
        with device:
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.rank = TorchRank([self.model], self.optimizer, device)

    def learn(self, turn: int) -> None:
        generator = torch.Generator().manual_seed(turn)
        batch = torch.randint(VOCABULARY, (2, 64), generator=generator).cuda()
        self.model.train()
        self.model(input_ids=batch, labels=batch).loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def logprobs(self, sampled: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        self.model.eval()
        found = []
        for prompt, tokens in sampled:
            context = torch.tensor([[*prompt, *tokens]], device="cuda")
            logits = self.model(input_ids=context).logits[0, len(prompt) - 1 : -1].float()
            chosen = torch.tensor(tokens, device="cuda")[:, None]
            found.append(logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist())
        return found

    def offload(self) -> None:
        self.rank.offload()

    def free(self) -> None:
        self.rank.free()

    def empty_cache(self) -> None:
        self.rank.empty_cache()

    def memory(self, *, restart: bool = False) -> Any:
        return [] if self.rank is None else self.rank.memory(restart)


class Refits:
    """Between this process and vLLM's, on the GPU that both have."""

    def __init__(self, trainer: LateTrainer, driver: Any) -> None:
        from rlrefit.integration.config import RefitConfig
        from rlrefit.integration.control import open_rendezvous

        self._trainer, self._driver = trainer, driver
        self._config = RefitConfig(bucket_mb=256, timeout_s=120.0, verify="full")
        self._server = open_rendezvous("127.0.0.1", 1, 1)
        self._pool = ThreadPoolExecutor(1)
        self._session: Any = None

    def __call__(self, version: int) -> list[Any]:
        from rlrefit.integration.records.record import RefitRecord
        from rlrefit.integration.session import RefitSession
        from rlrefit.workers.trainers.fsdp.source import FSDPSource

        if self._session is None:
            meeting = self._server.rendezvous
            joining = self._pool.submit(
                self._driver.join_refit, meeting.to_json(), 1, self._config, "colocated_ipc"
            )
            self._session = RefitSession.open(
                meeting, 0, lambda: FSDPSource(self._trainer.model), self._config, engine="colocated_ipc"
            )
            joining.result()
        receiving = self._pool.submit(self._driver.refit, version)
        sent = self._session.refit(version)
        return [sent, *(RefitRecord(**record) for record in receiving.result())]


def generate(driver: Any) -> list[tuple[list[int], list[float]]]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [
        found.output.outputs[0]
        for found in driver.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], parameters)
    ]
    return [
        (list(o.token_ids), [e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)])
        for o in outputs
    ]


def scene(folder: Path, total: int) -> Iterator[tuple[str, Any]]:
    """Turns in stages, and then one without; yields (what, found)."""
    from vllm import LLM

    from rlrefit.integration.colocated.cycle import ColocatedCycle
    from rlrefit.integration.colocated.memory import StageRecord
    from rlrefit.integration.colocated.stages import StageError
    from rlrefit.workers.engines.vllm.colocated import VllmSleeper
    from rlrefit.workers.engines.vllm.driver import EXTENSION, VllmDriver

    write_config(folder, total)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=16,
        enforce_eager=True,
        enable_sleep_mode=True,
        gpu_memory_utilization=UTILIZATION,
        worker_extension_cls=EXTENSION,
    )
    driver = VllmDriver(llm)
    trainer, stages = LateTrainer(folder), []

    def note(record: StageRecord) -> None:
        stages.append(record.to_json())

    refits, engine = Refits(trainer, driver), VllmSleeper([driver])
    cycle = ColocatedCycle(engine, trainer, refits, on_stage=note)
    sampled: list[tuple[list[int], list[float]]] = []
    apart, records, said = [], [], []
    for turn in range(TURNS):
        cycle.to_training()
        if sampled:
            contexts = [(prompt, tokens) for prompt, (tokens, _) in zip(PROMPTS, sampled, strict=True)]
            ours = cycle.train(lambda contexts=contexts: trainer.logprobs(contexts))
            theirs = [values for _, values in sampled]
            apart.append(
                max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
            )
        cycle.train(lambda turn=turn: trainer.learn(turn))
        records += [record.to_json() for record in cycle.to_generation(turn)]
        sampled = cycle.generate(lambda: generate(driver))
        said.append(sampled)
    yield "in stages", {"stages": list(stages), "apart": apart, "records": records, "said": said}
    stages.clear()
    cycle = ColocatedCycle(engine, trainer, refits, multi_stage_wake_up=False, on_stage=note)
    cycle.to_training()
    told = ["", ""]
    try:
        cycle.to_generation(TURNS)
    except Exception as error:
        told[0] = f"{type(error).__name__}: {error}"
    try:
        cycle.sleep()
    except StageError as error:
        told[1] = str(error)
    yield "all at once", {"stages": stages, "told": told, "stage": str(cycle.state.stage)}
    llm.llm_engine.engine_core.shutdown()


def scene_main(folder: str, total: int, results: Any) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    try:
        for what, found in scene(Path(folder), total):
            results.put((what, found))
    except BaseException:
        results.put(("failed", traceback.format_exc()))
        raise


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # The engine starts in a child of this process's child, each with a CUDA context of its own.
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    folder = tmp_path_factory.mktemp("model")
    total = torch.cuda.get_device_properties(0).total_memory
    process = spawn.Process(target=scene_main, args=(str(folder), total, results))
    process.start()
    told: dict[str, Any] = {}
    try:
        for _ in range(2):
            what, value = results.get(timeout=400)
            told[what] = value
            if what == "failed":
                break
    finally:
        process.join(30)
        process.kill()
        process.join()
    # The GPU is free from here on: its own rate of copying is measured beside.
    return told


def test_twenty_turns_fit_in_stages_with_flat_memory(
    found: dict[str, Any], tell: Callable[[str], None]
) -> None:
    assert "in stages" in found, found.get("failed")
    turns = found["in stages"]
    assert len(turns["apart"]) == TURNS - 1
    assert max(turns["apart"]) < SAME
    assert all(one != next_one for one, next_one in itertools.pairwise(turns["said"]))
    assert all(record["bytes_verified"] > 0 for record in turns["records"] if record["role"] == "generation")
    assert all(record["stage_peaks"]["wake_kv_cache"] > 0 for record in turns["records"])
    used: dict[str, list[int]] = {}
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for record in turns["stages"]:
        at_end = max(process["device_used"] for process in record["processes"])
        used.setdefault(record["move"], []).append(at_end)
        seconds.setdefault(record["move"], []).append(record["seconds"])
        peaks[record["move"]] = max(peaks.get(record["move"], 0), record["device_peak"])
    # The first two turns make what is kept: optimizer state, buckets, pinned copies.
    # A turn trains twice, first without gradients; each is held against its own kind.
    learned = used.pop("train")
    used |= {"log-probabilities": learned[1::2], "learn": learned[2::2]}
    for move, values in used.items():
        assert max(values[4:]) - values[3] < FLAT, (move, values)
    total = turns["stages"][-1]["processes"][0]["device_total"]
    assert max(peaks.values()) <= total
    # Awake as a whole the engine has what it was promised, but for what only its largest batches take.
    assert used["generate"][-1] > (UTILIZATION - 0.05) * total
    assert used["sleep"][-1] < 0.1 * total
    table = {
        move: {"s": round(sorted(values)[len(values) // 2], 3), "peak GiB": round(peaks[move] / 2**30, 2)}
        for move, values in seconds.items()
    }
    tell(json.dumps(table))
    received = [record for record in turns["records"] if record["role"] == "generation"]
    (transport,) = {record["transport"] for record in received}
    # Written from outside if vLLM's pool can export its memory, which depends on the host.
    assert transport in ("ipc", "pull")
    rates = sorted(record["bytes_bulk"] / record["seconds"]["transfer"] / 1e9 for record in received[1:])
    median = rates[len(rates) // 2]
    tell(
        f"{transport}: {received[0]['bytes_bulk'] / 1e9:.1f} GB a refit; GB/s {rates[0]:.0f} to {rates[-1]:.0f}, median "
        f"{median:.0f}, {median / copy_rate():.0%} of the GPU's own copies; seconds of the last {received[-1]['seconds']}"
    )


def copy_rate() -> float:
    """GB/s of payload that the GPU copies within its memory."""
    source = torch.ones(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return source.nbytes / min(seconds) / 1e9


def test_the_same_model_runs_out_of_memory_if_all_wakes_at_once(found: dict[str, Any]) -> None:
    assert "all at once" in found, found.get("failed")
    once = found["all at once"]
    assert once["stages"][-1]["move"] == "wake_all"
    assert once["stages"][-1]["failed"]
    failed, refused = once["told"]
    assert "wake_all failed" in failed
    assert "memory" in failed.lower()
    assert "Start the engine anew" in failed
    assert once["stage"] == "lost"
    assert "sleep was asked for at stage 'lost'" in refused
