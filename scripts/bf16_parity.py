"""How far bfloat16 is from float64: ours beside Hugging Face's, on the same weights and inputs.

    python scripts/bf16_parity.py [--size 32b] [--tokens 128] [--out benchmarks/bf16_parity.json]

Needs a GPU, torch and transformers (only this script does). A decoder layer of the real shape, forward and backward:
relative L2 error of y, dx and every parameter gradient against the float64 NumPy reference; then the logits of a
64-layer model. Exit status 1 when one of our errors exceeds 1.1 times Hugging Face's (attention: torch SDPA, the
default of transformers).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from cupyllm import check
from cupyllm.backend.cuda import CudaBackend
from cupyllm.cache import cached_synthetic
from cupyllm.config import ModelConfig, default_proportions, published
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.engine import DeviceEngine
from cupyllm.reference import qwen3
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.text import builtin_ids, open_codec

LIMIT = 1.1


def to_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32)).to("cuda", torch.bfloat16)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().astype(np.float64)


def huggingface_layer(
    config: ModelConfig, x: np.ndarray, params: dict[str, np.ndarray], d_y: np.ndarray
) -> dict[str, np.ndarray]:
    """y, dx and parameter gradients of transformers' layer in bfloat16."""
    hf = Qwen3Config(**{k: v for k, v in config.to_hf().items() if k not in ("architectures", "model_type")})
    hf._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = Qwen3DecoderLayer(hf, 0)
    layer.load_state_dict({name: to_torch(p) for name, p in params.items()}, assign=True)
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
    hidden = to_torch(x)[None].requires_grad_(True)
    positions = torch.arange(x.shape[0], device="cuda")[None]
    tables = Qwen3RotaryEmbedding(hf).to("cuda")(hidden, positions)
    out = layer(hidden, position_embeddings=tables, attention_mask=None, position_ids=positions)
    y = out[0] if isinstance(out, tuple) else out
    y.backward(to_torch(d_y)[None])
    grads = {name: to_numpy(p.grad) for name, p in layer.named_parameters()}
    return {"y": to_numpy(y)[0], "dx": to_numpy(hidden.grad)[0], **grads}


def compare_layer(config: ModelConfig, tokens: int, backend: CudaBackend) -> dict[str, dict[str, float]]:
    x, params, d_y = check.layer_inputs(config, tokens, "bfloat16", 0)
    ours = check.device_layer(config, x, params, d_y, backend)
    theirs = huggingface_layer(config, x, params, d_y)
    torch.cuda.empty_cache()
    call = check.reference_layer(config, tokens, np.float64)
    y, saved = call(x.astype(np.float64), {name: p.astype(np.float64) for name, p in params.items()})
    d_x, d_params = qwen3.layer_backward(saved, d_y.astype(np.float64))
    want = {"y": y, "dx": d_x, **d_params}
    return {name: errors(ours[name], theirs[name], want[name]) for name in want}


def compare_logits(layers: int, backend: CudaBackend) -> dict[str, float]:
    path = cached_synthetic(default_proportions(layers), 0)
    with Checkpoint.open(path) as checkpoint:
        ids = builtin_ids(open_codec(checkpoint.tokenizer_file, checkpoint.config.vocab_size), 256)[None]
        want = ReferenceEngine(checkpoint, "float64").forward(ids, want_logits=True).logits
        with DeviceEngine(checkpoint, backend, "bfloat16") as engine:
            ours = engine.forward(ids, want_logits=True).logits
    assert want is not None and ours is not None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").to("cuda")
    with torch.no_grad():
        theirs = to_numpy(model(torch.from_numpy(ids).to("cuda")).logits)
    return errors(ours, theirs, want)


def errors(ours: np.ndarray, theirs: np.ndarray, want: np.ndarray) -> dict[str, float]:
    a, b = check.relative_error(ours, want), check.relative_error(theirs, want)
    return {"ours": a, "huggingface": b, "ratio": a / b}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="32b")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    backend = CudaBackend()
    report = {
        "device": backend.device_name,
        "size": args.size,
        "tokens": args.tokens,
        "layer": compare_layer(published(args.size), args.tokens, backend),
        "logits": {f"{args.layers} layers": compare_logits(args.layers, backend)},
    }
    rows = {**report["layer"], **report["logits"]}
    for name, row in rows.items():
        print(f"{name:42} ours {row['ours']:.3e}  hf {row['huggingface']:.3e}  ratio {row['ratio']:.3f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    worst = max(row["ratio"] for row in rows.values())
    print(f"worst ratio {worst:.3f} (limit {LIMIT})")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
