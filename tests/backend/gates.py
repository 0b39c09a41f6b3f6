"""The compile gates: what every kernel takes on every target, and what must not be taken.

resources.txt has one row a kernel and one column a target: registers a thread / bytes of static shared memory a block,
and the stack frame and the spills, the most of any target. A kernel is named by its file, its symbol (which holds the
dtypes) and the macros beyond dtypes. Columns have fixed widths and names come last, so that a changed kernel is one
changed line and a long name moves no other.

What a kernel may not have at all (a spill, a stack frame, work that ptxas says it lost) fails with any compiler.
Growth over the table is judged with the NVRTC version that made it: another allocates registers differently (13.5 takes
more than 12.9 in 39 of 322 cases on sm_80 and sm_90a). A table a version was rejected, since CI runs only one of them.
With another version the tests fail, so that growth is never left unjudged in silence.

CI compiles every kernel for sm_80 and sm_90a and, for the others (RELATIVES), of each symbol of a file the kernel that
takes most registers there by the table: the likeliest one to spill. The script compiles all for all.

Shared memory over the 48 KB that a block may have without asking needs no gate: ptxas refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cupyllm.backend.base import CTYPE, KernelSpec
from cupyllm.backend.compile import ARCHITECTURES, compile_pairs
from cupyllm.backend.resources import Resources, parse_resources
from tests.backend.every_kernel import Use, every_kernel
from tests.hostcuda.build import cache_folder

TABLE = Path(__file__).with_name("resources.txt")
REGENERATE = "run python scripts/make_resource_table.py"
BLOCK_REGISTERS = 65536  # on every target
REGISTER_UNIT = 8  # a thread's registers are allocated in eights
RELATIVES = ("sm_86", "sm_89", "sm_100", "sm_120", "sm_121")  # given the same instructions as sm_80, and none besides

_CELL, _TOTAL = 11, 7  # widths of columns
_HEADER = """\
# What every kernel takes on every target, by NVRTC {}.{}: registers a thread / bytes of static shared memory a block;
# stack frame and spills in bytes a thread, the most of any target. Made by scripts/make_resource_table.py, judged by
# tests/backend/test_gates.py: a kernel that takes more fails.
"""


@dataclass(frozen=True)
class Row:
    """What a kernel may take. A target that it is not compiled for has no cell."""

    cells: dict[str, tuple[int, int]]  # architecture -> registers, shared bytes
    stack_bytes: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True)
class Table:
    nvrtc: tuple[int, int]
    rows: dict[str, Row]  # by kernel name


@dataclass(frozen=True)
class Measured:
    resources: Resources
    threads: int  # of the largest block it is launched with


def capability(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def name(spec: KernelSpec) -> str:
    """As in the table: attention.cu attention_forward_float32 HEAD_DIM=128."""
    types = set(CTYPE.values())
    macros = [f"{macro}={value}" for macro, value in spec.defines if macro != "SUFFIX" and value not in types]
    return " ".join([Path(spec.source).name, spec.symbol, *macros])


def everything() -> dict[str, dict[KernelSpec, Use]]:
    """Per target, the kernels that a launcher may ask for on it."""
    return {arch: every_kernel(capability(arch)) for arch in ARCHITECTURES}


def largest(table: Table) -> dict[str, dict[KernelSpec, Use]]:
    """What CI compiles: `everything`, but for RELATIVES only what takes most registers of each symbol of a file."""
    asked = everything()
    for arch in RELATIVES:
        most: dict[tuple[str, str], tuple[int, KernelSpec]] = {}
        for spec in asked[arch]:
            row = table.rows.get(name(spec))
            registers = BLOCK_REGISTERS if row is None or arch not in row.cells else row.cells[arch][0]
            key = (spec.source, spec.symbol)
            if key not in most or registers > most[key][0]:
                most[key] = (registers, spec)
        asked[arch] = {spec: asked[arch][spec] for _, spec in most.values()}
    return asked


def cubins() -> Path:
    """Where compiled kernels stay between test runs; keyed by content, so a hit is as good as a compilation."""
    folder = cache_folder() / "cubins"
    folder.mkdir(exist_ok=True)
    return folder


def measure(uses: Mapping[str, Mapping[KernelSpec, Use]], folder: Path) -> dict[str, dict[str, Measured]]:
    """Per target, compile kernels or take them from the cache in `folder`; the answer is by kernel name.

    All targets at once, since one pool of compiling processes keeps every core busy to the end. Raises BackendError
    when a kernel does not compile.
    """
    built = compile_pairs([(spec, arch) for arch, kernels in uses.items() for spec in kernels], folder)
    found: dict[str, dict[str, Measured]] = {arch: {} for arch in uses}
    for (spec, arch), cubin in built.items():
        kernel = name(spec)
        assert kernel not in found[arch], f"two kernels are called {kernel}; tell them apart by a macro or a symbol"
        found[arch][kernel] = Measured(parse_resources(cubin.log)[spec.symbol], uses[arch][spec].threads)
    return found


# ---- judging ----


def forbidden(arch: str, found: Mapping[str, Measured]) -> list[str]:
    """What no kernel may have, whatever the table says."""
    faults = []
    for kernel, measured in found.items():
        took, head = measured.resources, f"{kernel} for {arch}"
        if took.spill_bytes:
            faults.append(
                f"{head}: {took.spill_bytes} bytes of spills, expected none; keep fewer values alive, or bound "
                "the block smaller in __launch_bounds__"
            )
        if took.stack_bytes:
            faults.append(
                f"{head}: a stack frame of {took.stack_bytes} bytes, expected none; index local arrays by constants "
                "(unrolled loops) only, and inline the functions that it calls"
            )
        for remark in took.remarks:
            if "Potential Performance Loss" in remark or remark.startswith(("(C7508)", "(C7510)")):
                faults.append(
                    f"{head}: ptxas says of it, or of a kernel beside it: {remark!r}, expected nothing; setmaxnreg "
                    "needs __launch_bounds__(threads, 1), wgmma no call or assert and no other use of its "
                    "accumulators before the wait"
                )
        allocated = _round_up(measured.threads, 32) * _round_up(took.registers, REGISTER_UNIT)
        if allocated > BLOCK_REGISTERS:
            faults.append(
                f"{head}: {took.registers} registers for each of {measured.threads} threads, expected at most "
                f"{BLOCK_REGISTERS} a block; add __launch_bounds__({measured.threads})"
            )
    return faults


def grown(arch: str, found: Mapping[str, Measured], table: Table) -> list[str]:
    """Kernels that take more than their row. Those without a row are `uncovered`'s."""
    faults = []
    for kernel, measured, registers, shared_bytes in _with_rows(arch, found, table):
        took = measured.resources
        for what, got, limit in (
            ("registers", took.registers, registers),
            ("bytes of shared memory", took.shared_bytes, shared_bytes),
        ):
            if got > limit:
                faults.append(
                    f"{kernel} for {arch}: {got} {what}, expected at most {limit} ({TABLE.name}); make it smaller, or "
                    f"{REGENERATE} and say in the commit what the growth buys"
                )
    return faults


