"""What the checker found, as lines a person can act on.

A report says what is wrong, in which kernel, CTA and thread, on which element, at which source line, and which other
access it collides with:

    race in shared memory: attention_forward_float32, CTA (1,0,0), thread (33,0,0) reads tile[12] at attention.cu:88,
    which thread (1,0,0) writes at attention.cu:80 with no barrier between

A mistake in a kernel is one line of CUDA that thousands of threads execute, so reports are merged by kind, instruction
and other instruction: the first occurrence is described, the rest are counted. The launch goes on after a report and
everything is raised together at its end. Stopping at the first one was rejected: one missing barrier shows as several
reports, and the set of them tells which barrier it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

from cupyllm.errors import BackendError
from cupyllm.sim.ptx import Location

LIMIT = 20

TITLES = {
    "out-of-bounds": "out of bounds",
    "misaligned": "misaligned access",
    "uninitialised-read": "uninitialised read",
    "race-between-ctas": "race between CTAs",
    "cp-async": "cp.async misuse",
    "divergent-barrier": "divergent barrier",
    "divergent-shuffle": "divergent shuffle",
    "budget": "budget exceeded",
}
SPACES = ("shared", "global", "local", "const")


class UnknownInstruction(BackendError):
    """An instruction that the simulator does not execute; `opcode` is its name, in full."""

    def __init__(self, opcode: str, site: Site | None = None) -> None:
        self.opcode = opcode
        at = "" if site is None else f", which {site.kernel} has at {site.location}"
        super().__init__(f"the simulator does not execute {opcode}{at}; run this kernel on a GPU")


class SimError(BackendError):
    """A launch that broke a rule of CUDA. `reports`: those kept; `total`: how many different ones there were."""

    def __init__(self, reports: tuple[Report, ...], total: int) -> None:
        self.reports = reports
        self.total = total
        lines = [str(report) for report in reports]
        if total > len(reports):
            lines.append(f"and {total - len(reports)} further reports")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, eq=False)
class Site:
    """One instruction that can be reported: a memory access, a barrier, a shuffle.

    text: the instruction; "" where the launch as a whole is meant. params, symbols: positions of the parameters and
    names of the variables that the address may derive from; None when the analysis cannot tell.
    """

    kernel: str
    text: str
    where: tuple[Location, ...]
    params: frozenset[int] | None = None
    symbols: frozenset[str] | None = None

    @property
    def opcode(self) -> str:
        """The instruction's name, predicate left out."""
        return next((word for word in self.text.split() if not word.startswith("@")), "")

    @property
    def location(self) -> str:
        """ "attention.cuh:88 (inlined at attention.cu:200)"; the instruction itself when it has no source line."""
        if not self.where:
            return f"`{self.text}`"
        inner, *outer = (f"{PurePosixPath(place.file).name}:{place.line}" for place in self.where)
        return f"{inner} (inlined at {', '.join(outer)})" if outer else inner

    @property
    def verb(self) -> str:
        """What the instruction does to its element, in the third person."""
        name, *parts = self.opcode.split(".")
        if name in ("ld", "ldu", "ldmatrix", "tex"):
            return "reads"
        if name in ("st", "stmatrix"):
            return "writes"
        if name in ("atom", "red"):
            return "updates"
        if name == "cp" and "async" in parts:
            return "copies"
        return "waits at" if name in ("bar", "barrier") else "executes"

    @property
    def space(self) -> str:
        """The state space that the opcode names, "" for a generic address."""
        found = (part.split("::")[0] for part in self.opcode.split("."))
        return next((space for space in found if space in SPACES), "")


@dataclass
class Report:
    """One finding, as of its first occurrence; `count` counts all of them. `cta` and `thread` are None if unknown."""

    kind: str
    site: Site
    cta: tuple[int, int, int] | None
    thread: tuple[int, int, int] | None
    what: str
    other: Site | None
    line: str
    count: int = 1

    def __str__(self) -> str:
        return self.line if self.count == 1 else f"{self.line} [{self.count} times]"


