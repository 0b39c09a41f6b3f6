"""GGUF to Hugging Face: every tensor back where and what it was, the config, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from cupyllm.config import RopeConfig
from cupyllm.convert import gguf_file, gguf_import
from cupyllm.convert.gguf_import import import_gguf
from cupyllm.errors import CheckpointError, InputError, StorageError
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.tokenizer import Tokenizer
from tests.casekit import expect_raises
from tests.convert.ggufs import Made, make, permute, tiny_config, write

FAMILIES = ("llama", "qwen2", "qwen3")


def read(directory: Path) -> dict[str, np.ndarray]:
    with Checkpoint.open(directory) as checkpoint:
        assert checkpoint.notes == []
        return {name: np.array(checkpoint.tensor(name)) for name in checkpoint.names()}


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert set(got) == set(want)
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].tobytes() == want[name].tobytes(), name


# ---- tensors ----


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_comes_back_bit_for_bit(tmp_path: Path, family: str, tied: bool) -> None:
    made = make(tmp_path / "m.gguf", tiny_config(family, tie_word_embeddings=tied))
    done = import_gguf(made.path, tmp_path / "out")
    same(read(tmp_path / "out"), made.tensors)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        config = checkpoint.config
    for name in ("hidden_size", "head_dim", "num_key_value_heads", "vocab_size", "rope", "rms_norm_eps", "qk_norm"):
        assert getattr(config, name) == getattr(made.config, name), name
    assert config.tie_word_embeddings == tied and config.dtype == "float32"
    assert done.types == {"F32": len(made.tensors)} and done.notes == []
    assert done.path == tmp_path / "out"


@pytest.mark.parametrize(("kind", "name"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_sixteen_bit_files_keep_their_type(tmp_path: Path, kind: str, name: str) -> None:
    made = make(tmp_path / "m.gguf", tiny_config("qwen3"), kind)
    import_gguf(made.path, tmp_path / "out")
    dtype = np.dtype(np.float16 if kind == "F16" else ml_dtypes.bfloat16)
    same(read(tmp_path / "out"), {key: value.astype(dtype) for key, value in made.tensors.items()})


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_tensors_are_near_what_they_were(tmp_path: Path, kind: str, family: str) -> None:
    """A block of 32 values between lo and hi has steps of at most (hi - lo) / (2^bits - 1), or amax / 2^(bits-1).

    Rounding is half a step, a whole one where the range is cut short at one end (symmetric types have one value less
    there); the scale itself is rounded to float16, 2^-11 relative of at most amax.
    """
    made = make(tmp_path / "m.gguf", tiny_config(family), kind)
    done = import_gguf(made.path, tmp_path / "out", "float32")
    got = read(tmp_path / "out")
    bits = int(kind[1])
    assert set(done.types) == {kind, "F32"}
    worst = 0.0
    for name, want in made.tensors.items():
        if want.ndim == 1:
            assert got[name].tobytes() == want.tobytes()
            continue
        blocks, back = want.reshape(-1, 32), got[name].reshape(-1, 32)
        amax = np.abs(blocks).max(axis=1, keepdims=True)
        span = blocks.max(axis=1, keepdims=True) - blocks.min(axis=1, keepdims=True)
        step = span / (2**bits - 1) / 2 if kind.endswith("_1") else amax / (127 * 2 if bits == 8 else 2 ** (bits - 1))
        ratio = np.abs(back - blocks) / (step + 2**-10 * (amax + span))
        worst = max(worst, float(ratio.max()))
    print(f"{kind}: largest error {worst:.3f} of the bound")
    assert 0.3 < worst <= 1  # a bound far above the error would see nothing


K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(tmp_path: Path, kind: str) -> None:
    """gguf cannot make these, so the blocks are random bytes with scales that are numbers."""
    config = tiny_config("qwen3", hidden_size=256, intermediate_size=256, num_hidden_layers=1, layer_windows=(None,))
    rng = np.random.default_rng(0)
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (256, size), dtype=np.uint8)
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}[kind]
    for place in at:
        scales = (rng.random(256) * 0.01 + 0.001).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(256, 2)
    made = make(tmp_path / "m.gguf", config, {"blk.0.ffn_up.weight": kind}, extra={"blk.0.ffn_up.weight": blocks})
    import_gguf(made.path, tmp_path / "out")
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(want).all() and np.unique(want).size > 100
    same(read(tmp_path / "out"), {**made.tensors, "model.layers.0.mlp.up_proj.weight": want})


def test_q4_k_and_q6_k_by_the_definition(tmp_path: Path) -> None:
    """One value of each, worked out from ggml's block layouts (block_q4_K, block_q6_K in ggml-common.h)."""
    q4 = np.zeros((1, 144), np.uint8)
    q4[0, 0:4] = np.array([0.5, 0.25], np.float16).view(np.uint8)  # scale and minimum of the whole block
    q4[0, 4], q4[0, 8] = 3, 5  # scale and minimum of the first 32 values
    q4[0, 16] = 0x0B  # their first value: 11, low half
    q6 = np.zeros((1, 210), np.uint8)
    q6[0, 0], q6[0, 128] = 0x0D, 0x02  # low four bits 13, high two bits 2: 13 + 32 - 32
    q6[0, 192] = 7
    q6[0, 208:210] = np.array([0.5], np.float16).view(np.uint8)
    write(tmp_path / "m.gguf", "llama", {}, {"a": q4, "b": q6}, {"a": "Q4_K", "b": "Q6_K"})
    with gguf_file.GgufFile(tmp_path / "m.gguf") as file:
        first = {name: next(file.chunks(name))[1][0, 0] for name in ("a", "b")}
    assert first == {"a": 0.5 * 3 * 11 - 0.25 * 5, "b": 0.5 * 7 * 13}


