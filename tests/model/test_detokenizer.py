"""Ids to text as they come: case B4 and everything around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from cupyllm.errors import CheckpointError, InputError
from cupyllm.model.detokenizer import byte_alphabet
from cupyllm.model.tokenizer import Tokenizer

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tokenizer"
CHARACTERS = {byte: character for character, byte in byte_alphabet().items()}
MIXED = "😀🇨🇭👩‍👩‍👧‍👦👋🏽汉字日本語한국어ไทยéß√𝒜\u2028 a  b\n\tمرحبا🫠𠜎z"


def backend_of(tokenizer: Tokenizer) -> Backend:
    return Backend.from_file(str(tokenizer.path))


def save(directory: Path, backend: Backend) -> Tokenizer:
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.open(directory)


def byte_level(directory: Path, added: list[Any] = []) -> Tokenizer:  # noqa: B006 - not changed
    """256 bytes, nothing merged, so that any cut between bytes is a cut between tokens."""
    backend = Backend(models.BPE(vocab={CHARACTERS[i]: i for i in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for token in added:
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    return save(directory, backend)


def sentencepiece(directory: Path, strip: int = 1) -> Tokenizer:
    """Like Llama 2: pieces with ▁, bytes as <0xNN>, one leading space taken away."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdehlorwt", "▁a", "lo", "汉"]
    merges = [("▁", "a"), ("l", "o")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", strip, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return save(directory, backend)


@pytest.fixture
def qwen() -> Tokenizer:
    return Tokenizer.open(FIXTURE)


def deltas(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    stream = tokenizer.detokenizer(**options)
    return [*(stream.push(i) for i in ids), stream.end()]


def test_b4_an_emoji_over_two_tokens(qwen: Tokenizer) -> None:
    ids = qwen.encode("x😀y")
    assert [qwen.token(i) for i in ids] == ["x", "ðŁĺ", "Ģ", "y"]  # x, F0 9F 98, 80, y
    assert deltas(qwen, ids) == ["x", "", "😀", "y", ""]


def test_b4_a_cut_off_tail_is_one_replacement_character_at_the_end(qwen: Tokenizer) -> None:
    ids = qwen.encode("x😀")[:-1]
    assert deltas(qwen, ids) == ["x", "", "\ufffd"]
    assert qwen.decode(ids) == backend_of(qwen).decode(ids) == "x\ufffd"


def test_b4_bytes_that_are_never_valid_do_not_stall(qwen: Tokenizer) -> None:
    ids = [qwen.token_id(CHARACTERS[0x80])] * 4 + qwen.encode("ok")
    got = deltas(qwen, ids)  # type: ignore[arg-type]
    assert "\ufffd" in "".join(got[:4])
    assert "".join(got) == "\ufffd" * 4 + "ok" and got[-3:] == ["o", "k", ""]


def test_b4_a_space_after_half_a_character(qwen: Tokenizer) -> None:
    ids = [qwen.token_id(CHARACTERS[byte]) for byte in (0xE5, 0x9C, 0x20)]
    assert "".join(deltas(qwen, ids)) == "\ufffd "  # type: ignore[arg-type]


def test_b4_every_split_of_a_string_of_forty_characters(tmp_path: Path) -> None:
    """Cut in two anywhere, each half a stream of its own: a half character is U+FFFD only at the very end."""
    tokenizer = byte_level(tmp_path)
    data = (MIXED * 2)[:80].encode("utf-8")
    assert len(MIXED) >= 40
    for cut in range(len(data) + 1):
        ids = list(data[:cut])
        got = deltas(tokenizer, ids)
        assert "".join(got) == tokenizer.decode(ids) == data[:cut].decode("utf-8", "replace")
        assert "\ufffd" not in "".join(got[:-1])
        whole = tokenizer.detokenizer()
        first, second = whole.extend(ids), whole.extend(list(data[cut:]))
        assert first + second + whole.end() == data.decode("utf-8")


def test_b4_deltas_add_up_to_the_text_for_real_merges(qwen: Tokenizer) -> None:
    text = f"<|im_start|>user\n{MIXED} the other singing<|im_end|>\n<think>\n{MIXED}</think>"
    for skip in (True, False):
        ids = qwen.encode(text)
        assert "".join(deltas(qwen, ids, skip_special=skip)) == qwen.decode(ids, skip_special=skip)
        assert qwen.decode(ids, skip_special=skip) == backend_of(qwen).decode(ids, skip_special_tokens=skip)
    assert qwen.decode(qwen.encode(text), skip_special=False) == text


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_decode_as_tokenizers_does(qwen: Tokenizer, seed: int) -> None:
    """Malformed UTF-8 of every kind (lone, overlong, surrogates, cut): the same number of U+FFFD in the same places."""
    rng = np.random.default_rng(seed)
    backend = backend_of(qwen)
    leads = np.array([0x20, 0x61, 0x80, 0x9F, 0xBF, 0xC0, 0xC3, 0xE0, 0xE5, 0xED, 0xF0, 0xF4, 0xF5, 0xFF, 0xA0, 0x90])
    for _ in range(300):
        values = rng.choice(leads, 12) if rng.random() < 0.7 else rng.integers(0, 256, 12)
        ids = [int(qwen.token_id(CHARACTERS[int(v)]) or 0) for v in values]
        for at in rng.integers(0, 12, 2):
            ids[at] = int(rng.integers(256, qwen.size))
        for skip in (True, False):
            want = backend.decode(ids, skip_special_tokens=skip)
            assert qwen.decode(ids, skip_special=skip) == want
            assert "".join(deltas(qwen, ids, skip_special=skip)) == want


def test_a_special_token_inside_a_character_is_left_out(qwen: Tokenizer) -> None:
    head, tail = qwen.encode("😀")
    end = qwen.added_tokens["<|im_end|>"]
    assert qwen.decode([head, end, tail]) == "😀"
    assert deltas(qwen, [head, end, tail]) == ["", "", "😀", ""]
    assert qwen.decode([head, end, tail], skip_special=False) == "\ufffd<|im_end|>\ufffd"


def test_added_tokens_with_characters_outside_the_alphabet(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, [AddedToken("<a b>", special=True), AddedToken("  ", special=False)])
    ids = tokenizer.encode("x<a b>  y")
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special=False) == "x<a b>  y"
    assert tokenizer.decode(ids) == backend_of(tokenizer).decode(ids) == "x  y"


def test_sentencepiece_with_byte_fallback(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    backend = backend_of(tokenizer)
    for text in ("hello a world", "汉😀 a", " two", "", "a\nb", MIXED):
        ids = [1, *tokenizer.encode(text), 2]
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == backend.decode(ids) == text
        shown = backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special=False) == shown
    ids = tokenizer.encode("x😀y")
    got = deltas(tokenizer, ids)
    assert "".join(got) == "x😀y" and got[-3:] == ["😀", "y", ""] and "\ufffd" not in "".join(got)


def test_sentencepiece_with_a_wrong_byte_keeps_what_is_right(tmp_path: Path) -> None:
    """`tokenizers` gives one U+FFFD for every byte of the run; no stream can, since the first four were a character."""
    tokenizer = sentencepiece(tmp_path)
    ids = [3 + byte for byte in (*"😀".encode(), 0x80)]
    assert backend_of(tokenizer).decode(ids) == "\ufffd" * 5
    assert deltas(tokenizer, ids) == ["", "", "", "😀", "\ufffd", ""]
    assert tokenizer.decode(ids) == "😀\ufffd"


@pytest.mark.parametrize("scheme", ["always", "never", "first"])
def test_metaspace(tmp_path: Path, scheme: str) -> None:
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "▁", "▁a", "b", "a", "▁▁"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = save(tmp_path, backend)
    for ids in ([2, 3, 2], [5, 2, 1, 3], [3, 1, 1, 4], [1], []):
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == backend.decode(ids), ids


def test_no_decoder_separates_words(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = save(tmp_path, backend)
    assert deltas(tokenizer, [0, 1, 1]) == ["a", " b", " b", ""]
    assert tokenizer.decode([0, 1, 1]) == backend.decode([0, 1, 1])


def test_a_stream_can_be_used_again(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    stream = tokenizer.detokenizer()
    ids = tokenizer.encode("a b")
    assert [stream.extend(ids) + stream.end() for _ in range(2)] == ["a b", "a b"]
    assert stream.end() == ""


def test_ids_that_are_no_tokens(qwen: Tokenizer) -> None:
    for number in (-1, qwen.size, 151935):
        with pytest.raises(InputError, match=rf"id {number} is no token .* 0 <= id < 296"):
            qwen.detokenizer().push(number)


def test_a_gap_in_the_vocabulary_has_no_text(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={CHARACTERS[ord("a")]: 0, CHARACTERS[ord("b")]: 5}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = save(tmp_path, backend)
    assert tokenizer.size == 6
    assert tokenizer.decode([0, 3, 5]) == backend.decode([0, 3, 5]) == "ab"


def test_a_decoder_without_bytes_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    tokenizer = save(tmp_path, backend)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(CheckpointError, match="'WordPiece' is not supported"):
        tokenizer.decode([0])
    backend.decoder = decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()])  # strips every token
    with pytest.raises(CheckpointError, match="'Strip' is not supported"):
        save(tmp_path, backend).decode([0])


def test_the_alphabet_is_gpt2s() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(MIXED)
    assert bytes(byte_alphabet()[c] for c in encoded[0][0]) == MIXED.encode("utf-8")
    assert json.loads(json.dumps(byte_alphabet(), ensure_ascii=True)) == byte_alphabet()
