"""Text to ids and back."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.commands.inputs import DEFAULT_TOKENS
from cupyllm.errors import InputError
from cupyllm.text import BUILTIN_TEXT, Codec, builtin_ids, open_codec


def test_the_builtin_text_is_long_enough() -> None:
    data = BUILTIN_TEXT.encode("utf-8")
    assert len(data) >= 1024
    assert BUILTIN_TEXT.isascii() and "  " not in BUILTIN_TEXT
    # A BPE tokenizer makes one token of about 4.5 English characters: the default must not repeat the text.
    assert len(data) / 5 > DEFAULT_TOKENS


def test_bytes() -> None:
    codec = open_codec(None, 300)
    assert codec.encode("aé").tolist() == [0x61, 0xC3, 0xA9]
    assert [codec.decode(i) for i in (0x61, 0x0A, 0xC3, 256)] == ["a", "\n", "<0xC3>", "<256>"]
    assert codec.valid_vocab is None
    with pytest.raises(InputError, match="255"):
        Codec(255).encode("a")


def test_more_than_there_is_repeats() -> None:
    codec = Codec(256)
    length = codec.encode(BUILTIN_TEXT).size
    ids = builtin_ids(codec, length + 3)
    assert ids.size == length + 3 and np.array_equal(ids[:3], ids[length:])
