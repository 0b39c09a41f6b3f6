"""Ids back to text, whole or as they come.

A token is not a character: byte-level BPE spreads an emoji over several tokens, sentencepiece spells what its
vocabulary lacks as <0xNN> tokens. So every token is turned into its BYTES, and one incremental UTF-8 decoder turns the
bytes into text. What may yet become a character is held back (three bytes at most); what cannot is U+FFFD at once, by
Unicode's rule (one for each maximal part of a character); the end of the stream flushes what is held. Whole decoding is
the same machine run to the end, so the deltas of a stream always add up to it.

Rejected: decoding a growing window of ids and holding back while it ends in U+FFFD (that is what most engines do). It
decodes each token several times, stalls on bytes that are really invalid, and needs a rule for every exception.
`tokenizers`' DecodeStream, which does it, never flushes a cut-off tail.

Equal to `tokenizers`' own decode bit for bit where the decoder is ByteLevel (Qwen, Llama 3, SmolLM2) or absent. With
byte fallback (Llama 2) it differs in one respect: `tokenizers` gives up a whole run of <0xNN> tokens when one byte in
it is wrong, which no stream can know in time; here only the wrong bytes become U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cupyllm.errors import CheckpointError

if TYPE_CHECKING:
    from cupyllm.model.tokenizer import Tokenizer

_SPACE = b" "
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """One stream of ids. `push` returns the text that became certain, `end` the rest; then it can be used anew.

    `skip_special` leaves special tokens out of the text (tokenizer.json marks them), else they are shown. Ids that are
    no tokens raise InputError.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._start = True  # no token shown yet
        self._strip = tokenizer.byte_map.strip_spaces

    def push(self, token: int) -> str:
        """The text that this id completes; often a word, "" while a character is incomplete."""
        content = self._tokenizer.token(token)
        if token in self._hidden:
            return ""
        data = self._tokenizer.byte_map.token_bytes(content, self._start)
        self._start = False
        while self._strip and data:
            if data[:1] != _SPACE:
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return self._utf8.decode(data)

    def extend(self, tokens: Iterable[int]) -> str:
        """`push` for several ids."""
        return "".join([self.push(token) for token in tokens])

    def end(self) -> str:
        """What was held back, as U+FFFD, and back to the start."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._start, self._strip = True, self._tokenizer.byte_map.strip_spaces
        return rest


class ByteMap:
    """The bytes of a token, by the `decoder` of a tokenizer.json: steps that work token by token.

    `strip_spaces` is how many spaces are taken from the beginning of the whole text.
    Raises CheckpointError for a decoder whose tokens have no bytes of their own (WordPiece, CTC, ...).
    """

    def __init__(self, decoder: Mapping[str, Any] | None, where: str) -> None:
        self.strip_spaces = 0
        self._steps: list[Callable[[str, bool], str | bytes]] = []
        if decoder is None:
            self._steps.append(_separated)
            return
        sequence = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
        fused = False
        for step in sequence or []:
            kind = step.get("type")
            if kind == "ByteLevel":
                self._steps.append(_byte_level)
            elif kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
                self._steps.append(_replace(step["pattern"]["String"], step["content"]))
            elif kind == "ByteFallback":
                self._steps.append(_byte_fallback)
            elif kind == "Metaspace":
                self._steps.append(_metaspace(step["replacement"], step.get("prepend_scheme", "always") != "never"))
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step.get("content") == " " and not step.get("stop"):
                self.strip_spaces += step.get("start", 0)
            else:
                raise CheckpointError(
                    f"{where}: decoder step {kind!r} is not supported, expected ByteLevel, Metaspace, Replace, "
                    "ByteFallback, Fuse or a Strip of leading spaces after Fuse"
                )

    def token_bytes(self, content: str, first: bool) -> bytes:
        """The bytes that a token adds to the text; `first`: it is the first one shown."""
        value: str | bytes = content
        for step in self._steps:
            if isinstance(value, bytes):
                break
            value = step(value, first)
        return value if isinstance(value, bytes) else value.encode("utf-8")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes (bytes_to_unicode): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _byte_level(content: str, first: bool) -> str | bytes:
    """An added token with a character outside the alphabet (a space, say) stands for its own UTF-8."""
    try:
        return bytes([_ALPHABET[character] for character in content])
    except KeyError:
        return content


def _byte_fallback(content: str, first: bool) -> str | bytes:
    return bytes.fromhex(content[3:5]) if _BYTE_TOKEN.fullmatch(content) else content


def _replace(pattern: str, replacement: str) -> Callable[[str, bool], str]:
    return lambda content, first: content.replace(pattern, replacement)


def _metaspace(mark: str, prepended: bool) -> Callable[[str, bool], str]:
    """The mark is a space; in the first token it was put there by the encoder."""
    return lambda content, first: content.replace(mark, "" if first and prepended else " ")


def _separated(content: str, first: bool) -> str:
    """No decoder: tokens are words."""
    return content if first else " " + content
