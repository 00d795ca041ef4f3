import json

import pytest

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.config.schema import DataConfig
from rlrefit.recipes.data.dataset import DataError, Record
from rlrefit.recipes.data.prompts import PromptDataset, PromptSampler, held_out, load_prompts
from rlrefit.recipes.tiny.make_tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    "{% if enable_thinking is false %}!{% endif %}"
)
MESSAGES = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})


@pytest.fixture
def tokenizer():
    found = load_tokenizer()
    found.chat_template = TEMPLATE
    return found


def records(*prompts):
    return [Record(prompt, "1", f"data line {i}", i) for i, prompt in enumerate(prompts, start=1)]


@pytest.mark.parametrize(
    ("prompt", "settings", "text"),
    [
        ("1+2=", {}, "1+2="),
        ("hi", {"chat_template": True}, "<user>hi>"),
        ("hi", {"chat_template": True, "chat_template_kwargs": {"enable_thinking": False}}, "<user>hi>!"),
        (MESSAGES, {"max_prompt_tokens": 32}, "<system>a<user>b>"),
        ("1+2=", {"instruction": "max(", "max_prompt_tokens": 32}, "1+2=\nmax("),
        (
            "1+2=",
            {"instruction": "max(", "max_prompt_tokens": 32, "chat_template": True},
            "<user>1+2=\nmax(>",
        ),
    ],
)
def test_a_prompt_goes_with_its_instruction_through_the_chat_template(tokenizer, prompt, settings, text):
    (first,) = PromptDataset(records(prompt), tokenizer, DataConfig(**settings))
    assert (first.text, first.answer, first.origin) == (text, "1", "data line 1")
    assert first.token_ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("variables", "chat_template", "told"),
    [
        ({"enable_thinkng": False}, True, "enable_thinkng, which the chat template of .* never reads"),
        ({"tokenize": True}, True, "tokenize, which the recipe passes to the tokenizer itself"),
        ({"enable_thinking": False}, False, "no prompt goes through the chat template"),
    ],
)
def test_variables_that_would_change_nothing_are_refused(tokenizer, variables, chat_template, told):
    config = DataConfig(chat_template=chat_template, chat_template_kwargs=variables)
    with pytest.raises(DataError, match=told):
        PromptDataset(records("hi"), tokenizer, config)


def test_a_chat_template_that_the_tokenizer_lacks_is_an_error():
    with pytest.raises(DataError, match=r"data line 1.*data.chat_template"):
        PromptDataset(records("hi"), load_tokenizer(), DataConfig(chat_template=True))


def test_one_error_lists_broken_records_and_long_prompts_in_the_files_order(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [
        "{",
        json.dumps({"q": "12+2=", "a": "1"}),
        '{"q": ""}',
        '{"q": "1+2=", "a": "3"}',
        json.dumps({"q": "1+2+3=", "a": "1"}),
    ]
    path.write_text("\n".join(lines))
    config = DataConfig(max_prompt_tokens=4, prompt_key="q", answer_key="a")
    with pytest.raises(DataError) as caught:
        load_prompts(str(path), tokenizer, config)
    assert [p.position for p in caught.value.problems] == [1, 2, 3, 5]
    assert "5 tokens, more than data.max_prompt_tokens 4" in caught.value.problems[1].problem
    path.write_text(lines[3])  # as long as may be
    assert load_prompts(str(path), tokenizer, config)[0].answer == "3"


def test_messages_that_the_chat_template_refuses_are_listed_with_all_else(tokenizer):
    tokenizer.chat_template = (
        "{{ raise_exception('no system') if messages[0].role == 'system' }}max(" + TEMPLATE
    )
    refused, taken = MESSAGES, MESSAGES[1:]
    with pytest.raises(DataError, match="no system") as caught:
        PromptDataset(records(refused, "9" * 40, taken, refused), tokenizer, DataConfig(max_prompt_tokens=32))
    assert [problem.position for problem in caught.value.problems] == [1, 2, 4]


def test_long_prompts_are_dropped_where_that_is_asked_for_and_the_log_says_how_many(tokenizer, caplog):
    config = DataConfig(max_prompt_tokens=4, overlong_prompts="drop")
    dataset = PromptDataset(records("1+2+3=", "1+2=", "12+3="), tokenizer, config)
    assert [prompt.origin for prompt in dataset] == ["data line 2"]
    assert "2 of 3 prompts are dropped" in caplog.text
    with pytest.raises(DataError, match="all 1 prompts"):
        PromptDataset(records("1+2+3="), tokenizer, config)


def test_the_held_out_prompts_are_read_by_columns_of_their_own(tokenizer, tmp_path):
    data = load_config("dapo_qwen3_32b").data
    assert (data.prompt_key, data.answer_key) == ("prompt", "solution")
    assert (held_out(data).prompt_key, held_out(data).answer_key) == ("problem", "answer")
    assert held_out(DataConfig()) == DataConfig()
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"problem": "1+2=", "answer": "3"}) + "\n")
    config = held_out(DataConfig(validation_prompt_key="problem"))
    assert load_prompts(str(file), tokenizer, config)[0].answer == "3"


def test_every_epoch_is_a_permutation_and_epochs_and_seeds_differ():
    sampler = PromptSampler(seed=3, n=20)
    first, second = sampler.draw(20), sampler.draw(20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert PromptSampler(seed=4, n=20).draw(20) not in (first, second)


@pytest.mark.parametrize("before", [0, 3, 7, 10, 33])
def test_draws_do_not_depend_on_how_they_are_cut_and_a_resumed_sampler_goes_on_exactly(before):
    whole, sampler = PromptSampler(1, 7).draw(58), PromptSampler(1, 7)
    assert sampler.draw(before) == whole[:before]
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = PromptSampler(1, 7)
    resumed.draw(2)
    resumed.load_state_dict(state)
    assert resumed.draw(25) == sampler.draw(25) == whole[before : before + 25]


@pytest.mark.parametrize(("seed", "n"), [(2, 7), (1, 8)])
def test_a_state_of_other_data_or_another_seed_is_refused(seed, n):
    state = PromptSampler(1, 7).state_dict()
    with pytest.raises(ValueError, match="can't be resumed exactly"):
        PromptSampler(seed, n).load_state_dict(state)
