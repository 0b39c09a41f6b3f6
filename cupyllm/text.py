"""Text in and out of a model: the built-in text, a checkpoint's tokenizer, and bytes where there is none.

A checkpoint's tokenizer.json is run by model/tokenizer.py as transformers runs it, special tokens included. A
checkpoint without one is given UTF-8 bytes as ids 0-255 and the commands say so: a synthetic model has no tokenizer,
and bytes are real text with a known inverse. Guessing a tokenizer from the model's family was rejected: a wrong one
produces plausible nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupyllm.errors import InputError
from cupyllm.model.tokenizer import Tokenizer

BUILTIN_TEXT = """\
A large language model is mostly a pile of matrices. Sixty-four times over, a vector of a few thousand numbers is \
normalised, compared with the vectors of the words before it, mixed with what they have to say, and pushed through a \
wide pair of products that bend it a little. None of this is difficult to write down. What makes it hard to run is \
weight: the matrices of one layer fill most of a gigabyte, and all of the layers together are larger than the memory \
of almost any graphics card that a person can buy.

There is an old answer to a tool that is too big for the bench: bring it in one piece at a time. While the card works \
on one layer, the next is already on its way from the disk or from main memory, and the one before is forgotten. The \
arithmetic does not notice. It sees the same numbers in the same order, so it gives the same result to the last bit, \
and the memory that it needs no longer depends on how deep the model is. The price is the road between the two \
memories, and a careful program keeps that road full from the first byte to the last.

Training walks the same road twice, once forwards and once back. On the way back every step must know what it did on \
the way there, and a mistake in a derivative rarely stops anything. The loss still falls, only more slowly, and the \
model is quietly worse than it should be. So each gradient is derived by hand, written next to the formula that it \
belongs to, and then measured: nudge one number, look at how the result moves, and compare. If the two agree to many \
digits for every number in every layer, the derivation can be trusted. If they do not, no amount of data will help.
"""


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes for one checkpoint. `tokenizer` is None for UTF-8 bytes."""

    vocab_size: int
    tokenizer: Tokenizer | None = None

    @property
    def description(self) -> str:
        return "UTF-8 bytes as ids 0-255 (no tokenizer.json)" if self.tokenizer is None else "tokenizer.json"

    @property
    def valid_vocab(self) -> int | None:
        """Ids from here on pad the vocabulary and are no tokens; None where every id may come out."""
        return None if self.tokenizer is None else min(self.vocab_size, self.tokenizer.size)

    def encode(self, text: str) -> np.ndarray:
        """int64 [T]. Raises InputError when the text cannot be encoded for this vocabulary."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt: character {error.start} is not valid UTF-8, expected text; use --prompt-file"
            ) from None
        if self.tokenizer is not None:
            return np.asarray(self.tokenizer.encode(text), dtype=np.int64)
        if self.vocab_size < 256:
            raise InputError(
                f"prompt: the checkpoint has no tokenizer.json and a vocabulary of {self.vocab_size}, text as UTF-8 "
                "bytes needs at least 256; give token ids with --ids"
            )
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

    def decode(self, token: int) -> str:
        """The text of one token, for showing; what has no text is shown as <0xNN> (a byte) or <N> (an id)."""
        if self.tokenizer is not None:
            text = self.tokenizer.decode([token], skip_special=False) if token < self.tokenizer.size else ""
            return text if text else f"<{token}>"
        if token >= 256:
            return f"<{token}>"
        character = chr(token)
        shown = character.isascii() and (character.isprintable() or character == "\n")
        return character if shown else f"<0x{token:02X}>"


def open_codec(tokenizer_file: Path | None, vocab_size: int) -> Codec:
    """The codec for a checkpoint's tokenizer.json, or bytes. Raises CheckpointError when the file cannot be used."""
    return Codec(vocab_size, None if tokenizer_file is None else Tokenizer.open(tokenizer_file))


def builtin_ids(codec: Codec, num_tokens: int) -> np.ndarray:
    """int64 [num_tokens]: the built-in text, repeated as often as it takes. Raises InputError without usable ids."""
    ids = codec.encode(BUILTIN_TEXT)
    if not ids.size:
        raise InputError("built-in text gives no token, expected at least one; give token ids, or another tokenizer")
    if ids.max() >= codec.vocab_size:
        raise InputError(
            f"built-in text: id {int(ids.max())} is out of range, expected 0 <= id < {codec.vocab_size}; "
            f"{codec.description} does not belong to this model"
        )
    return np.resize(ids, num_tokens)
