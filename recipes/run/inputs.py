"""What a run reads before it starts anything: tokenizer, prompts, reward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...workers.checkpoint_folder import (
    CheckpointUnreachable,
    checkpoint_folder,
    copy_own_code,
    ending_tokens,
    is_hub_name,
)
from ...workers.trainers.megatron.hf_checkpoint import CheckpointMismatch, brings_code, check_checkpoint
from ..config.load import ConfigError, model_violations, resolve_data_path
from ..config.model import known_weights
from ..config.schema import TrainConfig
from ..data.dataset import DataError
from ..data.prompts import PromptDataset, PromptSampler, held_out, load_prompts
from ..policy.batch import PolicyBatch
from ..rewards.scorer import RewardError, RewardScorer, Scorer, load_reward


def on_all_hosts(model_path: str) -> str:
    """A checkpoint's folder or hub name, as a process in another working directory finds it."""
    return model_path if is_hub_name(model_path) else str(checkpoint_folder(model_path).absolute())


class RunInputs:
    """Tokenizer, prompts and reward function of a run.

    Args:
        config: checked by ``load_config``.
        model_path: checkpoint folder or hub name.

    Attributes:
        tokenizer: of the checkpoint.
        stop_token_ids: each of them ends a completion.
        pad_token_id: what rows are filled up with.
        train: the training prompts.
        validation: the held-out prompts.
        sampler: position in the training prompts.
        scorer: the reward function, in this process.

    Raises:
        ConfigError: everything that can't be read or does not fit the model.
    """

    def __init__(self, config: TrainConfig, model_path: str) -> None:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoTokenizer

        try:
            # Of a hub checkpoint the weights are fetched, and checked, where the ranks are.
            folder = checkpoint_folder(model_path, weights=False)
            if config.model.trust_remote_code:
                copy_own_code(model_path)
        except CheckpointUnreachable as error:
            raise ConfigError(config.name, [f"model.path: {error}"]) from error
        trust = config.model.trust_remote_code
        try:
            # Said, and not left out: transformers would ask at the terminal.
            hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
            ending = ending_tokens(folder)
        except Exception as error:  # code that a checkpoint brings may raise anything
            brought = trust and brings_code(folder)
            if not brought and not isinstance(error, (ValueError, OSError, StrictDataclassError)):
                raise
            reason = " ".join(str(error).split()).rstrip(".")
            remedy = (
                "Code that it brings was run; install what that imports, or mend it"
                if brought
                else "Code that comes with a checkpoint is not run without model.trust_remote_code"
            )
            unreadable = (
                f"model.path: transformers can't read the configuration or the tokenizer of {model_path}: {type(error).__name__}: {reason}. "
                f"{remedy}; or give a model that transformers has itself, with its tokenizer's files"
            )
            raise ConfigError(config.name, [unreadable]) from error
        # What transformers makes of a folder that has none of the tokenizer's files.
        if len(self.tokenizer) <= len(set(self.tokenizer.all_special_ids)):
            bare = f"model.path: {folder} has no tokenizer; copy the model's own (tokenizer.json and what belongs to it) there"
            raise ConfigError(config.name, [bare])
        # The tokenizer's is what its chat template ends turns with, which the checkpoint's own need not have.
        own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        self.stop_token_ids = tuple(dict.fromkeys([*own, *ending]))
        vocabulary = hf_config.get_text_config().vocab_size
        padding = self.tokenizer.pad_token_id
        # Llama's tokenizers have none, and others one that was added behind the embedding. No token sees padding, so any will do.
        self.pad_token_id = 0 if padding is None or padding >= vocabulary else padding
        data, wrong = config.data, model_violations(config, hf_config)

        def read[Read](key: str, reading: Callable[..., Read], *arguments: Any) -> Read | None:
            try:
                return reading(*arguments)
            except (CheckpointMismatch, DataError, RewardError) as error:
                wrong.append(f"{key}: {error}")
                return None

        if not is_hub_name(model_path):
            # Of a model whose code can't be run here, or is not brought.
            known = partial(known_weights, config)
            read("model.path", check_checkpoint, folder, trust, config.trainer.backend == "fsdp", known)
        prompts = [
            read(f"data.{part}", load_prompts, resolve_data_path(getattr(data, part)), self.tokenizer, keys)
            for part, keys in (("train", data), ("validation", held_out(data)))
        ]
        reward = read("reward.function", load_reward, config.reward.function, config.reward.kwargs)
        train, validation = prompts
        wrong += [
            f"data.{part}: {problem}"
            for part, read_in in (("train", train), ("validation", validation))
            if read_in is not None and (problem := _beyond(read_in, vocabulary))
        ]
        if wrong or train is None or validation is None or reward is None:
            raise ConfigError(config.name, wrong)
        self.train, self.validation = train, validation
        self.sampler = PromptSampler(config.seed, len(train))
        self.scorer: Scorer = RewardScorer(reward)

    def first_prompts(self, count: int) -> PolicyBatch:
        """The first prompts of the training data, without completions."""
        rows = [torch.tensor(self.train[i].token_ids) for i in range(min(count, len(self.train)))]
        padding = self.pad_token_id
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(row) for row in rows])
        return PolicyBatch(input_ids, torch.zeros(input_ids.shape), lengths=lengths)


def _beyond(prompts: PromptDataset, vocabulary: int) -> str:
    """Which prompt has a token that the model does not know, and what to do; empty if none has.

    Megatron's embedding over tensor-parallel ranks takes such a token for zeros, and says nothing.
    """
    for prompt in (prompts[index] for index in range(len(prompts))):
        if (token := max(prompt.token_ids)) >= vocabulary:
            return (
                f"the tokenizer makes token {token} of the prompt at {prompt.origin}, and the model knows {vocabulary} tokens "
                "(vocab_size), numbered from 0; give a checkpoint whose embedding was resized to its tokenizer, or the "
                "tokenizer that the model was trained with"
            )
    return ""
