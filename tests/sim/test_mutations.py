"""A fixed sample of scripts/mutate_kernels.py: each deletion is reported, or is listed with its proof.

The sample has places of every kernel file and of every kind, drawn with a fixed seed. That every place is judged at all
is tested for all of them, so that a new barrier or condition in a kernel asks for its line in expected.txt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cupyllm.backend.compile import flatten
from tests.sim.mutations import expected
from tests.sim.mutations.expected import Verdict
from tests.sim.mutations.judge import BUDGET, Judge, Judged, Outcome, all_places, find, mutate, sources
from tests.sim.mutations.scan import Place, ScanError, scan
from tests.simulated import KERNELS, new_simulator

PLACES = all_places()
VERDICTS = expected.read()
SIZE = 30


def sample() -> list[Place]:
    """One place of each file and of each kind of place and verdict, then others at random."""
    rng = random.Random(4)
    tried = [place for place in PLACES if place.key in VERDICTS and VERDICTS[place.key].name != "untried"]
    rng.shuffle(tried)
    chosen: dict[str, Place] = {}
    seen: set[str] = set()
    for place in tried:
        groups = {place.file, f"{place.kind} {VERDICTS[place.key].name}"}
        if groups - seen:
            chosen[place.key] = place
            seen |= groups
    for place in tried[: max(0, SIZE - len(chosen))]:
        chosen[place.key] = place
    return sorted(chosen.values(), key=lambda place: (place.file, place.line))


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    cache = KERNELS / "mutants"
    cache.mkdir(parents=True, exist_ok=True)
    with new_simulator(budget=BUDGET) as backend:
        yield Judge(backend, cache)


def test_every_place_is_judged() -> None:
    assert not expected.unclassified(PLACES, VERDICTS)


@pytest.mark.parametrize("place", sample(), ids=lambda place: f"{place.file}:{place.line}")
def test_a_deletion_is_reported_or_equivalent(judge: Judge, place: Place) -> None:
    judged = judge.judge(place)
    print(judged)
    assert not expected.complaints(judged, VERDICTS[place.key])


def test_wrong_numbers_without_a_report_are_seen(judge: Judge) -> None:
    place = next(place for place in PLACES if place.key == "swiglu.cu: sigmoid: g >= 0.0f")
    outcomes = judge.judge(place).outcomes
    assert {outcome.kernel for outcome in outcomes} == {"swiglu_forward", "swiglu_backward"}
    assert all(outcome.launches >= 5 and not outcome.kinds and not outcome.same_bits for outcome in outcomes)


# ---- what contradicts expected.txt ----

REPORTED, SILENT = Outcome("k", ("race",), "race in shared memory: k"), Outcome("k", case="odd", launches=2)
OTHER_NUMBERS = Outcome("k", case="odd", launches=2, same_bits=False)


@pytest.mark.parametrize(
    ("verdict", "outcomes", "complaint"),
    [
        (Verdict("reported"), [REPORTED], ""),
        (Verdict("reported"), [REPORTED, replace(SILENT, kernel="l")], "not reported in l, 2 launches"),
        (Verdict("reported"), [OTHER_NUMBERS], "not reported in k, 2 launches, other numbers in odd"),
        (Verdict("reported"), [], "no kernel reports it"),
        (Verdict("reported", "proof", ("l",)), [REPORTED, replace(SILENT, kernel="l")], ""),
        (Verdict("reported", "proof", ("l",)), [REPORTED, replace(REPORTED, kernel="l")], "stale: reported in l"),
        (Verdict("reported", "proof", ("l",)), [REPORTED, replace(OTHER_NUMBERS, kernel="l")], "not equal: other num"),
        (Verdict("reported", "proof", ("l",)), [REPORTED], "l is named, but its code does not change"),
        (Verdict("reported", "proof", ("k",)), [SILENT], "no kernel reports it"),
        (Verdict("equal", "proof"), [SILENT], ""),
        (Verdict("equal", "proof"), [], ""),
        (Verdict("equal", "proof"), [REPORTED], "stale: reported in k"),
        (Verdict("equal", "proof"), [OTHER_NUMBERS], "not equal: other numbers in k, odd"),
        (Verdict("free", "reason"), [OTHER_NUMBERS], ""),
        (Verdict("free", "reason"), [SILENT, REPORTED], "stale: reported in k: race in shared memory: k"),
    ],
)
def test_what_contradicts_a_verdict(verdict: Verdict, outcomes: list[Outcome], complaint: str) -> None:
    found = expected.complaints(Judged(PLACES[0], outcomes), verdict)
    assert [line.startswith(f"{PLACES[0].key}: {complaint}") for line in found] == ([True] if complaint else [])


def test_a_mutant_that_does_not_compile_is_no_success() -> None:
    assert expected.complaints(Judged(PLACES[0], [], "expected a ;"), Verdict("equal", "proof"))


def test_places_and_verdicts_go_together(tmp_path: Path) -> None:
    barrier = next(place for place in PLACES if place.kind == "barrier")
    path = tmp_path / "expected.txt"
    path.write_text(f"# a comment\n\n{barrier.key} | free: no bound\ngone.cu: f: i < n | reported\n")
    first, gone, wrong = expected.unclassified([PLACES[0], barrier], expected.read(path))
    assert first.startswith(f"{PLACES[0].key}: not in") and gone.startswith("gone.cu: f: i < n: in expected.txt, but")
    assert wrong == f"{barrier.key}: a barrier or a wait is reported or equal, not free"


@pytest.mark.parametrize(
    "line",
    ["a.cu: f: x", "a | equal", "a | free: ", "a | reported: why", "a | reported, but equal in k", "a | maybe: x"],
)
def test_a_line_that_is_no_verdict_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "expected.txt"
    path.write_text(f"b | reported\n{line}\n")
    with pytest.raises(ValueError, match=r"expected\.txt:2: "):
        expected.read(path)


# ---- the scanner ----

TEXT = """
DEVICE void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // a < b
KERNEL(first)(const float* x, i64 n) {
  for (int i = 0; i < n && x; i++) {
    if (i >= 3 || !(i == 1)) continue;
    bool last = i + 1 == n, other = f<int>(i) > 2;
    y[i] = last ? x[i > 0 ? i - 1 : 0] : (!x && last) ? 1 : 0;
    y[i < n ? i : n] = i > 5 ? 5 : i;
  }
  while (other(a < b)) wait();
  __syncthreads();
  asm volatile("bar.sync 1, 64;");
  if (x) __syncwarp(FULL_MASK); else __syncthreads();
}
"""


def test_what_the_scanner_finds() -> None:
    found = [(place.line, place.kind, place.text, place.number, place.replacement) for place in scan("a.cu", TEXT)]
    assert found == [
        (4, "loop", "i < n", 1, "i <= n"),
        (4, "condition", "x", 1, "true"),
        (5, "condition", "i >= 3", 1, "false"),
        (5, "condition", "i == 1", 1, "true"),
        (6, "condition", "i + 1 == n", 1, "true"),
        (6, "condition", "f<int>(i) > 2", 1, "true"),
        (7, "condition", "last", 1, "true"),
        (7, "condition", "i > 0", 1, "true"),
        (7, "condition", "!x", 1, "true"),
        (7, "condition", "last", 2, "true"),
        (8, "condition", "i < n", 2, "true"),
        (8, "condition", "i > 5", 1, "false"),
        (10, "condition", "other(a < b)", 1, "true"),
        (10, "condition", "a < b", 1, "true"),
        (10, "async", "wait();", 1, ";"),
        (11, "barrier", "__syncthreads();", 1, ";"),
        (12, "async", 'asm volatile("bar.sync 1, 64;");', 1, ";"),
        (13, "condition", "x", 2, "true"),
        (13, "barrier", "__syncwarp(FULL_MASK);", 1, ";"),
        (13, "barrier", "__syncthreads();", 2, ";"),
    ]
    assert {place.function for place in scan("a.cu", TEXT)} == {"first"}


@pytest.mark.parametrize("text", ["DEVICE int f() { return a<=b; }", "KERNEL(k)(int a) { if (a { }", "a )"])
def test_what_the_scanner_cannot_read_is_refused(text: str) -> None:
    with pytest.raises(ScanError):
        scan("a.cu", text)


def test_a_mutant_differs_in_its_place_only() -> None:
    """Lines stay where they are, in a header that is put into a kernel file too."""
    for place in PLACES:
        for source in sources().values():
            text = flatten(source)
            if find(text, place) is None:
                continue
            lines, mutant = text.split("\n"), mutate(text, place).split("\n")
            assert len(lines) == len(mutant)
            different = [i for i, (a, b) in enumerate(zip(lines, mutant, strict=True)) if a != b]
            assert len(different) == 1 + place.raw.count("\n") and place.raw.split("\n")[0] in lines[different[0]]