def test_pieces_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is a whole number of heads where rows are put back in order."""
    made = make(tmp_path / "m.gguf", tiny_config("llama"), "Q8_0")
    import_gguf(made.path, tmp_path / "whole")
    monkeypatch.setattr(gguf_file, "_CHUNK_VALUES", 64)  # one row, or one head
    import_gguf(made.path, tmp_path / "pieces")
    same(read(tmp_path / "pieces"), read(tmp_path / "whole"))


def test_rows_of_llamas_q_and_k_are_put_back_in_order() -> None:
    rows = np.arange(2 * 8, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    mixed = permute(rows, 2)
    assert mixed[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert gguf_import.unpermute(mixed, 8).tolist() == rows.tolist()
    assert gguf_import.unpermute(mixed[:, :1].T, 8)[0].tolist() == rows[:, 0].tolist()


def test_biases_of_llama(tmp_path: Path) -> None:
    made = make(tmp_path / "m.gguf", tiny_config("llama", qkv_bias=True, o_bias=True, mlp_bias=True))
    assert any(name.endswith("q_proj.bias") for name in made.tensors)
    import_gguf(made.path, tmp_path / "out")
    same(read(tmp_path / "out"), made.tensors)


def test_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path / "m.gguf", tiny_config("qwen3"))
    monkeypatch.setattr(gguf_import, "DEFAULT_SHARD_BYTES", 100_000)
    import_gguf(made.path, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    same(read(tmp_path / "out"), made.tensors)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    made = make(tmp_path / "m.gguf", tiny_config("qwen3"))
    seen: list[tuple[int, int]] = []
    import_gguf(made.path, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for value in made.tensors.values())
    assert seen == sorted(seen)


def test_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    big = np.full(64, 1e5, np.float32)
    made = make(tmp_path / "m.gguf", tiny_config(), extra={"output_norm.weight": big})
    refused(made, tmp_path, "tensor 'output_norm.weight' overflows float16", dtype="float16")
    import_gguf(made.path, tmp_path / "out", "bfloat16")
    big[3] = np.nan
    made = make(tmp_path / "n.gguf", tiny_config(), extra={"output_norm.weight": big})
    refused(made, tmp_path / "n", "tensor 'output_norm.weight' holds inf or NaN")


# ---- config ----


def config_of(directory: Path, **change: Any) -> Any:
    directory.mkdir()
    extra = change.pop("extra", None)
    made = make(directory / "m.gguf", tiny_config("llama"), change=change, extra=extra)
    import_gguf(made.path, directory / "out")
    with Checkpoint.open(directory / "out") as checkpoint:
        return checkpoint.config


def test_rope_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_of(tmp_path / "a", **linear).rope == RopeConfig(1e6, "linear", 4.0)
    yarn = {**linear, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 128}
    assert config_of(tmp_path / "b", **yarn).rope == RopeConfig(1e6, "yarn", 4.0, 128)
    none = {**linear, "llama.rope.scaling.type": "none"}
    assert config_of(tmp_path / "c", **none).rope == RopeConfig(1e6)
    assert config_of(tmp_path / "d", **{"llama.rope.freq_base": None}).rope == RopeConfig(10000.0)


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """generate_extra_tensors of llama.cpp's LlamaModel, frequency by frequency."""
    low, high, original = 1, 4, 8192
    result = []
    for frequency in 1.0 / (theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            result.append(1.0)
        elif wavelength > original / low:
            result.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_found_in_its_divisors(tmp_path: Path, factor: float) -> None:
    divisors = llama3_divisors(500000.0, 16, factor)
    assert len(set(divisors.tolist())) > 2
    config = config_of(tmp_path / "a", **{"llama.rope.freq_base": 500000.0}, extra={"rope_freqs.weight": divisors})
    assert config.rope == RopeConfig(500000.0, "llama3", factor, 8192, 1.0, 4.0)
    ones = np.ones(8, np.float32)
    assert config_of(tmp_path / "b", extra={"rope_freqs.weight": ones}).rope == RopeConfig(1e6)
    other = divisors.copy()
    other[2] *= 1.01
    made = make(tmp_path / "c.gguf", tiny_config("llama"), extra={"rope_freqs.weight": other})
    refused(made, tmp_path, "rope_freqs.weight is not Llama 3's rope scaling")


def test_numbers_that_older_files_leave_out(tmp_path: Path) -> None:
    gone = {f"llama.attention.{key}": None for key in ("key_length", "value_length")}
    assert config_of(tmp_path / "a", **gone).head_dim == 16
    kv = config_of(tmp_path / "b", **{"llama.attention.head_count": [4, 4]})
    assert kv.num_attention_heads == 4


def test_ids_of_the_tokenizer(tmp_path: Path) -> None:
    made = make(tmp_path / "m.gguf", tiny_config("qwen3"))
    done = import_gguf(made.path, tmp_path / "out")
    assert done.tokenizer == "qwen2 byte-level BPE" and done.has_chat_template
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == (272, 270, None)
    assert Tokenizer.open(tmp_path / "out").stop_ids == (270, 272)


def test_no_tokenizer(tmp_path: Path) -> None:
    made = make(tmp_path / "m.gguf", tiny_config("qwen3"), tokenizer={})
    done = import_gguf(made.path, tmp_path / "out")
    assert done.tokenizer is None and "has no tokenizer" in done.notes[0]
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert checkpoint.tokenizer_file is None


# ---- refusals ----


def refused(made: Made, tmp_path: Path, contains: str, kind: type = CheckpointError, dtype: str | None = None) -> None:
    out = tmp_path / "refused"
    expect_raises(kind, lambda: import_gguf(made.path, out, dtype), contains)
    left = sorted(entry.name for entry in tmp_path.iterdir()) if tmp_path.is_dir() else []
    assert not out.exists() and not any("partial" in name for name in left)


@pytest.mark.parametrize(
    ("change", "contains"),
    [
        (
            {"general.architecture": "gemma2"},
            "is a 'gemma2' model (general.architecture), expected llama, qwen2, qwen3",
        ),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, expected nothing"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, expected 16"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.block_count": None}, "llama.block_count is missing, expected an integer >= 1"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
        ({"llama.block_count": 1}, "'blk.1.attn_norm.weight' is no part of a llama model of 1 layers"),
        ({"llama.block_count": 3}, "lacks 9 of"),
        ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count is [4, 2]"),
        ({"llama.feed_forward_length": 64}, "expected [64, 64] by the metadata"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.attention.head_count_kv": 3}, "m.gguf: num_attention_heads is 4"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert', expected gpt2 or llama"),
        ({"tokenizer.ggml.pre": "starcoder"}, "tokenizer.ggml.pre is 'starcoder', expected one of default"),
        ({"tokenizer.ggml.tokens": ["a"] * 400}, "has 400 tokens for 320 embedding rows"),
        ({"tokenizer.ggml.merges": ["q z"]}, "a merge makes a piece that is no token"),
        ({"tokenizer.ggml.merges": ["qz"]}, "is no pair"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges is no list of strings"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types for 320 tokens"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x', expected int"),
        ({"split.count": 3}, "is one of 3 parts; join them first"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, change: dict[str, Any], contains: str) -> None:
    refused(make(tmp_path / "m.gguf", tiny_config("llama"), change=change), tmp_path, contains)


def test_tensors_that_are_missing_or_too_many(tmp_path: Path) -> None:
    made = make(tmp_path / "a.gguf", tiny_config("llama"), leave_out=["blk.1.ffn_up.weight"])
    refused(made, tmp_path, "lacks 1 of 21 tensors, model.layers.1.mlp.up_proj.weight first")
    made = make(tmp_path / "b.gguf", tiny_config("llama"), leave_out=["token_embd.weight"])
    refused(made, tmp_path, "has no token_embd.weight")
    made = make(tmp_path / "c.gguf", tiny_config("llama"), extra={"blk.0.ffn_gate_exps.weight": np.ones((2, 2), "f4")})
    refused(made, tmp_path, "'blk.0.ffn_gate_exps.weight' is no part")


def test_where_it_goes(tmp_path: Path) -> None:
    made = make(tmp_path / "m.gguf", tiny_config("llama"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for taken in (tmp_path / "full", made.path):
        with pytest.raises(StorageError, match="exists and is not an empty directory"):
            import_gguf(made.path, taken)
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["x"]
    (tmp_path / "empty").mkdir()
    import_gguf(made.path, tmp_path / "empty")
    same(read(tmp_path / "empty"), made.tensors)
    with pytest.raises(InputError, match="dtype is 'int8'"):
        import_gguf(made.path, tmp_path / "other", "int8")
