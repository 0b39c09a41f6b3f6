"""Literals and declarations of PTX: what a number means, how large a variable is and what it starts with."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from math import prod
from typing import NamedTuple

from cupyllm.sim.ptx import TYPE_BYTES, Immediate, Operand, Symbol, Variable

SPACES = ("shared", "local", "global", "const", "param")

_ATTRIBUTES = re.compile(r"((?:\.align\s+\d+\s+|\.attribute\([^)]*\)\s*|\.(?!align\b)\w+\s+)+)([%\w$].*)\Z", re.DOTALL)
_DECLARATOR = re.compile(r"\s*([%\w$]+)\s*(<\s*\d+\s*>)?((?:\s*\[\s*\w*\s*\])*)\s*(?:=\s*(.*?)\s*)?\Z", re.DOTALL)
_SIZE = re.compile(r"\[\s*(\w*)\s*\]")
_GENERIC = re.compile(r"generic\s*\(\s*([\w$]+)\s*\)(.*)\Z", re.DOTALL)
_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)U?\Z")
_FLOAT = re.compile(r"0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))\Z")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?\Z|-?\d+[eE][-+]?\d+\Z")


class Malformed(Exception):
    """A text that is not what it should be; the parser adds the line and makes it a PtxError."""


def integer(text: str) -> int:
    """Decimal, 0x, 0b or octal, with a sign and a U or without."""
    parts = _INTEGER.match(text)
    if parts is None:
        raise Malformed(f"not a number: {quote(text)}")
    digits = parts[2]
    octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
    value = int(digits, 8) if octal else int(digits, 0)
    return -value if parts[1] else value


def immediate(text: str) -> Immediate:
    number = _FLOAT.match(text)
    if number is not None:
        raw = int(number[1] or number[2], 16)
        code, size = (">f", 4) if number[1] else (">d", 8)
        return Immediate(text, struct.unpack(code, raw.to_bytes(size, "big"))[0], raw)
    if _DECIMAL.match(text):
        value = float(text)
        return Immediate(text, value, struct.unpack(">Q", struct.pack(">d", value))[0])
    return Immediate(text, integer(text))


class Declaration(NamedTuple):
    """`.shared .align 16 .b8 a[4]`: the words before the names, and the names with what follows them."""

    words: list[str]
    rest: str

    @property
    def type(self) -> str:
        kind = next((word[1:] for word in reversed(self.words) if word[1:] in TYPE_BYTES), None)
        if kind is None:
            raise Malformed("a declaration without a type that is handled")
        return kind

    @property
    def space(self) -> str:
        space = next((word[1:] for word in self.words if word[1:] in SPACES), None)
        if space is None:
            raise Malformed(f"a declaration that is not handled: {self.words[0]}")
        return space


_JOINED = re.compile(r"^\.(reg|shared|local|global|const|param)\.")  # `.reg.b32 x`, as CUDA's own headers write it


def declaration(text: str) -> Declaration:
    parts = _ATTRIBUTES.match(_JOINED.sub(r".\1 .", text.strip()))
    if parts is None:
        raise Malformed("not a declaration")
    return Declaration(parts[1].split(), parts[2])


def registers(declared: Declaration) -> list[str]:
    """The names of a .reg, `%r<4>` written out."""
    if ".v2" in declared.words or ".v4" in declared.words:
        raise Malformed("vector registers are not handled")
    names: list[str] = []
    for item in declared.rest.split(","):
        parts = _DECLARATOR.match(item)
        if parts is None or parts[3] or parts[4] is not None:
            raise Malformed(f"not a register: {quote(item)}")
        if parts[2]:
            names.extend(f"{parts[1]}{number}" for number in range(int(parts[2][1:-1])))
        else:
            names.append(parts[1])
    return names


def variables(declared: Declaration, operand: Callable[[str], Operand | None]) -> list[Variable]:
    """The variables of one declaration; `operand` resolves the names in an initialiser."""
    rest = declared.rest
    return [variable(declared, item, operand) for item in ([rest] if "=" in rest else rest.split(","))]


def variable(declared: Declaration, text: str, operand: Callable[[str], Operand | None]) -> Variable:
    parts = _DECLARATOR.match(text)
    if parts is None or parts[2]:
        raise Malformed(f"not a variable: {quote(text)}")
    words, space, kind = declared.words, declared.space, declared.type
    element = TYPE_BYTES[kind]
    width = next((int(word[2:]) for word in words if word in (".v2", ".v4")), 1)
    align = element * width
    if ".align" in words and ".ptr" not in words:  # a pointer's .align says what it points to
        align = int(words[words.index(".align") + 1])
    values = [] if parts[4] is None else [item.strip() for item in re.sub("[{}]", "", parts[4]).split(",")]
    sizes = _SIZE.findall(parts[3])
    count = prod(integer(size) for size in sizes if size) * width
    if "" in sizes:
        count *= -(-len(values) // max(count, 1))
    initial, addresses = (None, ()) if parts[4] is None else _initial(values, kind, count, operand)
    return Variable(parts[1], space, align, count * element, initial, element * width, addresses)


def _initial(
    values: list[str], kind: str, count: int, operand: Callable[[str], Operand | None]
) -> tuple[bytes, tuple[tuple[int, Symbol], ...]]:
    """The bytes that `count` elements start with, and where addresses go in them."""
    if len(values) > count:
        raise Malformed(f"{len(values)} values for {count} elements")
    element = TYPE_BYTES[kind]
    data = bytearray(element * count)
    addresses = []
    for start, text in zip(range(0, len(data), element), values, strict=False):
        generic = _GENERIC.match(text)
        value = operand(generic[1] + generic[2].strip() if generic else text)
        if isinstance(value, Symbol):
            addresses.append((start, value))
        elif isinstance(value, Immediate):
            data[start : start + element] = _bytes(value, kind, element)
        else:
            raise Malformed(f"not an initial value: {quote(text)}")
    return bytes(data), tuple(addresses)


def _bytes(value: Immediate, kind: str, nbytes: int) -> bytes:
    """A literal as a variable stores it, little-endian. A float in its own width keeps its bits."""
    single = value.text[:2] in ("0f", "0F")
    if kind in ("f32", "f64") and (value.raw is None or single != (kind == "f32")):
        return struct.pack("<f" if kind == "f32" else "<d", value.value)
    number = value.value if value.raw is None else value.raw
    return (int(number) & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")


def quote(text: str) -> str:
    return f"'{' '.join(text.split())}'"
