"""Tokenized prompts, and the order in which training draws them."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError  # torch brings jinja2 along

from ..config.schema import DataConfig
from .dataset import BadRecord, DataError, Record, read_records, require_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt, as the engine and the reward get it.

    Attributes:
        text: what was tokenized; after the chat template, where one is used.
        token_ids: its tokens.
        answer: what the reward function judges by.
        origin: file and line (or row) of the record.
    """

    text: str
    token_ids: tuple[int, ...]
    answer: str
    origin: str


class PromptDataset:
    """All prompts of a data set, tokenized.

    A string prompt is tokenized with the tokenizer's own special tokens, or, if ``chat_template`` is set,
    as the user's message of its chat template; a list of messages always goes through the template. The
    configured instruction follows string prompts.

    Args:
        records: from :func:`.dataset.load_records`.
        tokenizer: a fast tokenizer of transformers.
        config: ``max_prompt_tokens``, ``overlong_prompts``, ``instruction`` and the chat template's keys are read.

    Raises:
        DataError: prompts without or (unless they are to be dropped) with too many tokens, or that the chat template refuses,
            all of them listed; none is left; or a chat template is wanted that the tokenizer lacks, or that does not read its variables.
    """

    def __init__(
        self, records: Sequence[Record], tokenizer: PreTrainedTokenizerFast, config: DataConfig
    ) -> None:
        self._prompts, problems = _tokenize(records, tokenizer, config)
        if problems:
            raise DataError(problems)
        if len(self._prompts) < len(records):
            _tell_dropped(len(records) - len(self._prompts), len(records), config.max_prompt_tokens)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def load_prompts(source: str, tokenizer: PreTrainedTokenizerFast, config: DataConfig) -> PromptDataset:
    """Reads and tokenizes a data set, so that one error lists unreadable records and long prompts alike.

    Args:
        source: as for :func:`.dataset.load_records`.
        tokenizer: a fast tokenizer of transformers.
        config: keys and what :class:`PromptDataset` takes are read.

    Raises:
        DataError: the source can't be read, or some of its records can't be used.
    """
    records, problems = read_records(source, config.prompt_key, config.answer_key)
    if problems:
        _, too_long = _tokenize(records, tokenizer, config)
        raise DataError(sorted(problems + too_long, key=lambda problem: problem.position))
    require_records(records, source)
    return PromptDataset(records, tokenizer, config)


def held_out(config: DataConfig) -> DataConfig:
    """The configuration by which the validation's prompts are read."""
    return replace(
        config,
        prompt_key=config.validation_prompt_key or config.prompt_key,
        answer_key=config.validation_answer_key or config.answer_key,
    )