def shrunk(arch: str, found: Mapping[str, Measured], table: Table) -> list[str]:
    """Kernels for which the table allows notably more than they take: another unit of registers, or shared memory."""
    notes = []
    for kernel, measured, registers, shared_bytes in _with_rows(arch, found, table):
        took = measured.resources
        fewer = _round_up(took.registers, REGISTER_UNIT) < _round_up(registers, REGISTER_UNIT)
        if fewer or took.shared_bytes < shared_bytes:
            notes.append(
                f"{kernel} for {arch}: {took.registers} registers and {took.shared_bytes} bytes of shared memory, "
                f"{TABLE.name} allows {registers} and {shared_bytes}; {REGENERATE} to keep what was won"
            )
    return notes


def uncovered(asked: Mapping[str, Iterable[str]], table: Table) -> list[str]:
    """Kernels without a row or cell, and rows and cells without a kernel. `asked`: architecture -> kernel names."""
    have = {kernel: list(row.cells) for kernel, row in table.rows.items()}
    want: dict[str, list[str]] = {}
    for arch, kernels in asked.items():
        for kernel in kernels:
            want.setdefault(kernel, []).append(arch)
    faults = []
    for kernel in sorted(have.keys() | want.keys()):
        has, wants = have.get(kernel, []), want.get(kernel, [])
        if missing := [arch for arch in wants if arch not in has]:
            faults.append(
                f"{kernel} for {', '.join(missing)}: not in {TABLE.name}, expected a row with a figure for every "
                f"target; {REGENERATE}"
            )
        if stale := [arch for arch in has if arch not in wants]:
            faults.append(
                f"{kernel} for {', '.join(stale)}: {TABLE.name} has it, expected no row or figure, since no launcher "
                f"asks for it; {REGENERATE}"
            )
    faults += [
        f"{kernel}: its row in {TABLE.name} allows {row.stack_bytes} bytes of stack and {row.spill_bytes} of spills, "
        "expected none; take them out of the kernel"
        for kernel, row in sorted(table.rows.items())
        if row.stack_bytes or row.spill_bytes
    ]
    return faults


