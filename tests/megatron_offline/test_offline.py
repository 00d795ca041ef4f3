"""What one process says of any layout, beside what ranks with real parameters export and hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlrefit.integration.layout import volume
from rlrefit.recipes.plan.catalog import GenLayout, Model, TrainLayout, open_model, train_holdings
from rlrefit.recipes.plan.hosts import Hosts
from rlrefit.recipes.plan.offline import OfflineError, OfflineExport, OfflineQuestion, ask_bridge
from rlrefit.recipes.plan.options import PlanOptions
from rlrefit.recipes.plan.study import Study, study
from rlrefit.recipes.plan.with_bridge import differences, opened_path
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.catalog.shrunken import CONFIGS
from tests.refit.models import make_model
from tests.spawn import PATIENT_S, run_ranks, run_together

# name → (model, layout) of two ranks
REAL: dict[str, tuple[str, TrainLayout]] = {
    "TP2": ("qwen3", TrainLayout(tp=2, vocabulary_multiple=1)),
    "a vocabulary that TP2 pads": ("qwen3-odd-vocabulary", TrainLayout(tp=2, vocabulary_multiple=1)),
    "PP2 x VPP2": ("qwen3-four-layers", TrainLayout(pp=2, vpp=2, vocabulary_multiple=1)),
    "tied embeddings, PP2": ("qwen3-tied", TrainLayout(pp=2, vocabulary_multiple=1)),
    "TP2 x EP2": ("qwen3-moe", TrainLayout(tp=2, ep=2, vocabulary_multiple=1)),
    "TP2 x ETP2": ("qwen3-moe", TrainLayout(tp=2, etp=2, vocabulary_multiple=1)),
    "PP2, experts": ("qwen3-moe", TrainLayout(pp=2, vocabulary_multiple=1)),
    "EP2": ("qwen3-moe", TrainLayout(ep=2, dp=2, vocabulary_multiple=1)),
}
# Layouts of many ranks, and families that can't be run here: beside the catalogue.
PREDICTED: dict[str, tuple[str, TrainLayout, int]] = {
    "qwen3_moe, 16 ranks": ("qwen3_moe", TrainLayout(tp=2, pp=2, ep=4, cp=2, dp=2), 13),
    "deepseek_v3 with MTP, 16 ranks": ("deepseek_v3", TrainLayout(pp=2, ep=8), 11),
    "glm4_moe with MTP, 16 ranks": ("glm4_moe", TrainLayout(pp=2, ep=8), 11),
    "nemotron_h, uneven stages": ("nemotron_h", TrainLayout(tp=2, pp=3), 5),
    "llama, one rank": ("llama", TrainLayout(), 0),
    "experts of one tensor, images, MTP": ("qwen3_5_moe", TrainLayout(tp=2, pp=2, ep=4), 7),
    "transformers' own image encoder": ("gemma3", TrainLayout(tp=2, pp=2), 1),
    "keys that are values": ("gemma4", TrainLayout(tp=2), 1),
    "keys of layers before": ("gemma4-shared", TrainLayout(tp=2), 1),
    "experts beside an MLP": ("gemma4-moe", TrainLayout(tp=2, pp=2, ep=4), 7),
    "a model as large as it is": ("qwen3-30b-a3b", TrainLayout(tp=2, ep=8, dp=4), 5),
}
# Left to make test-all: other cases have each part of these layouts; MTP layers are DeepSeek's too, and ranks of Bridge build these
# families in tests/families.
_MORE = {
    "TP2 x ETP2",
    "PP2, experts",
    "glm4_moe with MTP, 16 ranks",
    "transformers' own image encoder",
    "keys that are values",
    "keys of layers before",
    "experts beside an MLP",
}
_FIELDS = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}


def _model(name: str) -> Model:
    return Model(name, CONFIGS[name]) if name in CONFIGS else open_model(name)


def _real_layout(layout: TrainLayout) -> dict[str, int]:
    sizes = {_FIELDS[key]: getattr(layout, key) for key in _FIELDS}
    return sizes | ({"virtual_pipeline": layout.vpp} if layout.vpp > 1 else {})


@dataclass(frozen=True)
class Answers:
    """Of one process to all questions, by case, and of the real ranks: by case what each tells.

    Attributes:
        stayed: whether the process that asked has neither Megatron nor a process group after it, if it had none before.
    """

    offline: dict[str, OfflineExport]
    real: dict[str, list[dict[str, Any]]]
    stayed: bool


def tell(rank: int, cases: list[tuple[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """What a rank with real parameters exports and holds of each (checkpoint, fields of ``MegatronLayout``)."""
    from megatron.core import parallel_state

    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    found = []
    for path, layout in cases:
        built = build_megatron(path, MegatronLayout(**layout))
        source = MegatronSource(built.bridge, built.model)
        held, refused = source.fragments()
        names = [spec.name for spec in source.specs()]
        exported = {name: weight.clone() for name, weight in source.export(names)}
        values, key = [fragment.view.clone() for fragment in held], source.storage_key()
        offload(built.model)
        away, _ = source.fragments()
        pairs = zip(away, values, strict=True)
        found.append(
            {
                "specs": [spec.to_json() for spec in source.specs()],
                "exported": set(exported),
                "key changes when offloaded": source.storage_key() != key,
                "equal fragments": all(torch.equal(fragment.view, value) for fragment, value in pairs),
                "equal export": all(torch.equal(w, exported[n]) for n, w in source.export(names)),
                "held": [(f.name, tuple(f.full_shape), f.box, f.view.dtype) for f in held],
                "refused": refused,
            }
        )
        parallel_state.destroy_model_parallel()
    return found


def offload(model: list[Any]) -> None:
    """As trainers do: the buffers' parameters copied to the host, and the storage under all parameters freed."""
    for chunk in model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            buffer.param_data_cpu = buffer.param_data.clone()
            buffer.param_data.untyped_storage().resize_(0)


