"""Optimizer arithmetic on host arrays: pieces go up, one kernel runs, results come back.

The host owns masters and moments (train/state.py says why); the device holds four buffers of one piece. Buffers and
programs are made once and serve every parameter of every step.
"""

from __future__ import annotations

import numpy as np

from cupyllm.backend.base import Backend
from cupyllm.backend.record import Recorder
from cupyllm.backend.space import Space
from cupyllm.ops import adamw as adamw_op
from cupyllm.ops import grad_norm as grad_norm_op

PIECE_ELEMENTS = 16 << 20  # float32 elements of one call


class Updates:
    """AdamW and sums of squares for arrays of up to `largest` elements (larger ones go in pieces)."""

    def __init__(self, backend: Backend, largest: int, forced: dict[str, str] | None = None) -> None:
        self.backend, self.forced = backend, forced
        self.size = max(1, min(largest, PIECE_ELEMENTS))
        self.space = Space(backend)
        try:
            self.p, self.g, self.m, self.v = (self.space.tensor((self.size,), "float32", name) for name in "pgmv")
            self.scalars = self.space.tensor(adamw_op.SCALARS.shape, "float32", "scalars")
            self.sum = self.space.tensor((1,), "float64", "sum")
        except BaseException:
            self.close()
            raise

    def sum_of_squares(self, gradient: np.ndarray) -> float:
        """float64 sum of squares of a float32 array; pieces are added in order."""
        flat, total, value = gradient.reshape(-1), 0.0, np.empty(1, np.float64)
        for at in range(0, flat.size, self.size):
            piece = flat[at : at + self.size]
            key = ("sum", piece.size)
            if key not in self.space.programs:
                rec = Recorder.of(self.backend, self.forced)
                grad_norm_op.sum_of_squares(rec, self.g.rows(0, piece.size), self.sum)
                self.space.programs[key] = self.space.load(rec)
            self.backend.upload(self.g.address, piece)
            self.backend.run(self.space.programs[key])
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
            key = ("adamw", count)
            if key not in self.space.programs:
                rec = Recorder.of(self.backend, self.forced)
                p, g, dm, dv = (t.rows(0, count) for t in device)
                adamw_op.adamw(rec, p, g, dm, dv, self.scalars)
                self.space.programs[key] = self.space.load(rec)
            for tensor, piece in zip(device, pieces, strict=True):
                self.backend.upload(tensor.address, piece)
            self.backend.run(self.space.programs[key])
            for tensor, piece in zip((self.p, self.m, self.v), (pieces[0], pieces[2], pieces[3]), strict=True):
                self.backend.download(piece, tensor.address)

    def close(self) -> None:
        self.space.close()
