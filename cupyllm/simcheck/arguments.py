"""The arguments of a kernel that a user asks to check, as text: what sim-check's --args and --arg take.

    argument  =  [NAME=] value
    value     =  TYPE[SHAPE] [: fill]      an array, "f32[64,128]", "i32[64]:random:10", "f32[8]:empty"
              |  FILE.npy                  an array as numpy.save wrote it
              |  @NAME                     the same array as another argument: in place
              |  NUMBER | TYPE : NUMBER    "64", "1e-6", "f16:0.5"; without a type, of the parameter's
              |  null
    fill      =  random [: N] | empty | zeros | ones | arange | NUMBER | FILE.npy

`empty` was never written: a kernel that reads it before it writes it is reported. random is normal for floats and
uniform in [0, N) for integers. Without a fill floats are random, and integers 0, since they tend to be indices.
A named argument goes to the parameter of that name, the others in order to those that are left.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cupyllm.errors import InputError, OutOfMemory
from cupyllm.files import read_regular, show_path, why_missing
from cupyllm.hostmem import available_bytes
from cupyllm.sim.ptx import Parameter
from cupyllm.simcheck.declarations import Declared

DTYPES: dict[str, np.dtype[Any]] = {
    **{
        f"{letter}{8 * n}": np.dtype(f"{letter}{n}")
        for letter in "iuf"
        for n in (1, 2, 4, 8)
        if (letter, n) != ("f", 1)
    },
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
_SHORT = {dtype: name for name, dtype in DTYPES.items()}
_LONG = {dtype.name: name for name, dtype in DTYPES.items()}
_SIXTEEN = {"half": "f16", "__half": "f16", "__nv_bfloat16": "bf16", "nv_bfloat16": "bf16"}
_SCALE = 3  # bytes of memory that a byte of an array takes: the host's, the device's, and what is known of it
GRAMMAR = "an array (f32[64,128], f32[64]:empty, x.npy), a number (64, 1e-6, f16:0.5), @NAME or null"
FILLS = "random, random:N, empty, zeros, ones, arange, a number or FILE.npy"


@dataclass(frozen=True)
class Array:
    """dtype: a key of DTYPES."""

    dtype: str
    shape: tuple[int, ...]
    fill: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Same:
    """The array of another argument."""

    target: str


@dataclass(frozen=True)
class Scalar:
    """dtype: a key of DTYPES, or "" for the parameter's."""

    text: str
    dtype: str = ""


@dataclass(frozen=True)
class Given:
    """One argument as written. name: "" where none was given."""

    text: str
    name: str
    value: Array | Same | Scalar


def parse(line: str, items: Sequence[str] = ()) -> list[Given]:
    """The arguments of --args, one string, and of several --arg. Raises InputError."""
    close_up = re.sub(r"\[[^\]]*\]", lambda shape: shape[0].replace(" ", ""), line)
    try:
        words = shlex.split(close_up)
    except ValueError as error:
        raise InputError(f"--args {line!r}: {error}; close it") from None
    return [_given(word) for word in (*words, *items)]


def assign(given: Sequence[Given], parameters: Sequence[Parameter], known: Sequence[Declared] | None) -> list[Given]:
    """The arguments in the parameters' order, each with a name and of its parameter's kind. Raises InputError.

    `known`: the parameters as the source declares them, if that can be read.
    """
    if len(given) != len(parameters):
        kernel = ", ".join(_signature(p, known[i] if known else None) for i, p in enumerate(parameters))
        raise InputError(
            f"--args: got {len(given)} arguments, the kernel takes {len(parameters)}"
            f"{': ' + kernel if parameters else ''}; give one for each"
        )
    places: list[Given | None] = [None] * len(parameters)
    names = [declared.name for declared in known] if known else []
    for item in given:
        if known and item.name:
            if item.name not in names:
                raise InputError(
                    f"--args: the kernel has no parameter {item.name!r}, expected one of {', '.join(names)}"
                )
            if places[names.index(item.name)] is not None:
                raise InputError(f"--args: {item.name} was given twice, expected once")
            places[names.index(item.name)] = item
    rest = iter([item for item in given if not (known and item.name)])
    filled = [next(rest) if place is None else place for place in places]
    named = [replace(item, name=item.name or (names[i] if names else f"arg{i}")) for i, item in enumerate(filled)]
    duplicate = next((item.name for i, item in enumerate(named) if item.name in [n.name for n in named[:i]]), None)
    if duplicate:
        raise InputError(f"--args: {duplicate} was given twice, expected once")
    for i, (item, parameter) in enumerate(zip(named, parameters, strict=True)):
        _check_kind(item, parameter, known[i] if known else None)
        if isinstance(item.value, Same):
            _target(named, item)
    return named


