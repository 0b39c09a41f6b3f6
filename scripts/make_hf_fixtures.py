"""Write tests/fixtures/hf: tiny random checkpoints and what Hugging Face transformers computes from them.

    python scripts/make_hf_fixtures.py [--out tests/fixtures/hf] [NAME ...]

Needs torch, transformers and this package (pip install transformers torch; pip install -e .); CPU, one thread, eager
attention. Each folder holds config.json, model*.safetensors, expected.safetensors and meta.json:

    input_ids, labels   int64 [B,T]; labels unshifted, -100 ignored, raw at padding and segment starts
    segments            int32 [B,T], negative = padding (only where rows are padded or packed)
    position_ids        int64 [B,T] (only with segments)
    logits [B,T,V], loss [1], hidden.<i> [B,T,C] (0 = input of layer 0, i = output of layer i-1, L+1 = normed),
    grad.<parameter>    float32

Tolerances are ten times the distance between transformers' float32 and our float64 reference, as measured here. A wrong
reference would measure a large distance and so excuse itself: the maker refuses a distance beyond what float32
rounding can explain (LIMITS), and it refuses a fixture that cannot see the mistakes that it was made for (`sees`: the
distance of a reference with that mistake, in tolerances).

The fixtures `bf16*` are different: transformers run in bfloat16, whose error against float64 is the yardstick of our
own bfloat16 mode.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

from cupyllm.config import ModelConfig
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.reference.engine import ReferenceEngine

Tensors = dict[str, torch.Tensor]
Mutation = Callable[[ModelConfig, dict[str, Any]], tuple[ModelConfig, dict[str, Any]]]

# Distances that float32 rounding can explain here (2-4 layers, sums of 128 terms at most, each 6e-8): about 1e-6.
LIMITS = {
    "logits_max_abs": 3e-5,
    "loss_abs": 5e-6,
    "hidden_max_abs_over_rms": 1e-5,
    "grad_max_abs_over_tensor_max": 1e-5,
}
LOSS_FLOOR = 2e-5
MIN_SEEN = 10.0  # tolerances

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_cache": False,
}
QWEN3 = {**SHAPE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
QWEN2 = {**SHAPE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2}
LLAMA = {
    **SHAPE,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
}
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@dataclass(frozen=True)
class Fixture:
    name: str
    what: str
    config: dict[str, Any]
    tokens: int = 16
    rows: int = 2
    stored: torch.dtype = torch.bfloat16
    segments: list[list[int]] | None = None
    shards: int = 1
    shuffled: bool = False
    ids_hold: int | None = None  # this id is put into the text
    mutations: dict[str, Mutation] = field(default_factory=dict)
    run_dtype: torch.dtype = torch.float32  # what transformers computes in
    keep: Callable[[str], bool] = lambda name: True  # which results are stored


def replace(**changes: Any) -> Mutation:
    return lambda config, batch: (dataclasses.replace(config, **changes), batch)


def replace_rope(**changes: Any) -> Mutation:
    return lambda config, batch: (
        dataclasses.replace(config, rope=dataclasses.replace(config.rope, **changes)),
        batch,
    )


def without_segments(config: ModelConfig, batch: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    return config, {**batch, "segments": None}


def yarn(truncate: bool, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,  # the defaults 32 and 1 would put the ramp of so short a context outside the head
        "beta_slow": 0.5,
        "truncate": truncate,
        **more,
    }


FIXTURES = [
    Fixture(
        "yarn",
        "qwen3, YaRN factor 4 over 32 positions, ramp floored and ceiled, v4 config dialect (rope_theta, rope_scaling)",
        {**QWEN3, "rope_theta": 10000.0, "rope_scaling": yarn(True), "torch_dtype": "bfloat16"},
        tokens=48,
        mutations={
            "rope scaling ignored": replace_rope(rope_type="default"),
            "ramp not truncated": replace_rope(truncate=False),
            "no attention factor": replace_rope(attention_factor=1.0),
        },
    ),
    Fixture(
        "yarn_untruncated",
        "qwen3, YaRN factor 4, truncate false, attention_factor given, v5 config dialect (rope_parameters)",
        {
            **QWEN3,
            "rope_parameters": {"rope_theta": 10000.0, **yarn(False, attention_factor=1.25)},
            "dtype": "bfloat16",
        },
        tokens=48,
        mutations={
            "ramp truncated": replace_rope(truncate=True),
            "attention factor ignored": replace_rope(attention_factor=None),
        },
    ),
    Fixture(
        "yarn_mscale",
        "qwen3, YaRN with mscale and mscale_all_dim, default betas",
        {
            **QWEN3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
            "dtype": "bfloat16",
        },
        tokens=48,
        mutations={"mscale ignored": replace_rope(mscale=None, mscale_all_dim=None)},
    ),
    Fixture(
        "llama3_rope",
        "llama, rope_type llama3 factor 8 over 32 positions",
        {
            **LLAMA,
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "torch_dtype": "bfloat16",
        },
        tokens=48,
        mutations={
            "rope scaling ignored": replace_rope(rope_type="default"),
            "linear instead": replace_rope(rope_type="linear"),
            "high_freq_factor 2": replace_rope(high_freq_factor=2.0),
        },
    ),
    Fixture(
        "llama_bias",
        "llama, attention_bias and mlp_bias, rope_type linear factor 4",
        {
            **LLAMA,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            "dtype": "bfloat16",
        },
        mutations={"rope scaling ignored": replace_rope(rope_type="default")},
    ),
    Fixture(
        "qwen3_bias",
        "qwen3 with attention_bias (q, k, v and o)",
        {**QWEN3, **DEFAULT_ROPE, "attention_bias": True, "dtype": "bfloat16"},
    ),
    Fixture(
        "qwen3_window",
        "qwen3, layer_types full / sliding / full, window 5",
        {
            **QWEN3,
            **DEFAULT_ROPE,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "dtype": "bfloat16",
        },
        mutations={
            "no window": replace(layer_windows=(None, None, None)),
            "window off by one": replace(layer_windows=(None, 6, None)),
            "every layer windowed": replace(layer_windows=(5, 5, 5)),
        },
    ),
    Fixture(
        "qwen2_window",
        "qwen2, use_sliding_window with max_window_layers 1 of 2, window 4, v4 config dialect",
        {
            **QWEN2,
            "rope_theta": 10000.0,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "torch_dtype": "bfloat16",
        },
        mutations={
            "no window": replace(layer_windows=(None, None)),
            "first layer instead": replace(layer_windows=(4, None)),
        },
    ),
    Fixture(
        "fp16", "qwen3, weights stored in float16", {**QWEN3, **DEFAULT_ROPE, "dtype": "float16"}, stored=torch.float16
    ),
    Fixture(
        "shuffled_shards",
        "qwen3, tensors in shuffled order over 3 shards, so that layers straddle them",
        {**QWEN3, **DEFAULT_ROPE, "dtype": "bfloat16"},
        shards=3,
        shuffled=True,
    ),
    Fixture(
        "padded",
        "qwen3, a left-padded, a right-padded and a full row",
        {**QWEN3, **DEFAULT_ROPE, "dtype": "bfloat16"},
        rows=3,
        segments=[[-1] * 5 + [0] * 11, [0] * 12 + [-1] * 4, [0] * 16],
        mutations={"padding attended": without_segments},
    ),
    Fixture(
        "packed",
        "qwen3 with a window, rows packed from several texts (block-diagonal mask, positions reset), a padded tail",
        {
            **QWEN3,
            **DEFAULT_ROPE,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "dtype": "bfloat16",
        },
        segments=[[0] * 7 + [1] * 6 + [2] * 3, [3] * 1 + [4] * 10 + [-1] * 5],
        # Positions that do not start again would go unseen: inside a segment rope depends on differences alone.
        mutations={"segments ignored": without_segments},
    ),
    Fixture(
        "pad_token",
        "qwen3, tied, pad_token_id 3 in the text: its embedding row's gradient has the head's part alone",
        {**QWEN3, **DEFAULT_ROPE, "tie_word_embeddings": True, "pad_token_id": 3, "dtype": "bfloat16"},
        ids_hold=3,
        mutations={"padding row learns": replace(pad_token_id=None)},
    ),
]
BF16 = [
    Fixture(
        "bf16",
        "qwen3, 4 layers, transformers run in bfloat16",
        {
            **QWEN3,
            **DEFAULT_ROPE,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "dtype": "bfloat16",
        },
        tokens=64,
        run_dtype=torch.bfloat16,
    ),
    Fixture(
        "bf16_deep",
        "qwen3, 64 layers, transformers run in bfloat16; logits, loss and some hidden states only",
        {
            **QWEN3,
            **DEFAULT_ROPE,
            "num_hidden_layers": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "dtype": "bfloat16",
        },
        tokens=64,
        run_dtype=torch.bfloat16,
        keep=lambda name: name in ("logits", "loss", *(f"hidden.{i}" for i in (0, 1, 32, 64, 65))),
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "tests" / "fixtures" / "hf")
    parser.add_argument("names", nargs="*", help="only these fixtures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for number, fixture in enumerate([*FIXTURES, *BF16]):
        if not options.names or fixture.name in options.names:
            make(fixture, 7000 + number, options.out / fixture.name)
    return 0


def make(fixture: Fixture, seed: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    generator = torch.Generator().manual_seed(seed)
    (folder / "config.json").write_text(json.dumps(fixture.config, indent=1) + "\n")
    weights = random_weights(load_config(folder), fixture, generator)
    write_checkpoint(folder, weights, fixture, generator)
    batch = random_batch(fixture, generator)
    expected = run_transformers(folder, weights, batch, fixture.run_dtype)
    expected = {name: tensor for name, tensor in expected.items() if fixture.keep(name)}
    if fixture.run_dtype == torch.bfloat16:
        report = bf16_report(folder, batch, expected)
    else:
        report = fp32_report(fixture, folder, batch, expected)
    inputs = {"input_ids": batch["ids"], "labels": batch["labels"]}
    if batch["segments"] is not None:
        inputs |= {"segments": batch["segments"], "position_ids": batch["positions"]}
    safetensors.torch.save_file(
        {name: torch.as_tensor(t).contiguous() for name, t in {**inputs, **expected}.items()},
        folder / "expected.safetensors",
    )
    meta = {
        "name": fixture.name,
        "what": fixture.what,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__},
        "device": "cpu, 1 thread",
        "attention_implementation": "eager",
        "seed": seed,
        "stored_dtype": str(fixture.stored).removeprefix("torch."),
        **report,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(fixture.name, json.dumps(report), file=sys.stderr)


def load_config(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


def random_weights(config: Any, fixture: Fixture, generator: torch.Generator) -> Tensors:
    """Norms around 1, matrices that keep the variance, biases that show; rounded to the stored dtype."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.3 * noise
        elif parameter.ndim == 1:
            value = 0.3 * noise
        elif "embed" in name and not config.tie_word_embeddings:
            value = noise
        else:
            value = noise * 1.5 / math.sqrt(parameter.shape[1])
        weights[name] = value.to(fixture.stored)
    return weights


