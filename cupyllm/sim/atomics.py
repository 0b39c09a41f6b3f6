"""Atomic operations, as if lanes executed them one after another: CTA by CTA, thread by thread.

Float sums are those of an H200, in whose global memory other units add than in shared memory. float32: subnormal
operands and sums are zeros in global memory, and count in shared (PTX ISA, atom); NaN is canonical. Half precision: NaN
is canonical. float64: a NaN operand passes, made quiet in shared memory, as it is in global.

The GPU takes any order; a fixed one makes runs repeat. Lanes are sorted by address. Where few addresses are hit
often, the values of each are accumulated in one go, which is sequential for ufunc.accumulate (unlike reduce, which
sums floats in pairs); otherwise the n-th lanes of all addresses are done together, for n = 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from cupyllm.sim.lanes import Array
from cupyllm.sim.memory import DTYPE
from cupyllm.sim.rounding import NAN16, flush, has_nan, nan16, nan32, nan64

_PACKED = {"f16x2": np.dtype(np.float16), "bf16x2": np.dtype(ml_dtypes.bfloat16)}
_ACCUMULATE: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def apply(data: Array, index: Array, space: str, op: str, type: str, b: Array, c: Array | None) -> Array:
    """Updates data[index], in the order of the lanes, and returns what each lane found. All 1-D, of the type's width.

    c: cas only, which stores it where the old value is b.
    """
    element = _PACKED.get(type, DTYPE[type])
    step = _step(op, element) if op != "add" or element.kind in "iu" else _float_sum(type, space)
    order = np.argsort(index, kind="stable")
    at = index[order]
    starts = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
    counts = np.diff(np.concatenate([starts, [len(at)]]))
    values = b[order].view(DTYPE[type])
    others = values if c is None else c[order].view(DTYPE[type])
    old = np.empty(len(at), DTYPE[type])
    typed = data.view(DTYPE[type])
    if op in _ACCUMULATE and type not in _PACKED and len(starts) < counts.max():
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            run = np.concatenate([typed[at[start : start + 1]], values[start : start + count]])
            run = _accumulate(run, op, step, type == "f32" and space == "global")
            old[start : start + count], typed[at[start]] = run[:-1], run[-1]
    else:
        for turn in range(int(counts.max())):
            lanes = starts[counts > turn] + turn
            found = typed[at[lanes]]
            old[lanes] = found
            new = step(found.view(element), values[lanes].view(element), others[lanes].view(element))
            typed[at[lanes]] = new.astype(element, copy=False).view(DTYPE[type])
    result = np.empty_like(old)
    result[order] = old
    return result


def _accumulate(run: Array, op: str, step: Callable[[Array, Array, Array], Array], flushes: bool) -> Array:
    """The results of all steps from run[0] on, one after another."""
    result = _ACCUMULATE[op].accumulate(run, dtype=run.dtype)
    if run.dtype.kind == "f" and (
        has_nan(result) or (flushes and any(np.any((x != 0) & (flush(x) == 0)) for x in (run, result)))
    ):
        for i in range(1, len(run)):  # what NumPy adds otherwise than a GPU
            run[i : i + 1] = step(run[i - 1 : i], run[i : i + 1], run[i : i + 1])
        return run
    return result


def _float_sum(type: str, space: str) -> Callable[[Array, Array, Array], Array]:
    def bfloat16(old: Array, b: Array, c: Array) -> Array:
        total = old + b
        total.view(np.uint16)[total != total] = NAN16
        return total

    sums: dict[str, Callable[[Array, Array, Array], Array]] = {
        "f16": lambda old, b, c: nan16(old + b),
        "bf16": bfloat16,
    }
    if space == "global":
        sums["f32"] = lambda old, b, c: nan32(flush(flush(old) + flush(b)))
        sums["f64"] = lambda old, b, c: np.where(b != b, b, np.where(old != old, old, old + b))
    else:
        sums["f32"] = lambda old, b, c: nan32(old + b)
        sums["f64"] = lambda old, b, c: nan64("add", old + b, old, b)
    return sums[type.removesuffix("x2")]


def _step(op: str, dtype: np.dtype) -> Callable[[Array, Array, Array], Array]:
    if op in _ACCUMULATE:
        ufunc = _ACCUMULATE[op]
        return lambda old, b, c: ufunc(old, b)
    one, zero = np.ones((), dtype), np.zeros((), dtype)
    steps: dict[str, Callable[[Array, Array, Array], Array]] = {
        "exch": lambda old, b, c: b,
        "cas": lambda old, b, c: np.where(old == b, c, old),
        "inc": lambda old, b, c: np.where(old >= b, zero, old + one),
        "dec": lambda old, b, c: np.where((old == zero) | (old > b), b, old - one),
    }
    return steps[op]
