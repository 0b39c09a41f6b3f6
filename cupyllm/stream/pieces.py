"""A weight source's values in pieces, by pread: what computes on the host reads its weights here.

One buffer of a few MiB is filled and converted again and again, so reading costs no memory that grows with a tensor,
and a file that is cut short under a running job is a CheckpointError. Computing from the mapping was rejected: there
the same file is a SIGBUS, which ends the process without a word. pread costs one copy more, but within a core's cache,
and spares the page faults.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from cupyllm.backend.base import NUMPY_DTYPE
from cupyllm.engine import WeightSource

PIECE_BYTES = 1 << 20


class PieceReader:
    """Reads and converts tensors of `source` through one buffer. Not for several threads at once."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.read_bytes = 0  # stored bytes that `read` has converted
        self.seconds = 0.0  # and how long that took
        self._buffer = np.empty(0, np.uint8)

    def pieces(self, name: str, first: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
        """Elements [first, first + count) of the flattened tensor, in order, in their stored dtype.

        Each array is a view of the buffer and valid until the next is asked for. Raises CheckpointError when the file
        has been cut short.
        """
        dtype_name, shape = self.source.spec(name)
        dtype = NUMPY_DTYPE[dtype_name]
        if count is None:
            count = math.prod(shape) - first
        if not self._buffer.size:
            self._buffer = np.empty(PIECE_BYTES, np.uint8)
        step = self._buffer.size // dtype.itemsize
        for at in range(first, first + count, step):
            raw = self._buffer[: min(step, first + count - at) * dtype.itemsize]
            self.source.read_into(name, raw, at * dtype.itemsize)
            yield raw.view(dtype)

    def read(self, name: str, out: np.ndarray, first: int = 0) -> np.ndarray:
        """Fill `out` (float32 or float64, C-contiguous) with the values from element `first` on, exactly."""
        started = time.perf_counter()
        assert out.flags.c_contiguous, name
        flat, at = out.reshape(-1), 0
        for stored in self.pieces(name, first, flat.size):
            widen_into(stored, flat[at : at + stored.size])
            at += stored.size
            self.read_bytes += stored.nbytes
        self.seconds += time.perf_counter() - started
        return out


def widen_into(stored: np.ndarray, out: np.ndarray) -> None:
    """out = stored, exactly, where `out` is float32 or float64 and at least as wide."""
    if stored.dtype.name == "bfloat16" and out.dtype == np.float32:
        # A bfloat16 is the upper half of a float32: four times faster than ml_dtypes' cast.
        bits = out.view(np.uint32)
        bits[...] = stored.view(np.uint16)
        bits <<= 16
    else:
        np.copyto(out, stored, casting="unsafe")


def gather_rows(source: WeightSource, name: str, rows: np.ndarray) -> np.ndarray:
    """Rows [U,C] of a matrix [V,C] in its stored dtype; `rows` [U] must be within [0,V)."""
    dtype, (_, width) = source.spec(name)
    gathered = np.empty((rows.size, width), NUMPY_DTYPE[dtype])
    for out, row in zip(gathered.view(np.uint8), rows.tolist(), strict=True):
        source.read_into(name, out, row * out.size)
    return gathered