def ask_all(folder: Path) -> Answers:
    return _ask(folder, more=False)


@of_all_tests
def ask_more(folder: Path) -> Answers:
    return _ask(folder, more=True)


def _ask(folder: Path, *, more: bool) -> Answers:
    """One process answers all questions while two ranks build their models."""
    had_megatron = "megatron" in sys.modules
    built = {name: case for name, case in REAL.items() if (name in _MORE) == more}
    paths = {kind: str(make_model(kind, folder / kind, 0)) for kind in {kind for kind, _ in built.values()}}
    questions = []
    for kind, layout in built.values():
        # The configuration alone: nothing may come from the weights beside it.
        config = folder / f"{kind}-config.json"
        config.write_text((Path(paths[kind]) / "config.json").read_text())
        questions.append(OfflineQuestion(config, layout, (0, 1)))
    predicted = [case for case in PREDICTED if (case in _MORE) == more]
    questions += _predicted(predicted, folder)
    cases = [(paths[kind], _real_layout(layout)) for kind, layout in built.values()]
    offline, ranks = run_together(
        partial(ask_bridge, questions), partial(run_ranks, tell, 2, cases, timeout_s=PATIENT_S)
    )
    stayed = not dist.is_initialized() and ("megatron" in sys.modules) == had_megatron
    real = dict(zip(built, map(list, zip(*ranks, strict=True)), strict=True))
    return Answers(dict(zip([*built, *predicted], offline, strict=True)), real, stayed)


def _predicted(cases: Iterable[str], folder: Path) -> list[OfflineQuestion]:
    questions = []
    for name, layout, rank in map(PREDICTED.__getitem__, cases):
        config = folder / f"{name}.json"
        config.write_text(json.dumps(_model(name).config))
        questions.append(OfflineQuestion(config, layout, (rank,)))
    return questions


AHEAD = (ask_all, ask_more)


@pytest.fixture(scope="module")
def answers(found_ahead: FoundAhead) -> Answers:
    return found_ahead.by(ask_all)


