"""Write tests/backend/resources.txt: registers and shared memory of every kernel on every target.

    python scripts/make_resource_table.py

Compiles what the tests' cache has not got (a minute or two), prints what changed, and writes the table. A kernel that
spills, has a stack frame or lost performance by ptxas's own word is not put into a table: exit status 1, nothing
written. See tests/backend/gates.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupyllm.backend import nvrtc
from cupyllm.errors import CupyllmError
from tests.backend import gates


def changes(old: gates.Table | None, new: gates.Table) -> list[str]:
    """One line a kernel that is new, gone or takes something else."""
    before = {} if old is None else old.rows
    lines = [] if old is None or old.nvrtc == new.nvrtc else ["NVRTC {}.{} -> {}.{}".format(*old.nvrtc, *new.nvrtc)]
    for kernel in sorted(before.keys() | new.rows.keys()):
        if kernel not in new.rows:
            lines.append(f"gone     {kernel}")
        elif kernel not in before:
            lines.append(f"new      {kernel}: {_figures(new.rows[kernel].cells)}")
        elif before[kernel] != new.rows[kernel]:
            lines.append(f"changed  {kernel}: {_difference(before[kernel].cells, new.rows[kernel].cells)}")
    return lines


def main() -> int:
    try:
        found = gates.measure(gates.everything(), gates.cubins())
        version = nvrtc.version()
    except CupyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    faults = [fault for arch, kernels in found.items() for fault in gates.forbidden(arch, kernels)]
    if faults:
        print("\n".join([*faults, f"{gates.TABLE} was not written"]), file=sys.stderr)
        return 1
    try:
        old = gates.read(gates.TABLE.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        print(f"compared with nothing: {error}")
        old = None
    new = gates.tabulate(found, version)
    lines = changes(old, new)
    print("\n".join([*lines, f"{len(new.rows)} kernels, {len(lines)} changes: {gates.TABLE}"]))
    gates.TABLE.write_text(gates.render(new), encoding="utf-8")
    return 0


def _figures(cells: dict[str, tuple[int, int]]) -> str:
    return ", ".join("{} {}/{}".format(arch, *cell) for arch, cell in cells.items())


def _difference(old: dict[str, tuple[int, int]], new: dict[str, tuple[int, int]]) -> str:
    parts = []
    for arch in dict.fromkeys([*old, *new]):
        if old.get(arch) != new.get(arch):
            before, after = ("/".join(map(str, cells[arch])) if arch in cells else "-" for cells in (old, new))
            parts.append(f"{arch} {before} -> {after}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
