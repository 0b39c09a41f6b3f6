"""Running micro-kernels on the simulator: CUDA C -> NVRTC -> PTX for compute_80 -> NumPy, with every check on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cupyllm.backend import nvrtc
from cupyllm.backend.base import KernelSpec, Launch, fixed
from cupyllm.sim.machine import Simulator
from cupyllm.sim.memory import DeviceMemory
from cupyllm.sim.module import SimModule, load_module
from tests.sim.micro import Micro
from tests.sim.micro.run import OPTIONS, text_of, units

Array = np.ndarray

TENSOR_DTYPE = {"u1": "uint8", "u2": "float16", "u4": "int32", "u8": "int64"}  # of the same size, for launches


class SimRunner:
    """A runner for run_micro. Nothing is cached: NVRTC and translation take 3 s for all of the kernels together."""

    def __init__(self, table: Iterable[Micro]) -> None:
        self._unit = {micro.name: unit for unit in units(table) for micro in unit}
        self._modules: dict[str, SimModule] = {}  # by the first kernel of a unit
        self._memory = DeviceMemory(64 << 20)
        self._simulator = Simulator(self._memory)

    def run(self, micro: Micro, inputs: list[Array], outputs: list[Array]) -> None:
        """One launch; fills `outputs`. Raises SimError with what the checks found."""
        arrays = [*inputs, *outputs]
        names = [f"input {k}" for k in range(len(inputs))] + [f"output {k}" for k in range(len(outputs))]
        held = [self._memory.allocate(array.nbytes, name) for array, name in zip(arrays, names, strict=True)]
        args = []
        for array, allocation in zip(arrays, held, strict=True):
            self._memory.upload(allocation.address, array)
            dtype = TENSOR_DTYPE[array.dtype.str[1:].replace("|", "")]
            args.append(fixed(allocation.address, array.shape, dtype, allocation.name))
        spec = KernelSpec("micro.cu", micro.name)
        try:
            self._simulator.launch(
                self.module(micro), Launch(spec, (micro.grid, 1, 1), (micro.block, 1, 1), tuple(args))
            )
            for array, allocation in zip(arrays[len(inputs) :], held[len(inputs) :], strict=True):
                self._memory.download(array, allocation.address)
        finally:
            for allocation in held:
                self._memory.free(allocation)

    def module(self, micro: Micro) -> SimModule:
        """The translated unit that the kernel is in."""
        unit = self._unit[micro.name]
        key = unit[0].name
        if key not in self._modules:
            self._modules[key] = load_module(_ptx(unit))
        return self._modules[key]


def _ptx(unit: list[Micro]) -> str:
    options = ["--gpu-architecture=compute_80", "-lineinfo", *OPTIONS]
    text, _ = nvrtc.compile_text(text_of(unit), "micro.cu", options, "ptx")
    return text.decode() if isinstance(text, bytes) else text
