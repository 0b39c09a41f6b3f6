"""Paged attention: op attention's bits, whatever the pages, chunks and neighbours; and the fp64 reference.

Tolerance: attention's own derivation (tests/ops/test_attention.py), with the longest sequence as its sum.
Everything unwritten holds NaN here: slots behind a sequence's end, free pages, pages behind the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cupyllm.backend.base import NUMPY_DTYPE, Backend, Spec
from cupyllm.backend.eager import run_op
from cupyllm.errors import InputError
from cupyllm.ops.attention import OP as ATTENTION
from cupyllm.ops.op import Case
from cupyllm.ops.paged_attention import OP, ROWS, most_tiles
from cupyllm.reference import paged_attention as reference
from tests.hostcuda.backend import HostBackend
from tests.ops.opcheck import U32, assert_same_bits, check, relative_error, tolerance

SMALL = [case for case in OP.cases() if case.size == "small"]


def limit(dtype: str, head_dim: int, num_keys: int) -> float:
    return U32 * (math.sqrt(head_dim / 2) / math.sqrt(3) + 6) + tolerance(dtype, num_keys)


@dataclass
class Paged:
    """Sequences in one run each, and the same in pages."""

    q: list[np.ndarray]  # [n,HQ*D] of each sequence: the queries of its last n tokens
    k: list[np.ndarray]  # [T,HK*D]
    v: list[np.ndarray]
    inputs: list[np.ndarray]  # of op paged_attention
    attrs: dict[str, Any]

    @property
    def starts(self) -> list[int]:
        return [int(start) for start in self.inputs[4]]


def make(
    lengths: list[tuple[int, int]],  # (keys, queries) of each sequence
    heads: tuple[int, int, int] = (2, 1, 16),  # HQ, HK, D
    page_tokens: int = 32,
    dtype: str = "float32",
    seed: int = 0,
    **attrs: Any,
) -> Paged:
    """Random sequences; pages in random order, NaN in every slot and -1 in every table entry that nobody may read."""
    num_heads, kv_heads, head_dim = heads
    rng = np.random.default_rng(seed)

    def normal(rows: int, num: int) -> np.ndarray:
        return rng.standard_normal((rows, num * head_dim)).astype(NUMPY_DTYPE[dtype])

    q, k, v = ([normal(pair[i], h) for pair in lengths] for i, h in ((1, num_heads), (0, kv_heads), (0, kv_heads)))
    entries = max(1, max(-(-keys // page_tokens) for keys, _ in lengths)) + 1
    num_pages = len(lengths) * entries + 2
    order = iter(rng.permutation(num_pages).tolist())
    table = np.full((len(lengths), entries), -1, np.int32)
    pages = np.full((2, num_pages, page_tokens, kv_heads * head_dim), np.nan, NUMPY_DTYPE[dtype])
    window = attrs.get("window")
    for s, (keys, queries) in enumerate(lengths):
        first = 0 if window is None else max(0, keys - queries - window + 1)
        for entry in range(first // page_tokens, -(-keys // page_tokens)):
            page = table[s, entry] = next(order)
            token = slice(entry * page_tokens, min(keys, (entry + 1) * page_tokens))
            for half, rows in enumerate((k[s], v[s])):
                pages[half, page, : token.stop - token.start] = rows[token]
    starts = np.cumsum([0, *(queries for _, queries in lengths)]).astype(np.int32)
    kv_lengths = np.array([keys for keys, _ in lengths], np.int32)
    attrs = {"num_heads": num_heads, "num_kv_heads": kv_heads, **attrs}
    return Paged(q, k, v, [np.concatenate(q), pages[0], pages[1], table, starts, kv_lengths], attrs)


def paged(backend: Backend, inputs: list[np.ndarray], attrs: dict[str, Any]) -> np.ndarray:
    return run_op(backend, OP, inputs, (), attrs).outputs[0]


def contiguous(backend: Backend, q: np.ndarray, k: np.ndarray, v: np.ndarray, attrs: dict[str, Any]) -> np.ndarray:
    return run_op(backend, ATTENTION, [q[None], k[None], v[None], None, None], (), attrs).outputs[0][0]


def assert_contiguous_bits(backend: Backend, case: Paged) -> None:
    out = paged(backend, case.inputs, case.attrs)
    for s, (start, stop) in enumerate(pairwise(case.starts)):
        if stop > start:
            want = contiguous(backend, case.q[s], case.k[s], case.v[s], case.attrs)
            assert_same_bits(out[start:stop], want, f"sequence {s}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_own_cases(backend: Backend, case: Case, dtype: str) -> None:
    longest = case.inputs[3][1] * case.inputs[1][1]
    head_dim = case.inputs[0][1] // case.attrs["num_heads"]
    check(backend, "paged_attention", case, dtype, limit=limit(dtype, head_dim, longest))


# HQ, HK, D: groups of 1, 2, 4 and 8, every head size class, the tests' other dimensions around the tiles of 32
HEADS = [(1, 1, 128), (2, 1, 16), (4, 1, 24), (8, 1, 32), (4, 2, 64), (2, 2, 80), (2, 1, 96)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_tokens", [32, 64, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bits_of_contiguous_attention(
    backend: Backend, heads: tuple[int, int, int], page_tokens: int, dtype: str
) -> None:
    lengths = [(65, 1), (33, 33), (page_tokens, 5), (page_tokens + 1, 1), (1, 1), (40, 2)]
    assert_contiguous_bits(backend, make(lengths, heads, page_tokens, dtype))


@pytest.mark.parametrize("window", [1, 4, 31, 32, 33, 64, 65, 500])
def test_windows(backend: Backend, window: int) -> None:
    """Pages behind the window are not in the table any more."""
    case = make([(131, 1), (131, 35), (70, 70), (3, 3)], page_tokens=32, window=window, scale=0.3)
    if window <= 64:
        assert (case.inputs[3][0] == -1).sum() > (case.inputs[3][1] == -1).sum()
    assert_contiguous_bits(backend, case)
    want, _ = reference.forward(*(a.astype(np.float64) if a.dtype.kind == "f" else a for a in case.inputs),
                                **case.attrs)  # fmt: skip
    assert relative_error(paged(backend, case.inputs, case.attrs), want) < limit("float32", 16, 131)


@pytest.mark.parametrize("seed", range(6))
def test_any_chunks_and_neighbours_give_the_bits_of_the_whole(backend: Backend, seed: int) -> None:
    """Random sequences advance by random chunks, several a step or none; every row equals the whole sequence's."""
    rng = np.random.default_rng(seed)
    heads = [(2, 1, 16), (4, 4, 16), (8, 2, 16)][seed % 3]
    attrs: dict[str, Any] = {"window": int(rng.integers(1, 80))} if seed % 2 else {}
    dtype, page_tokens = ("bfloat16", 64) if seed % 4 == 3 else ("float32", 32)
    totals = [int(n) for n in rng.integers(1, 100, 4)]
    whole = make([(n, n) for n in totals], heads, page_tokens, dtype, seed, **attrs)
    want = [contiguous(backend, *each, whole.attrs) for each in zip(whole.q, whole.k, whole.v, strict=True)]
    done = [0] * len(totals)
    while done != totals:
        chosen = [s for s in rng.permutation(len(totals)).tolist() if done[s] < totals[s] and rng.random() < 0.7]
        if not chosen:
            continue
        counts = {s: int(rng.integers(1, min(40, totals[s] - done[s]) + 1)) for s in chosen}
        step = make([(done[s] + counts[s], counts[s]) for s in chosen], heads, page_tokens, dtype, seed, **attrs)
        # The step's own pages hold the sequences' keys and values so far, in another random order.
        for half, rows in ((1, whole.k), (2, whole.v)):
            for row, s in enumerate(chosen):
                for position in range(done[s] + counts[s]):
                    page = step.inputs[3][row, position // page_tokens]
                    if page >= 0:
                        step.inputs[half][page, position % page_tokens] = rows[s][position]
        step.inputs[0] = np.concatenate([whole.q[s][done[s] : done[s] + counts[s]] for s in chosen])
        out = paged(backend, step.inputs, step.attrs)
        for row, s in enumerate(chosen):
            got = out[step.starts[row] : step.starts[row + 1]]
            assert_same_bits(got, want[s][done[s] : done[s] + counts[s]], f"sequence {s} from {done[s]}")
            done[s] += counts[s]


def test_placement_and_neighbours_do_not_matter(backend: Backend) -> None:
    """Shuffled pages, another order of sequences, a wider table: the same bits."""
    case = make([(70, 3), (100, 40), (33, 1)])
    first = paged(backend, case.inputs, case.attrs)
    q, k_pages, v_pages, table, starts, lengths = case.inputs
    moved = np.random.default_rng(5).permutation(len(k_pages))  # page p goes to moved[p]
    k_moved, v_moved = (np.empty_like(pages) for pages in (k_pages, v_pages))
    k_moved[moved], v_moved[moved] = k_pages, v_pages
    order = [2, 0, 1]
    wide = np.full((3, table.shape[1] + 3), -1, np.int32)
    wide[:, : table.shape[1]] = np.where(table >= 0, moved[table], -1)[order]
    rows = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
    counts = np.diff(starts)[order]
    inputs = [q[rows], k_moved, v_moved, wide, np.cumsum([0, *counts]).astype(np.int32), lengths[order]]
    assert_same_bits(paged(backend, inputs, case.attrs), first[rows])


def test_padding_of_a_step(backend: Backend) -> None:
    """Rows behind the last sequence and sequences without rows or keys give 0, and change nothing for the others."""
    case = make([(70, 3), (33, 33)])
    want = paged(backend, case.inputs, case.attrs)
    q, k_pages, v_pages, table, starts, lengths = case.inputs
    padded = np.concatenate([q, np.full((45, q.shape[1]), np.nan, np.float32)])
    for extra_keys in (0, 20):
        inputs = [
            *(padded, k_pages, v_pages),
            np.concatenate([table, np.full((3, table.shape[1]), -1, np.int32)]),
            np.concatenate([starts, [starts[-1]] * 3]).astype(np.int32),
            np.concatenate([lengths, [0, extra_keys, 0]]).astype(np.int32),
        ]
        got = paged(backend, inputs, case.attrs)
        assert_same_bits(got[: len(q)], want)
        assert_same_bits(got[len(q) :], np.zeros_like(got[len(q) :]))


def test_no_rows_record_nothing() -> None:
    assert most_tiles(0, 5) == 0


def test_the_grid_covers_every_split() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        counts = rng.integers(0, 70, rng.integers(1, 9)).tolist()
        if rng.random() < 0.3:
            counts = [ROWS * count + 1 for count in counts]  # as many tiles as these rows can have
        assert sum(-(-count // ROWS) for count in counts) <= most_tiles(sum(counts), len(counts) - 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", [1, 2])
def test_visible_values_surface_and_hidden_ones_do_not(backend: Backend, where: int, value: float) -> None:
    """A NaN or inf in a written slot reaches the queries that see it, in its own sequence, and no other row."""
    case = make([(40, 40), (40, 40)], window=7)
    case.inputs[0][:] = np.abs(case.inputs[0])
    want = paged(backend, case.inputs, case.attrs)
    page = case.inputs[3][0, 0]
    case.inputs[where][page, 20, 0] = value
    got = paged(backend, case.inputs, case.attrs)
    sees = np.zeros(80, bool)
    sees[20:27] = True
    assert (~np.isfinite(got[sees])).any(axis=1).all()
    assert_same_bits(got[~sees], want[~sees])


@pytest.mark.parametrize("page", [-1, -(2**31), 1000, 2**31 - 1])
def test_a_visible_page_that_is_not_there_is_nan(backend: Backend, page: int) -> None:
    """The host's mistake, but neither foreign memory nor a plausible answer; the reference says what is wrong."""
    case = make([(70, 2), (70, 2)])
    case.inputs[3][0, 1] = page
    got = paged(backend, case.inputs, case.attrs)
    assert np.isnan(got[:2]).all() and np.isfinite(got[2:]).all()
    with pytest.raises(InputError, match="a page that is not there"):
        reference.forward(*case.inputs, **case.attrs)
    case = make([(70, 2), (70, 2)])
    case.inputs[5][0] = 2000  # more keys than the table holds
    assert np.isnan(paged(backend, case.inputs, case.attrs)[:2]).all()
    with pytest.raises(InputError, match="a block table that long"):
        reference.forward(*case.inputs, **case.attrs)


def test_the_reference_refuses_more_rows_than_keys() -> None:
    case = make([(5, 5)])
    case.inputs[5][0] = 4
    with pytest.raises(InputError, match="5 rows and 4 keys"):
        reference.forward(*case.inputs, **case.attrs)


@pytest.mark.parametrize("tokens", [3, 4, 5, 8])
@pytest.mark.parametrize("window", [4, None])
def test_d5_a_window_of_w_is_w_keys_in_prefill_and_decode(backend: Backend, tokens: int, window: int | None) -> None:
    """q = k = 0 and v[j] = j: the output is the mean of the visible positions, the same bits token by token."""
    case = make([(tokens, tokens)], (1, 1, 16), window=window)
    for array in (case.inputs[0], case.inputs[1]):
        array[~np.isnan(array)] = 0
    page = case.inputs[3][0, 0]
    case.inputs[2][page, :tokens] = np.arange(tokens)[:, None]
    out = paged(backend, case.inputs, case.attrs)
    mean = [np.mean(range(max(0, t + 1 - (window or tokens)), t + 1)) for t in range(tokens)]
    if (tokens, window) == (8, 4):
        assert mean == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]
    np.testing.assert_allclose(out[:, 0], mean, rtol=8 * U32)
    for t in range(tokens):
        one = [case.inputs[0][t : t + 1], *case.inputs[1:4], np.array([0, 1], np.int32), np.array([t + 1], np.int32)]
        assert_same_bits(paged(backend, one, case.attrs)[0], out[t], f"token {t}")


def test_same_bits_every_time_and_in_any_thread_order(backend: Backend) -> None:
    case = make([(70, 40), (65, 1)], (4, 2, 64))
    first = paged(backend, case.inputs, case.attrs)
    again = [paged(backend, case.inputs, case.attrs) for _ in range(3)]
    if isinstance(backend, HostBackend):
        again.append(paged(HostBackend(descending=True), case.inputs, case.attrs))
    for out in again:
        assert_same_bits(out, first)


GOOD: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SPECS = {
    "q": Spec((5, 64), "float32"),
    "k_pages": Spec((3, 32, 32), "float32"),
    "v_pages": Spec((3, 32, 32), "float32"),
    "block_table": Spec((2, 7), "int32"),
    "q_starts": Spec((3,), "int32"),
    "kv_lengths": Spec((2,), "int32"),
}


@pytest.mark.parametrize(
    "name, spec, attrs, words",
    [
        ("q", Spec((1, 5, 64), "float32"), {}, "q's shape"),
        ("q", Spec((5, 66), "float32"), {}, "q's width"),
        ("q", Spec((5, 48), "float32"), {}, "head size is 12"),
        ("q", Spec((5, 64), "float16"), {}, "q's dtype"),
        ("k_pages", Spec((3, 32, 16), "float32"), {}, "k_pages' shape"),
        ("k_pages", Spec((3, 48, 32), "float32"), {}, "page size is 48"),
        ("k_pages", Spec((3, 16, 32), "float32"), {}, "page size is 16"),
        ("k_pages", Spec((3, 32, 32), "bfloat16"), {}, "k_pages is"),
        ("v_pages", Spec((4, 32, 32), "float32"), {}, "v_pages is"),
        ("block_table", Spec((7,), "int32"), {}, "block_table's shape"),
        ("block_table", Spec((2, 7), "int64"), {}, "block_table is"),
        ("q_starts", Spec((2,), "int32"), {}, "q_starts is"),
        ("kv_lengths", Spec((3,), "int32"), {}, "kv_lengths is"),
        ("q", SPECS["q"], {"num_kv_heads": 3}, "num_kv_heads"),
        ("q", SPECS["q"], {"num_kv_heads": 0}, "num_kv_heads"),
        ("q", SPECS["q"], {"window": 0}, "window is 0"),
        ("q", SPECS["q"], {"scale": math.inf}, "scale is inf"),
    ],
)
def test_refusals(name: str, spec: Spec, attrs: dict[str, Any], words: str) -> None:
    assert OP.infer(list(SPECS.values()), (), GOOD) == [SPECS["q"]]
    with pytest.raises(InputError, match=words) as caught:
        OP.infer(list((SPECS | {name: spec}).values()), (), GOOD | attrs)
    assert "\n" not in str(caught.value)


def test_cost_counts_the_table() -> None:
    flops = OP.cost(list(SPECS.values()), (), GOOD)[0].flops
    assert flops == 4 * 5 * 64 * 7 * 32
    assert OP.cost(list(SPECS.values()), (), GOOD | {"window": 9})[0].flops == 4 * 5 * 64 * 9
