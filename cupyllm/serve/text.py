"""The text of one sequence as its tokens come, ended by stop strings.

A stop string may be spread over tokens, so text that could be the beginning of one is held back until it is decided: at
most len(longest stop) - 1 characters. The answer ends before the stop string that is completed first; of several
completed by the same character, before the one that begins first. That depends on the text alone and not on how it was
cut into tokens. Rejected: looking for the leftmost stop string in each piece, which gives "a" or "" for "abc" with the
stops "bc" and "abcd", depending on where the pieces end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from cupyllm.errors import InputError
from cupyllm.text import Codec


class IdStream(Protocol):
    """Ids to text, one at a time (model/detokenizer.py)."""

    def push(self, token: int) -> str: ...

    def end(self) -> str: ...


class ByteStream:
    """IdStream for models without a tokenizer: ids 0-255 are UTF-8 bytes, others are shown as <id>."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(bytes([token])) if token < 256 else f"{self.end()}<{token}>"

    def end(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def id_stream(codec: Codec) -> IdStream:
    """A new stream for a checkpoint's ids; special tokens have no text."""
    return ByteStream() if codec.tokenizer is None else codec.tokenizer.detokenizer()


class TextStream:
    """`push` and `end` return the text that is certain; `text` is all of it. `stopped`: a stop string was found."""

    def __init__(self, ids: IdStream, stops: Sequence[str] = ()) -> None:
        """Raises InputError for an empty stop string, which would end every answer before it begins."""
        if any(not stop for stop in stops):
            raise InputError("stop: got an empty string, expected text; leave it out")
        self.text = ""
        self.stopped = False
        self._ids, self._stops = ids, tuple(stops)
        self._held = ""

    def push(self, token: int) -> str:
        """The text that this id makes certain; "" once stopped."""
        return "" if self.stopped else self._add(self._ids.push(token))

    def end(self) -> str:
        """What was held back: the sequence has ended, so it is no stop string."""
        if self.stopped:
            return ""
        sure = self._add(self._ids.end())
        rest, self._held = self._held, ""
        self.text += rest
        return sure + rest

    def _add(self, piece: str) -> str:
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            sure, self._held, self.stopped = self._held[: min(found)[1]], "", True
        else:
            keep = partial_match(self._held, self._stops)
            sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += sure
        return sure


def partial_match(text: str, needles: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a needle begins, the whole needle excluded."""
    longest = max((len(needle) for needle in needles), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(len(needle) > length and needle.startswith(text[-length:]) for needle in needles):
            return length
    return 0