def write_checkpoint(folder: Path, weights: Tensors, fixture: Fixture, generator: torch.Generator) -> None:
    names = list(weights)
    if fixture.shuffled:
        names = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
    if fixture.shards == 1:
        write_safetensors(folder / "model.safetensors", {name: weights[name] for name in names})
        return
    weight_map: dict[str, str] = {}
    for shard in range(fixture.shards):
        file = f"model-{shard + 1:05d}-of-{fixture.shards:05d}.safetensors"
        part = names[shard * len(names) // fixture.shards : (shard + 1) * len(names) // fixture.shards]
        write_safetensors(folder / file, {name: weights[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """In the given order; the safetensors package would sort."""
    kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, tensor in tensors.items():
        blob = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": kinds[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def random_batch(fixture: Fixture, generator: torch.Generator) -> dict[str, Any]:
    shape = (fixture.rows, fixture.tokens)
    vocab = fixture.config["vocab_size"]
    ids = torch.randint(0, vocab, shape, generator=generator).numpy()
    labels = ids.copy()
    labels[torch.rand(shape, generator=generator).numpy() < 0.15] = -100
    if fixture.ids_hold is not None:
        ids[:, 2::5] = fixture.ids_hold
    segments = None if fixture.segments is None else np.array(fixture.segments, np.int32)
    return {"ids": ids, "labels": labels, "segments": segments, "positions": positions_of(segments)}


def positions_of(segments: np.ndarray | None) -> np.ndarray | None:
    """Written as a loop, unlike the reference's: a count within each run, 0 in padding."""
    if segments is None:
        return None
    positions = np.zeros(segments.shape, np.int64)
    for row, out in zip(segments, positions, strict=True):
        for t in range(1, row.size):
            out[t] = out[t - 1] + 1 if row[t] == row[t - 1] and row[t] >= 0 else 0
    return positions


def run_transformers(folder: Path, weights: Tensors, batch: dict[str, Any], dtype: torch.dtype) -> Tensors:
    config = load_config(folder)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    missing, unexpected = model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    hidden: Tensors = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _m, args, i=i: hidden.__setitem__(f"hidden.{i}", args[0].detach()))
    last = len(model.model.layers)
    model.model.layers[-1].register_forward_hook(lambda _m, _a, out: hidden.__setitem__(f"hidden.{last}", out.detach()))
    model.model.norm.register_forward_hook(lambda _m, _a, out: hidden.__setitem__(f"hidden.{last + 1}", out.detach()))
    ids, labels, segments = batch["ids"], batch["labels"].copy(), batch["segments"]
    arguments: dict[str, Any] = {"use_cache": False}
    if segments is not None:
        labels[:, 1:][(segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] < 0)] = -100
        arguments["position_ids"] = torch.tensor(batch["positions"])
        if segments.max() == 0:
            arguments["attention_mask"] = torch.tensor(segments + 1)
        else:
            arguments["attention_mask"] = packed_masks(config, segments, dtype)
    out = model(input_ids=torch.tensor(ids), labels=torch.tensor(labels), **arguments)
    out.loss.backward()
    grads = {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    return {"logits": out.logits.detach(), "loss": out.loss.detach().reshape(1), **hidden, **grads}


def packed_masks(config: Any, segments: np.ndarray, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Additive [B,1,T,T] masks by kind of layer, spelled out pair by pair."""
    masks = {}
    for kind, window in (("full_attention", None), ("sliding_attention", config.sliding_window)):
        mask = torch.full((segments.shape[0], 1, segments.shape[1], segments.shape[1]), torch.finfo(dtype).min)
        for b, row in enumerate(segments):
            for i in range(row.size):
                for j in range(i + 1):
                    if row[i] == row[j] and row[i] >= 0 and (window is None or i - j < window):
                        mask[b, 0, i, j] = 0
        masks[kind] = mask.to(dtype)
    return masks


def run_reference(
    folder: Path, batch: dict[str, Any], mutation: Mutation | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """The float64 reference's logits, loss, hidden states and gradients under the fixture's names; target count."""
    with Checkpoint.open(folder) as checkpoint:
        engine = ReferenceEngine(checkpoint, "float64")
        if mutation is not None:
            engine.config, batch = mutation(engine.config, batch)
        layout = {"segments": batch["segments"], "positions": batch["positions"]}
        wanted = range(engine.config.num_hidden_layers + 2)
        result = engine.forward(batch["ids"], labels=batch["labels"], want_logits=True, want_hidden=wanted, **layout)
        assert result.logits is not None
        values = {"logits": result.logits, "loss": np.array([result.loss])}
        values |= {f"hidden.{i}": h for i, h in result.hidden.items()}
        engine.loss_and_grads(
            batch["ids"],
            batch["labels"],
            lambda name, grad: values.__setitem__(f"grad.{name}", grad.copy()),
            **layout,
        )
        engine.close()
    return values, result.num_targets


def distances(batch: dict[str, Any], expected: dict[str, Any], ours: dict[str, np.ndarray]) -> dict[str, float]:
    valid = np.ones(batch["ids"].shape, bool) if batch["segments"] is None else batch["segments"] >= 0
    theirs = {name: np.asarray(tensor, np.float64) for name, tensor in expected.items()}
    gap = {name: np.abs(ours[name] - value) for name, value in theirs.items()}
    hidden = [name for name in theirs if name.startswith("hidden.")]
    grads = [name for name in theirs if name.startswith("grad.")]
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    return {
        "logits_max_abs": float(gap["logits"][valid].max()),
        "loss_abs": float(gap["loss"][0]),
        "hidden_max_abs_over_rms": max(
            float(gap[n][valid].max() / np.sqrt(np.mean(theirs[n][valid] ** 2))) for n in hidden
        ),
        "grad_max_abs_over_tensor_max": max(float(gap[n].max() / np.abs(theirs[n]).max()) for n in grads),
    }


def fp32_report(fixture: Fixture, folder: Path, batch: dict[str, Any], expected: Tensors) -> dict[str, Any]:
    ours, count = run_reference(folder, batch)
    measured = distances(batch, expected, ours)
    for name, limit in LIMITS.items():
        if measured[name] > limit:
            raise SystemExit(f"{fixture.name}: {name} is {measured[name]:.2e}, float32 explains {limit:.0e}")
    tolerance = {name: round_up(10 * value) for name, value in measured.items()}
    tolerance["loss_abs"] = max(tolerance["loss_abs"], LOSS_FLOOR)
    sees = {}
    for what, mutation in fixture.mutations.items():
        wrong = distances(batch, expected, run_reference(folder, batch, mutation)[0])
        sees[what] = float(f"{max(wrong[name] / tolerance[name] for name in tolerance):.3g}")
        if sees[what] < MIN_SEEN:
            raise SystemExit(f"{fixture.name}: cannot see '{what}': {sees[what]} tolerances")
    return {
        "compute_dtype": "float32",
        "n_targets": count,
        "loss": float(expected["loss"][0]),
        "hf_float32_error_vs_float64_reference": measured,
        "recommended_tolerance": {
            **tolerance,
            "why": "10x the distance between transformers' float32 and the float64 reference (loss: at least 2e-5, as"
            " one ulp is up to 1e-6), so that any sound float32 order of summation passes",
        },
        "sees": sees,
    }


def bf16_report(folder: Path, batch: dict[str, Any], expected: Tensors) -> dict[str, Any]:
    """The yardstick: relative L2 error of each bfloat16 tensor against the float64 reference."""
    ours, count = run_reference(folder, batch)
    errors = {}
    for name, tensor in expected.items():
        theirs = np.asarray(tensor.float(), np.float64)
        errors[name] = float(np.linalg.norm(theirs - ours[name]) / np.linalg.norm(ours[name]))
        if errors[name] > 0.2:
            raise SystemExit(f"bf16: {name} is off by {errors[name]:.2f}: that is no rounding")
    return {
        "compute_dtype": "bfloat16",
        "n_targets": count,
        "loss": float(expected["loss"][0]),
        "hf_bfloat16_relative_l2_error_vs_float64_reference": errors,
    }


def round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{next(step for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9)) * power:.0e}")


if __name__ == "__main__":
    sys.exit(main())
