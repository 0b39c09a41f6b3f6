"""Where updated weights live while training streams: on the host.

Each parameter has a float32 master and two float32 moments in host memory. The engine reads weights from here exactly
as it reads a checkpoint (this class is a WeightSource): layer by layer, forward and again in backward. In float32 the
streamed weight is the master itself; in bfloat16 it is a rounded copy kept beside it and renewed by each update. The
checkpoint's file is never written. Per parameter that is 12 bytes of state, 4 of gradient during a step, and 2 more in
bfloat16. Storing the master as rounded bfloat16 plus a 16-bit rest would save 4 of them; plain arrays come first
because the reference backend trains on them directly.
"""

from __future__ import annotations

import math

import numpy as np

from cupyllm.backend.base import NUMPY_DTYPE
from cupyllm.config import ModelConfig
from cupyllm.engine import WeightSource
from cupyllm.errors import OutOfMemory
from cupyllm.stream.pieces import PieceReader


def state_bytes(source: WeightSource, dtype: str) -> int:
    """Host bytes that training every parameter of `source` takes at its peak, gradients included."""
    parameters = sum(math.prod(source.spec(name)[1]) for name in source.names())
    return parameters * (16 + (0 if dtype == "float32" else 2))


class HostState:
    """Masters, moments and the compute copies; a WeightSource."""

    def __init__(self, source: WeightSource, dtype: str, available_bytes: int | None = None) -> None:
        """Copy every weight of `source`. `dtype`: of the streamed weights.

        Raises OutOfMemory when `available_bytes` of host memory cannot hold the state, CheckpointError when a file
        changes meanwhile.
        """
        needed = state_bytes(source, dtype)
        if available_bytes is not None and needed > available_bytes:
            raise OutOfMemory(
                f"training state: needs {needed / 2**30:.1f} GiB of host memory (16 to 18 bytes a parameter), "
                f"{available_bytes / 2**30:.1f} GiB are available; train fewer layers (--layers) or a smaller model"
            )
        self.config: ModelConfig = source.config
        self.dtype = dtype
        self.master: dict[str, np.ndarray] = {}
        self.m: dict[str, np.ndarray] = {}
        self.v: dict[str, np.ndarray] = {}
        self.compute: dict[str, np.ndarray] = {}
        self.step = 0
        reader = PieceReader(source)
        source.check_unchanged()
        for name in source.names():
            self.master[name] = reader.read(name, np.empty(source.spec(name)[1], np.float32))
            self.m[name] = np.zeros_like(self.master[name])
            self.v[name] = np.zeros_like(self.master[name])
            if dtype != "float32":
                self.compute[name] = np.empty(self.master[name].shape, NUMPY_DTYPE[dtype])
            self.refresh(name)
        source.check_unchanged()

    def refresh(self, name: str) -> None:
        """Renew the streamed copy of a parameter after its master changed."""
        if self.dtype == "float32":
            self.compute[name] = self.master[name]
        else:
            # In place: a second copy of a large embedding would not be within state_bytes.
            self.compute[name][...] = self.master[name]

    def names(self) -> list[str]:
        return list(self.master)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.master[name].shape

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        out[:] = self.compute[name].reshape(-1).view(np.uint8)[start : start + out.size]

    def check_unchanged(self) -> None:
        """Host arrays change only through the trainer, between passes."""
