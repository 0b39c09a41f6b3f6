"""The drawing of cases, and the checker itself: a checker that cannot fail proves nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import Spec
from cupyllm.errors import InputError
from cupyllm.ops import cases
from cupyllm.ops.op import Case
from tests.hostcuda.backend import HostBackend
from tests.ops import opcheck


def test_same_seed_same_arrays() -> None:
    case = Case("x", ((5, 4), (7,)), ((4,),), kinds=("normal", "ids:9"))
    one, two, other = cases.draw(case), cases.draw(case), cases.draw(case, seed=1)
    for a, b in zip((*one.inputs, *one.params), (*two.inputs, *two.params), strict=True):
        assert a is not None and b is not None
        opcheck.assert_same_bits(a, b)
    assert (one.params[0] != other.params[0]).any()


@pytest.mark.parametrize("dtypes", [("float64", None), ("float32", "float16"), ("bfloat16", None)])
def test_dtypes_are_those_of_specs(dtypes: tuple[str, str | None]) -> None:
    kinds = ("normal", "ids:3", "labels:3", "positions", "segments", "cos", "sin", "none")
    case = Case("x", ((2, 4),) * 8, ((3,),), kinds=kinds)
    drawn, (inputs, params) = cases.draw(case, *dtypes), cases.specs(case, *dtypes)
    for array, spec in zip((*drawn.inputs, *drawn.params), (*inputs, *params), strict=True):
        assert (None if array is None else Spec(array.shape, array.dtype.name)) == spec
    wide = cases.widen(drawn.inputs)
    assert wide[7] is None and wide[1] is drawn.inputs[1]
    assert wide[0] is not None and wide[0].dtype == np.float64


def test_integer_kinds() -> None:
    case = Case("x", ((500,), (500,), (2, 3)), kinds=("ids:7", "labels:7", "positions"))
    ids, labels, positions = cases.draw(case).inputs
    assert ids is not None and labels is not None and positions is not None
    assert set(ids.tolist()) == set(range(7)) and set(labels.tolist()) == {-100, *range(7)} and labels[0] != -100
    assert positions.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_kinds_of_a_paged_cache() -> None:
    case = Case("x", ((300,), (3, 4), (2, 2)), kinds=("slots:400", "pages:12", "values:5,-1,0,7"))
    slots, pages, values = cases.draw(case).inputs
    assert slots is not None and pages is not None and values is not None
    written = slots[slots >= 0].tolist()
    assert len(set(written)) == len(written) and max(written) < 400 and slots[0] >= 0
    assert 30 < (slots == -1).sum() == 300 - len(written) < 90
    assert sorted(pages.ravel().tolist()) == list(range(12))
    assert values.tolist() == [[5, -1], [0, 7]] and values.dtype == np.int32


def test_query_segments_are_the_tail_of_the_key_segments() -> None:
    case = Case("x", ((3, 20), (3, 50)), kinds=("segments", "segments"))
    padded = 0
    for seed in range(20):
        q, k = cases.draw(case, seed=seed).inputs
        assert q is not None and k is not None
        np.testing.assert_array_equal(q, k[:, 30:])
        for row in k:
            real = row[row >= 0]
            assert (np.diff(real) >= 0).all() and (row[len(real) :] == -1).all() and len(real) >= 37
            padded += len(real) < 50
    assert padded > 20


def test_rope_tables_lie_on_the_unit_circle() -> None:
    cos, sin = cases.draw(Case("x", ((6, 4), (6, 4)), kinds=("cos", "sin")), "float64").inputs
    assert cos is not None and sin is not None
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-15)
    np.testing.assert_allclose(np.arctan2(sin[1], cos[1]), 10_000.0 ** (-np.arange(4) / 4))


def test_unknown_kind() -> None:
    with pytest.raises(InputError, match="kind is 'noise', expected normal"):
        cases.draw(Case("x", ((1,),), kinds=("noise",)))


def test_tolerance_is_between_a_right_and_a_wrong_sum() -> None:
    """fp32 sums of normal terms at L = 25600: in runs of 128 below the limit, in one sequence above it."""
    terms = np.random.default_rng(0).standard_normal((400, 25600)).astype(np.float32)
    want = terms.sum(axis=1, dtype=np.float64)
    runs = np.cumsum(terms.reshape(400, 200, 128), axis=2)[..., -1]
    two_levels, sequence = np.cumsum(runs, axis=1)[:, -1], np.cumsum(terms, axis=1)[:, -1]
    limit = opcheck.tolerance("float32", 25600)
    assert opcheck.relative_error(two_levels, want) < limit < opcheck.relative_error(sequence, want)


def test_relative_error() -> None:
    want = np.array([3.0, 4.0])
    assert opcheck.relative_error(np.array([3.0, 4.5], np.float32), want) == 0.1
    assert opcheck.relative_error(np.array([3.0, np.nan], np.float32), want) == np.inf
    assert opcheck.relative_error(np.array([0.25], np.float32), np.zeros(1)) == 0.25


def test_check_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyllm.reference import add

    right = add.backward
    monkeypatch.setattr(add, "backward", lambda saved, d_y: (right(saved, d_y)[0], 1.001 * d_y))
    case = Case("x", ((3, 5), (3, 5)))
    with pytest.raises(AssertionError, match="d_input1"):
        opcheck.check(HostBackend(), "add", case, "float32", limit=opcheck.tolerance("float32", 1))


@pytest.mark.parametrize("side", ["before", "behind"])
def test_guards_notice_a_write_outside(side: str) -> None:
    guarded = opcheck.GuardedBackend(HostBackend())
    buffer: Any = guarded.allocate(100, "y")
    guarded.fill(buffer.address, 100, 0)
    guarded.fill(buffer.address - 1 if side == "before" else buffer.address + 100, 1, 0)
    buffer.free()
    assert guarded.broken == [f"y: 1 bytes written {side} it"]


def test_recording_needs_no_device() -> None:
    case = next(case for case in ops.get("linear").cases() if case.size == "model")
    made = opcheck.record("linear", case, forced={"linear": "plain"})
    assert opcheck.kernel_names(made) == ["linear_forward", "linear_dgrad", "linear_wgrad"]
