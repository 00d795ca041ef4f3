import json

import pytest

from rlrefit.recipes.config.schema import DataConfig
from rlrefit.recipes.data.dataset import DataError, Record, load_records
from rlrefit.recipes.data.prompts import PromptDataset, PromptSampler, load_prompts
from rlrefit.recipes.tiny.make_tokenizer import load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def tokenizer():
    return load_tokenizer()


def records(*prompts):
    return [Record(prompt, "1", f"data line {i}", i) for i, prompt in enumerate(prompts, start=1)]


def test_a_prompt_has_its_text_tokens_answer_and_origin(tokenizer):
    dataset = PromptDataset(records("1+2=", "3="), tokenizer, DataConfig())
    assert len(dataset) == 2
    first = dataset[0]
    assert (first.text, first.answer, first.origin) == ("1+2=", "1", "data line 1")
    assert first.token_ids == tuple(tokenizer("1+2=")["input_ids"])
    assert tokenizer.decode(dataset[1].token_ids) == "3="


def test_a_string_prompt_becomes_the_users_message_of_the_chat_template(tokenizer):
    tokenizer.chat_template = TEMPLATE
    dataset = PromptDataset(records("hi"), tokenizer, DataConfig(chat_template=True))
    assert dataset[0].text == "<user>hi>"
    assert dataset[0].token_ids == tuple(tokenizer("<user>hi>", add_special_tokens=False)["input_ids"])


def test_the_templates_variables_reach_it(tokenizer):
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is false %}!{% endif %}"
    told = {"chat_template": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert PromptDataset(records("hi"), tokenizer, DataConfig(**told))[0].text == "<user>hi>!"


@pytest.mark.parametrize(
    ("variables", "chat_template", "told"),
    [
        ({"enable_thinkng": False}, True, "gives enable_thinkng, which the chat template of .* never reads"),
        ({"tokenize": True}, True, "gives tokenize, which the recipe passes to the tokenizer itself"),
        ({"enable_thinking": False}, False, "no prompt goes through the chat template"),
    ],
)
def test_variables_that_would_change_nothing_are_refused(tokenizer, variables, chat_template, told):
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is false %}!{% endif %}"
    config = DataConfig(chat_template=chat_template, chat_template_kwargs=variables)
    with pytest.raises(DataError, match=told):
        PromptDataset(records("hi"), tokenizer, config)


def test_messages_go_through_the_chat_template_in_any_case(tokenizer):
    tokenizer.chat_template = TEMPLATE
    messages = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    dataset = PromptDataset(records(messages), tokenizer, DataConfig(max_prompt_tokens=32))
    assert dataset[0].text == "<system>a<user>b>"


def test_a_chat_template_that_the_tokenizer_lacks_is_an_error(tokenizer):
    with pytest.raises(DataError, match=r"data line 1.*has none; set data.chat_template to false"):
        PromptDataset(records("hi"), tokenizer, DataConfig(chat_template=True))


def test_the_longest_allowed_prompt_passes_and_all_longer_ones_are_listed(tokenizer):
    config = DataConfig(max_prompt_tokens=4)
    assert len(PromptDataset(records("1+2="), tokenizer, config)) == 1
    with pytest.raises(DataError) as caught:
        PromptDataset(records("1+2=", "12+2=", "1", "1+2+3="), tokenizer, config)
    assert [p.origin for p in caught.value.problems] == ["data line 2", "data line 4"]
    assert "5 tokens, more than data.max_prompt_tokens 4; shorten it or raise the limit" in str(caught.value)


def test_one_error_lists_broken_records_and_long_prompts_in_the_files_order(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [
        "{",
        json.dumps({"prompt": "1" * 20, "answer": "1"}),
        '{"prompt": ""}',
        '{"prompt": "1", "answer": "1"}',
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        load_prompts(str(path), tokenizer, DataConfig(max_prompt_tokens=8))
    assert [p.position for p in caught.value.problems] == [1, 2, 3]
    assert "20 tokens" in caught.value.problems[1].problem


def test_prompts_are_loaded_under_the_configured_keys(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "1+1=", "label": "2"}) + "\n")
    config = DataConfig(prompt_key="question", answer_key="label")
    assert load_prompts(str(path), tokenizer, config)[0].answer == "2"
    assert load_records(str(path), "question", "label")[0].prompt == "1+1="


def test_every_epoch_is_a_permutation_and_epochs_and_seeds_differ():
    sampler = PromptSampler(seed=3, n=20)
    first, second = sampler.draw(20), sampler.draw(20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    other = PromptSampler(seed=4, n=20)
    assert other.draw(20) not in (first, second)


def test_draws_do_not_depend_on_how_they_are_cut():
    whole = PromptSampler(5, 7).draw(50)
    sampler = PromptSampler(5, 7)
    assert [index for count in (1, 6, 0, 7, 16, 20) for index in sampler.draw(count)] == whole


@pytest.mark.parametrize("before", [0, 3, 7, 10, 14, 33])
def test_a_resumed_sampler_goes_on_exactly(before):
    sampler = PromptSampler(1, 7)
    sampler.draw(before)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = sampler.draw(25)
    resumed = PromptSampler(1, 7)
    resumed.draw(2)
    resumed.load_state_dict(state)
    assert resumed.draw(25) == expected


@pytest.mark.parametrize(("seed", "n"), [(2, 7), (1, 8)])
def test_a_state_of_other_data_or_another_seed_is_refused(seed, n):
    state = PromptSampler(1, 7).state_dict()
    with pytest.raises(ValueError, match="can't be resumed exactly"):
        PromptSampler(seed, n).load_state_dict(state)


def test_a_sampler_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 prompt"):
        PromptSampler(0, 0)
    with pytest.raises(ValueError, match="0 or more"):
        PromptSampler(0, 1).draw(-1)
