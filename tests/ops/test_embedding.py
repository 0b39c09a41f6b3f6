"""embedding against the reference: the gather bit for bit, the scatter-add in order."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec
from cupyllm.backend.eager import run_op
from cupyllm.errors import InputError
from cupyllm.ops.cases import Drawn, draw
from cupyllm.ops.op import Case
from tests.hostcuda.backend import HostBackend
from tests.ops import opcheck

OP = ops.get("embedding")
CASES = opcheck.small_cases("embedding")


def limits(case: Case, dtype: str) -> dict[str, float]:
    """A row's sum is at most N long."""
    return {
        "output0": opcheck.tolerance(dtype, 1),
        "d_param0": opcheck.tolerance("float32", case.inputs[0][0]),
    }


@pytest.mark.parametrize("dtypes", opcheck.DTYPE_PAIRS, ids="/".join)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(backend: Backend, case: Case, dtypes: tuple[str, str]) -> None:
    opcheck.check(backend, "embedding", case, *dtypes, limit=limits(case, dtypes[0]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_accumulates(backend: Backend, case: Case) -> None:
    opcheck.check(backend, "embedding", case, "float32", limit=limits(case, "float32"), accumulate=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float16"])
def test_gathers_exactly(backend: Backend, dtype: str, weight_dtype: str) -> None:
    ids = np.array([4, 0, 4, 3], np.int32)
    weight = np.random.default_rng(0).standard_normal((5, 300)).astype(NUMPY_DTYPE[weight_dtype])
    done = run_op(backend, OP, [ids], [weight], {"dtype": dtype})
    want = weight.astype(np.float32).astype(NUMPY_DTYPE[dtype])[ids]
    opcheck.assert_same_bits(done.outputs[0], want)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FC00001, 0xFFFFFFFF])
def test_a_nan_stays_one_in_bfloat16(backend: Backend, bits: int) -> None:
    """A payload in the lower half alone must not be cut off: the upper half of such a NaN is infinity's."""
    weight = np.full((2, 5), bits, np.uint32).view(np.float32)
    done = run_op(backend, OP, [np.array([1], np.int32)], [weight], {"dtype": "bfloat16"})
    want = np.full((1, 5), bits >> 16 | 0x40, np.uint16)  # quiet, with the sign and the upper payload of the input
    opcheck.assert_same_bits(done.outputs[0].view(np.uint16), want)


def test_rows_that_no_id_names_are_zero_or_unchanged(backend: Backend) -> None:
    ids, d_y = np.array([1, 5, 1], np.int32), np.ones((3, 4), np.float32)
    weight = np.full((7, 4), 9, np.float32)
    written = run_op(backend, OP, [ids], [weight], {}, [d_y]).d_params[0]
    want = np.zeros((7, 4), np.float32)
    want[1], want[5] = 2, 1
    opcheck.assert_same_bits(written, want)
    added = run_op(backend, OP, [ids], [weight], {}, [d_y], d_params=[weight]).d_params[0]
    opcheck.assert_same_bits(added, want + 9)


def test_padding_row_gets_nothing(backend: Backend) -> None:
    ids, d_y = np.array([1, 2, 1, 2], np.int32), np.full((4, 3), np.nan, np.float32)
    d_y[1::2] = 1
    start = np.ones((4, 3), np.float32)
    attrs = {"padding_idx": 1}
    written = run_op(backend, OP, [ids], [start], attrs, [d_y]).d_params[0]
    assert (written[[0, 1, 3]] == 0).all() and (written[2] == 2).all()
    added = run_op(backend, OP, [ids], [start], attrs, [d_y], d_params=[start]).d_params[0]
    assert (added[[0, 1, 3]] == 1).all() and (added[2] == 3).all()


def test_adds_in_order_of_position(backend: Backend) -> None:
    """1, then 2^-25 sixty-four times: in order each is lost, the other way round they add up to 2^-19.

    The order is part of the promise of equal bits.
    """
    ids = np.array([3, *[3, 0] * 64], np.int32)
    d_y = np.where(np.arange(129) == 0, 1, 2.0**-25).astype(np.float32)[:, None]
    weight = np.zeros((4, 1), np.float32)
    forward = run_op(backend, OP, [ids], [weight], {}, [d_y]).d_params[0]
    assert forward[3, 0] == 1 and forward[0, 0] == 64 * 2.0**-25
    backward = run_op(backend, OP, [ids[::-1]], [weight], {}, [d_y[::-1]]).d_params[0]
    assert backward[3, 0] == np.float32(1 + 2.0**-19)


def test_a_frequent_id_is_summed_in_two_levels(backend: Backend) -> None:
    """25600 positive terms of one row; the limit is derived in test_linear.py."""
    case = Case("frequent", ((25600,),), ((2, 1),), kinds=("ids:1",))
    ids, d_y = np.zeros(25600, np.int32), np.random.default_rng(0).random((25600, 1)).astype(np.float32)
    drawn = Drawn([ids], [np.zeros((2, 1), np.float32)])
    done = opcheck.run(backend, "embedding", case, drawn, [d_y], "float32")
    error = opcheck.relative_error(done.d_params[0], opcheck.reference("embedding", case, drawn, [d_y])["d_param0"])
    sequential = abs(float(np.cumsum(d_y[:, 0])[-1]) / float(d_y.sum(dtype=np.float64)) - 1)
    print(f"{error:.2e}, in one sequence {sequential:.2e}")
    assert error < 15 * opcheck.U32 < sequential


def test_repeats_and_thread_order_does_not_matter(backend: Backend) -> None:
    case = CASES[4]
    drawn = draw(case, "bfloat16")
    d_y = [np.random.default_rng(1).standard_normal((257, 9)).astype(NUMPY_DTYPE["bfloat16"])]
    first = opcheck.run(backend, "embedding", case, drawn, d_y, "bfloat16")
    opcheck.assert_same_run(first, opcheck.run(backend, "embedding", case, drawn, d_y, "bfloat16"))
    for descending in (False, True):
        other = opcheck.run(HostBackend(descending=descending), "embedding", case, drawn, d_y, "bfloat16")
        opcheck.assert_same_run(first, other)  # additions alone: every device gives these bits


def test_nan_goes_where_its_id_goes(backend: Backend) -> None:
    weight = np.ones((3, 2), np.float32)
    weight[1, 0] = np.nan
    d_y = np.ones((3, 2), np.float32)
    d_y[2, 1] = np.inf
    done = run_op(backend, OP, [np.array([0, 1, 2], np.int32)], [weight], {}, [d_y])
    assert np.isnan(done.outputs[0]).tolist() == [[False, False], [True, False], [False, False]]
    np.testing.assert_array_equal(done.d_params[0], [[1, 1], [1, 1], [1, np.inf]])


def test_no_positions(backend: Backend) -> None:
    ids, weight, d_y = np.empty(0, np.int32), np.ones((3, 2), np.float32), np.empty((0, 2), np.float32)
    done = run_op(backend, OP, [ids], [weight], {}, [d_y])
    assert done.outputs[0].shape == (0, 2) and (done.d_params[0] == 0).all()


def test_unwanted_gradient_costs_nothing() -> None:
    case = Case("frozen", ((3,),), ((4, 2),), kinds=("ids:4",))
    assert opcheck.kernel_names(opcheck.record("embedding", case, want_params=False)) == ["embedding_forward"]
    added = opcheck.kernel_names(opcheck.record("embedding", case, accumulate=True))
    assert added == ["embedding_forward", "embedding_chain", "embedding_backward"]


@pytest.mark.parametrize(
    ("ids", "weight", "attrs", "message"),
    [
        (Spec((3,), "int64"), Spec((4, 2), "float32"), {}, "ids dtype is int64, expected int32"),
        (Spec((3, 1), "int32"), Spec((4, 2), "float32"), {}, r"ids shape is \(3, 1\), expected \[N\]"),
        (Spec((3,), "int32"), Spec((8,), "float32"), {}, r"weight shape is \(8,\), expected \[V,C\]"),
        (Spec((3,), "int32"), Spec((4, 2), "int32"), {}, "weight dtype is int32"),
        (Spec((3,), "int32"), Spec((4, 2), "float16"), {}, "output dtype is float16, expected float32 or bfloat16"),
        (Spec((3,), "int32"), Spec((4, 2), "float32"), {"padding_idx": 4}, "padding_idx is 4, expected None or 0 <="),
    ],
)
def test_infer_refuses(ids: Spec, weight: Spec, attrs: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        OP.infer([ids], [weight], attrs)
    assert str(caught.value).startswith("embedding: ") and "\n" not in str(caught.value)


def test_cost_reads_only_the_named_rows() -> None:
    forward, backward = OP.cost([Spec((3,), "int32")], [Spec((100, 8), "bfloat16")], {"dtype": "float32"})
    assert forward.bytes == 4 * 3 + 2 * 24 + 4 * 24
    assert backward.bytes == 4 * 3 + 4 * 24 + 4 * 800
