"""Which launches may start before the one before them has ended."""

from __future__ import annotations

from cupyllm.backend.base import KernelSpec, Storage, Tensor, fixed
from cupyllm.backend.record import Recorder

KERNEL = KernelSpec("x.cu", "x")


def recorded(*launches: tuple[Tensor | None, list[Tensor]]) -> list[bool]:
    rec = Recorder(90)
    for weights, args in launches:
        rec.launch(KERNEL, 1, 32, *args, weights=weights)
    return [launch.programmatic for launch in rec.launches]


def test_only_a_launch_that_names_its_weights_is_programmatic() -> None:
    w, x = fixed(4096, (8,), "float32"), fixed(8192, (8,), "float32")
    assert recorded((None, [x]), (w, [w, x]), (None, [w, x])) == [False, True, False]


def test_the_first_one_waits_for_what_came_before_the_list() -> None:
    w = fixed(4096, (8,), "float32")
    assert recorded((w, [w])) == [False]


def test_weights_that_the_launch_before_may_be_writing_are_waited_for() -> None:
    """The same storage, another tensor of it, and another storage over the same bytes."""
    w, x = fixed(4096, (64,), "float32"), fixed(8192, (8,), "float32")
    inside, touching = fixed(4096 + 252, (1,), "float32"), fixed(4096 + 256, (1,), "float32")
    for before, early in ((w, False), (w.rows(8, 16), False), (inside, False), (touching, True), (x, True)):
        assert recorded((None, [before]), (w, [w, x])) == [False, early], before


def test_a_launch_further_back_may_still_be_running() -> None:
    """Programmatic ones hand the start on; the first one that waited for all before it ends the search."""
    w, v, x = (fixed(4096 << i, (8,), "float32") for i in range(3))
    assert recorded((None, [w]), (v, [v, x]), (w, [w, x])) == [False, True, False]
    assert recorded((None, [w]), (None, [x]), (v, [v, x]), (w, [w, x])) == [False, False, True, True]


def test_storages_without_addresses_are_told_apart() -> None:
    w, other = (Tensor((8,), "float32", Storage(32, None)) for _ in range(2))
    assert recorded((None, [w]), (w, [w])) == [False, False]
    assert recorded((None, [other]), (w, [w])) == [False, True]
