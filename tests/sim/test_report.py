"""Reports: the line a person reads, merging, counting, the limit."""

from __future__ import annotations

import pytest

from cupyllm.errors import BackendError
from cupyllm.sim.ptx import Location
from cupyllm.sim.report import Reports, SimError, Site, UnknownInstruction


def site(text: str, *places: tuple[str, int], kernel: str = "attend") -> Site:
    return Site(kernel, text, tuple(Location(*place) for place in places))


LOAD = site("ld.shared.f32 %f1, [%r2]", ("/src/attention.cu", 88))
STORE = site("@%p1 st.shared.v4.f32 [%r2], {%f1, %f2, %f3, %f4}", ("/src/attention.cu", 80))


def only(reports: Reports) -> str:
    with pytest.raises(SimError) as error:
        reports.raise_if_any()
    return str(error.value)


def test_a_race_names_both_threads_lines_and_the_element() -> None:
    reports = Reports()
    reports.begin((2, 2, 1), (64, 2, 1))
    reports.add("race", LOAD, 1, 33, "tile[12]", other=STORE, other_thread=65)
    assert only(reports) == (
        "race in shared memory: attend, CTA (1,0,0), thread (33,0,0) reads tile[12] at attention.cu:88, "
        "which thread (1,1,0) writes at attention.cu:80 with no barrier between"
    )


def test_rows_count_from_the_first_cta_of_the_batch() -> None:
    reports = Reports()
    reports.begin((3, 4, 5), (8, 4, 2), first_cta=12)
    reports.add("out-of-bounds", LOAD, 2, 63, "x[100]", detail="x has 100 elements")
    reports.begin((3, 4, 5), (8, 4, 2), first_cta=59)
    reports.add("race-between-ctas", LOAD, 0, 0, "y[3]", other=STORE, other_cta=13)
    lines = only(reports).splitlines()
    assert lines[0] == (
        "out of bounds: attend, CTA (2,0,1), thread (7,3,1) reads x[100] at attention.cu:88: x has 100 elements"
    )
    assert lines[1] == (
        "race between CTAs: attend, CTA (2,3,4), thread (0,0,0) reads y[3] at attention.cu:88, "
        "which CTA (1,0,1) writes at attention.cu:80"
    )


def test_location_follows_the_call_sites_outwards() -> None:
    inlined = site("st.global.f32 [%rd1], %f1", ("/a/tile.cuh", 5), ("/a/attention.cuh", 70), ("/a/attention.cu", 200))
    assert inlined.location == "tile.cuh:5 (inlined at attention.cuh:70, attention.cu:200)"
    assert site("bar.sync 0").location == "`bar.sync 0`"


@pytest.mark.parametrize(
    ("text", "verb", "space"),
    [
        ("ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1]", "reads", "global"),
        ("@!%p3 st.local.u32 [%rd1], %r1", "writes", "local"),
        ("ld.u32 %r1, [%rd1]", "reads", ""),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5]", "reads", "shared"),
        ("atom.global.add.f32 %f1, [%rd1], %f2", "updates", "global"),
        ("red.shared::cta.add.u32 [%r1], 1", "updates", "shared"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16", "copies", "shared"),
        ("bar.sync 0", "waits at", ""),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1", "executes", ""),
    ],
)
def test_verb_and_space_come_from_the_opcode(text: str, verb: str, space: str) -> None:
    assert (site(text).verb, site(text).space) == (verb, space)


def test_what_the_instruction_cannot_tell_is_given() -> None:
    copy = site("cp.async.cg.shared.global [%r1], [%rd1], 16", ("linear.cu", 7))
    reports = Reports()
    reports.begin((1, 1, 1), (2, 2, 1))
    reports.add("uninitialised-read", copy, 0, 2, "x[4]", verb="copies from")
    reports.add("race", site("st.f32 [%rd1], %f1", ("linear.cu", 9)), 0, 0, "y[0]", space="global", other=copy)
    reports.add("divergent-barrier", site("bar.sync 0", ("linear.cu", 11)), 0, 3, detail="thread (0,1,0) has left")
    one, two = site("bar.sync 1, 64", ("linear.cu", 11)), site("bar.sync 2, 64", ("linear.cu", 20))
    reports.add("divergent-barrier", one, 0, 0, other=two, other_thread=1)
    reports.add("budget", Site("spin", "", ()), detail="1000 instructions a thread")
    assert only(reports).splitlines() == [
        "uninitialised read: attend, CTA (0,0,0), thread (0,1,0) copies from x[4] at linear.cu:7",
        "race in global memory: attend, CTA (0,0,0), thread (0,0,0) writes y[0] at linear.cu:9, "
        "which another thread copies at linear.cu:7 with no barrier between",
        "divergent barrier: attend, CTA (0,0,0), thread (1,1,0) waits at bar.sync at linear.cu:11: "
        "thread (0,1,0) has left",
        "divergent barrier: attend, CTA (0,0,0), thread (0,0,0) waits at bar.sync at linear.cu:11, "
        "while thread (1,0,0) waits at bar.sync at linear.cu:20",
        "budget exceeded: spin: 1000 instructions a thread",
    ]


def test_the_same_finding_is_counted_not_repeated() -> None:
    reports = Reports()
    reports.add("race", LOAD, 0, 0, "tile[0]", other=STORE, count=5)
    reports.add("race", STORE, 0, 0, "tile[9]", other=LOAD)  # a race has no order
    reports.add("misaligned", LOAD, 0, 0, "tile[0]")
    twin = Site(LOAD.kernel, LOAD.text, LOAD.where)  # the same text elsewhere in the kernel
    reports.add("misaligned", twin, 0, 0, "tile[0]")
    with pytest.raises(SimError) as error:
        reports.raise_if_any()
    assert [(report.kind, report.count) for report in error.value.reports] == [
        ("race", 6),
        ("misaligned", 1),
        ("misaligned", 1),
    ]
    assert str(error.value).splitlines()[0].endswith("[6 times]")


def test_beyond_the_limit_reports_are_counted() -> None:
    reports = Reports(limit=2)
    sites = [site(f"ld.shared.f32 %f1, [%r{number}]", ("x.cu", number)) for number in range(1, 6)]
    for one in sites + sites:
        reports.add("misaligned", one, 0, 0, "tile[0]")
    with pytest.raises(SimError) as error:
        reports.raise_if_any()
    assert error.value.total == 5 and len(error.value.reports) == 2
    assert str(error.value).splitlines()[-1] == "and 3 further reports"


def test_raising_empties() -> None:
    reports = Reports()
    reports.raise_if_any()
    reports.add("misaligned", LOAD, 0, 0, "tile[0]")
    with pytest.raises(BackendError):
        reports.raise_if_any()
    reports.raise_if_any()
    reports.add("misaligned", LOAD, 0, 0, "tile[0]")
    assert not only(reports).endswith("times]")


def test_an_unknown_instruction_is_named() -> None:
    error = UnknownInstruction("wgmma.fence.sync.aligned", site("wgmma.fence.sync.aligned", ("linear.cu", 3)))
    assert isinstance(error, BackendError) and error.opcode == "wgmma.fence.sync.aligned"
    assert str(error) == (
        "the simulator does not execute wgmma.fence.sync.aligned, which attend has at linear.cu:3; "
        "run this kernel on a GPU"
    )
    assert "vadd.u32" in str(UnknownInstruction("vadd.u32"))
