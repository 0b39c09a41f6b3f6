"""Packed arguments, and what running them costs the host."""

from __future__ import annotations

import ctypes
import statistics
import struct
import time

import numpy as np
import pytest

from cupyllm.backend.base import KernelSpec, fixed
from cupyllm.backend.null import NullBackend
from cupyllm.backend.program import Program
from cupyllm.backend.record import Recorder

MAX_US_PER_LAUNCH = 8.0  # design: 64 layers of 17 nodes must not be bound by the host
RUN = KernelSpec("x.cu", "x")


def recorded(*args: object, count: int = 1) -> Recorder:
    rec = Recorder(80)
    for index in range(count):
        rec.node = f"layers.{index}"
        rec.launch(RUN, (2, 3, 4), (5, 6, 7), *args, shared_bytes=8)  # type: ignore[arg-type]
    return rec


def test_arguments_lie_where_culaunchkernel_reads_them() -> None:
    args = (fixed(1 << 45, (4,), "float32"), None, -3, np.float32(1.5), np.float64(0.1), np.int64(7), 2**63 - 1)
    program = Program(recorded(*args, count=2).launches, {RUN: 99})
    for call in program.calls(77):
        function, *shape, stream, pointers, extra = call
        assert (function, shape, stream, extra) == (99, [2, 3, 4, 5, 6, 7, 8], 77, 0)
        addresses = struct.unpack("7Q", ctypes.string_at(pointers, 56))
        slots = [ctypes.string_at(address, 8) for address in addresses]
        assert [struct.unpack("q", slots[i])[0] for i in (0, 1, 2, 5, 6)] == [1 << 45, 0, -3, 7, 2**63 - 1]
        assert struct.unpack("f", slots[3][:4])[0] == 1.5 and struct.unpack("d", slots[4])[0] == 0.1


@pytest.mark.parametrize("arg", [1.5, True, "x"])
def test_arguments_of_other_types_are_our_bugs(arg: object) -> None:
    with pytest.raises(AssertionError):
        Program(recorded(arg).launches, {RUN: 0})


def test_program_without_launches() -> None:
    assert Program([], {}).calls(0) == []
    assert Program([], {}).describe() == "nothing"


def test_program_says_which_nodes_it_runs() -> None:
    assert Program(recorded(count=1).launches, {RUN: 0}).describe() == "layers.0"
    assert Program(recorded(count=9).launches, {RUN: 0}).describe() == "layers.0 .. layers.8"


def test_host_cost_of_a_launch() -> None:
    backend = NullBackend()
    x = fixed(backend.allocate(64).address, (4,), "float32")
    program = backend.load(recorded(x, x, x, x, 1, 2, 3, np.float32(1), count=1000).launches)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        backend.run(program)
        seconds.append(time.perf_counter() - start)
    cost_us = statistics.median(seconds) / 1000 * 1e6
    print(f"{cost_us:.2f} us a launch")
    assert cost_us <= MAX_US_PER_LAUNCH
    assert backend.num_launches == 20 * 1000


def test_null_device_counts_memory() -> None:
    backend = NullBackend(90)
    a, b = backend.allocate(1000), backend.allocate(500)
    assert a.address % 256 == b.address % 256 == 0 and b.address >= a.address + 1000
    a.free()
    a.free()
    assert (backend.peak_bytes(), backend.live_bytes) == (1500, 500)
