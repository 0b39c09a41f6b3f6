"""What Hugging Face computes on small models (tests/fixtures), and how far an engine is from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from cupyllm.engine import Engine

FIXTURES = Path(__file__).parent / "fixtures"
GOLDENS = sorted((FIXTURES / "goldens").glob("h?"))
HF = sorted(path for path in (FIXTURES / "hf").iterdir() if not path.name.startswith("bf16"))
HF_BF16 = sorted((FIXTURES / "hf").glob("bf16*"))


def load(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return load_file(folder / "expected.safetensors"), json.loads((folder / "meta.json").read_text())


def segments_of(expected: dict[str, np.ndarray]) -> np.ndarray | None:
    if "attention_mask" in expected:
        return (expected["attention_mask"] - 1).astype(np.int32)
    return expected.get("segments")


def compute(engine: Engine, expected: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray, list[int]]:
    """Our values under the fixture's names, the [B,T] mask of what is not padding, the target counts."""
    ids, labels, segments = expected["input_ids"], expected["labels"], segments_of(expected)
    wanted = [int(name.split(".")[1]) for name in expected if name.startswith("hidden.")]
    result = engine.forward(ids, labels=labels, segments=segments, want_logits=True, want_hidden=wanted)
    ours = {"logits": result.logits, "loss": np.array([result.loss])}
    ours |= {f"hidden.{index}": value for index, value in result.hidden.items()}
    losses = engine.loss_and_grads(
        ids, labels, lambda name, grad: ours.__setitem__(f"grad.{name}", grad.copy()), segments=segments
    )
    assert losses.loss == result.loss
    valid = np.ones(ids.shape, bool) if segments is None else segments >= 0
    assert result.argmax[valid].tolist() == result.logits.argmax(axis=-1)[valid].tolist()
    last = [int(np.flatnonzero(row)[-1]) for row in valid]
    np.testing.assert_array_equal(result.last_logits, result.logits[np.arange(len(last)), last])
    return ours, valid, [result.num_targets, losses.num_targets]


def worst_errors(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], valid: np.ndarray) -> dict[str, float]:
    """The largest errors in the units of a fixture's recommended_tolerance."""
    worst = {"logits_max_abs": np.abs(ours["logits"] - expected["logits"])[valid].max()}
    worst["loss_abs"] = abs(float(ours["loss"][0]) - float(expected["loss"][0]))
    hidden, grads = [0.0], []
    for name, value in expected.items():
        if name.startswith("hidden."):
            rms = math.sqrt(np.mean(np.square(value[valid], dtype=np.float64)))
            hidden.append(np.abs(ours[name] - value)[valid].max() / rms)
        elif name.startswith("grad."):
            grads.append(np.abs(ours[name] - value).max() / np.abs(value).max())
    return worst | {"hidden_max_abs_over_rms": max(hidden), "grad_max_abs_over_tensor_max": max(grads)}
