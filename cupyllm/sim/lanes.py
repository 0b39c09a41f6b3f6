"""Small operations on registers and masks that every memory space needs.

A register is [B, T], [B, 1], [1, T] or [1, 1]; a mask is None (every lane) or a bool array of such a shape.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from cupyllm.sim.memory import CARRIER

Array = np.ndarray


def narrow(mask: Array | None, shape: tuple[int, ...]) -> Array | None:
    """The mask of a register that is uniform where `shape` is 1: set where any of its lanes is. None: all are."""
    if mask is None:
        return None
    if shape[0] == 1 and mask.shape[0] != 1:
        mask = np.logical_or.reduce(mask, axis=0, keepdims=True)
    if shape[1] == 1 and mask.shape[1] != 1:
        mask = np.logical_or.reduce(mask, axis=1, keepdims=True)
    return None if mask.size == 1 else mask  # a mask has at least one lane


def both(mask: Array | None, other: Array) -> Array | Literal[False]:
    """Lanes of both, a mask; False where there is none, since None means every lane."""
    if mask is not None:
        other = mask & other
    return other if other.any() else False


def split(value: Array, vec: int, dtype: np.dtype) -> tuple[Array, ...]:
    """[B, T] vectors into `vec` contiguous [B, T] arrays."""
    parts = value.view(dtype).reshape(*value.shape, vec)
    return tuple(np.ascontiguousarray(parts.transpose(2, 0, 1)))


def join(values: tuple[Array, ...], dtype: np.dtype) -> Array:
    """`vec` registers into one array of vectors, or the register itself in its carrier type."""
    if len(values) == 1:
        value = values[0]
        if value.dtype.itemsize != dtype.itemsize:
            value = value.astype(f"u{dtype.itemsize}")  # st.u8 of a wider register stores its low bits
        return value.view(CARRIER[dtype.itemsize])
    shape = values[0].shape
    if any(value.shape != shape for value in values):
        shape = np.broadcast_shapes(*(value.shape for value in values))
    packed = np.empty((*shape, len(values)), dtype)
    for place, value in enumerate(values):
        if value.dtype.itemsize != dtype.itemsize:
            value = value.astype(f"u{dtype.itemsize}")
        packed[..., place] = value.view(dtype)
    return packed.view(CARRIER[dtype.itemsize * len(values)])[..., 0]


def first(bad: Array) -> tuple[int, int, int]:
    """(row, thread, how many) of the lanes that are set; at least one is."""
    flat = np.flatnonzero(bad)
    row, thread = divmod(int(flat[0]), bad.shape[1])
    return row, thread, len(flat)


def pattern(byte: int, size: int) -> np.generic:
    """`size` equal bytes as a scalar of the carrier type."""
    return np.frombuffer(bytes([byte]) * size, CARRIER[size])[0]


def chosen(mask: Array, *registers: Array) -> list[Array]:
    """The registers' elements in the lanes of the mask, [lanes], row by row."""
    shape = np.broadcast_shapes(mask.shape, *(register.shape for register in registers))
    lanes = np.flatnonzero(mask if mask.shape == shape else np.broadcast_to(mask, shape))
    return [
        (register if register.shape == shape else np.broadcast_to(register, shape)).reshape(-1).take(lanes)
        for register in registers
    ]
