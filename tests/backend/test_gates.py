"""The compile gates: every kernel, every target, no spills, no growth; and that each gate closes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cupyllm.backend import nvrtc
from cupyllm.backend.base import KernelSpec, kernel
from cupyllm.backend.compile import ARCHITECTURES, CU, compile_cubin
from cupyllm.backend.resources import Resources, parse_resources
from cupyllm.errors import BackendError
from scripts import make_resource_table
from tests.backend import gates
from tests.backend.every_kernel import Use, every_kernel
from tests.backend.gates import Measured, Row, Table

SOURCE = str(Path(__file__).with_name("gates.cu"))
ADD = kernel("add.cu", "add_forward", dtypes={"X_T": "float32"})


@pytest.fixture(scope="module")
def table() -> Table:
    return gates.read(gates.TABLE.read_text(encoding="utf-8"))


# ---- every kernel, every target ----


def test_every_kernel_compiles_within_the_table(table: Table) -> None:
    faults = []
    judged = not gates.other_version(table, nvrtc.version())  # else test_growth_is_judged fails
    for arch, found in gates.measure(gates.largest(table), gates.cubins()).items():
        faults += gates.forbidden(arch, found)
        if judged:
            faults += gates.grown(arch, found, table)
            for note in gates.shrunk(arch, found, table):
                warnings.warn(note, stacklevel=1)
    assert not faults, "\n".join(faults)


def test_growth_is_judged(table: Table) -> None:
    """By the NVRTC that made the table: with another the test above looks at spills, frames and remarks only."""
    faults = gates.other_version(table, nvrtc.version())
    assert not faults, "\n".join(faults)


def test_table_and_launchers_have_the_same_kernels(table: Table) -> None:
    asked = {arch: map(gates.name, kernels) for arch, kernels in gates.everything().items()}
    faults = gates.uncovered(asked, table)
    assert not faults, "\n".join(faults)


def test_what_ci_compiles(table: Table) -> None:
    """Every kernel for sm_80 and sm_90a; every symbol for every target, by its largest kernel."""
    asked, compiled = gates.everything(), gates.largest(table)
    for arch, kernels in asked.items():
        if arch not in gates.RELATIVES:
            assert compiled[arch] == kernels and arch in ("sm_80", "sm_90a")
            continue
        assert {(k.source, k.symbol) for k in compiled[arch]} == {(k.source, k.symbol) for k in kernels}
        assert len(compiled[arch]) < len(kernels) / 2, "else it saves little"
        for spec in kernels:
            taken = [k for k in compiled[arch] if (k.source, k.symbol) == (spec.source, spec.symbol)]
            registers = [table.rows[gates.name(k)].cells[arch][0] for k in (spec, *taken)]
            assert len(taken) == 1 and registers[0] <= registers[1]


def test_table_is_as_the_script_writes_it(table: Table) -> None:
    assert gates.render(table) == gates.TABLE.read_text(encoding="utf-8")


def test_no_kernel_is_left_out() -> None:
    """Every KERNEL(...) of every source is asked for by some launcher, so the gates see it."""
    capabilities = [gates.capability(arch) for arch in ARCHITECTURES]
    asked = {(spec.source, spec.symbol) for capability in capabilities for spec in every_kernel(capability)}
    for path in CU.glob("*.cu"):
        for name in re.findall(r"^KERNEL\((\w+)\)", path.read_text(), re.MULTILINE):
            used = any(
                source == path.name and re.fullmatch(rf"{name}(_(float|bfloat|int)\d+)*", symbol)
                for source, symbol in asked
            )
            assert used, f"no launcher asks for {name} of {path.name}"


# ---- what no kernel may have, provoked by gates.cu ----


def faulty(symbol: str, macro: str, value: str = "1") -> KernelSpec:
    return KernelSpec(SOURCE, symbol, ((macro, value),))


@pytest.fixture(scope="module")
def provoked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    uses = {
        faulty("spilled", "SPILL"): 1024,
        faulty("framed", "FRAME"): 32,
        faulty("calling", "CALL"): 1,
        faulty("adjusting", "BOUNDS", "256"): 256,
        faulty("adjusting", "BOUNDS", "256,1"): 256,
        faulty("overlapped", "WGMMA"): 128,
        faulty("serialised", "WGMMA"): 128,
        faulty("hungry", "HUNGRY"): 1024,
    }
    folder = tmp_path_factory.mktemp("cubins")
    faulty_uses = {spec: Use("faulty", threads) for spec, threads in uses.items()}
    return gates.measure({"sm_90a": faulty_uses}, folder)["sm_90a"]


@pytest.mark.parametrize(
    ("kernel", "faults"),
    [
        ("gates.cu spilled SPILL=1", [r"\d+ bytes of spills, expected none; ", r"a stack frame of \d+ bytes"]),
        ("gates.cu framed FRAME=1", [r"a stack frame of 128 bytes, expected none; index local arrays by constants"]),
        ("gates.cu calling CALL=1", [r"\d+ bytes of spills", r"a stack frame of \d+ bytes.* inline the functions"]),
        (
            "gates.cu adjusting BOUNDS=256",
            [r"ptxas says .*C7508.*setmaxnreg.*, expected nothing; .*\(threads, 1\)"],
        ),
        ("gates.cu adjusting BOUNDS=256,1", []),
        ("gates.cu overlapped WGMMA=1", []),
        (
            "gates.cu serialised WGMMA=1",
            [r"ptxas says .*C7510.*serialized.*, expected nothing; .* no call or"],
        ),
        ("gates.cu hungry HUNGRY=1", [r"\d+ registers for each of 1024 threads, expected at most 65536 a block; add"]),
    ],
)
def test_a_kernel_may_not_have(provoked: dict[str, Measured], kernel: str, faults: list[str]) -> None:
    found = gates.forbidden("sm_90a", {kernel: provoked[kernel]})
    assert len(found) == len(faults)
    for fault, pattern in zip(found, faults, strict=True):
        assert re.match(re.escape(f"{kernel} for sm_90a: ") + pattern, fault)


def test_compiler_that_dies_names_the_kernel(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"gates\.cu for sm_90a with -DILL_FORMED=1") as caught:
        gates.measure({"sm_90a": {faulty("storing", "ILL_FORMED"): Use("faulty", 32)}}, tmp_path)
    if nvrtc.version() == (12, 9):  # a later one may refuse the instruction instead
        assert "crashed (exit status -11)" in str(caught.value)


# ---- the table ----


@pytest.fixture
def added(tmp_path: Path) -> dict[str, Measured]:
    return gates.measure({"sm_80": {ADD: Use("plain", 256)}}, tmp_path)["sm_80"]


def test_equal_to_the_table_passes_and_one_more_fails(added: dict[str, Measured]) -> None:
    (name,) = added
    taken = added[name].resources
    assert name == "add.cu add_forward_float32" and taken.registers > 1
    same = gates.tabulate({"sm_80": added}, (12, 9))
    assert gates.grown("sm_80", added, same) == []
    for registers, shared_bytes, what in (
        (taken.registers - 1, 0, f"{taken.registers} registers, expected at most {taken.registers - 1}"),
        (taken.registers, -1, "0 bytes of shared memory, expected at most -1"),
    ):
        lowered = Table((12, 9), {name: Row({"sm_80": (registers, shared_bytes)})})
        (fault,) = gates.grown("sm_80", added, lowered)
        assert fault.startswith(f"{name} for sm_80: {what} (resources.txt); ") and "make_resource_table" in fault


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "told"), [(-1, 0, False), (0, 0, False), (8, 0, True), (0, 4, True)]
)
def test_what_a_kernel_won_is_told(added: dict[str, Measured], registers: int, shared_bytes: int, told: bool) -> None:
    """Fewer registers, but no unit of eight less, save nothing on the device."""
    (name,) = added
    row = Row({"sm_80": (added[name].resources.registers + registers, shared_bytes)})
    notes = gates.shrunk("sm_80", added, Table((12, 9), {name: row}))
    assert [note.split(":")[0] for note in notes] == [f"{name} for sm_80"] * told


def test_missing_and_stale_rows_fail() -> None:
    rows = {"a.cu both": Row({"sm_80": (8, 0), "sm_86": (8, 0)}), "a.cu gone": Row({"sm_80": (8, 0)})}
    asked = {"sm_80": ["a.cu both", "a.cu new"], "sm_86": ["a.cu both", "a.cu new"]}
    assert gates.uncovered(asked, Table((12, 9), rows)) == [
        "a.cu gone for sm_80: resources.txt has it, expected no row or figure, since no launcher asks for it; "
        "run python scripts/make_resource_table.py",
        "a.cu new for sm_80, sm_86: not in resources.txt, expected a row with a figure for every target; "
        "run python scripts/make_resource_table.py",
    ]


def test_missing_and_stale_figures_fail() -> None:
    """A variant that becomes able to run on another target, or on fewer."""
    table = Table((12, 9), {"a.cu k": Row({"sm_80": (8, 0), "sm_86": (8, 0)})})
    missing, stale = gates.uncovered({"sm_86": ["a.cu k"], "sm_90a": ["a.cu k"]}, table)
    assert missing.startswith("a.cu k for sm_90a: not in") and stale.startswith("a.cu k for sm_80: resources.txt has")
    assert gates.uncovered({"sm_86": ["a.cu k"], "sm_80": ["a.cu k"]}, table) == []


def test_row_that_allows_a_spill_fails() -> None:
    rows = {"a.cu k": Row({"sm_80": (8, 0)}, stack_bytes=16, spill_bytes=4)}
    (fault,) = gates.uncovered({"sm_80": ["a.cu k"]}, Table((12, 9), rows))
    assert fault.startswith("a.cu k: its row in resources.txt allows 16 bytes of stack and 4 of spills, expected none;")


def test_table_survives_being_written() -> None:
    rows = {
        "a.cu k N=128": Row({arch: (255, 49152) for arch in ARCHITECTURES}),
        "a.cu k N=16": Row({"sm_90a": (8, 0)}, stack_bytes=123456, spill_bytes=8),
    }
    text = gates.render(Table((13, 0), rows))
    assert gates.read(text) == Table((13, 0), rows)
    assert text.index("N=16") < text.index("N=128") and text.count("-  ") == len(ARCHITECTURES) - 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text + text.splitlines()[-1] + "\n", r"^b\.cu k: resources\.txt has two rows of this name"),
        (lambda text: text.replace("NVRTC 12.9", "NVRTC"), "no NVRTC version"),
        (lambda text: text + "8/0 8/0 b.cu\n", "is no row of 7 targets"),
        (lambda text: text.replace("8/0", "8", 1), "is no row of 7 targets"),
        (lambda text: "", "no NVRTC version or no rows"),
    ],
)
def test_damaged_table_is_refused(damage: Callable[[str], str], message: str) -> None:
    text = gates.render(Table((12, 9), {"b.cu k": Row(dict.fromkeys(ARCHITECTURES, (8, 0)))}))
    with pytest.raises(ValueError, match=message):
        gates.read(damage(text))


def test_two_kernels_of_one_name_are_refused(tmp_path: Path) -> None:
    """They would share a row, and the larger one's figures would let the smaller one grow."""
    twin = replace(ADD, defines=(*ADD.defines, ("SUFFIX", "_float32")))
    with pytest.raises(AssertionError, match=r"two kernels are called add\.cu add_forward_float32"):
        gates.measure({"sm_80": {ADD: Use("plain", 256), twin: Use("plain", 256)}}, tmp_path)


