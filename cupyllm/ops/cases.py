"""Drawing the arrays of a Case: what tests, grad-check and benchmarks feed an op with.

Everything comes from one seeded generator, so a failure can be drawn again from its case's name and seed. Values are
drawn in float64 and rounded once to the dtypes asked for; `widen` gives the fp64 reference exactly those rounded
values, so that a comparison measures the kernel and not the rounding of its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.backend.base import NUMPY_DTYPE, Spec
from cupyllm.errors import InputError
from cupyllm.ops.op import Case

IGNORE_INDEX = -100
ROPE_THETA = 1e4  # of the tables that "cos" and "sin" draw
FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass
class Drawn:
    """Arrays of one call, in the dtypes that a kernel takes."""

    inputs: list[np.ndarray | None]
    params: list[np.ndarray]


def draw(case: Case, dtype: str = "float32", weight_dtype: str | None = None, seed: int = 0) -> Drawn:
    """Inputs and parameters of `case`: activations in `dtype`, parameters in `weight_dtype` (default: `dtype`).

    Integer inputs are int32, rope tables float32 (float64 where `dtype` is). Raises InputError on an unknown kind.
    """
    rng = np.random.default_rng(seed)
    kinds = (*case.kinds, *("normal",) * (len(case.inputs) - len(case.kinds)))
    segments = _segments(case, kinds, rng)
    inputs = [_input(kind, shape, dtype, segments, rng) for kind, shape in zip(kinds, case.inputs, strict=True)]
    params = [
        _param(kind, shape, weight_dtype or dtype, rng)
        for kind, shape in zip(_param_kinds(case), case.params, strict=True)
    ]
    return Drawn(inputs, params)


def draw_cotangents(outputs: Sequence[Spec], seed: int = 1) -> list[np.ndarray | None]:
    """A gradient for every floating-point output, None for integer ones (an argmax has no gradient)."""
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(spec.shape).astype(NUMPY_DTYPE[spec.dtype]) if spec.dtype in FLOAT_DTYPES else None
        for spec in outputs
    ]


def widen(arrays: Iterable[np.ndarray | None]) -> list[np.ndarray | None]:
    """The same values in float64; integers and absent arrays as they are."""
    return [a.astype(np.float64) if a is not None and a.dtype.name in FLOAT_DTYPES else a for a in arrays]


def op_attrs(op: str, case: Case, dtype: str) -> dict[str, Any]:
    """The launcher's attrs: the case's, and the output dtype where an op cannot tell it from its inputs."""
    return {**case.attrs, "dtype": dtype} if op == "embedding" else dict(case.attrs)


def reference_attrs(case: Case) -> dict[str, Any]:
    """The reference's attrs: the case's without those that only say in which dtype a kernel writes."""
    return {name: value for name, value in case.attrs.items() if name not in ("dtype", "out_dtype")}


def specs(case: Case, dtype: str = "float32", weight_dtype: str | None = None) -> tuple[list[Spec | None], list[Spec]]:
    """Specs of the inputs and parameters that `draw` would give, without drawing them."""
    kinds = (*case.kinds, *("normal",) * (len(case.inputs) - len(case.kinds)))
    inputs = [
        None if kind == "none" else Spec(shape, _dtype_of(kind, dtype))
        for kind, shape in zip(kinds, case.inputs, strict=True)
    ]
    params = zip(_param_kinds(case), case.params, strict=True)
    return inputs, [Spec(shape, _PARAM_DTYPE.get(kind, weight_dtype or dtype)) for kind, shape in params]


_PARAM_DTYPE = {"bytes": "uint8", "scales": "float32", "int4_scales": "int32", "nested": "float32"}  # else as asked


def _param_kinds(case: Case) -> tuple[str, ...]:
    return (*case.param_kinds, *("normal",) * (len(case.params) - len(case.param_kinds)))


def _param(kind: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    if kind == "normal":
        return rng.standard_normal(shape).astype(NUMPY_DTYPE[dtype])
    if kind == "bytes":
        return rng.integers(0, 256, shape, np.uint8)
    if kind in ("scales", "int4_scales"):
        scales = rng.uniform(0.5, 2.0, shape).astype(np.float32)
        if kind == "scales":
            return scales
        zeros = rng.integers(0, 17, shape, np.uint32)
        return (scales.view(np.uint32) & np.uint32(0xFFFFFF00) | zeros).view(np.int32)
    if kind == "nested":
        drawn = rng.uniform(-1.0, 1.0, shape)
        drawn[256:] = 0.5 + 0.5 * np.abs(drawn[256:])  # the offset, and what the map's values are multiplied by
        return drawn.astype(np.float32)
    raise InputError(f"case: parameter kind is {kind!r}, expected normal, {', '.join(_PARAM_DTYPE)}")


def _dtype_of(kind: str, dtype: str) -> str:
    name = kind.partition(":")[0]
    if name == "normal":
        return dtype
    if name in ("cos", "sin"):
        return "float64" if dtype == "float64" else "float32"
    return "int32"


def _input(
    kind: str, shape: tuple[int, ...], dtype: str, segments: np.ndarray, rng: np.random.Generator
) -> np.ndarray | None:
    name, _, argument = kind.partition(":")
    if name == "none":
        return None
    target = NUMPY_DTYPE[_dtype_of(kind, dtype)]
    if name == "normal":
        return rng.standard_normal(shape).astype(target)
    if name == "ids":
        return rng.integers(0, int(argument), shape).astype(target)
    if name == "labels":
        labels = rng.integers(0, int(argument), shape)
        # One in five is not scored, but never the first, so that every case has a loss.
        ignored = rng.random(shape) < 0.2
        ignored.flat[0] = False
        return np.where(ignored, IGNORE_INDEX, labels).astype(target)
    if name == "positions":
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(target)
    if name == "segments":
        return segments[: shape[0], segments.shape[1] - shape[1] :].astype(target)
    if name == "values":
        return np.array([int(value) for value in argument.split(",")], target).reshape(shape)
    if name == "slots":
        # One in five is -1 (nothing is written), but never the first.
        slots = rng.permutation(int(argument))[: math.prod(shape)]
        slots[1:][rng.random(len(slots) - 1) < 0.2] = -1
        return slots.reshape(shape).astype(target)
    if name == "pages":
        return rng.permutation(int(argument))[: math.prod(shape)].reshape(shape).astype(target)
    if name in ("cos", "sin"):
        num_positions, half = math.prod(shape[:-1]), shape[-1]
        angles = np.arange(num_positions)[:, None] * ROPE_THETA ** (-np.arange(half) / half)
        return getattr(np, name)(angles).reshape(shape).astype(target)
    expected = "normal, ids:N, labels:N, positions, segments, cos, sin, values:A,B,.., slots:N, pages:N or none"
    raise InputError(f"case: kind is {kind!r}, expected {expected}")


def _segments(case: Case, kinds: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """Segment ids int [B,T] for the longest "segments" input; shorter ones take the tail of each row.

    Query tails align with key tails, so the query's segments must be the tail of the keys'. A row is two or three runs
    (0, 1, 2) and up to a quarter of padding (-1) at its end.
    """
    shapes = [shape for kind, shape in zip(kinds, case.inputs, strict=True) if kind == "segments"]
    if not shapes:
        return np.zeros((0, 0), np.int64)
    batch, tokens = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    rows = np.empty((batch, tokens), np.int64)
    for row in rows:
        cuts = rng.integers(0, tokens + 1, rng.integers(1, 3))
        row[:] = np.searchsorted(np.sort(cuts), np.arange(tokens), side="right")
        padding = int(rng.integers(0, tokens // 4 + 1))
        row[tokens - padding :] = -1
    return rows
