"""kv_append: rows land in their slots bit for bit, and nothing else changes. No tolerance: nothing is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec
from cupyllm.backend.eager import run_op
from cupyllm.errors import InputError
from cupyllm.ops.kv_append import OP
from cupyllm.ops.op import Case
from cupyllm.reference import kv_append as reference
from tests.ops.opcheck import assert_same_bits, check

SMALL = [case for case in OP.cases() if case.size == "small"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_own_cases(backend: Backend, case: Case, dtype: str) -> None:
    check(backend, "kv_append", case, dtype, limit=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows, pages", [(1, (1, 32, 16)), (31, (2, 32, 255)), (33, (3, 64, 513)), (300, (5, 128, 8))])
def test_bits_move_and_the_rest_stays(backend: Backend, rows: int, pages: tuple[int, int, int], dtype: str) -> None:
    """Every bit pattern is carried, NaN payloads and -0 included; other slots, NaN or not, keep every bit."""
    rng = np.random.default_rng(rows)
    size = NUMPY_DTYPE[dtype].itemsize

    def bits(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(NUMPY_DTYPE[dtype])

    k, v, k_pages, v_pages = bits(rows, pages[2]), bits(rows, pages[2]), bits(*pages), bits(*pages)
    slots = rng.permutation(pages[0] * pages[1])[:rows].astype(np.int32)
    slots[rows // 2 :: 3] = -1
    got = run_op(backend, OP, [k, v, k_pages, v_pages, slots]).outputs
    for written, before, new in ((got[0], k_pages, k), (got[1], v_pages, v)):
        want = before.reshape(-1, pages[2]).copy()
        for slot, row in zip(slots.tolist(), new, strict=True):
            if slot >= 0:
                want[slot] = row
        assert_same_bits(written, want.reshape(pages))


def test_slots_outside_the_pool_write_nothing(backend: Backend) -> None:
    """The contract is -1; a kernel that cannot raise must still not write into foreign memory (guard bytes: check)."""
    kinds = ("normal",) * 4 + (f"values:-1,{-(2**31)},64,{2**31 - 1},5",)
    case = Case("outside", ((5, 8), (5, 8), (2, 32, 8), (2, 32, 8), (5,)), kinds=kinds)
    inputs = [np.ones((5, 8), np.float32)] * 2 + [np.zeros((2, 32, 8), np.float32)] * 2
    slots = np.array([-1, -(2**31), 64, 2**31 - 1, 5], np.int32)
    got = run_op(backend, OP, [*inputs, slots]).outputs
    for pages in got:
        assert pages.sum() == 8 and (pages.reshape(64, 8)[5] == 1).all()
    with pytest.raises(InputError, match="slot 2147483647"):
        check(backend, "kv_append", case, "float32", limit=0.0)


def test_the_reference_refuses_a_slot_for_two_rows() -> None:
    rows, pages = np.ones((2, 8)), np.zeros((1, 32, 8))
    with pytest.raises(InputError, match="one slot for two rows"):
        reference.forward(rows, rows, pages, pages.copy(), np.array([3, 3]))
    (k_pages, _), saved = reference.forward(rows, rows, pages, pages.copy(), np.array([-1, -1]))
    assert saved == () and not k_pages.any()


@pytest.mark.parametrize(
    "k, v, k_pages, v_pages, slots, words",
    [
        ((3,), (3,), (1, 4, 3), (1, 4, 3), (3,), "k's shape"),
        ((3, 8), (2, 8), (1, 4, 8), (1, 4, 8), (3,), "kv_append: v is"),
        ((3, 8), (3, 8), (1, 4, 7), (1, 4, 7), (3,), "k_pages' shape"),
        ((3, 8), (3, 8), (4, 8), (4, 8), (3,), "k_pages' shape"),
        ((3, 8), (3, 8), (1, 4, 8), (2, 4, 8), (3,), "v_pages is"),
        ((3, 8), (3, 8), (1, 4, 8), (1, 4, 8), (4,), "slots is"),
        ((3, 8), (3, 8), (1 << 26, 64, 8), (1 << 26, 64, 8), (3,), "fewer than 2"),
    ],
)
def test_refusals(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, words: str) -> None:
    inputs = [*(Spec(shape, "float32") for shape in (k, v, k_pages, v_pages)), Spec(slots, "int32")]
    with pytest.raises(InputError, match=words) as caught:
        OP.infer(inputs, (), {})
    assert "\n" not in str(caught.value)


def test_refuses_other_dtypes() -> None:
    row, pages = Spec((3, 8), "bfloat16"), Spec((1, 32, 8), "bfloat16")
    slots = Spec((3,), "int32")
    assert OP.infer([row, row, pages, pages, slots], (), {}) == []
    for position, spec, words in (
        (0, Spec((3, 8), "float16"), "k's dtype"),
        (1, Spec((3, 8), "float32"), "v is"),
        (3, Spec((1, 32, 8), "float32"), "v_pages is"),
        (4, Spec((3,), "int64"), "slots is"),
    ):
        inputs = [row, row, pages, pages, slots]
        inputs[position] = spec
        with pytest.raises(InputError, match=words):
            OP.infer(inputs, (), {})


def test_cost_counts_both_rows_both_ways() -> None:
    shapes = ((5, 8), (5, 8), (2, 32, 8), (2, 32, 8))
    inputs = [*(Spec(shape, "bfloat16") for shape in shapes), Spec((5,), "int32")]
    assert OP.cost(inputs, (), {})[0].bytes == 2 * 2 * 5 * 8 * 2 + 5 * 4
