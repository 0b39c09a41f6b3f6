"""Kernels with one planted fault each, and their clean siblings: what the checker must report, and where.

The text of a kernel says it all. PICK(a, b) is `a` in the faulty kernel and `b` in its sibling, FIX(text) is there in
the sibling only. `// <- kind` marks each line that the report must name; every kernel has at least one. Above the
kernel stands its launch:

    //@ grid 2, block 64, shared 512: in 64, hole 64 from 48, out 8x64, ids 64 of 4, zeros 8, counts 8, int 3, null

in: random floats; hole: the same, never written from an element on; out: floats never written; ids: integers 1, 2, ..
modulo the number; zeros: floats; counts: integers, all 0; freed: memory given back before. Sizes are exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupyllm.backend.base import Argument, KernelSpec, Launch, Spec
from cupyllm.backend.eager import Session
from cupyllm.backend.sim import SimBackend

FOLDER = Path(__file__).parent
FILES = ("memory.cu", "races.cu", "copies.cu", "meetings.cu", "loops.cu")

_KERNEL = re.compile(r"^//@ (?P<launch>[^:\n]+): (?P<args>[^\n]+)\nKERNEL\((?P<name>\w+)\)", re.M)
_MARK = re.compile(r"// <- ([\w-]+)$")
_MACROS = {True: (("PICK(a, b)", "a"), ("FIX(...)", "")), False: (("PICK(a, b)", "b"), ("FIX(...)", "__VA_ARGS__"))}


@dataclass(frozen=True)
class Planted:
    """A faulty kernel and how it is launched. `lines`: those that its reports must name."""

    file: str
    name: str
    kind: str
    lines: tuple[int, ...]
    grid: int
    block: int
    shared_bytes: int
    args: tuple[str, ...]

    def spec(self, faulty: bool) -> KernelSpec:
        return KernelSpec(str(FOLDER / self.file), self.name, _MACROS[faulty])

    def launch(self, session: Session, faulty: bool) -> Launch:
        args = tuple(_argument(session, text) for text in self.args)
        grid, block = (self.grid, 1, 1), (self.block, 1, 1)
        return Launch(self.spec(faulty), grid, block, args, self.shared_bytes, self.name)


def planted() -> list[Planted]:
    """All of them, in the order of the files."""
    return [kernel for file in FILES for kernel in _read(file)]


def _read(file: str) -> list[Planted]:
    text = (FOLDER / file).read_text()
    heads = list(_KERNEL.finditer(text))
    assert len(heads) == text.count("\nKERNEL("), f"{file}: a kernel without its launch"
    found = []
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
        first = text.count("\n", 0, head.start()) + 1
        body = text[head.start() : end].split("\n")
        marks = {first + i: mark[1] for i, line in enumerate(body) if (mark := _MARK.search(line))}
        kinds = set(marks.values())
        assert len(kinds) == 1, f"{file}: {head['name']} has marks {marks}, expected one kind"
        numbers = {key: int(value) for key, value in (part.split() for part in head["launch"].split(", "))}
        assert numbers.keys() <= {"grid", "block", "shared"}, head["launch"]
        found.append(
            Planted(
                *(file, head["name"], kinds.pop(), tuple(marks)),
                *(numbers["grid"], numbers["block"], numbers.get("shared", 0)),
                tuple(head["args"].split(", ")),
            )
        )
    return found


def run(backend: SimBackend, kernel: Planted, faulty: bool) -> None:
    """Launch it once on arrays of its own. Raises SimError with what is found."""
    with Session(backend) as session:
        backend.run(backend.load([kernel.launch(session, faulty)]))


def _argument(session: Session, text: str) -> Argument:
    kind, *rest = text.split()
    if kind == "null":
        return None
    if kind == "int":
        return int(rest[0])
    shape = tuple(int(n) for n in rest[0].split("x"))
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    if kind == "out":
        return session.empty(Spec(shape, "float32"), text)
    if kind == "ids":
        return session.put((np.arange(1, shape[0] + 1) % int(rest[2])).astype(np.int32), text)
    if kind in ("zeros", "counts"):
        return session.put(np.zeros(shape, np.float32 if kind == "zeros" else np.int32), text)
    if kind == "freed":
        with Session(session.backend) as other:
            return other.put(values, text)
    if kind == "hole":
        tensor = session.empty(Spec(shape, "float32"), text)
        session.backend.upload(tensor.address, values[: int(rest[2])])
        return tensor
    assert kind == "in", text
    return session.put(values, text)