def arrays(given: Sequence[Given]) -> dict[str, np.ndarray | None]:
    """The contents of every array by its argument's name, None for `empty`. Raises InputError, OutOfMemory."""
    wanted = {item.name: item.value for item in given if isinstance(item.value, Array)}
    needed, free = _SCALE * sum(array.nbytes for array in wanted.values()), available_bytes()
    if needed > free:
        raise OutOfMemory(
            f"--args: the arrays take {needed} bytes of host memory here, {free} are free; take smaller ones"
        )
    return {name: _contents(name, array, number) for number, (name, array) in enumerate(wanted.items())}


def scalar(item: Given, parameter: Parameter, known: Declared | None) -> int | np.float32 | np.float64:
    """The value of a number or null for its parameter, as a launch takes it. Raises InputError."""
    value = item.value
    assert isinstance(value, Scalar)
    if value.text == "null":
        if parameter.nbytes != 8 or (known and known.kind in ("integer", "float")):
            raise _refused(item, parameter, known, "got null")
        return 0
    dtype = value.dtype or _scalar_dtype(value.text, parameter, known)
    if DTYPES[dtype].itemsize != parameter.nbytes:
        raise _refused(item, parameter, known, f"got {value.dtype} of {DTYPES[dtype].itemsize} bytes")
    number = _number(item, dtype)
    if dtype in ("f32", "f64"):
        return np.float32(number) if dtype == "f32" else np.float64(number)
    bits = np.array(number).astype(DTYPES[dtype]).reshape(1)
    return int(bits.view(f"i{parameter.nbytes}")[0])


# -- from text ----------------------------------------------------------------------------------------------------


def _given(text: str) -> Given:
    match = re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(.+)", text, re.DOTALL)
    if match is None:
        raise InputError(f"--args: got {text!r}, expected {GRAMMAR}")
    return Given(text, match[1] or "", _value(text, match[2]))


def _value(text: str, value: str) -> Array | Same | Scalar:
    if value.startswith("@"):
        return Same(value[1:])
    if match := re.fullmatch(r"(\w+)\[([^\]]*)\](?::(.*))?", value, re.DOTALL):
        return _array(text, match[1], match[2], match[3])
    if value.endswith(".npy"):
        loaded = _load(value)
        if loaded.dtype not in _SHORT:
            raise InputError(
                f"--args {text}: {show_path(value)} holds {loaded.dtype} values, expected one of {', '.join(DTYPES)}; "
                "write TYPE[SHAPE]:FILE.npy for bf16 values stored as 16-bit ones"
            )
        return Array(_SHORT[loaded.dtype], loaded.shape, value)
    kind, colon, number = value.partition(":")
    if colon:
        return Scalar(_is_number(text, number), _dtype(text, kind))
    return Scalar(value if value == "null" else _is_number(text, value))


def _array(text: str, kind: str, shape: str, fill: str | None) -> Array:
    if not re.fullmatch(r"\d+(,\d+)*", shape):
        raise InputError(f"--args {text}: the shape is [{shape}], expected sizes as in [64,128]")
    dtype = _dtype(text, kind)
    sizes = tuple(int(size) for size in shape.split(","))
    if math.prod(sizes) >= 2**48:
        raise OutOfMemory(f"--args {text}: no memory holds that many elements; take a smaller shape")
    if fill is None:
        fill = "random" if _is_float(dtype) else "zeros"
    known = fill in ("random", "empty", "zeros", "ones", "arange") or fill.endswith(".npy")
    if re.fullmatch(r"random:[1-9]\d{0,17}", fill):
        known = not _is_float(dtype)
    if not known:
        _is_number(text, fill, f"the fill is {fill!r}, expected {FILLS}")
    return Array(dtype, sizes, fill)


def _dtype(text: str, name: str) -> str:
    if name in DTYPES:
        return name
    if name in _LONG:
        return _LONG[name]
    raise InputError(f"--args {text}: the type is {name!r}, expected one of {', '.join(DTYPES)}")


def _is_number(text: str, number: str, problem: str = "") -> str:
    try:
        _parsed(number)
    except ValueError:
        raise InputError(f"--args {text}: {problem or f'got {number!r}, expected {GRAMMAR}'}") from None
    return number


def _parsed(number: str) -> int | float:
    if number in ("true", "false"):
        return int(number == "true")
    try:
        return int(number, 0)
    except ValueError:
        return float(number)


def _is_float(dtype: str) -> bool:
    return "f" in dtype


# -- against the kernel's parameters ------------------------------------------------------------------------------


def _check_kind(item: Given, parameter: Parameter, known: Declared | None) -> None:
    """Refuse an array for a number and a number for a pointer."""
    kind = known.kind if known else ""
    is_array = not isinstance(item.value, Scalar)
    if is_array and (parameter.nbytes != 8 or kind in ("integer", "float") or parameter.type == "f64"):
        raise _refused(item, parameter, known, f"got the array {item.value}" if item.text else "got an array")
    if is_array or kind != "pointer":
        if not is_array:
            scalar(item, parameter, known)
        return
    assert isinstance(item.value, Scalar)
    if item.value.text not in ("null", "0"):
        raise _refused(item, parameter, known, f"got the number {item.value.text}")


