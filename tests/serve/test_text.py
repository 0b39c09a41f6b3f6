"""Text as it comes, and stop strings: what is shown never depends on how the text was cut into tokens."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from cupyllm.errors import InputError
from cupyllm.model.tokenizer import Tokenizer
from cupyllm.serve.text import ByteStream, TextStream, id_stream, partial_match
from cupyllm.text import Codec
from tests.goldens import FIXTURES


class Pieces:
    """An IdStream whose token i is the i-th piece; the last one comes only at the end."""

    def __init__(self, pieces: list[str], last: str = "") -> None:
        self.pieces, self.last = pieces, last

    def push(self, token: int) -> str:
        return self.pieces[token]

    def end(self) -> str:
        return self.last


def shown(pieces: list[str], stops: tuple[str, ...], last: str = "") -> tuple[list[str], TextStream]:
    stream = TextStream(Pieces(pieces, last), stops)
    return [stream.push(i) for i in range(len(pieces))] + [stream.end()], stream


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The answer by definition: read characters until some stop string ends at one; drop the longest that does."""
    for end in range(len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)], True
    return text, False


@pytest.mark.parametrize(
    ("pieces", "stops", "deltas", "stopped"),
    [
        (["ab", "c"], (), ["ab", "c", ""], False),
        (["ab", "c", "d"], ("c",), ["ab", "", "", ""], True),
        (["a\n", "\n", "b"], ("\n\n",), ["a", "", "", ""], True),
        (["a\n", "b\n"], ("\n\n",), ["a", "\nb", "\n"], False),  # held back, then decided, then the end
        (["xSTO", "RY"], ("STOP",), ["x", "STORY", ""], False),
        (["aaab"], ("aab",), ["a", ""], True),
        (["aa", "a", "b"], ("aab",), ["", "a", "", ""], True),
        (["abc", "d"], ("abcd", "bc"), ["a", "", ""], True),  # bc is complete first
        (["xab"], ("b", "ab"), ["x", ""], True),  # both end here: before the longer one
        (["the end."], ("the end.",), ["", ""], True),
    ],
)
def test_stop_strings(pieces: list[str], stops: tuple[str, ...], deltas: list[str], stopped: bool) -> None:
    got, stream = shown(pieces, stops)
    assert (got, stream.stopped) == (deltas, stopped)
    assert stream.text == "".join(deltas)


def test_any_cut_gives_the_same_text() -> None:
    """2000 texts over three letters, where stop strings overlap themselves and each other all the time."""
    rng = random.Random(0)
    ended = 0
    for _ in range(2000):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 25)))
        stops = tuple(
            "".join(rng.choice("abc") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))
        )
        marks = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        edges = [0, *marks, len(text)]
        pieces = [text[a:b] for a, b in pairwise(edges)]
        deltas, stream = shown(pieces, stops)
        assert ("".join(deltas), stream.stopped) == cut(text, stops), (pieces, stops)
        ended += stream.stopped
        done, given = "", ""
        for piece, delta in zip(pieces, deltas, strict=False):
            done, given = done + piece, given + delta
            if cut(done, stops)[1]:
                break
            held = done[len(given) :]  # no more is held back than what may become a stop string
            assert done == given + held and (not held or any(stop.startswith(held) for stop in stops)), (pieces, stops)
    assert 500 < ended < 1900


def test_what_the_end_releases_may_complete_a_stop_string() -> None:
    deltas, stream = shown(["a"], ("�",), last="�")
    assert (deltas, stream.stopped, stream.text) == (["a", ""], True, "a")


def test_no_stop_string_may_be_empty() -> None:
    with pytest.raises(InputError, match="stop: got an empty string"):
        TextStream(ByteStream(), ("x", ""))


def test_bytes_where_there_is_no_tokenizer() -> None:
    stream = id_stream(Codec(300))
    assert [stream.push(i) for i in "é!".encode()] == ["", "é", "!"]
    assert stream.push(0xF0) == "" and stream.push(299) == "�<299>" and stream.push(0xC3) == ""
    assert stream.end() == "�" and stream.end() == ""


def test_an_emoji_over_several_tokens() -> None:
    """Case B4: the deltas add up to the text, and none holds half a character."""
    tokenizer = Tokenizer.open(FIXTURES / "tokenizer")
    text = "a 😀👍🏽 é\n"
    stream = TextStream(id_stream(Codec(320, tokenizer)), ("STOP", "🚀"))
    deltas = [stream.push(token) for token in tokenizer.encode(text)] + [stream.end()]
    assert "".join(deltas) == stream.text == text and not any("�" in delta for delta in deltas)
    assert "" in deltas


def test_a_stop_string_inside_an_emojis_tokens() -> None:
    tokenizer = Tokenizer.open(FIXTURES / "tokenizer")
    stream = TextStream(id_stream(Codec(320, tokenizer)), ("😀",))
    assert "".join(stream.push(token) for token in tokenizer.encode("ab😀cd")) == "ab"
    assert stream.stopped and stream.end() == "" and stream.push(97) == ""


def test_partial_match() -> None:
    assert partial_match("ab", ["bc", "abd"]) == 2
    assert partial_match("ab", ["ab"]) == 0  # whole, not partial
    assert partial_match("", ["x"]) == partial_match("abc", []) == 0
