"""Recording, and the arena: storages that live at the same time never share bytes, others may."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.backend.base import ALIGNMENT, KernelSpec, Tensor, fixed
from cupyllm.backend.record import Recorder, arena_layout, place

RUN = KernelSpec("add.cu", "add_forward_float32")


def random_list(rng: np.random.Generator) -> tuple[Recorder, list[Tensor]]:
    rec = Recorder(80)
    tensors: list[Tensor] = []
    for _ in range(int(rng.integers(1, 40))):
        for _ in range(int(rng.integers(0, 4))):
            tensors.append(rec.empty((int(rng.integers(1, 5000)),), "bfloat16"))
        recent = tensors[-int(rng.integers(1, 12)) :]
        picked = [t for t in recent if rng.random() < 0.5]
        rec.launch(RUN, 1, 32, fixed(1 << 40, (4,), "float32"), *picked, None, 3, np.float32(1))
    return rec, tensors


def lifetimes(rec: Recorder) -> dict[int, tuple[int, int]]:
    """First and last launch of every unplaced storage, found without the code under test."""
    found: dict[int, tuple[int, int]] = {}
    for index, launch in enumerate(rec.launches):
        for arg in launch.args:
            if isinstance(arg, Tensor) and arg.storage.address is None:
                found[id(arg.storage)] = (found.get(id(arg.storage), (index, index))[0], index)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_overlapping_lifetimes_never_share_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rec, tensors = random_list(rng)
    keep = [t for t in tensors if rng.random() < 0.1]
    lives = lifetimes(rec)
    for tensor in keep:
        if id(tensor.storage) in lives:
            lives[id(tensor.storage)] = (lives[id(tensor.storage)][0], len(rec.launches))
    offsets, total = arena_layout(rec.launches, keep)
    assert {id(storage) for storage in offsets} == set(lives)
    placed = [(offset, offset + storage.nbytes, *lives[id(storage)]) for storage, offset in offsets.items()]
    for i, (start, stop, first, last) in enumerate(placed):
        assert start % ALIGNMENT == 0 and 0 <= start and stop <= total
        for other_start, other_stop, other_first, other_last in placed[:i]:
            at_once = first <= other_last and other_first <= last
            assert not (at_once and start < other_stop and other_start < stop)
    # no smaller than what lives at the fullest moment, no larger than everything side by side
    fullest = max(
        (
            sum(stop - start for start, stop, first, last in placed if first <= t <= last)
            for t in range(len(rec.launches))
        ),
        default=0,
    )
    assert fullest <= total <= sum(-(-(stop - start) // ALIGNMENT) * ALIGNMENT for start, stop, *_ in placed)


def test_disjoint_lifetimes_share() -> None:
    rec = Recorder(80)
    for name in "abcdefgh":
        rec.launch(RUN, 1, 32, rec.empty((1000,), "float32", name))
    _, total = arena_layout(rec.launches)
    assert total == 4096  # 4000 bytes, rounded up to the alignment: eight times the same


def test_placing_leaves_the_list_reusable() -> None:
    rec = Recorder(80)
    x = rec.empty((1000,), "float32", "x")
    rec.launch(RUN, 1, 32, x, x.view(10, 100).rows(3, 5))
    offsets, _ = arena_layout(rec.launches)
    for base in (1 << 20, 1 << 30):
        (launch,) = place(rec.launches, offsets, base)
        whole, rows = launch.args
        assert isinstance(whole, Tensor) and isinstance(rows, Tensor)
        assert (whole.address, rows.address) == (base, base + 1200) and rows.shape == (2, 100)
    assert x.storage.address is None


def test_empty_grid_records_nothing() -> None:
    rec = Recorder(80)
    rec.launch(RUN, (3, 0), 32)
    assert rec.launches == []


@pytest.mark.parametrize(("grid", "block"), [((1, 65536), 32), (2**31, 32), (1, 1025), (1, (32, 33)), (1, 0)])
def test_impossible_launches_are_our_bugs(grid: object, block: object) -> None:
    with pytest.raises(AssertionError):
        Recorder(80).launch(RUN, grid, block)  # type: ignore[arg-type]