def other_version(table: Table, version: tuple[int, int]) -> list[str]:
    """A fault when growth cannot be judged, since NVRTC is not the table's."""
    if table.nvrtc == version:
        return []
    made, got = (".".join(map(str, numbers)) for numbers in (table.nvrtc, version))
    return [
        f"NVRTC {got} is installed, expected {made}, which made {TABLE.name}: growth of kernels was not judged; "
        f"install the nvidia-cuda-nvrtc wheel of version {made}, or {REGENERATE}"
    ]


# ---- the file ----


def read(text: str) -> Table:
    """Raises ValueError for a table that render() did not write."""
    version = re.search(r"NVRTC (\d+)\.(\d+)", text)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if version is None or not lines:
        raise ValueError(f"{TABLE.name} has no NVRTC version or no rows; {REGENERATE}")
    *archs, _stack, _spills, _kernel = lines[0].split()
    rows: dict[str, Row] = {}
    for line in lines[1:]:
        match = re.fullmatch(rf"((?:(?:\d+/\d+|-) +){{{len(archs)}}})(\d+) +(\d+) +(.+)", line)
        if match is None:
            raise ValueError(f"{TABLE.name}: {line!r} is no row of {len(archs)} targets; {REGENERATE}")
        cells, stack_bytes, spill_bytes, kernel = match.groups()
        if kernel in rows:
            raise ValueError(f"{kernel}: {TABLE.name} has two rows of this name, expected one; {REGENERATE}")
        figures = {arch: cell.split("/") for arch, cell in zip(archs, cells.split(), strict=True) if cell != "-"}
        taken = {arch: (int(registers), int(shared)) for arch, (registers, shared) in figures.items()}
        rows[kernel] = Row(taken, int(stack_bytes), int(spill_bytes))
    return Table((int(version[1]), int(version[2])), rows)


def render(table: Table) -> str:
    """The file, kernels in alphabetical order."""
    titles = "".join(arch.ljust(_CELL) for arch in ARCHITECTURES)
    lines = [f"{titles}{'stack'.ljust(_TOTAL)}{'spills'.ljust(_TOTAL)}kernel"]
    for kernel, row in sorted(table.rows.items(), key=lambda item: _natural(item[0])):
        cells = "".join(
            ("{}/{}".format(*row.cells[arch]) if arch in row.cells else "-").ljust(_CELL) for arch in ARCHITECTURES
        )
        lines.append(f"{cells}{str(row.stack_bytes).ljust(_TOTAL)}{str(row.spill_bytes).ljust(_TOTAL)}{kernel}")
    return _HEADER.format(*table.nvrtc) + "\n".join(lines) + "\n"


def tabulate(found: Mapping[str, Mapping[str, Measured]], version: tuple[int, int]) -> Table:
    """The table of what was measured. `found`: architecture -> kernel name -> figures."""
    rows: dict[str, Row] = {}
    for arch, kernels in found.items():
        for kernel, measured in kernels.items():
            took, row = measured.resources, rows.get(kernel, Row({}))
            rows[kernel] = Row(
                {**row.cells, arch: (took.registers, took.shared_bytes)},
                max(row.stack_bytes, took.stack_bytes),
                max(row.spill_bytes, took.spill_bytes),
            )
    return Table(version, rows)


def _with_rows(arch: str, found: Mapping[str, Measured], table: Table) -> Iterable[tuple[str, Measured, int, int]]:
    for kernel, measured in found.items():
        row = table.rows.get(kernel)
        if row is not None and arch in row.cells:
            yield kernel, measured, *row.cells[arch]


def _natural(kernel: str) -> list[str]:
    """HEAD_DIM=16 before HEAD_DIM=128."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", kernel)]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
