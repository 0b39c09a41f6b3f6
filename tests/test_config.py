"""config.json in both dialects, against what transformers' own files say; what is not supported is refused by name."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cupyllm.config import PUBLISHED_SIZES, ModelConfig, RopeConfig, default_proportions, published
from cupyllm.errors import ConfigError, InputError
from tests.casekit_checkpoint import expect_raises, tiny_config

FIXTURES = Path(__file__).parent / "fixtures"
DIRECTORIES = sorted(p.parent for p in FIXTURES.glob("*/*/config.json"))

QWEN3_4 = {  # Qwen3-8B's published file
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 320,
    "rope_theta": 10000.0,
}
LLAMA = TINY | {"model_type": "llama"}
QWEN2 = TINY | {"model_type": "qwen2"}


def read(raw: dict[str, Any]) -> ModelConfig:
    """Without a word: a note would be a warning, and so an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ModelConfig.from_hf(raw)


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in keys}


def refused(raw: dict[str, Any], *texts: str) -> None:
    message = expect_raises(ConfigError, lambda: ModelConfig.from_hf(raw))
    for text in ("config.json", "expected", *texts):
        assert text in message, f"{text!r} not in {message!r}"


def test_published_file_in_both_dialects() -> None:
    four = read(QWEN3_4)
    assert four == published("8b")
    five = without(QWEN3_4, "rope_scaling", "rope_theta", "torch_dtype") | {
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 36,
    }
    assert read(five) == four


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: d.name)
def test_transformers_own_files(directory: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    config = ModelConfig.from_hf(directory, [])
    assert config == ModelConfig.from_hf(directory / "config.json", []) == ModelConfig.from_hf(raw, [])
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert getattr(config, key) == raw[key]
    assert config.rms_norm_eps == raw["rms_norm_eps"] and config.tie_word_embeddings == raw["tie_word_embeddings"]
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta")} | (raw.get("rope_scaling") or {})
    assert config.rope.theta == rope["rope_theta"] and config.rope.rope_type == rope.get("rope_type", "default")
    for key in set(rope) - {"rope_theta", "rope_type"}:
        assert getattr(config.rope, key) == rope[key]
    if raw.get("layer_types"):
        windows = [None if t == "full_attention" else raw["sliding_window"] for t in raw["layer_types"]]
        assert list(config.layer_windows) == windows


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: d.name)
def test_to_hf_says_the_same(directory: Path) -> None:
    config = ModelConfig.from_hf(directory, [])
    assert read(config.to_hf()) == config
    json.dumps(config.to_hf(), allow_nan=False)


@pytest.mark.parametrize("size", PUBLISHED_SIZES)
def test_to_hf_of_published_sizes(size: str) -> None:
    assert read(published(size).to_hf()) == published(size)
    assert published(size.upper()) == published(size)


def test_unknown_size() -> None:
    expect_raises(ConfigError, lambda: published("7b"), contains="0.6b, 1.7b, 4b, 8b, 14b, 32b")


def test_default_proportions_are_those_of_32b() -> None:
    small, large = default_proportions(64), published("32b")
    for name in ("hidden_size", "intermediate_size"):
        assert getattr(small, name) * 32 == getattr(large, name)
    assert small.num_attention_heads * small.head_dim * 32 == large.num_attention_heads * large.head_dim
    assert small.num_attention_heads // small.num_key_value_heads == 8 == large.num_attention_heads // 8
    assert (small.num_hidden_layers, small.vocab_size, small.tie_word_embeddings) == (64, 320, False)
    assert small.rope == large.rope and small.dtype == "bfloat16"


# --- defaults


def test_head_dim_defaults() -> None:
    assert read(without(TINY, "head_dim")).head_dim == 128  # Qwen3Config's default
    assert read(without(LLAMA, "head_dim")).head_dim == 16 == read(QWEN2 | {"head_dim": None}).head_dim
    assert read(LLAMA | {"head_dim": 32}).head_dim == 32
    refused(without(LLAMA, "head_dim") | {"hidden_size": 66}, "head_dim is nothing")