def _refused(item: Given, parameter: Parameter, known: Declared | None, got: str) -> InputError:
    kind = known.kind if known else ""
    expected = {"pointer": "an array or null", "integer": "an integer", "float": "a number"}.get(kind, "a number")
    return InputError(
        f"--args {item.text}: {got}, expected {expected}: the parameter is {_signature(parameter, known)}"
    )


def _signature(parameter: Parameter, known: Declared | None) -> str:
    if known is not None:
        return f"{known.type} {known.name}"
    bits = f"{parameter.nbytes} bytes" if parameter.type.startswith("b8") else f".{parameter.type}"
    return f"parameter {parameter.name.rpartition('_')[2]} ({bits})"


def _target(named: Sequence[Given], item: Given) -> None:
    assert isinstance(item.value, Same)
    target = item.value.target
    owners = [other.name for other in named if isinstance(other.value, Array)]
    if target not in owners:
        raise InputError(
            f"--args {item.text}: there is no array {target!r}, expected one of {', '.join(owners) or 'none'}"
        )


def _scalar_dtype(text: str, parameter: Parameter, known: Declared | None) -> str:
    """The type of a number that was given without one: the declaration's, else that of PTX, else the number's own."""
    size = parameter.nbytes
    sixteen = _SIXTEEN.get(known.type.split()[-1]) if known else None
    if sixteen and size == 2:
        return sixteen
    if size not in (1, 2, 4, 8) or (parameter.type == "b8" and size != 1):
        raise InputError(
            f"--args {text}: the parameter is {_signature(parameter, known)}, passed by value; only numbers can be, "
            "those of 16 bits as f16:NUMBER or bf16:NUMBER"
        )
    if parameter.type.startswith("f") or (known and known.kind == "float"):
        return f"f{8 * size}"
    if (known and known.kind in ("integer", "pointer")) or not parameter.type.startswith("b") or size == 1:
        return f"i{8 * size}"
    return f"f{8 * size}" if isinstance(_parsed(text), float) else f"i{8 * size}"


def _number(item: Given, dtype: str) -> int | float:
    value = item.value
    assert isinstance(value, Scalar)
    number = _parsed(value.text)
    if _is_float(dtype):
        try:
            return float(number)
        except OverflowError:
            raise InputError(f"--args {item.text}: got {number}, expected a number that {dtype} holds") from None
    bits = 8 * DTYPES[dtype].itemsize
    if isinstance(number, float):
        raise InputError(f"--args {item.text}: got {value.text}, expected an integer of {bits} bits")
    # Signedness is the kernel's affair: PTX does not tell an int from an unsigned one.
    low, high = (0 if dtype.startswith("u") else -(2 ** (bits - 1))), 2**bits - 1
    if not low <= number <= high:
        raise InputError(f"--args {item.text}: got {number}, expected an integer of {bits} bits")
    return number - 2**bits if number >= 2 ** (bits - 1) and dtype.startswith("i") else number


# -- contents -----------------------------------------------------------------------------------------------------


def _contents(name: str, array: Array, number: int) -> np.ndarray | None:
    dtype, shape, fill = DTYPES[array.dtype], array.shape, array.fill
    if fill == "empty":
        return None
    if fill.endswith(".npy"):
        return _from_file(name, array)
    if fill.startswith("random"):
        rng = np.random.default_rng(number)
        if _is_float(array.dtype):
            return rng.standard_normal(shape, np.float64 if dtype.itemsize == 8 else np.float32).astype(dtype)
        high = int(fill.partition(":")[2] or 100)
        return rng.integers(0, min(high, int(np.iinfo(dtype).max) + 1), shape).astype(dtype)
    if fill == "arange":
        return np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    number_text = {"zeros": "0", "ones": "1"}.get(fill, fill)
    value = _number(Given(f"{name}={array}:{fill}", name, Scalar(number_text)), array.dtype)
    return np.full(shape, np.array(value).astype(dtype))


def _from_file(name: str, array: Array) -> np.ndarray:
    loaded, dtype = _load(array.fill), DTYPES[array.dtype]
    if loaded.dtype.kind in "Vu" and loaded.dtype.itemsize == dtype.itemsize and array.dtype == "bf16":
        loaded = loaded.view(dtype)
    if loaded.shape != array.shape or loaded.dtype != dtype:
        got = f"{loaded.dtype} {list(loaded.shape)}"
        raise InputError(
            f"--args {name}: {show_path(array.fill)} holds {got}, expected {dtype} {list(array.shape)}; convert it"
        )
    return np.ascontiguousarray(loaded)


def _load(path: str) -> np.ndarray:
    try:
        return np.asarray(np.lib.format.read_array(io.BytesIO(read_regular(path)), allow_pickle=False))
    except FileNotFoundError:
        raise InputError(f"--args: {why_missing(path)}; give a file written by numpy.save") from None
    except OSError as error:
        raise InputError(f"--args: cannot read {show_path(path)}: {error.strerror}; give another file") from None
    except (ValueError, SyntaxError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--args {show_path(path)} is no .npy file: {reason}; write it with numpy.save") from None
