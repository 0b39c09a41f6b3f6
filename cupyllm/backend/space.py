"""Device memory that is freed together, and programs whose temporaries share one arena in it.

Programs of a space run one after another on one stream, so one arena, as large as the largest asks for, serves all of
them. When it has to grow, programs that point into the old one are forgotten: `programs` is the cache to look them up
in before recording again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyllm.backend.base import Backend, Buffer, Spec, Tensor, fixed
from cupyllm.backend.record import Recorder, arena_layout, place


class Space:
    """Owns what it hands out until `close`. Not thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.programs: dict[object, Any] = {}
        self._buffers: list[Buffer] = []
        self._arena: Buffer | None = None

    def tensor(self, shape: Sequence[int], dtype: str, name: str = "") -> Tensor:
        """A device tensor with undefined content. Raises OutOfMemory."""
        spec = Spec(tuple(shape), dtype)
        self._buffers.append(self.backend.allocate(max(spec.nbytes, 1), name))
        return fixed(self._buffers[-1].address, spec.shape, dtype, name)

    def put(self, array: np.ndarray, name: str = "") -> Tensor:
        """A device copy of a contiguous array."""
        tensor = self.tensor(array.shape, array.dtype.name, name)
        self.backend.upload(tensor.address, array)
        return tensor

    def load(self, rec: Recorder) -> Any:
        """The recorded launches as a program, their temporaries in the arena. Raises OutOfMemory."""
        offsets, total = arena_layout(rec.launches)
        if self._arena is None or self._arena.nbytes < total:
            if self._arena is not None:
                self.backend.synchronize()
                self.programs.clear()
                arena, self._arena = self._arena, None
                arena.free()
            self._arena = self.backend.allocate(max(total, 1), "arena")
        return self.backend.load(place(rec.launches, offsets, self._arena.address))

    def close(self) -> None:
        """Wait for the device and free everything; a second call does nothing."""
        self.programs.clear()
        owned = [*self._buffers, *([] if self._arena is None else [self._arena])]
        self._buffers, self._arena = [], None
        if owned:
            self.backend.synchronize()
        for buffer in owned:
            buffer.free()

    def __enter__(self) -> Space:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
