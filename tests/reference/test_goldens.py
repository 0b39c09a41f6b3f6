"""The reference against what Hugging Face transformers computes: tests/fixtures/goldens (h1-h6, train) and hf.

Tolerances come with each fixture (meta.json, recommended_tolerance): ten times the distance between transformers'
float32 and a float64 evaluation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.model.checkpoint import Checkpoint
from cupyllm.reference import grad_norm, qwen3
from cupyllm.reference.engine import ReferenceEngine
from tests.goldens import FIXTURES, GOLDENS, HF, HF_BF16, compute, load, worst_errors
from tests.reference.sources import ArraySource


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("folder", [*GOLDENS, *HF], ids=lambda path: path.name)
def test_logits_loss_hidden_states_and_every_gradient(folder: Path, dtype: Any) -> None:
    expected, meta = load(folder)
    tolerance = meta["recommended_tolerance"]
    with Checkpoint.open(folder) as checkpoint:
        ours, valid, counts = compute(ReferenceEngine(checkpoint, dtype), expected)
        assert {name for name in expected if name.startswith("grad.")} == {f"grad.{n}" for n in checkpoint.names()}
    assert counts == [meta["n_targets"]] * 2
    worst = worst_errors(ours, expected, valid)
    print({name: f"{value:.1e} of {tolerance[name]:.0e}" for name, value in worst.items()})
    for name, value in worst.items():
        assert value <= tolerance[name], name


@pytest.mark.parametrize("folder", GOLDENS, ids=lambda path: path.name)
def test_greedy_ids_by_repeated_forward(folder: Path) -> None:
    expected, _ = load(folder)
    ids = expected["greedy_ids"][:, :8]
    with Checkpoint.open(folder) as checkpoint:
        engine = ReferenceEngine(checkpoint)
        for _ in range(24):
            result = engine.forward(ids, mode="resident")
            assert result.argmax[0, -1] == result.last_logits[0].argmax()
            ids = np.concatenate([ids, result.argmax[:, -1:]], axis=1)
    np.testing.assert_array_equal(ids, expected["greedy_ids"])


def test_twelve_adamw_steps() -> None:
    """h1's fixed batch: losses, norms before clipping and the final weights."""
    expected, meta = load(FIXTURES / "goldens" / "train")
    batch, _ = load(FIXTURES / "goldens" / "h1")
    tolerance = meta["recommended_tolerance"]
    with Checkpoint.open(FIXTURES / "goldens" / "h1") as checkpoint:
        source = ArraySource(checkpoint.config, {n: checkpoint.tensor(n).copy() for n in checkpoint.names()})
    engine = ReferenceEngine(source)
    first = {name: np.zeros_like(array) for name, array in source.arrays.items()}
    second = {name: np.zeros_like(array) for name, array in source.arrays.items()}
    for step in range(1, 13):
        grads: dict[str, np.ndarray] = {}
        loss = engine.loss_and_grads(
            batch["input_ids"], batch["labels"], lambda name, grad, g=grads: g.__setitem__(name, grad.copy())
        ).loss
        norm = math.sqrt(sum(engine.sum_of_squares(grads).values()))
        loss_tolerance = tolerance["losses_abs_first3" if step <= 3 else "losses_abs"]
        assert abs(loss - expected["losses"][step - 1]) <= loss_tolerance
        wanted = expected["grad_norms"][step - 1]
        assert abs(norm - wanted) <= max(tolerance["grad_norms_abs"], tolerance["grad_norms_rel"] * wanted)
        for name, param in source.arrays.items():
            engine.adamw(
                param,
                grads[name],
                first[name],
                second[name],
                lr=1e-2,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                weight_decay=0.1 if param.ndim >= 2 else 0.0,
                step=step,
                grad_scale=grad_norm.clip_coefficient(norm, 1.0),
            )
    final = engine.forward(batch["input_ids"], labels=batch["labels"]).loss
    assert abs(final - expected["final_loss"][0]) <= tolerance["losses_abs"]
    gaps = np.concatenate([np.abs(a - expected[f"final.{n}"]).ravel() for n, a in source.arrays.items()])
    print(f"weights: 99% within {np.quantile(gaps, 0.99):.1e}, max {gaps.max():.1e}")
    assert np.quantile(gaps, 0.99) <= tolerance["final_weights_abs_q99"]
    assert gaps.max() <= tolerance["final_weights_max_abs"]


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_default_positions_are_those_of_transformers(name: str) -> None:
    expected, _ = load(FIXTURES / "hf" / name)
    segments = expected["segments"]
    np.testing.assert_array_equal(qwen3.default_positions(segments, segments.shape), expected["position_ids"])


@pytest.mark.parametrize("folder", HF_BF16, ids=lambda path: path.name)
def test_bf16_yardstick_is_reproduced(folder: Path) -> None:
    """The recorded error of transformers' bfloat16 is that of the stored tensors against our float64."""
    expected, meta = load(folder)
    recorded = meta["hf_bfloat16_relative_l2_error_vs_float64_reference"]
    with Checkpoint.open(folder) as checkpoint:
        ours, _, counts = compute(ReferenceEngine(checkpoint, "float64"), expected)
    assert counts == [meta["n_targets"]] * 2
    assert set(recorded) == set(expected) - {"input_ids", "labels"}
    for name, error in recorded.items():
        gap = np.linalg.norm(expected[name].astype(np.float64) - ours[name]) / np.linalg.norm(ours[name])
        assert gap == pytest.approx(error, rel=1e-6, abs=1e-12), name
    assert 1e-3 < recorded["logits"] < 0.2
