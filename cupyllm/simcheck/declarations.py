"""What the simulator's user calls things: kernels under their C++ names, parameters as the source declares them.

PTX has neither: extern "C" or not, a kernel is a symbol, and its parameters are numbered. The symbol's name is read
from its mangling (Itanium C++ ABI, 5.1: source names with their lengths), the parameters from the text of the
declaration. Names serve messages only; where the text is not plain C, say behind macros, there are none, and the types
are those of PTX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cupyllm.errors import InputError
from cupyllm.files import show_path

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.DOTALL)
_QUALIFIER = re.compile(r"\b(const|volatile|__restrict__|__restrict|struct|enum|typename|__grid_constant__)\b")
_FLOATING = {"float", "double", "half", "__half", "__nv_bfloat16", "nv_bfloat16"}
_INTEGER = re.compile(r"((unsigned|signed|long|short|int|char|bool)\s*)+|(std::)?(u?int\d+|size|ptrdiff|u?intptr)_t")
MAX_LISTED = 12


@dataclass(frozen=True)
class Declared:
    """A parameter as the source has it. kind: "pointer", "float", "integer", or "" where the type has another name."""

    name: str
    type: str
    kind: str


def find_kernel(wanted: str, symbols: Sequence[str], file: str) -> str:
    """The symbol of the kernel called `wanted` ("": the only one). Raises InputError that lists what is there."""
    if not symbols:
        raise InputError(
            f"{show_path(file)} defines no kernel, expected a __global__ function; a template needs an explicit "
            "instantiation"
        )
    if wanted in symbols:
        return wanted
    found = [symbol for symbol in symbols if wanted in ("", cpp_name(symbol), cpp_name(symbol).rpartition("::")[2])]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(_both_names(symbol) for symbol in (found or symbols)[:MAX_LISTED])
    shown += ", ..." if len(found or symbols) > MAX_LISTED else ""
    if not wanted:
        raise InputError(f"--kernel {show_path(file)} has {len(found)} kernels: {shown}; add :NAME of one of them")
    if found:
        raise InputError(f"--kernel {show_path(file)}:{wanted} fits {len(found)} kernels: {shown}; give one's symbol")
    raise InputError(f"--kernel {show_path(file)} has no kernel {wanted!r}, expected one of {shown}")


def cpp_name(symbol: str) -> str:
    """ "ns::scale" of "_ZN2ns5scaleEPf": the name without its parameters' types; any other symbol as it is."""
    if not symbol.startswith("_Z"):
        return symbol
    position, parts = 2, []
    nested = symbol.startswith("N", position)
    if nested:
        position += 1
    while match := re.compile(r"L?(\d+)").match(symbol, position):
        end = match.end() + int(match[1])
        parts.append(symbol[match.end() : end])
        position = end
        if not nested:
            break
    return "::".join(parts) or symbol


def declared(texts: Iterable[str], symbol: str, count: int) -> list[Declared] | None:
    """The `count` parameters of a kernel, when just one declaration with so many can be read."""
    name = cpp_name(symbol).rpartition("::")[2]
    found: list[list[Declared]] = []
    for text in texts:
        plain = _COMMENT.sub(" ", text)
        for start in (match.end() for match in re.finditer(r"\b__global__\b", plain)):
            head = re.match(rf"[^{{;]*?\b{re.escape(name)}\s*\(", plain[start:])
            if head is None:
                continue
            parameters = _parameters(plain[start + head.end() :])
            if parameters is not None and len(parameters) == count and parameters not in found:
                found.append(parameters)
    return found[0] if len(found) == 1 else None


def _parameters(text: str) -> list[Declared] | None:
    """What stands before the bracket that closes the list; `text` begins behind the opening one."""
    depth, parts, current = 0, [], ""
    for letter in text:
        if letter == ")" and depth == 0:
            break
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    else:
        return None
    if current.strip() not in ("", "void") or parts:
        parts.append(current)
    found = [_parameter(part) for part in parts]
    names = [parameter.name for parameter in found if parameter is not None]
    return [p for p in found if p is not None] if len(set(names)) == len(found) else None


def _parameter(text: str) -> Declared | None:
    text = text.partition("=")[0]
    match = re.fullmatch(r"\s*(.*[\s*&>])([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)", text, re.DOTALL)
    if match is None:
        return None
    kind = " ".join(_QUALIFIER.sub(" ", match[1]).split())
    if not kind:
        return None
    if "*" in kind or match[3].strip():
        return Declared(match[2], _pretty(match[1] + match[3]), "pointer")
    category = "float" if kind in _FLOATING else "integer" if _INTEGER.fullmatch(kind) else ""
    return Declared(match[2], _pretty(match[1]), category)


def _pretty(text: str) -> str:
    return re.sub(r"\s*\*", "*", " ".join(re.sub(r"\b__restrict(__)?\b", " ", text).split()))


def _both_names(symbol: str) -> str:
    name = cpp_name(symbol)
    return symbol if name == symbol else f"{name} ({symbol})"