def test_another_compiler_is_a_fault_of_its_own() -> None:
    table = Table((12, 9), {})
    assert gates.other_version(table, (12, 9)) == []
    (fault,) = gates.other_version(table, (13, 0))
    assert fault.startswith("NVRTC 13.0 is installed, expected 12.9,") and "growth of kernels was not judged" in fault


def test_changes_are_told_kernel_by_kernel() -> None:
    old = Table((12, 9), {"a.cu gone": Row({"sm_80": (8, 0)}), "a.cu k": Row({"sm_80": (8, 0), "sm_86": (9, 0)})})
    new = Table((13, 0), {"a.cu k": Row({"sm_80": (10, 64), "sm_86": (9, 0)}), "a.cu new": Row({"sm_80": (8, 0)})})
    assert make_resource_table.changes(old, new) == [
        "NVRTC 12.9 -> 13.0",
        "gone     a.cu gone",
        "changed  a.cu k: sm_80 8/0 -> 10/64",
        "new      a.cu new: sm_80 8/0",
    ]
    assert make_resource_table.changes(old, old) == []


def test_script_writes_no_table_with_a_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gates, "TABLE", tmp_path / "resources.txt")
    spills = 0

    def measure(uses: object, folder: Path) -> dict[str, dict[str, Measured]]:
        spilling = {"sm_100": spills}
        return {arch: {"a.cu k": Measured(Resources(8, 64, 0, spilling.get(arch, 0)), 32)} for arch in ARCHITECTURES}

    monkeypatch.setattr(gates, "measure", measure)
    assert make_resource_table.main() == 0
    written = gates.TABLE.read_bytes()
    assert gates.read(written.decode()).rows == {"a.cu k": Row(dict.fromkeys(ARCHITECTURES, (8, 64)))}
    spills = 4
    assert make_resource_table.main() == 1
    assert "a.cu k for sm_100: 4 bytes of spills" in capsys.readouterr().err
    assert gates.TABLE.read_bytes() == written