class PromptSampler:
    """Endless order of prompt indices: every epoch is a permutation of all prompts.

    The order depends on ``seed`` and the number of prompts alone, and each epoch's on its number, so that
    the state is a position and a resumed run goes on with exactly the prompt that would have come.

    Args:
        seed: of all epochs' permutations; not negative.
        n: number of prompts, at least 1.

    Raises:
        ValueError: ``n`` is below 1 or ``seed`` negative.
    """

    def __init__(self, seed: int, n: int) -> None:
        if n < 1 or seed < 0:
            raise ValueError(
                f"can't shuffle {n} prompts with seed {seed}; give at least 1 prompt and a seed of 0 or more"
            )
        self._seed = seed
        self._n = n
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def draw(self, count: int) -> list[int]:
        """The next ``count`` indices; an epoch's end is crossed without a gap.

        Raises:
            ValueError: ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"can't draw {count} prompts; give 0 or more")
        drawn: list[int] = []
        while len(drawn) < count:
            if self._position == self._n:
                self._epoch += 1
                self._position = 0
                self._order = self._permutation()
            taken = self._order[self._position : self._position + count - len(drawn)]
            drawn += taken
            self._position += len(taken)
        return drawn

    def state_dict(self) -> dict[str, int]:
        """Seed, number of prompts, epoch and position in it, as plain integers."""
        return {"seed": self._seed, "n": self._n, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where :meth:`state_dict` was taken.

        Raises:
            ValueError: the state is of another seed or number of prompts, so its position means nothing here.
        """
        if (state["seed"], state["n"]) != (self._seed, self._n):
            raise ValueError(
                f"the saved order is of seed {state['seed']} and {state['n']} prompts, this run's of seed "
                f"{self._seed} and {self._n}: it can't be resumed exactly; restore the data and the seed, or start anew"
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        # Seeding with the pair, not a sum: seed 1's epoch 0 must not be seed 0's epoch 1.
        generator = np.random.Generator(np.random.PCG64([self._seed, self._epoch]))
        return [int(index) for index in generator.permutation(self._n)]


def _tokenize(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerFast, config: DataConfig
) -> tuple[list[Prompt], list[BadRecord]]:
    plain = [isinstance(record.prompt, str) and not config.chat_template for record in records]
    if not all(plain) and not tokenizer.chat_template:
        first = records[plain.index(False)]
        raise DataError(
            f"{first.origin}: the prompt is to go through the chat template, but the tokenizer "
            f"({tokenizer.name_or_path or type(tokenizer).__name__}) has none; set data.chat_template to false and "
            "give prompts as strings, or use a model whose tokenizer has a template"
        )
    _check_template_kwargs(tokenizer, config, used=not all(plain))
    prompts: list[Prompt] = []
    problems: list[BadRecord] = []
    for record, is_plain in zip(records, plain, strict=True):
        try:
            text = _text(record, tokenizer, config, templated=not is_plain)
        except TemplateError as error:  # templates raise it for roles that the model does not know, say
            problem = f"the chat template refuses the messages: {error}; correct them or drop the record"
            problems.append(BadRecord(record.origin, record.position, problem))
            continue
        # A template writes the special tokens itself.
        token_ids = tuple(tokenizer(text, add_special_tokens=is_plain)["input_ids"])
        limit = config.max_prompt_tokens
        if 0 < len(token_ids) <= limit:
            prompts.append(Prompt(text, token_ids, record.answer, record.origin))
        elif token_ids:
            if config.overlong_prompts == "drop":
                continue
            problem = f"the prompt has {len(token_ids)} tokens, more than data.max_prompt_tokens {limit}; shorten it or raise the limit"
            problems.append(BadRecord(record.origin, record.position, problem))
        else:
            problem = "the tokenizer makes no token of the prompt; write one in characters that it knows"
            problems.append(BadRecord(record.origin, record.position, problem))
    return prompts, problems


def _tell_dropped(dropped: int, of: int, limit: int) -> None:
    if dropped == of:
        raise DataError(
            f"all {of} prompts have more than data.max_prompt_tokens {limit} tokens, and data.overlong_prompts drops "
            "them; raise the limit"
        )
    logger.warning(
        "%d of %d prompts are dropped: they have more than data.max_prompt_tokens %d tokens",
        dropped,
        of,
        limit,
    )


def _text(record: Record, tokenizer: PreTrainedTokenizerFast, config: DataConfig, *, templated: bool) -> str:
    prompt = record.prompt
    if isinstance(prompt, str) and config.instruction:
        prompt = f"{prompt}\n{config.instruction}"
    if not templated:
        assert isinstance(prompt, str)
        return prompt
    messages: list[dict[str, Any]] = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [dict(message) for message in prompt]
    )
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **config.chat_template_kwargs
        )
    )


def _check_template_kwargs(tokenizer: PreTrainedTokenizerFast, config: DataConfig, *, used: bool) -> None:
    """A template ignores a variable that it does not know: the prompts would be others than were asked for."""
    given = config.chat_template_kwargs
    if not given:
        return
    if not used:
        raise DataError(
            f"data.chat_template_kwargs gives {', '.join(given)}, and no prompt goes through the chat template; set "
            "data.chat_template to true, or leave the variables out"
        )
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if taken := [name for name in given if name in own]:
        raise DataError(
            f"data.chat_template_kwargs gives {', '.join(taken)}, which the recipe passes to the tokenizer itself; leave "
            "it out"
        )
    template = tokenizer.get_chat_template()
    if unread := [name for name in given if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise DataError(
            f"data.chat_template_kwargs gives {', '.join(unread)}, which the chat template of "
            f"{tokenizer.name_or_path or type(tokenizer).__name__} never reads: it would change nothing; correct the "
            "name, or leave it out"
        )
