"""A recorded list with every argument bound: what a backend runs again and again.

Arguments are packed once into one array of 64-bit slots, and one array of pointers into it, which is the form that
cuLaunchKernel reads. A tensor map takes 16 slots, aligned to 64 bytes as its parameter is. A run is then a loop over
ready-made argument tuples. Packing at each launch, as CuPy's RawKernel does, costs several times the launch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyllm.backend.base import Argument, KernelSpec, Launch, Tensor, TensorMap

# (function, grid x y z, block x y z, dynamic shared bytes, stream, address of argument pointers, extra)
Call = tuple[int, int, int, int, int, int, int, int, int, int, int]
Step = tuple[Callable[..., Any], tuple[Any, ...]]  # what is called for one launch, and with what


MAP_SLOTS, MAP_ALIGNMENT = 16, 8  # of a tensor map, in slots


def no_tensor_maps(wanted: TensorMap) -> bytes:
    """For devices that run nothing."""
    return bytes(8 * MAP_SLOTS)


class Program:
    """Launches bound to addresses. `functions` maps each kernel to its handle, `encode` makes tensor maps."""

    def __init__(
        self,
        launches: Sequence[Launch],
        functions: Mapping[KernelSpec, int],
        encode: Callable[[TensorMap], bytes] = no_tensor_maps,
    ) -> None:
        self.launches = list(launches)
        self._functions = [functions[launch.kernel] for launch in launches]
        self._starts = [0, *np.cumsum([len(launch.args) for launch in launches]).tolist()][:-1]
        slots, count = _layout(launches)
        self._memory = np.zeros(count + MAP_ALIGNMENT, np.uint64)
        skipped = -self._memory.ctypes.data // 8 % MAP_ALIGNMENT
        self._values = self._memory[skipped : skipped + count]
        self._pointers = self._values.ctypes.data + 8 * np.array(slots or [0], np.uint64)
        self._calls: dict[int, list[Call]] = {}
        self._steps: dict[int, list[Step]] = {}
        integers, floats, doubles = (self._values.view(dtype) for dtype in (np.int64, np.float32, np.float64))
        for start, launch in zip(self._starts, launches, strict=True):
            for slot, arg in zip(slots[start : start + len(launch.args)], launch.args, strict=True):
                if isinstance(arg, TensorMap):
                    self._values[slot : slot + MAP_SLOTS] = np.frombuffer(encode(arg), np.uint64)
                elif isinstance(arg, np.float32):
                    floats[2 * slot] = arg  # little-endian: the low half of the slot
                elif isinstance(arg, np.float64):
                    doubles[slot] = arg
                else:
                    integers[slot] = integer_argument(arg, launch)

    def calls(self, stream: int) -> list[Call]:
        """One argument tuple a launch, for this stream; made at the first use."""
        found = self._calls.get(stream)
        if found is None:
            base = self._pointers.ctypes.data
            found = [
                (function, *launch.grid, *launch.block, launch.shared_bytes, stream, base + 8 * start, 0)
                for function, start, launch in zip(self._functions, self._starts, self.launches, strict=True)
            ]
            self._calls[stream] = found
        return found

    def steps(self, stream: int, bind: Callable[[Launch, Call], Step]) -> list[Step]:
        """What to call for each launch on this stream, as `bind` has it; made at the first use."""
        found = self._steps.get(stream)
        if found is None:
            calls = self.calls(stream)
            found = [bind(launch, call) for launch, call in zip(self.launches, calls, strict=True)]
            self._steps[stream] = found
        return found

    def forget(self, stream: int) -> None:
        """Drop what was made for this stream, which is about to end."""
        self._calls.pop(stream, None)
        self._steps.pop(stream, None)

    def describe(self) -> str:
        """The nodes it runs, first to last."""
        nodes = list(dict.fromkeys(launch.node or launch.kernel.symbol for launch in self.launches))
        return " .. ".join(nodes if len(nodes) < 3 else (nodes[0], nodes[-1])) or "nothing"


def _layout(launches: Sequence[Launch]) -> tuple[list[int], int]:
    """The slot of each argument of each launch, and how many slots there are (at least one)."""
    slots, count = [], 0
    for launch in launches:
        for arg in launch.args:
            if isinstance(arg, TensorMap):
                count = -(-count // MAP_ALIGNMENT) * MAP_ALIGNMENT
            slots.append(count)
            count += MAP_SLOTS if isinstance(arg, TensorMap) else 1
    return slots, max(count, 1)


def integer_argument(arg: Argument, launch: Launch) -> int:
    """A pointer or a 64-bit integer. Plain floats are refused: a kernel would read their bits as something else."""
    if arg is None:
        return 0
    if isinstance(arg, Tensor):
        return arg.address
    assert isinstance(arg, (int, np.integer)) and not isinstance(arg, bool), f"{launch.kernel.symbol}: argument {arg!r}"
    return int(arg)
