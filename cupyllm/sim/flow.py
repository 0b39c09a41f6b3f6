"""What can be known of a kernel before it runs: blocks, where lanes must meet, what is live, where pointers come from.

Blocks are numbered in program order, and "lowest number first" is the order in which diverged lanes run (machine.py):
lanes that jumped ahead wait at the join while the others catch up. A block is cut into segments before every
instruction that lanes of a warp or a CTA execute together; a segment that starts with one is entered only by complete
groups.

Origins: an address derives from the parameters and variables whose values flow into it, followed through arithmetic and
moves without regard to order (a union over all definitions of a register). A value that was loaded may be an index, so
it adds nothing to an origin that is known; an address made of loaded values alone has an unknown one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cupyllm.sim.ptx import (
    Address,
    Instruction,
    Kernel,
    Label,
    Not,
    Pair,
    PtxError,
    Register,
    Symbol,
    Vector,
)

_MEETINGS = ("bar", "barrier", "shfl", "vote", "match", "redux", "elect", "mma", "ldmatrix", "stmatrix", "movmatrix")
_NO_RESULT = frozenset(
    "st red bra brx ret exit trap brkpt bar barrier membar fence cp prefetch prefetchu discard applypriority nanosleep "
    "pmevent stmatrix griddepcontrol".split()
)
EXIT = -1  # in place of a block: the lane ends
_LOADED = 1  # origin bit of values from memory


@dataclass
class Segment:
    """Instructions that a group of lanes runs without having to meet others on the way."""

    index: int
    block: int
    instructions: list[Instruction]
    live_after: frozenset[str] = frozenset()  # registers that something later may read

    @property
    def meeting(self) -> Instruction | None:
        """The instruction lanes must enter together, if the segment starts with one."""
        first = self.instructions[0] if self.instructions else None
        return first if first is not None and is_meeting(first) else None


@dataclass
class Block:
    """A straight run. `branch` is its last jump or return, which is not among the instructions."""

    index: int
    instructions: list[Instruction]
    branch: Instruction | None = None
    taken: int = EXIT  # block where `branch` leads
    following: int = EXIT  # block after it
    segments: list[int] = field(default_factory=list)

    @property
    def conditional(self) -> bool:
        return self.branch is not None and self.branch.predicate is not None

    def successors(self) -> Iterator[int]:
        if self.branch is None or self.conditional:
            yield self.following
        if self.branch is not None:
            yield self.taken


@dataclass
class Flow:
    """A kernel cut into blocks and segments, with the origins of its registers as bit sets (see `origin`)."""

    blocks: list[Block]
    segments: list[Segment]
    origins: dict[str, int]
    names: list[str | int]  # what each origin bit above _LOADED stands for: parameter number or variable name

    def origin(self, address: Address) -> tuple[frozenset[int] | None, frozenset[str] | None]:
        """(parameters, variables) that an address may derive from; (None, None) when that is unknown."""
        bits = self._bits(address.base)
        found = [name for i, name in enumerate(self.names) if bits >> (i + 1) & 1]
        if not found:
            return None, None
        params = frozenset(name for name in found if isinstance(name, int))
        return params, frozenset(name for name in found if isinstance(name, str))

    def _bits(self, operand: object) -> int:
        if isinstance(operand, Register):
            return self.origins.get(operand.name, 0)
        if isinstance(operand, Symbol) and operand.name in self.names:
            return 2 << self.names.index(operand.name)
        return 0


def is_meeting(instruction: Instruction) -> bool:
    """Whether lanes must execute it together."""
    opcode = instruction.opcode
    return opcode.split(".", 1)[0] in _MEETINGS and not opcode.startswith(("bar.arrive", "barrier.arrive"))


def analyse(kernel: Kernel, variables: Iterable[str]) -> Flow:
    """The flow of `kernel`; `variables` are the module's names. Raises PtxError on a jump that leads nowhere."""
    blocks = _blocks(kernel)
    segments = _segments(blocks)
    _liveness(blocks, segments)
    names: list[str | int] = [*range(len(kernel.parameters)), *(v.name for v in kernel.variables), *variables]
    return Flow(blocks, segments, _origins(kernel, names), names)


def sources(instruction: Instruction) -> Iterator[str]:
    """Registers that it reads, the guard and address bases included."""
    if instruction.predicate is not None:
        yield instruction.predicate.name
    first = 0 if instruction.opcode.split(".", 1)[0] in _NO_RESULT else 1
    for place, operand in enumerate(instruction.operands):
        if place >= first:
            yield from _registers(operand)
        elif isinstance(operand, Address):
            yield from _registers(operand)


def results(instruction: Instruction) -> Iterator[str]:
    """Registers that it writes."""
    if instruction.opcode.split(".", 1)[0] in _NO_RESULT or not instruction.operands:
        return
    yield from _registers(instruction.operands[0])


def _registers(operand: object) -> Iterator[str]:
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Not):
        yield from _registers(operand.operand)
    elif isinstance(operand, Address):
        yield from _registers(operand.base)
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from _registers(item)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)