@pytest.fixture
def of_case(case: str, found_ahead: FoundAhead) -> Answers:
    return found_ahead.by(ask_more if case in _MORE else ask_all)


@pytest.mark.parametrize("case", left_to_all(REAL, _MORE))
def test_the_export_and_each_ranks_part_of_it_are_those_of_real_ranks(case: str, of_case: Answers) -> None:
    told = of_case.offline[case]
    specs = [spec.to_json() for spec in told.specs]
    for rank, real in enumerate(of_case.real[case]):
        predicted = told.ranks[rank]
        assert specs == real["specs"]  # in its order
        assert {name for name, *_ in specs} == real["exported"]
        assert [(h.name, h.full_shape, h.box, h.dtype) for h in predicted.held] == real["held"]
        assert predicted.refused == real["refused"]
        # Offloaded parameters are held and exported from their host copies.
        for what in ("key changes when offloaded", "equal fragments", "equal export"):
            assert real[what], what


@pytest.mark.parametrize("case", left_to_all(PREDICTED, _MORE))
def test_many_ranks_and_other_families_are_as_the_catalogue_predicts(case: str, of_case: Answers) -> None:
    name, layout, rank = PREDICTED[case]
    told = of_case.offline[case]
    model = _model(name)
    specs = model.specs()
    assert sorted(told.specs) == sorted(specs)
    positions = {spec.name: i for i, spec in enumerate(specs)}
    predicted = train_holdings(model, layout, rank, positions)
    expected = {
        (specs[index].name, box, group.axes)
        for group in predicted.groups
        for index in group.indices.tolist()
        for box in group.boxes
    }
    assert {(h.name, h.box, h.axes) for h in told.ranks[rank].held if volume(h.box)} == expected


def test_a_plan_is_told_what_bridge_sees_otherwise(answers: Answers) -> None:
    name, layout, rank = PREDICTED["qwen3_moe, 16 ranks"]
    told = answers.offline["qwen3_moe, 16 ranks"]

    def planned(**changed: int) -> Study:
        model = Model(name, CONFIGS[name] | changed)
        options = PlanOptions(model, layout, GenLayout(tp=2), Hosts(), 1 << 20, 1, 1, "", None, (), "gpu")
        return study(options)

    assert differences(planned(), told) == []
    assert "lm_head.weight as torch.bfloat16[300, 64]" in differences(planned(vocab_size=304), told)[0]
    more = "".join(differences(planned(num_hidden_layers=6), told))
    assert "does not export model.layers.4." in more
    assert f"bridge: trainer rank {rank} " in more
    assert "the catalogue does not know" in "".join(differences(planned(num_experts=4), told))


def test_questions_take_next_to_no_memory_beyond_the_imports_and_leave_the_process_as_it_was(
    answers: Answers,
) -> None:
    first, *others = (told.peak_rss_bytes for told in answers.offline.values())
    # The first question has loaded what all need.
    assert first < 1.5e9
    assert max(others) - first < 150e6
    assert answers.stayed
    large = answers.offline["a model as large as it is"]
    assert len(large.specs) > 18_000
    assert large.cpu_seconds < 10.0


def test_all_that_is_wrong_with_the_questions_is_told_before_anything_starts() -> None:
    with pytest.raises(OfflineError) as told:
        ask_bridge([OfflineQuestion("x", TrainLayout(vpp=2)), OfflineQuestion("y", TrainLayout(tp=2), (2,))])
    for part in ("vpp needs pp above 1", "rank 2 is not among", "x is no file", "y is no file"):
        assert part in str(told.value)


def test_what_lies_in_the_working_directory_does_not_stand_in_for_a_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3-8b", "Qwen/Qwen3-8B", "mine"):
        (tmp_path / name).mkdir(parents=True)
    assert opened_path("qwen3-8b") is None
    assert opened_path("Qwen/Qwen3-8B") is None
    assert opened_path("mine") == Path("mine")
    assert opened_path("elsewhere") is None
