"""Parameter names and shapes: those of Hugging Face's files, and the published sizes' totals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cupyllm.config import ModelConfig, published
from cupyllm.model import names
from tests.casekit_checkpoint import parameter_count, tiny_config

FIXTURES = Path(__file__).parent.parent / "fixtures"
DIRECTORIES = sorted(p.parent for p in FIXTURES.glob("*/*/config.json"))

PARAMETERS = {  # the published model cards' safetensors totals (a tied head counted once)
    "0.6b": 596_049_920,
    "1.7b": 1_720_574_976,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
    "14b": 14_768_307_200,
    "32b": 32_762_123_264,
}


@pytest.mark.parametrize("size", PARAMETERS)
def test_published_sizes(size: str) -> None:
    assert parameter_count(published(size)) == PARAMETERS[size]


def test_a_layer_of_32b_is_975196672_bytes() -> None:
    assert 2 * sum(math.prod(s) for s in names.layer_params(published("32b")).values()) == 975_196_672


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: d.name)
def test_names_and_shapes_are_those_in_transformers_files(directory: Path) -> None:
    held: dict[str, tuple[int, ...]] = {}
    for file in directory.glob("model*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        held.update({name: tuple(e["shape"]) for name, e in header.items() if name != "__metadata__"})
    assert held == names.model_params(ModelConfig.from_hf(directory))


def test_qwen3_layer_order() -> None:
    assert list(names.layer_params(tiny_config())) == [
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]


def test_switches_add_biases() -> None:
    config = replace(tiny_config(), qk_norm=False, qkv_bias=True, o_bias=True, mlp_bias=True)
    params = names.layer_params(config)
    assert params["self_attn.k_proj.bias"] == (32,) and params["self_attn.o_proj.bias"] == (64,)
    assert params["mlp.gate_proj.bias"] == (96,) and params["mlp.down_proj.bias"] == (64,)
    assert not any("q_norm" in name for name in params)


@pytest.mark.parametrize("tied", [False, True])
def test_streamed_names(tied: bool) -> None:
    config = replace(tiny_config(), tie_word_embeddings=tied)
    streamed = names.streamed_names(config)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert streamed == [*names.layer_names(config, 0), *names.layer_names(config, 1), "model.norm.weight", head]
    assert names.streamed_names(config, 1) == [*names.layer_names(config, 0), "model.norm.weight", head]
    assert ("lm_head.weight" in names.model_params(config)) is not tied
