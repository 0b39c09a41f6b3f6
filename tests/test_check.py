"""What the gradient checks would miss: errors planted in a backward, just beyond and well within each limit.

A gradient multiplied by 1 + e has a relative L2 error of e, whatever its values are. Limits are 1e-6 (finite
differences), 2e-6 (parity in float32) and 2^-7 (an op in bfloat16); their derivation is in check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cupyllm import check, ops
from cupyllm.backend.base import Backend
from cupyllm.check import Finding
from cupyllm.config import ModelConfig
from cupyllm.ops.op import Case
from cupyllm.reference import linear, qwen3
from tests.reference.sources import tiny_config

CASE = next(case for case in ops.get("linear").cases() if case.size == "small" and len(case.params) == 2)
TOKENS = 5


@contextmanager
def planted(backward: Callable[..., Any], error: float) -> Iterator[pytest.MonkeyPatch]:
    """The reference's linear.backward with d_weight (1 + error) in place of d_weight."""

    def wrong(saved: Any, d_y: np.ndarray) -> Any:
        d_x, d_weight, *d_bias = backward(saved, d_y)
        return (d_x, d_weight * (1 + error), *d_bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "backward", wrong)
        yield patch


@contextmanager
def planted_in_layer(error: float) -> Iterator[None]:
    """The reference's layer_backward with the error in one parameter's gradient."""
    backward = qwen3.layer_backward

    def wrong(saved: Any, d_y: np.ndarray) -> Any:
        d_x, grads = backward(saved, d_y)
        return d_x, {**grads, "mlp.up_proj.weight": grads["mlp.up_proj.weight"] * (1 + error)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3, "layer_backward", wrong)
        yield


def failed(findings: list[Finding]) -> list[str]:
    print(*(f"{f.tensor} {f.error:.2e} of {f.limit:.2e}" for f in findings), sep="\n")
    assert findings
    return [f.tensor for f in findings if not f.ok]


def small_case() -> Case:
    assert CASE.inputs[0] is not None
    return CASE


@pytest.mark.parametrize(("error", "wrong"), [(0.0, []), (3e-7, []), (3e-6, ["d_param0"]), (-3e-6, ["d_param0"])])
def test_finite_differences_of_an_op(error: float, wrong: list[str]) -> None:
    with planted(linear.backward, error):
        assert failed(check.op_differences("linear", small_case())) == wrong


@pytest.mark.parametrize(("error", "wrong"), [(0.0, []), (3e-6, ["mlp.up_proj.weight"])])
def test_finite_differences_of_a_layer(error: float, wrong: list[str]) -> None:
    with planted_in_layer(error):
        assert failed(check.layer_differences(layer_config(), TOKENS)) == wrong


@pytest.mark.parametrize(
    ("dtype", "error", "wrong"),
    [
        ("float32", 0.0, []),
        ("float32", 1e-6, []),
        ("float32", 3e-6, ["d_param0"]),
        ("bfloat16", 0.0, []),
        ("bfloat16", 2.0**-9, []),
        ("bfloat16", 3 * 2.0**-8, ["d_param0"]),
    ],
)
def test_parity_of_an_op(backend: Backend, dtype: str, error: float, wrong: list[str]) -> None:
    with planted(linear.backward, error):
        assert failed(check.op_parity("linear", small_case(), backend, dtype)) == wrong


@pytest.mark.parametrize(
    ("dtype", "error", "wrong"),
    [
        ("float32", 0.0, []),
        ("float32", 3e-6, ["mlp.up_proj.weight"]),
        ("bfloat16", 0.0, []),
        ("bfloat16", 0.04, ["mlp.up_proj.weight"]),
    ],
)
def test_parity_of_a_layer(backend: Backend, dtype: str, error: float, wrong: list[str]) -> None:
    with planted_in_layer(error):
        assert failed(check.layer_parity(layer_config(), TOKENS, backend, dtype)) == wrong


def layer_config() -> ModelConfig:
    return tiny_config(head_dim=16, dtype="bfloat16")


def test_nan_is_a_failure() -> None:
    assert not Finding("op", "case", "parity", "d_x", float("nan"), 1.0).ok
    assert not check.Report().ok  # nothing compared is nothing shown
