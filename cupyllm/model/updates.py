"""Optimizer arithmetic on host arrays: pieces go up, one kernel runs, results come back.

The host owns masters and moments (train/state.py says why); the device holds four buffers of one piece. Buffers and
programs are made once and serve every parameter of every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.backend.base import Backend, Buffer, Spec, Tensor, fixed
from cupyllm.backend.record import Recorder, arena_layout, place
from cupyllm.ops import adamw as adamw_op
from cupyllm.ops import grad_norm as grad_norm_op

PIECE_ELEMENTS = 16 << 20  # float32 elements of one call


class Updates:
    """AdamW and sums of squares for arrays of up to `largest` elements (larger ones go in pieces)."""

    def __init__(self, backend: Backend, largest: int, forced: dict[str, str] | None = None) -> None:
        self.backend, self.forced = backend, forced
        self.size = max(1, min(largest, PIECE_ELEMENTS))
        self.buffers: list[Buffer] = []
        try:
            self.p, self.g, self.m, self.v = (self._tensor((self.size,), "float32") for _ in range(4))
            self.scalars = self._tensor(adamw_op.SCALARS.shape, "float32")
            self.sum = self._tensor((1,), "float64")
        except BaseException:
            self.close()
            raise
        self.adamw_programs: dict[int, Any] = {}
        self.sum_programs: dict[int, Any] = {}

    def _tensor(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        self.buffers.append(self.backend.allocate(Spec(shape, dtype).nbytes, "update"))
        return fixed(self.buffers[-1].address, shape, dtype)

    def sum_of_squares(self, gradient: np.ndarray) -> float:
        """float64 sum of squares of a float32 array; pieces are added in order."""
        flat, total, value = gradient.reshape(-1), 0.0, np.empty(1, np.float64)
        for at in range(0, flat.size, self.size):
            piece = flat[at : at + self.size]
            if piece.size not in self.sum_programs:
                rec = Recorder(self.backend.capability, self.forced)
                grad_norm_op.sum_of_squares(rec, self.g.rows(0, piece.size), self.sum)
                self.sum_programs[piece.size] = self._load(rec)
            self.backend.upload(self.g.address, piece)
            self.backend.run(self.sum_programs[piece.size])
            self.backend.download(value, self.sum.address)
            total += float(value[0])
        return total

    def adamw(self, scalars: np.ndarray, param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray) -> None:
        """One update of param, m and v (float32, C-contiguous, in place); `scalars` from ops/adamw.pack_scalars."""
        assert all(a.flags.c_contiguous and a.dtype == np.float32 for a in (param, grad, m, v))
        host = [a.reshape(-1) for a in (param, grad, m, v)]
        device = (self.p, self.g, self.m, self.v)
        self.backend.upload(self.scalars.address, scalars)
        for at in range(0, param.size, self.size):
            pieces = [a[at : at + self.size] for a in host]
            count = pieces[0].size
            if count not in self.adamw_programs:
                rec = Recorder(self.backend.capability, self.forced)
                p, g, dm, dv = (t.rows(0, count) for t in device)
                adamw_op.adamw(rec, p, g, dm, dv, self.scalars)
                self.adamw_programs[count] = self._load(rec)
            for tensor, piece in zip(device, pieces, strict=True):
                self.backend.upload(tensor.address, piece)
            self.backend.run(self.adamw_programs[count])
            for tensor, piece in zip((self.p, self.m, self.v), (pieces[0], pieces[2], pieces[3]), strict=True):
                self.backend.download(piece, tensor.address)

    def _load(self, rec: Recorder) -> Any:
        offsets, total = arena_layout(rec.launches)
        arena = self.backend.allocate(max(total, 1), "update arena")
        self.buffers.append(arena)
        return self.backend.load(place(rec.launches, offsets, arena.address))

    def close(self) -> None:
        self.backend.synchronize()
        for buffer in self.buffers:
            buffer.free()
        self.buffers = []