def _is_branch(instruction: Instruction) -> bool:
    return instruction.opcode.split(".", 1)[0] in ("bra", "ret", "exit")


def _blocks(kernel: Kernel) -> list[Block]:
    leaders = {0, *kernel.labels.values()}
    leaders |= {i + 1 for i, instruction in enumerate(kernel.body) if _is_branch(instruction)}
    starts = sorted(start for start in leaders if start < len(kernel.body))
    at = {start: index for index, start in enumerate(starts)}
    blocks = []
    for index, start in enumerate(starts):
        stop = starts[index + 1] if index + 1 < len(starts) else len(kernel.body)
        body = kernel.body[start:stop]
        block = Block(index, body, following=index + 1 if index + 1 < len(starts) else EXIT)
        if body and _is_branch(body[-1]):
            block.instructions, block.branch = body[:-1], body[-1]
            block.taken = _target(kernel, body[-1], at)
        blocks.append(block)
    return blocks


def _target(kernel: Kernel, branch: Instruction, at: dict[int, int]) -> int:
    if not branch.opcode.startswith("bra"):
        return EXIT
    label = branch.operands[0]
    name = label.name if isinstance(label, (Label, Symbol)) else None
    if name not in kernel.labels:
        raise PtxError(f"{kernel.name}: {branch.text} jumps to a label that is not there")
    return at.get(kernel.labels[name], EXIT)  # a label at the very end: the kernel returns


def _segments(blocks: list[Block]) -> list[Segment]:
    segments: list[Segment] = []
    for block in blocks:
        runs: list[list[Instruction]] = [[]]
        for instruction in block.instructions:
            if is_meeting(instruction) and (runs[-1] or len(runs) > 1):
                runs.append([])
            runs[-1].append(instruction)
        for run in runs:
            block.segments.append(len(segments))
            segments.append(Segment(len(segments), block.index, run))
    return segments


def _liveness(blocks: list[Block], segments: list[Segment]) -> None:
    """Fill `live_after`. Backward data flow, registers as bits of an int."""
    bit: dict[str, int] = {}

    def mask(names: Iterable[str]) -> int:
        total = 0
        for name in names:
            total |= 1 << bit.setdefault(name, len(bit))
        return total

    used, defined, follow = [], [], []
    for segment in segments:
        block = blocks[segment.block]
        reads = writes = 0
        for instruction in segment.instructions:
            reads |= mask(sources(instruction)) & ~writes
            wrote = mask(results(instruction))
            if instruction.predicate is not None:
                reads |= wrote & ~writes  # it may leave the old value
            writes |= wrote
        if segment.index == block.segments[-1]:
            reads |= (mask(sources(block.branch)) & ~writes) if block.branch is not None else 0
            follow.append([blocks[b].segments[0] for b in block.successors() if b != EXIT])
        else:
            follow.append([segment.index + 1])
        used.append(reads)
        defined.append(writes)
    live = list(used)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(segments))):
            after = 0
            for successor in follow[i]:
                after |= live[successor]
            now = used[i] | after & ~defined[i]
            if now != live[i]:
                live[i], changed = now, True
    names = list(bit)
    for i, segment in enumerate(segments):
        after = 0
        for successor in follow[i]:
            after |= live[successor]
        segment.live_after = frozenset(names[b] for b in _bits(after))


def _bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def _origins(kernel: Kernel, names: list[str | int]) -> dict[str, int]:
    place: dict[str | int, int] = {name: 2 << i for i, name in enumerate(names)}
    for number, parameter in enumerate(kernel.parameters):
        place[parameter.name] = 2 << number
    origins: dict[str, int] = {}
    edges: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for instruction in kernel.body:
        targets = tuple(results(instruction))
        if not targets:
            continue
        stem = instruction.opcode.split(".", 1)[0]
        constant = 0
        reads: tuple[str, ...] = ()
        if stem in ("ld", "ldu", "atom", "ldmatrix") and ".param" not in instruction.opcode:
            constant = _LOADED
        elif stem in ("setp", "set"):
            continue
        else:
            reads = tuple(sources(instruction))
            for operand in instruction.operands[1:]:
                constant |= _symbols(operand, place)
        for target in targets:
            origins[target] = origins.get(target, 0) | constant
        if reads:
            edges.append((targets, reads))
    changed = True
    while changed:
        changed = False
        for targets, reads in edges:
            flowing = 0
            for register in reads:
                flowing |= origins.get(register, 0)
            for target in targets:
                now = origins.get(target, 0) | flowing
                if now != origins.get(target, 0):
                    origins[target], changed = now, True
    return origins


def _symbols(operand: object, place: dict[str | int, int]) -> int:
    if isinstance(operand, Symbol):
        return place.get(operand.name, 0)
    if isinstance(operand, Address):
        return _symbols(operand.base, place)
    if isinstance(operand, Vector):
        total = 0
        for item in operand.items:
            total |= _symbols(item, place)
        return total
    return 0
