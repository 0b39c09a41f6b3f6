"""Tensor maps (TMA descriptors): 128 opaque bytes that only the driver can make, from an address, extents and a box.

They hold an address, so they are encoded when a program is bound to its memory and not when it is recorded. ctypes on
the driver's own library is used because CuPy does not wrap cuTensorMapEncodeTiled, and NVIDIA's Python bindings would
be another dependency for this one call. Rank 2, unit element strides, no interleaving, 256-byte L2 promotion, zeros
outside the tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cupyllm.backend.base import ITEMSIZE, TensorMap
from cupyllm.errors import BackendError

NBYTES, ALIGNMENT = 128, 64
_DTYPES = {"float32": 7, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a box's row; other widths have none
_NO_INTERLEAVE, _L2_PROMOTION_256_BYTES, _ZEROS_OUTSIDE = 0, 3, 0


def driver() -> Any:
    """The driver's library. Raises BackendError where it is missing or does not know tensor maps."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuTensorMapEncodeTiled.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        raise BackendError(
            f"the CUDA driver cannot make tensor maps ({' '.join(str(error).split())}); update it, or take kernels "
            "that need none: --variant linear=plain"
        ) from error
    return library


def encode(library: Any, tensor_map: TensorMap) -> bytes:
    """The descriptor's bytes; its tensor must have an address. Raises BackendError when the driver refuses."""
    tensor, (box_rows, box_cols) = tensor_map.tensor, tensor_map.box
    (rows, cols), size = tensor.shape, ITEMSIZE[tensor.dtype]
    raw = (ctypes.c_uint8 * (NBYTES + ALIGNMENT))()
    target = -(-ctypes.addressof(raw) // ALIGNMENT) * ALIGNMENT
    status = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(target),
        _DTYPES[tensor.dtype],
        2,
        ctypes.c_void_p(tensor.address),
        (ctypes.c_uint64 * 2)(cols, rows),  # the contiguous axis comes first
        (ctypes.c_uint64 * 1)(cols * size),
        (ctypes.c_uint32 * 2)(box_cols, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLES.get(box_cols * size, 0),
        _L2_PROMOTION_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    if status:
        raise BackendError(
            f"cuTensorMapEncodeTiled: status {status} for {tensor.dtype} {rows} x {cols} at {tensor.address:#x}, boxes "
            f"of {box_rows} x {box_cols}; report this, and take --variant linear=plain"
        )
    return ctypes.string_at(target, NBYTES)
