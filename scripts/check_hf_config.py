"""Check that transformers reads the config.json that we write as we mean it.

    python scripts/check_hf_config.py

Needs transformers and torch besides this package. For every family, rope type and window it builds the transformers
configuration from `ModelConfig.to_hf()`, has transformers save it in its own dialect, and reads that back: both
directions must agree. It then loads one synthetic checkpoint as a transformers model, with every weight accounted for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import transformers

from cupyllm.config import PUBLISHED_SIZES, ModelConfig, RopeConfig, default_proportions, published
from cupyllm.synth import synthesize


def configs() -> dict[str, ModelConfig]:
    base = replace(default_proportions(4), max_position_embeddings=4096)
    ropes = {
        "linear": RopeConfig(1e4, "linear", 2.0),
        "yarn": RopeConfig(1e6, "yarn", 4.0, 1024),
        "yarn explicit": RopeConfig(1e6, "yarn", 4.0, 1024, beta_fast=16.0, attention_factor=1.5, truncate=False),
        "yarn mscale": RopeConfig(1e6, "yarn", 4.0, 1024, mscale=1.0, mscale_all_dim=0.5),
        "llama3": RopeConfig(5e5, "llama3", 8.0, 512),
    }
    llama = replace(base, family="llama", qk_norm=False, head_dim=20)
    result = {size: published(size) for size in PUBLISHED_SIZES}
    result |= {f"qwen3 {name}": replace(base, rope=rope) for name, rope in ropes.items()}
    result |= {f"llama {name}": replace(llama, rope=rope) for name, rope in ropes.items()}
    result["qwen3 windows"] = replace(base, layer_windows=(None, 7, None, 7))
    result["qwen3 bias, tokens"] = replace(base, qkv_bias=True, o_bias=True, eos_token_ids=(3, 4), pad_token_id=2)
    result["qwen2"] = replace(base, family="qwen2", qk_norm=False, qkv_bias=True, layer_windows=(None, None, 9, 9))
    result["llama bias"] = replace(llama, qkv_bias=True, o_bias=True, mlp_bias=True, tie_word_embeddings=True)
    return result


def main() -> int:
    wrong = 0
    for name, config in configs().items():
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config.to_hf()))
            theirs = transformers.AutoConfig.from_pretrained(directory)
            theirs.save_pretrained(directory)
            back = ModelConfig.from_hf(directory)
            windows = config.layer_windows or (None,) * config.num_hidden_layers
            agrees = back == replace(config, layer_windows=windows)
        print(f"{name:22} {'agrees' if agrees else f'DIFFERS: {back} for {config}'}")
        wrong += not agrees
    with tempfile.TemporaryDirectory() as directory:
        path = synthesize(default_proportions(2), Path(directory) / "synth", seed=0, max_shard_bytes=10**6)
        _, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        lost = {key: value for key, value in info.items() if value}
        print(f"{'synthetic checkpoint':22} {f'DIFFERS: {lost}' if lost else 'loads whole'}")
        wrong += bool(lost)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
