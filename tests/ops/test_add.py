"""add: one rounding and two copies, so every result is checked bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec, fixed
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops.cases import draw
from cupyllm.ops.op import Case
from tests.ops import opcheck

OP = ops.get("add")
CASES = opcheck.small_cases("add")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(backend: Backend, case: Case, dtype: str) -> None:
    opcheck.check(backend, "add", case, dtype, limit=opcheck.tolerance(dtype, 1, stages=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounds_once_to_nearest_even(backend: Backend, dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = ((rng.standard_normal(5000) * 2.0 ** rng.integers(-20, 20, 5000)) for _ in range(2))
    a, b = a.astype(NUMPY_DTYPE[dtype]), b.astype(NUMPY_DTYPE[dtype])
    # Ties: 1 + 2^-8 lies halfway between bf16 1 and 1 + 2^-7; 1 + 3 2^-8 halfway between odd and even.
    a[:4], b[:4] = [1, 1, -1, 1 + 2.0**-7], [2.0**-8, 3 * 2.0**-8, -(2.0**-8), 2.0**-8]
    done = run_op(backend, OP, [a, b], (), {}, [a])
    want = (a.astype(np.float32) + b.astype(np.float32)).astype(NUMPY_DTYPE[dtype])
    opcheck.assert_same_bits(done.outputs[0], want)
    for d in done.d_inputs:
        assert d is not None
        opcheck.assert_same_bits(d, a)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_special_values(backend: Backend, dtype: str) -> None:
    """NaN, infinities, overflow to infinity, subnormals and the sign of zero behave as IEEE 754 says."""
    largest = float(np.finfo(np.float32).max) if dtype == "float32" else (2 - 2.0**-7) * 2.0**127
    tiny = 2.0**-149 if dtype == "float32" else 2.0**-133
    a = np.array([np.nan, np.inf, np.inf, -np.inf, largest, -largest, tiny, -0.0, 0.0, tiny], NUMPY_DTYPE[dtype])
    b = np.array([1, 1, -np.inf, -np.inf, largest, -largest, tiny, -0.0, -0.0, -tiny], NUMPY_DTYPE[dtype])
    done = run_op(backend, OP, [a, b], (), {}, [a])
    with np.errstate(invalid="ignore", over="ignore"):
        want = (a.astype(np.float32) + b.astype(np.float32)).astype(NUMPY_DTYPE[dtype])
    np.testing.assert_array_equal(np.isnan(done.outputs[0]), np.isnan(want))
    number = ~np.isnan(want)
    opcheck.assert_same_bits(done.outputs[0][number], want[number])
    assert done.d_inputs[0] is not None
    opcheck.assert_same_bits(done.d_inputs[0], a)


def test_may_write_over_its_input(backend: Backend) -> None:
    """The residual stream is updated in place."""
    a, b = draw(Case("alias", ((3, 200), (3, 200)))).inputs
    assert a is not None and b is not None
    with Session(backend) as session:
        x, y = session.put(a), session.put(b)
        rec = Recorder.of(backend)
        OP.forward(rec, [x, y], [], [x], {})
        session.execute(rec)
        opcheck.assert_same_bits(session.get(x), a + b)


def test_unwanted_gradients_and_no_elements() -> None:
    case, empty = Case("some", ((2, 3), (2, 3))), Case("empty", ((0, 3), (0, 3)))
    assert opcheck.kernel_names(opcheck.record("add", case)) == ["add_forward", "add_backward"]
    assert opcheck.kernel_names(opcheck.record("add", case, want_inputs=False)) == ["add_forward"]
    assert opcheck.record("add", empty).launches == []


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(backend: Backend, wanted: int) -> None:
    d_y = np.arange(300, dtype=np.float32)
    with Session(backend) as session:
        source, target = session.put(d_y), session.empty(Spec((300,), "float32"))
        rec = Recorder.of(backend)
        OP.backward(rec, (), [source], [target, None] if wanted == 0 else [None, target], [], {}, False)
        session.execute(rec)
        opcheck.assert_same_bits(session.get(target), d_y)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (Spec((2, 3), "float32"), Spec((3, 2), "float32"), r"b shape is \(3, 2\), expected \(2, 3\) as a"),
        (Spec((2, 3), "float32"), Spec((2, 3), "bfloat16"), "b dtype is bfloat16, expected float32 as a"),
        (Spec((2, 3), "float16"), Spec((2, 3), "float16"), "a dtype is float16"),
    ],
)
def test_infer_refuses(a: Spec, b: Spec, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        OP.infer([a, b], [], {})
    assert str(caught.value).startswith("add: ") and "\n" not in str(caught.value)


def test_forced_variant_that_does_not_exist() -> None:
    x = fixed(256, (2, 3), "float32")
    with pytest.raises(InputError, match=r"add: no variant fits \(forced: fast, device sm_80\); it has: plain"):
        OP.forward(Recorder(80, {"add": "fast"}), [x, x], [], [x], {})


def test_cost_is_one_pass() -> None:
    forward, backward = OP.cost([Spec((3, 8), "bfloat16")] * 2, [], {})
    assert (forward.flops, forward.bytes, backward.bytes) == (24, 2 * 3 * 24, 2 * 3 * 24)