def test_family_switches() -> None:
    qwen3, qwen2, llama = read(TINY | {"attention_bias": True}), read(QWEN2), read(LLAMA | {"mlp_bias": True})
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, True, False)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (False, True, False, False)
    assert (llama.qk_norm, llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (False, False, False, True)
    assert read(LLAMA | {"attention_bias": True}).o_bias


def test_other_defaults() -> None:
    config = read(TINY)
    assert config.tie_word_embeddings is False and config.rms_norm_eps == 1e-6
    assert config.max_position_embeddings == 32768 and read(LLAMA).max_position_embeddings == 2048
    assert config.dtype == "float32" and config.layer_windows == (None,) * 4
    assert read(without(LLAMA, "num_key_value_heads")).num_key_value_heads == 4
    assert read(TINY | {"num_key_value_heads": None}).num_key_value_heads == 4
    refused(without(TINY, "num_key_value_heads"), "num_key_value_heads is nothing")


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "auto"}, "float32"),
    ],
)
def test_dtypes(keys: dict[str, Any], dtype: str) -> None:
    assert read(TINY | keys).dtype == dtype


def test_token_ids() -> None:
    config = read(TINY | {"eos_token_id": [3, 5, 3], "bos_token_id": 0, "pad_token_id": 7})
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((3, 5), 0, 7)
    assert read(TINY | {"eos_token_id": 4}).eos_token_ids == (4,)
    assert read(TINY | {"eos_token_id": None}).eos_token_ids == () == read(TINY).eos_token_ids
    assert read(TINY | {"pad_token_id": -1}).pad_token_id == 319  # torch's padding_idx counts from the end
    refused(TINY | {"eos_token_id": ["x"]}, "eos_token_id is 'x'")


def test_token_ids_outside_the_vocabulary_are_ignored_aloud() -> None:
    notes: list[str] = []
    config = ModelConfig.from_hf(TINY | {"eos_token_id": [5, 320], "pad_token_id": 151643}, notes)
    assert config.eos_token_ids == (5,) and config.pad_token_id is None
    assert len(notes) == 2 and "eos_token_id 320" in notes[0] and "pad_token_id 151643" in notes[1]


# --- rope


def test_no_rope_information() -> None:
    refused(without(TINY, "rope_theta"), "rope_theta is nothing")
    refused(without(TINY, "rope_theta") | {"rope_parameters": {"rope_type": "default"}}, "rope_theta is nothing")
    notes: list[str] = []
    assert ModelConfig.from_hf(without(LLAMA, "rope_theta"), notes).rope == RopeConfig(10000.0)
    assert len(notes) == 1 and "default 10000" in notes[0]
    with pytest.warns(UserWarning, match="default 10000"):
        ModelConfig.from_hf(without(LLAMA, "rope_theta"))


@pytest.mark.parametrize("dialect", [4, 5])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        RopeConfig(1e6, "yarn", 4.0, 32768),
        RopeConfig(1e6, "yarn", 4.0, 32768, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5, truncate=False),
        RopeConfig(1e6, "yarn", 4.0, 32768, mscale=1.0, mscale_all_dim=0.5),
        RopeConfig(1e4, "linear", 2.0),
    ],
    ids=["llama3", "yarn", "yarn explicit", "yarn mscale", "linear"],
)
def test_rope_types(rope: RopeConfig, type_key: str, dialect: int) -> None:
    assert rope == read(replace(tiny_config(), rope=rope).to_hf()).rope
    scaling = replace(tiny_config(), rope=rope).to_hf()["rope_scaling"]
    scaling[type_key] = scaling.pop("rope_type")
    if dialect == 4:
        raw = TINY | {"rope_theta": rope.theta, "rope_scaling": scaling}
    else:
        raw = without(TINY, "rope_theta") | {"rope_parameters": scaling | {"rope_theta": rope.theta}}
    assert read(raw).rope == rope


def test_yarn_as_the_model_card_says() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read(QWEN3_4 | {"rope_scaling": scaling}).rope
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor, rope.truncate) == (32.0, 1.0, None, True)


def test_original_length_defaults() -> None:
    base = TINY | {"max_position_embeddings": 4096}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read(base | {"rope_scaling": yarn}).rope.original_max_position_embeddings == 4096
    outer = base | {"rope_scaling": yarn | {"original_max_position_embeddings": 9}}
    outer["original_max_position_embeddings"] = 1024  # the outer one has priority in transformers
    assert read(outer).rope.original_max_position_embeddings == 1024
    no_factor = base | {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}}
    assert read(no_factor).rope.factor == 4.0


