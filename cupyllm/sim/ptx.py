"""What a PTX module consists of: kernels, their parameters, variables and instructions, with source lines.

parse() reads what NVRTC and inline assembly write: one entry per kernel, braces inside a body for inline assembly and
call sequences, no device functions (they are skipped; a call to one stays an instruction, for the translator to refuse
by name). cupyllm/sim/ptx_parser.py does it, cupyllm/sim/ptx_values.py has the literals and declarations.

Names declared inside braces come out as name.N with N the braces' number in the kernel, so that every register, label
and variable of a kernel has a name of its own; a dot occurs in no name of PTX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from cupyllm.errors import BackendError

TYPE_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8", "pred"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
    "b128": 16,
}


class PtxError(BackendError):
    """Text that is not PTX, or PTX that is not handled. The message has what, the line's number and its text."""


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """%tid.x, %laneid, %clock64, ..."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. raw: a float's bits, 32 of them for the 0f form, 64 for 0d and decimals; None for an integer."""

    text: str
    value: int | float
    raw: int | None = None


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable or parameter, or the name of a function, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]; coordinates are those of a tensor access, [map, {x, y}]."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: Vector | None = None


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, _} or a call's (a, b); None is the sink."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True, slots=True)
class Not:
    operand: Register


@dataclass(frozen=True, slots=True)
class Pair:
    """The destinations p|q; None is the sink."""

    first: Register | None
    second: Register | None


@dataclass(frozen=True, slots=True)
class Label:
    name: str


Operand: TypeAlias = "Register | Special | Immediate | Symbol | Address | Vector | Not | Pair | Label"


@dataclass(frozen=True, slots=True)
class Location:
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """where: innermost position first, then the call sites outwards. An operand is None where it is the sink `_`."""

    opcode: str
    operands: tuple[Operand | None, ...]
    predicate: Register | None
    negated: bool
    where: tuple[Location, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    type: str
    offset: int
    nbytes: int
    align: int


@dataclass(frozen=True, slots=True)
class Variable:
    """initial: None without an initialiser, which for global and const means zeros.

    nbytes is 0 for an extern array, dynamic shared memory. addresses: (byte, symbol) pairs of an initialiser that holds
    addresses; those bytes of `initial` are zero.
    """

    name: str
    space: str
    align: int
    nbytes: int
    initial: bytes | None
    element_bytes: int
    addresses: tuple[tuple[int, Symbol], ...] = ()


@dataclass
class Kernel:
    """registers: name -> declared type. labels: name -> index in body of the instruction that follows.

    variables: the kernel's shared and local ones, and the module's shared ones that it names.
    """

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    max_threads: int | None = None


@dataclass
class Module:
    """variables: the global and const ones."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    target: str = ""


def parse(text: str) -> Module:
    """The module that `text` holds. Raises PtxError."""
    from cupyllm.sim.ptx_parser import Parser  # which needs the classes above

    return Parser(text).parse()
