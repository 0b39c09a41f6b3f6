"""Tokenizers out of GGUF metadata: the same ids as the tokenizer that the metadata was made from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from cupyllm.convert.gguf_tokenizer import PRE_TOKENIZERS, GgufTokenizer
from cupyllm.errors import CheckpointError
from cupyllm.model.tokenizer import Tokenizer
from tests.casekit import expect_raises
from tests.convert.ggufs import TOKENIZER, byte_level_metadata

TEXTS = (
    "the other singing thing\n\n  <think>x</think><|im_start|>user\nHi<|im_end|>",
    "I'LL don't 1234567 x12 e\u0301 汉字 😀🇨🇭  trailing  ",
    "a\r\n\r\n\tb \u00a0c -- !!??\n",
    "",
)


def rebuild(directory: Path, metadata: dict[str, Any]) -> Tokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    found = GgufTokenizer(metadata, "m.gguf")
    (directory / "tokenizer.json").write_text(json.dumps(found.tokenizer_json()), "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(found.settings()), "utf-8")
    return Tokenizer.open(directory)


def words(pre: str, text: str) -> list[str]:
    """The pieces that a pre-tokenizer makes, as text."""
    document = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": PRE_TOKENIZERS[pre]}
    pieces = Backend.from_str(json.dumps(document)).pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


# ---- byte-level ----


def test_qwens_tokenizer_comes_back(tmp_path: Path) -> None:
    want, got = Tokenizer.open(TOKENIZER), rebuild(tmp_path, byte_level_metadata())
    assert got.size == want.size == 296  # the vocabulary's padding is no token
    assert (got.eos_id, got.pad_id, got.special_ids) == (want.eos_id, want.pad_id, want.special_ids)
    assert got.added_tokens == want.added_tokens
    for text in TEXTS:
        assert got.encode(text) == want.encode(text)
        assert got.encode(text, allow_special=False) == want.encode(text, allow_special=False)
        assert got.decode(got.encode(text)) == want.decode(want.encode(text))
    message = [{"role": "user", "content": TEXTS[0]}]
    assert got.encode_chat(message, enable_thinking=False) == want.encode_chat(message, enable_thinking=False)


def test_patterns() -> None:
    """By the published tokenizers: how each splits digits, contractions and spaces before a word."""
    text = "I'm I'M 1234 a12"
    assert words("qwen2", text) == ["I", "'m", " I", "'M", " ", "1", "2", "3", "4", " a", "1", "2"]
    assert words("llama-bpe", text) == ["I", "'m", " I", "'M", " ", "123", "4", " a", "12"]
    assert words("gpt-2", text) == ["I", "'m", " I", "'", "M", " 1234", " a", "12"]
    assert words("default", text) == words("gpt-2", text)
    assert words("smollm", text) == ["I", "'m", " I", "'", "M", " ", "1", "2", "3", "4", " a", "1", "2"]
    assert words("deepseek-r1-qwen", text) == words("qwen2", text)
    assert words("qwen2", "a\n\n b") == ["a", "\n\n", " b"]
    assert words("gpt-2", "a\n\n b") == ["a", "\n\n", " b"]


def test_qwen_composes_characters_and_others_do_not(tmp_path: Path) -> None:
    assert len(rebuild(tmp_path / "a", byte_level_metadata("qwen2")).encode("e\u0301")) == 2
    assert len(rebuild(tmp_path / "b", byte_level_metadata("smollm")).encode("e\u0301")) == 3


def test_llama3_adds_bos_and_takes_whole_words(tmp_path: Path) -> None:
    metadata = byte_level_metadata("llama-bpe")
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata["tokenizer.ggml.tokens"][296] = "zq"  # a word that no merge makes
    metadata["tokenizer.ggml.token_type"][296] = 1
    tokenizer = rebuild(tmp_path, metadata)
    assert tokenizer.encode("zq") == [270, 296]
    assert tokenizer.encode("zq", add_special_tokens=False) == [296]
    assert tokenizer.encode_chat([{"role": "user", "content": "zq"}])[0] == 271
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert rebuild(tmp_path, metadata).encode("zq") == [296]


def test_bos_and_eos_around_a_text(tmp_path: Path) -> None:
    metadata = {**byte_level_metadata(), "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert rebuild(tmp_path, metadata).encode("a") == [270, 97, 272]


def test_stop_ids_are_those_that_llama_cpp_finds() -> None:
    metadata = byte_level_metadata()
    assert GgufTokenizer(metadata, "m").stop_ids() == [270, 272]  # <|endoftext|> is a control token too
    metadata["tokenizer.ggml.eot_token_id"] = 5
    assert GgufTokenizer(metadata, "m").stop_ids() == [5, 270, 272]
    metadata["tokenizer.ggml.token_type"] = [1] * 320
    metadata["tokenizer.ggml.eos_token_id"] = 0xFFFFFFFF  # some files say none like this
    assert GgufTokenizer(metadata, "m").stop_ids() == [5]


def test_several_chat_templates(tmp_path: Path) -> None:
    metadata = {**byte_level_metadata(), "tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    template = rebuild(tmp_path, metadata).chat_template
    message = [{"role": "user", "content": "x"}]
    assert template.render(message) == "D" and template.render(message, tools=[{"name": "f"}]) == "T"
    del metadata["tokenizer.chat_template"], metadata["tokenizer.chat_template.tool_use"]
    assert not rebuild(tmp_path, metadata).has_chat_template


def test_no_types_means_all_normal(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.token_type"]
    assert rebuild(tmp_path, metadata).added_tokens == {}


# ---- sentencepiece ----


def sentencepiece_metadata() -> dict[str, Any]:
    """Pieces over a small alphabet with random scores, so that the order of merges matters; bytes for the rest."""
    rng = np.random.default_rng(5)
    control = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    pieces = [*control, *((f"<0x{i:02X}>", 6) for i in range(256)), *((c, 1) for c in "▁abcé")]
    have = {piece for piece, _ in pieces}
    while len(pieces) < 360:
        made = "".join(rng.choice(list("▁abcé"), rng.integers(2, 5)))
        if made not in have:
            have.add(made)
            pieces.append((made, 1))
    pieces.append(("<user>", 4))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, kind in pieces],
        "tokenizer.ggml.scores": [float(s) for s in rng.permutation(len(pieces)) * -1.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


def by_score(metadata: dict[str, Any], text: str) -> list[int]:
    """llama.cpp's llm_tokenizer_spm: join the two neighbours whose piece scores highest, leftmost first, until none."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 1}
    scores = metadata["tokenizer.ggml.scores"]
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result: list[int] = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return result


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    tokenizer = rebuild(tmp_path, metadata)
    rng = np.random.default_rng(1)
    for _ in range(300):
        text = "".join(rng.choice(list(" abcéz汉"), rng.integers(1, 24)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == by_score(metadata, text), text
        assert tokenizer.decode(ids) == text


def test_sentencepiece_special_tokens(tmp_path: Path) -> None:
    tokenizer = rebuild(tmp_path, sentencepiece_metadata())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, (2,))
    assert tokenizer.encode("a")[0] == 1 and tokenizer.encode("a", add_special_tokens=False)[0] != 1
    assert tokenizer.special_ids == {0, 1, 2} and "<user>" in tokenizer.added_tokens
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]
    assert 1 not in tokenizer.encode("<s>", add_special_tokens=False, allow_special=False)
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a")  # one bos, not two
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": False}
    plain = rebuild(tmp_path, metadata)
    assert plain.decode(plain.encode(" a")) == " a"
    assert plain.encode("a", add_special_tokens=False) != tokenizer.encode("a", add_special_tokens=False)


