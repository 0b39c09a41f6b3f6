"""Every kind of fault is found, by name and by source line; a clean sibling of each kernel gives no report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from cupyllm.backend.eager import Session
from cupyllm.backend.sim import SimBackend
from cupyllm.errors import BackendError
from cupyllm.sim.report import Report, SimError, Site
from tests.sim.planted import Planted, planted, run
from tests.simulated import new_simulator

KERNELS = planted()
BUDGET = 20_000_000  # the clean kernels take a tenth of it


@pytest.fixture(scope="module")
def sim() -> Iterator[SimBackend]:
    with new_simulator(budget=BUDGET) as backend:
        yield backend


def lines(site: Site | None, file: str) -> set[int]:
    """Lines of this file that a report names: the instruction's own, or where it is inlined."""
    return set() if site is None else {place.line for place in site.where if PurePosixPath(place.file).name == file}


def named(report: Report, file: str) -> set[int]:
    return lines(report.site, file) | lines(report.other, file)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_planted_fault_is_found(sim: SimBackend, kernel: Planted) -> None:
    with pytest.raises(SimError) as caught:
        run(sim, kernel, faulty=True)
    print(caught.value)
    of_the_kind = [report for report in caught.value.reports if report.kind == kernel.kind]
    assert of_the_kind, f"expected {kernel.kind}, got {[report.kind for report in caught.value.reports]}"
    missing = set(kernel.lines) - set().union(*(named(report, kernel.file) for report in of_the_kind))
    assert not missing, f"{kernel.file}:{missing} not named as {kernel.kind}"
    assert f": {kernel.name}" in str(caught.value) and f"{kernel.file}:" in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_its_clean_sibling_gives_no_report(sim: SimBackend, kernel: Planted) -> None:
    run(sim, kernel, faulty=False)


def test_there_are_three_of_each_kind() -> None:
    counts = Counter(kernel.kind for kernel in KERNELS)
    assert min(counts.values()) >= 3, counts
    kinds = "out-of-bounds misaligned uninitialised-read race race-between-ctas cp-async divergent-barrier"
    assert counts.keys() == {*kinds.split(), "divergent-shuffle", "budget"}


@pytest.mark.parametrize("grid", [(2**31 - 1, 1, 1), (1 << 20, 65535, 65535), (40_000, 40_000, 1)])
def test_a_huge_grid_is_refused_before_it_runs(sim: SimBackend, grid: tuple[int, int, int]) -> None:
    with Session(sim) as session:
        launch = replace(KERNELS[0].launch(session, faulty=False), grid=grid)
        with pytest.raises(BackendError, match=r"one_behind: \d+ threads, more than the budget of 20000000"):
            sim.run(sim.load([launch]))


@pytest.mark.parametrize("name", ["tile_one_behind", "into_the_next_array", "bins_not_cleared"])
def test_static_and_dynamic_shared_memory_together_have_a_limit(sim: SimBackend, name: str) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    with Session(sim) as session:
        launch = replace(kernel.launch(session, faulty=False), shared_bytes=163 * 1024)
        with pytest.raises(BackendError, match=rf"{name}: \d+ bytes of shared memory a block, expected <= 166912"):
            sim.run(sim.load([launch]))
        whole = {"tile_one_behind": 256, "into_the_next_array": 512, "bins_not_cleared": 16}[name]
        sim.run(sim.load([replace(launch, shared_bytes=163 * 1024 - whole)]))  # to the last byte
