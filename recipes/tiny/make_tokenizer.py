"""The tiny models' character tokenizer, and the maker of the ``tokenizer.json`` that ships with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_CHARACTERS = "0123456789+-*/=<>().,:;?! \nabcdefghijklmnopqrstuvwxyz"
VOCAB_SIZE = 64  # divides by every tensor-parallel size that the tiny models' heads allow


def vocabulary() -> dict[str, int]:
    """Token to id: the three special tokens, one token per character, and reserved ones up to 64.

    The reserved tokens are ordinary ones on purpose: special tokens vanish in decoding, and a model
    that samples "7<reserved_3>" must not read as if it had answered "7".
    """
    tokens = [PAD, EOS, UNK, *_CHARACTERS]
    tokens += [f"<reserved_{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def write_tokenizer(path: Path = TOKENIZER_FILE) -> None:
    """Writes the tokenizer as a ``tokenizer.json`` of the `tokenizers` library; the same bytes each time."""
    from tokenizers import Tokenizer, decoders, models

    # BPE without merges is a character tokenizer that engines' detokenizers know.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    tokenizer.save(str(path), pretty=True)


def load_tokenizer() -> PreTrainedTokenizerFast:
    """The shipped tokenizer as transformers uses it: pads on the left, adds no special tokens."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER_FILE),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER_FILE)
