"""Compiling micro-kernels, and running them on a GPU; simulate.py runs them on the simulator."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cupyllm.backend import nvrtc
from tests.sim.micro import Micro

Array = np.ndarray

UNIT = 48  # kernels in one source: few compilations, and a refused one is soon isolated
CANARY = 0xCD  # bytes of an output before the launch
OPTIONS = ("--std=c++17", "-default-device")


def units(table: Iterable[Micro]) -> list[list[Micro]]:
    """The table in compile units, neighbours together."""
    kernels = list(table)
    return [kernels[start : start + UNIT] for start in range(0, len(kernels), UNIT)]


def text_of(unit: list[Micro]) -> str:
    return "\n".join(micro.source for micro in unit)


class Runner(Protocol):
    def run(self, micro: Micro, inputs: list[Array], outputs: list[Array]) -> None:
        """One launch; fills `outputs`."""
        ...


def run_micro(micro: Micro, inputs: tuple[Array, ...], runner: Runner) -> list[Array]:
    """The kernel's outputs, flat arrays of bits."""
    outputs = [
        np.full(count * np.dtype(dtype).itemsize, CANARY, np.uint8).view(dtype) for dtype, count in micro.outputs
    ]
    runner.run(micro, [np.ascontiguousarray(array).reshape(-1) for array in inputs], outputs)
    return outputs


class CudaRunner:
    """CUDA C -> NVRTC -> cubin for this GPU -> the GPU. `refused`: kernels that do not compile, with the log."""

    def __init__(self, table: Iterable[Micro]) -> None:
        import cupy

        self._cupy = cupy
        self._functions: dict[str, Any] = {}
        built, self.refused = compile_units(table, f"sm_{cupy.cuda.Device().compute_capability}")
        with tempfile.TemporaryDirectory() as folder:
            for number, (unit, cubin) in enumerate(built):
                path = Path(folder) / f"{number}.cubin"
                path.write_bytes(cubin)
                module = cupy.RawModule(path=str(path))
                for micro in unit:
                    self._functions[micro.name] = module.get_function(micro.name)

    def run(self, micro: Micro, inputs: list[Array], outputs: list[Array]) -> None:
        arrays = [self._cupy.asarray(array) for array in (*inputs, *outputs)]
        self._functions[micro.name]((micro.grid,), (micro.block,), tuple(arrays))
        for array, result in zip(outputs, arrays[len(inputs) :], strict=True):
            array[:] = result.get()


def compile_units(table: Iterable[Micro], arch: str) -> tuple[list[tuple[list[Micro], bytes]], dict[str, str]]:
    """((kernels, cubin) of each unit, {kernel that does not compile: log}). A unit that fails is taken apart."""
    built: list[tuple[list[Micro], bytes]] = []
    refused: dict[str, str] = {}
    waiting = units(table)
    while waiting:
        unit = waiting.pop(0)
        try:
            cubin, _ = nvrtc.compile_text(text_of(unit), "micro.cu", [f"--gpu-architecture={arch}", *OPTIONS])
            built.append((unit, cubin))
        except RuntimeError as error:
            if len(unit) == 1:
                refused[unit[0].name] = " ".join(str(error).split())
            else:
                half = len(unit) // 2
                waiting[:0] = [unit[:half], unit[half:]]
    return built, refused
