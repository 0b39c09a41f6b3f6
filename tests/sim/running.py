"""Compile a piece of CUDA C and run it on the simulator: what tests of the machine are made of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cupyllm.backend import nvrtc
from cupyllm.backend.base import KernelSpec, Launch, fixed
from cupyllm.sim.machine import Simulator
from cupyllm.sim.memory import DeviceMemory
from cupyllm.sim.module import SimModule, load_module

OPTIONS = ["-arch=compute_80", "-std=c++17", "-lineinfo"]


@lru_cache(maxsize=None)
def compiled(text: str) -> SimModule:
    """The module of a CUDA C source."""
    ptx, _ = nvrtc.compile_text(text, "test.cu", OPTIONS, "ptx")
    return load_module(ptx if isinstance(ptx, str) else ptx.decode())


class Device:
    """A simulator with arrays on it. `args` of run(): arrays on the device by name, integers, NumPy floats, None."""

    def __init__(self, **options: Any) -> None:
        self.memory = DeviceMemory(1 << 28)
        self.simulator = Simulator(self.memory, **options)
        self.tensors: dict[str, Any] = {}

    def put(self, name: str, array: np.ndarray) -> str:
        """A device copy of exactly this size."""
        self.empty(name, array.shape, array.dtype.name)
        if array.nbytes:
            self.memory.upload(self.tensors[name].address, np.ascontiguousarray(array))
        return name

    def empty(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> str:
        """Uninitialised memory."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        allocation = self.memory.allocate(max(nbytes, 1), name)
        self.tensors[name] = fixed(allocation.address, shape, dtype, name)
        return name

    def get(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        array = np.empty(tensor.shape, tensor.dtype)
        self.memory.download(array, tensor.address)
        return array

    def run(self, text: str, symbol: str, grid: Any, block: Any, *args: Any, shared_bytes: int = 0) -> None:
        """Launch a kernel of `text`. Raises what Simulator.launch raises."""
        bound = tuple(self.tensors[arg] if isinstance(arg, str) else arg for arg in args)
        size = [tuple((*((n,) if isinstance(n, int) else n), 1, 1)[:3]) for n in (grid, block)]
        launch = Launch(KernelSpec("test.cu", symbol), size[0], size[1], bound, shared_bytes)
        self.simulator.launch(compiled(text), launch)
