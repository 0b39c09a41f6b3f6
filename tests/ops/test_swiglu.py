"""swiglu against the fp64 reference, also far out where exp overflows."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec
from cupyllm.backend.eager import run_op
from cupyllm.errors import InputError
from cupyllm.ops.cases import Drawn, draw
from cupyllm.ops.op import Case
from tests.ops import opcheck

OP = ops.get("swiglu")
CASES = opcheck.small_cases("swiglu")
# No sums. exp errs by at most 2 ulp = 4 u32, of which s gets all (g < 0) or less; then at most eight rounded steps.
STAGES = 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(backend: Backend, case: Case, dtype: str) -> None:
    opcheck.check(backend, "swiglu", case, dtype, limit=opcheck.tolerance(dtype, 1, stages=STAGES))


def test_each_element_is_accurate_far_out(backend: Backend) -> None:
    """Every gate from -87 to 87 to a few u of its own size; 1 / (1 + exp(-g)) and 1 - s would lose all digits.

    Beyond 87 the results leave fp32's normal range. The argument of exp is exact, so its size costs nothing.
    """
    gate = np.linspace(-87, 87, 1001, dtype=np.float32)[None]
    up, d_y = np.full_like(gate, 1.5), np.full_like(gate, -0.75)
    case = Case("far", (gate.shape, gate.shape))
    done = opcheck.run(backend, "swiglu", case, Drawn([gate, up], []), [d_y], "float32")
    g, u, d = (a.astype(np.float64) for a in (gate, up, d_y))
    s, one_minus_s = 1 / (1 + np.exp(-g)), 1 / (1 + np.exp(g))
    assert done.d_inputs[0] is not None and done.d_inputs[1] is not None
    np.testing.assert_allclose(done.outputs[0], g * s * u, rtol=STAGES * opcheck.U32)
    np.testing.assert_allclose(done.d_inputs[1], d * g * s, rtol=STAGES * opcheck.U32)
    # s (1 + g (1 - s)) has a zero at g = -1.278: relative to the size of its terms.
    size = np.abs(d * u * s) * (1 + np.abs(g * one_minus_s))
    error = np.abs(done.d_inputs[0] - d * u * s * (1 + g * one_minus_s)) / size
    print(f"largest error {error.max():.2e}")
    assert error.max() < STAGES * opcheck.U32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_gates_are_finite(backend: Backend, dtype: str) -> None:
    gate = np.array([[-3e38, -1e30, -1e4, -200, -110, 110, 200, 1e4, 1e30, 3e38, 0.0, -0.0]], np.float32)
    gate, up = gate.astype(NUMPY_DTYPE[dtype]), np.ones_like(gate).astype(NUMPY_DTYPE[dtype])
    done = run_op(backend, OP, [gate, up], (), {}, [up])
    wide = gate.astype(np.float64)
    silu = np.where(wide > 0, wide, 0)
    assert done.d_inputs[0] is not None and done.d_inputs[1] is not None
    np.testing.assert_array_equal(done.outputs[0].astype(np.float64), silu)
    np.testing.assert_array_equal(done.d_inputs[1].astype(np.float64), silu)
    slope = np.where(wide > 0, 1, np.where(wide < 0, 0, 0.5))
    np.testing.assert_array_equal(done.d_inputs[0].astype(np.float64), slope)


def test_nan_stays_in_its_element(backend: Backend) -> None:
    drawn = draw(Case("nan", ((1, 300), (1, 300))))
    gate, up = drawn.inputs
    assert gate is not None and up is not None
    gate[0, 3], up[0, 280] = np.nan, np.nan
    done = run_op(backend, OP, [gate, up], (), {}, [np.ones_like(gate)])
    assert done.d_inputs[0] is not None and done.d_inputs[1] is not None
    assert np.flatnonzero(np.isnan(done.outputs[0])).tolist() == [3, 280]
    assert np.flatnonzero(np.isnan(done.d_inputs[0])).tolist() == [3, 280]
    assert np.flatnonzero(np.isnan(done.d_inputs[1])).tolist() == [3]


def test_bf16_is_closer_than_rounding_silu_first(backend: Backend) -> None:
    """Hugging Face rounds silu(gate) to bf16 before the product; rounding once must be no worse (it is 1.3x closer)."""
    drawn = draw(Case("order", ((64, 257), (64, 257))), "bfloat16")
    done = run_op(backend, OP, drawn.inputs)
    gate, up = (a.astype(np.float64) for a in drawn.inputs if a is not None)
    silu = gate / (1 + np.exp(-gate))
    bf16 = NUMPY_DTYPE["bfloat16"]
    twice = (silu.astype(np.float32).astype(bf16).astype(np.float32) * up.astype(np.float32)).astype(bf16)
    ours, theirs = (opcheck.relative_error(y, silu * up) for y in (done.outputs[0], twice))
    print(f"ours {ours:.2e}, rounded twice {theirs:.2e}")
    assert ours < 0.8 * theirs


def test_repeats_with_the_same_bits_anywhere(backend: Backend) -> None:
    """An element's bits depend on its inputs alone: whole, shifted, and again."""
    drawn = draw(Case("rows", ((9, 70), (9, 70))))
    gate, up = drawn.inputs
    assert gate is not None and up is not None
    whole = run_op(backend, OP, [gate, up], (), {}, [gate])
    opcheck.assert_same_run(whole, run_op(backend, OP, [gate, up], (), {}, [gate]))
    part = run_op(backend, OP, [gate[4:7], up[4:7]], (), {}, [gate[4:7]])
    opcheck.assert_same_bits(part.outputs[0], whole.outputs[0][4:7])
    for ours, all_rows in zip(part.d_inputs, whole.d_inputs, strict=True):
        assert ours is not None and all_rows is not None
        opcheck.assert_same_bits(ours, all_rows[4:7])


def test_unwanted_gradients_and_no_elements() -> None:
    case, empty = Case("some", ((2, 3), (2, 3))), Case("empty", ((0, 3), (0, 3)))
    assert opcheck.kernel_names(opcheck.record("swiglu", case)) == ["swiglu_forward", "swiglu_backward"]
    assert opcheck.kernel_names(opcheck.record("swiglu", case, want_inputs=False)) == ["swiglu_forward"]
    assert opcheck.record("swiglu", empty).launches == []


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (Spec((2, 3), "float32"), Spec((3, 2), "float32"), r"up shape is \(3, 2\), expected \(2, 3\) as gate"),
        (Spec((2, 3), "float32"), Spec((2, 3), "bfloat16"), "up dtype is bfloat16, expected float32 as gate"),
        (Spec((2, 3), "int32"), Spec((2, 3), "int32"), "gate dtype is int32"),
    ],
)
def test_infer_refuses(gate: Spec, up: Spec, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        OP.infer([gate, up], [], {})
    assert str(caught.value).startswith("swiglu: ") and "\n" not in str(caught.value)


def test_cost_is_one_pass() -> None:
    forward, backward = OP.cost([Spec((3, 8), "bfloat16")] * 2, [], {})
    assert (forward.bytes, backward.bytes) == (2 * 3 * 24, 2 * 5 * 24)