def test_sentencepiece_with_listed_merges(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    merges = GgufTokenizer(metadata, "m").tokenizer_json()["model"]["merges"]
    listed = {**metadata, "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    del listed["tokenizer.ggml.scores"]
    assert GgufTokenizer(listed, "m").tokenizer_json()["model"]["merges"] == merges
    metadata["tokenizer.ggml.scores"] = [0.0]
    expect_raises(CheckpointError, lambda: GgufTokenizer(metadata, "m").tokenizer_json(), "1 tokenizer.ggml.scores for")


def test_damage() -> None:
    expect_raises(
        CheckpointError, lambda: GgufTokenizer({"tokenizer.ggml.model": "t5"}, "m"), "m: tokenizer.ggml.model"
    )
    empty = {"tokenizer.ggml.model": "gpt2"}
    expect_raises(CheckpointError, lambda: GgufTokenizer(empty, "m"), "has no tokenizer.ggml.tokens")
    assert len(ByteLevel.alphabet()) == 256


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pattern_loses_nothing(tmp_path: Path, pre: str) -> None:
    tokenizer = rebuild(tmp_path, byte_level_metadata(pre))
    for text in TEXTS:
        composed = text.replace("e\u0301", "é") if "qwen" in pre else text
        ids = tokenizer.encode(text, allow_special=False, add_special_tokens=False)
        assert tokenizer.decode(ids) == composed
