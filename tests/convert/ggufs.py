"""GGUF files made for tests: a tiny checkpoint put into GGUF's names and orders, as llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.synth import synthesize

TOKENIZER = Path(__file__).parent.parent / "fixtures" / "tokenizer"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tiny_config(family: str = "llama", **changes: Any) -> ModelConfig:
    """Two layers whose rows are whole quantisation blocks."""
    values: dict[str, Any] = {
        "family": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family == "qwen3" else 16,
        "intermediate_size": 96,
        "vocab_size": 320,
        "rope": RopeConfig(theta=1e6),
        "rms_norm_eps": 1e-5,
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "layer_windows": (None, None),
        "max_position_embeddings": 512,
        "dtype": "float32",
    }
    return ModelConfig(**{**values, **changes})


def gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """What the converter writes for a model without rope scaling."""
    arch = config.family
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope.theta),
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
    }


def byte_level_metadata(pre: str = "qwen2", vocab_size: int = 320) -> dict[str, Any]:
    """The tests' tokenizer as the converter writes it, the vocabulary padded to the model's."""
    document = json.loads((TOKENIZER / "tokenizer.json").read_text("utf-8"))
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text("utf-8"))
    tokens = [*document["model"]["vocab"], *(token["content"] for token in document["added_tokens"])]
    types = [1] * len(document["model"]["vocab"]) + [3 if t["special"] else 4 for t in document["added_tokens"]]
    padding = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    ids = {token: i for i, token in enumerate(tokens)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types + [5] * len(padding),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in document["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.bos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }


@dataclass
class Made:
    """A GGUF file and the Hugging Face tensors that it was made from."""

    path: Path
    config: ModelConfig
    tensors: dict[str, np.ndarray]
    metadata: dict[str, Any] = field(default_factory=dict)


def make(
    path: Path,
    config: ModelConfig,
    types: Mapping[str, str] | str = "F32",
    *,
    tokenizer: Mapping[str, Any] | None = None,
    change: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    leave_out: Sequence[str] = (),
) -> Made:
    """Write `path`. `types`: the type of matrices, or of each GGUF tensor by name; vectors are F32.

    `change` replaces metadata (None removes a key), `extra` and `leave_out` go by GGUF names.
    """
    source = synthesize(config, path.with_suffix(".hf"), 0)
    tensors: dict[str, np.ndarray] = {}
    with Checkpoint.open(source) as checkpoint:
        for name in checkpoint.names():
            tensors[name] = checkpoint.tensor(name).astype(np.float32)
    stored: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if config.family == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if config.family == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        stored[gguf_name(name)] = values
    stored = {**{name: v for name, v in stored.items() if name not in leave_out}, **(extra or {})}
    metadata = {**metadata_of(config), **(byte_level_metadata() if tokenizer is None else tokenizer), **(change or {})}
    write(path, config.family, metadata, stored, types)
    return Made(path, config, tensors, metadata)


def write(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, str] | str = "F32",
) -> None:
    writer = gguf.GGUFWriter(str(path), str(metadata.get("general.architecture", arch)))
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    for name, values in tensors.items():
        kind = "F32" if values.ndim == 1 else types if isinstance(types, str) else types.get(name, "F32")
        quantization = gguf.GGMLQuantizationType[kind]
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=quantization)
        elif kind == "F32":
            writer.add_tensor(name, values)
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