def test_two_thetas_are_not_silent() -> None:
    notes: list[str] = []
    raw = TINY | {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    assert ModelConfig.from_hf(raw, notes).rope.theta == 5000.0 and len(notes) == 1


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}, "'longrope'"),
        ({"rope_type": "linear"}, "rope_scaling.factor is nothing"),
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor is '2'"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor is 0.5"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor is nothing"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1}, "high_freq_factor is 1"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}, "attention_factor is 0"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate is 1"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1.5}, "is 1.5"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "one for all layers"),
        ("linear", "rope_scaling is 'linear'"),
    ],
)
def test_unsupported_ropes(scaling: Any, text: str) -> None:
    refused(TINY | {"rope_scaling": scaling}, text)


def test_contradicting_ropes() -> None:
    a, b = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4.0}
    refused(TINY | {"rope_scaling": a, "rope_parameters": b}, "rope_scaling", "rope_parameters")


# --- windows


def test_windows() -> None:
    on = {"use_sliding_window": True, "sliding_window": 5}
    full, slide = "full_attention", "sliding_attention"
    types = [slide, full, slide, full]
    assert read(TINY | on | {"max_window_layers": 3}).layer_windows == (None, None, None, 5)
    assert read(TINY | on | {"max_window_layers": 0}).layer_windows == (5, 5, 5, 5)
    assert read(TINY | on).layer_windows == (None,) * 4  # max_window_layers is 28 by default
    assert read(TINY | on | {"max_window_layers": 0, "layer_types": types}).layer_windows == (5, None, 5, None)
    assert read(TINY | on | {"max_window_layers": 0, "layer_types": [full] * 4}).layer_windows == (None,) * 4
    assert read(TINY | {"use_sliding_window": False, "sliding_window": 5}).layer_windows == (None,) * 4
    assert read(TINY | {"use_sliding_window": True, "sliding_window": None}).layer_windows == (None,) * 4
    assert read(QWEN2 | {"sliding_window": 5, "max_window_layers": 1}).layer_windows == (None,) * 4
    refused(TINY | {"layer_types": types, "sliding_window": 5}, "use_sliding_window False")
    refused(TINY | on | {"layer_types": types, "sliding_window": None}, "sliding_window None")
    refused(TINY | on | {"layer_types": types[:3]}, "3 entries", "(4)")
    refused(TINY | on | {"layer_types": [*types[:3], "chunked_attention"]}, "'chunked_attention'")
    refused(TINY | on | {"sliding_window": 0}, "sliding_window is 0")
    refused(LLAMA | on | {"layer_types": types}, "layer_types")


def test_with_layers() -> None:
    config = replace(tiny_config(), num_hidden_layers=3, layer_windows=(None, 4, None))
    assert config.with_layers(2).layer_windows == (None, 4) and config.with_layers(2).window(1) == 4
    assert config.with_layers(3) == config
    assert replace(tiny_config(), layer_windows=()).window(1) is None
    for number in (0, 4):
        expect_raises(InputError, partial(config.with_layers, number), contains="1 to 3")


# --- refused


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is 'awq'"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "hidden_size is nothing"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "320"}, "vocab_size is '320'"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of num_key_value_heads (3)"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    refused(TINY | changes, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON list"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' appears twice"),
        ('{"rms_norm_eps": NaN}', "NaN"),
        ("", "not valid JSON"),
    ],
)
def test_damaged_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    found = expect_raises(ConfigError, lambda: ModelConfig.from_hf(tmp_path), contains=message)
    assert str(tmp_path / "config.json") in found


BIG = 10**400  # an integer that is no float
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rms_norm_eps": BIG}, "rms_norm_eps"),
        ({"rope_theta": BIG}, "rope_theta"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"num_hidden_layers": BIG}, "num_hidden_layers"),
        ({"hidden_size": 2**31}, "hidden_size"),
        ({"max_position_embeddings": BIG}, "max_position_embeddings"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": BIG}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**LLAMA3, "factor": 1e308}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": 1e308}}, "factor"),
        ({"rope_scaling": {**YARN, "beta_slow": 1e308}}, "beta_slow"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e-308}}, "beta_fast"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta"),
    ],
)
def test_numbers_that_would_overflow(changes: dict[str, Any], key: str) -> None:
    refused(TINY | changes, key)
    assert len(expect_raises(ConfigError, lambda: ModelConfig.from_hf(TINY | changes))) < 300  # digits are cut


def test_dropout_is_said() -> None:
    notes: list[str] = []
    ModelConfig.from_hf(TINY | {"attention_dropout": 0.1}, notes)
    assert len(notes) == 1 and "attention_dropout 0.1" in notes[0]