@dataclass
class Reports:
    """The reports of one launch: at most `limit` described, all of them counted.

    Rows and threads are those of the batch that begin() announced: row r is CTA first_cta + r, both count x fastest.
    """

    limit: int = LIMIT
    total: int = 0
    kept: list[Report] = field(default_factory=list)
    _seen: dict[tuple[str, frozenset[Site | None]], Report | None] = field(default_factory=dict)
    _grid: tuple[int, int, int] = (1, 1, 1)
    _block: tuple[int, int, int] = (1, 1, 1)
    _first_cta: int = 0

    def begin(self, grid: tuple[int, int, int], block: tuple[int, int, int], first_cta: int = 0) -> None:
        """A new batch of CTAs starts."""
        self._grid, self._block, self._first_cta = grid, block, first_cta

    def add(
        self,
        kind: str,
        site: Site,
        row: int | None = None,
        thread: int | None = None,
        what: str = "",
        *,
        detail: str = "",
        verb: str = "",
        space: str = "",
        other: Site | None = None,
        other_thread: int | None = None,
        other_cta: int | None = None,
        other_verb: str = "",
        count: int = 1,
    ) -> None:
        """One finding, or `count` of them, of which (row, thread) is the first.

        what: the element, such as "tile[12]"; what follows a first ", " is said behind the source line, as in "4 bytes,
        right after the end of tile". detail: a clause that ends the line. verb, space: where the instruction does not
        tell, say for cp.async, which reads one address and writes another. other_cta: linear, of the grid.
        """
        key = self._key(kind, site, other)
        if key in self._seen:
            report = self._seen[key]
            if report is not None:
                report.count += count
            return
        self.total += 1
        self._seen[key] = None
        if len(self.kept) >= self.limit:
            return
        cta = None if row is None else _position(self._first_cta + row, self._grid)
        place = None if thread is None else _position(thread, self._block)
        line = f"{_title(kind, site, space)}: {site.kernel}"
        line += "" if cta is None else f", CTA {_text(cta)}"
        line += "" if place is None else f", thread {_text(place)}"
        if site.text:
            element, comma, more = what.partition(", ")
            line += f" {verb or site.verb} {element or site.opcode} at {site.location}{comma}{more}"
        if other is not None:
            line += _tail(kind, self._who(other_thread, other_cta), other_verb or other.verb, other, not detail)
        line += f": {detail}" if detail else ""
        report = Report(kind, site, cta, place, what, other, line, count)
        self._seen[key] = report
        self.kept.append(report)

    def raise_if_any(self) -> None:
        """Raises SimError with what was found, and forgets it, so that the next launch starts anew."""
        if not self.total:
            return
        error = SimError(tuple(self.kept), self.total)
        self.kept, self.total, self._seen = [], 0, {}
        raise error

    def _key(self, kind: str, site: Site, other: Site | None) -> tuple[str, frozenset[Site | None]]:
        # Without order: a race of a load with a store is that of the store with the load.
        return kind, frozenset((site, other))

    def _who(self, thread: int | None, cta: int | None) -> str:
        parts = [] if cta is None else [f"CTA {_text(_position(cta, self._grid))}"]
        parts += [] if thread is None else [f"thread {_text(_position(thread, self._block))}"]
        return ", ".join(parts) or "another thread"


def _title(kind: str, site: Site, space: str) -> str:
    if kind == "race":
        return f"race in {space or site.space or 'generic'} memory"
    return TITLES.get(kind, kind.replace("-", " "))


def _tail(kind: str, who: str, verb: str, other: Site, bare: bool) -> str:
    """The other access to the same element; for a meeting of threads, where another one is meanwhile."""
    if kind.startswith("divergent"):
        return f", while {who} {verb} {other.opcode} at {other.location}"
    barrier = " with no barrier between" if kind == "race" and bare else ""
    return f", which {who} {verb} at {other.location}{barrier}"


def _position(index: int, size: tuple[int, int, int]) -> tuple[int, int, int]:
    """(x, y, z) of a linear index, x fastest."""
    return index % size[0], index // size[0] % size[1], index // (size[0] * size[1])


def _text(position: tuple[int, int, int]) -> str:
    return "({},{},{})".format(*position)