# ---- ptxas's log ----

LOG = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : (C7519) warpgroup.arrive is injected in around line 84 by compiler in function 'one'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'two'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'two'
ptxas info    : (C7516) Potential Performance Loss: ill formed pipeline stage in the function 'helper'
ptxas info    : 0 bytes gmem
ptxas info    : Function properties for shared_helper
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 38528 bytes smem, 416 bytes cmem[0]
ptxas info    : Compile time = 9.221 ms
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
ptxas         .     8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : Compile time = 1.2 ms
ptxas info    : Function properties for helper
ptxas         .     32 bytes stack frame, 20 bytes spill stores, 40 bytes spill loads
"""


def test_log_of_several_kernels_is_told_apart() -> None:
    found = parse_resources(LOG)
    assert list(found) == ["one", "two"]
    one, two = found["one"], found["two"]
    assert (one.registers, one.shared_bytes, one.stack_bytes, one.spill_bytes) == (168, 38528, 16, 0)
    assert (two.registers, two.shared_bytes, two.stack_bytes, two.spill_bytes) == (30, 0, 56, 63)
    assert [remark[1:6] for remark in one.remarks] == ["C7508", "C7519", "C7516"]  # no kernel is named helper
    assert [remark[1:6] for remark in two.remarks] == ["C7508", "C7510", "C7516"]
    assert one.remarks[0].endswith("at entry.")


def test_remark_that_loses_nothing_passes() -> None:
    """Only what ptxas calls a loss, under whatever number, and the two numbers that are known to be one."""
    said = Resources(8, 0, 0, 0, ("(C7519) warpgroup.arrive is injected", "(C7599) Potential Performance Loss: new"))
    (fault,) = gates.forbidden("sm_90a", {"k": Measured(said, 32)})
    assert "C7599" in fault
    bare = Resources(8, 0, 0, 0, ("(C7508) reworded", "(C7510) reworded"))
    assert len(gates.forbidden("sm_90a", {"k": Measured(bare, 32)})) == 2


def test_log_without_what_is_looked_for_is_no_kernel_without_spills() -> None:
    with pytest.raises(AssertionError, match="ptxas printed no"):
        parse_resources(re.sub(r"\d+ bytes spill stores, \d+ bytes spill loads", "none", LOG))


def test_resources_of_a_real_log(tmp_path: Path) -> None:
    linear = kernel("linear.cu", "linear_forward", dtypes={"X_T": "float32", "W_T": "float32", "Y_T": "float32"})
    found = parse_resources(compile_cubin(linear, "sm_80", tmp_path).log)
    tiles = 2 * 17 * 64 * 4  # two tiles of 17 x 64 floats
    assert found[linear.symbol].shared_bytes == tiles and found[linear.symbol].registers > 32
    assert len(found) == 4 and not found[linear.symbol].remarks
