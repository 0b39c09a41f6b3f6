"""Programmatic dependent launches: what the driver is given; on a GPU, the second kernel starts early and waits."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.backend import dependent
from cupyllm.backend.base import KernelSpec, Spec, Tensor, fixed
from cupyllm.backend.dependent import Launcher
from cupyllm.backend.eager import Session
from cupyllm.backend.null import NullBackend
from cupyllm.backend.program import Program
from cupyllm.backend.record import Recorder
from cupyllm.errors import BackendError

SOURCE = str(Path(__file__).with_name("dependent.cu"))
RUN = KernelSpec("x.cu", "x")
MAX_US_PER_LAUNCH = 8.0  # as test_program.py has it for ordinary launches


class DriverError(Exception):
    pass


class Function:
    """In place of cuLaunchKernelEx: reads what it is given as the driver does."""

    restype: Any = None

    def __init__(self, status: int = 0) -> None:
        self.status, self.seen = status, []  # type: ignore[var-annotated]

    def __call__(self, config: Any, function: Any, pointers: Any, extra: Any) -> None:
        raw = ctypes.string_at(ctypes.addressof(config._obj), 56)
        words = np.frombuffer(raw, np.uint32)
        attributes = int(np.frombuffer(raw, np.uint64)[5])
        attribute = np.frombuffer(ctypes.string_at(attributes, 72), np.int32)
        stream = int(np.frombuffer(raw, np.uint64)[4])
        self.seen.append(
            (words[:7].tolist(), stream, int(words[12]), attribute.tolist(), function.value, pointers.value)
        )
        assert extra.value is None
        self.restype(self.status)


class Driver:
    def __init__(self, status: int = 0) -> None:
        self.cuLaunchKernelEx = Function(status)


def test_what_the_driver_is_given() -> None:
    """CUlaunchConfig and CUlaunchAttribute at their offsets: one attribute, number 6, value 1."""
    driver = Driver()
    launcher = Launcher(DriverError, driver)
    call = (99, 2, 3, 4, 5, 6, 7, 8, 77, 1234, 0)
    function, arguments = launcher.step(call)
    function(*arguments)
    assert driver.cuLaunchKernelEx.seen == [([2, 3, 4, 5, 6, 7, 8], 77, 1, [6, 0, 1] + [0] * 15, 99, 1234)]


def test_a_status_is_the_drivers_error() -> None:
    function, arguments = Launcher(DriverError, Driver(700)).step((1, *[1] * 6, 0, 0, 1, 0))
    with pytest.raises(DriverError, match="700"):
        function(*arguments)


def test_a_driver_without_it_says_what_to_do() -> None:
    with pytest.raises(BackendError, match=r"no cuLaunchKernelEx \(.*\); update it"):
        Launcher(DriverError, object())


def test_steps_are_made_once_a_stream() -> None:
    rec = Recorder(90)
    rec.launch(RUN, 1, 1, 5)
    program, made = Program(rec.launches, {RUN: 3}), []

    def bind(launch: Any, call: Any) -> Any:
        made.append((launch, call))
        return len, ("four",)

    assert program.steps(7, bind) is program.steps(7, bind) and program.steps(8, bind) == [(len, ("four",))]
    assert [call[8] for _, call in made] == [7, 8]
    program.forget(7)
    program.steps(7, bind)
    assert [call[8] for _, call in made] == [7, 8, 7]


def test_host_cost_of_a_programmatic_launch() -> None:
    """The ctypes call itself, on a C function that does next to nothing."""
    libc = ctypes.CDLL(None)

    class Cheap:
        cuLaunchKernelEx = libc.abs

    rec = Recorder(90)
    x = fixed(NullBackend().allocate(64).address, (4,), "float32")
    for _ in range(1000):
        rec.launch(RUN, 1, 1, x, x, 1, 2)
    launcher = Launcher(DriverError, Cheap())
    Cheap.cuLaunchKernelEx.restype = None  # abs of an address is no status
    steps = Program(rec.launches, {RUN: 3}).steps(0, lambda launch, call: launcher.step(call))
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        for function, arguments in steps:
            function(*arguments)
        seconds.append(time.perf_counter() - start)
    cost_us = statistics.median(seconds) / len(steps) * 1e6
    print(f"{cost_us:.2f} us a launch")
    assert cost_us <= MAX_US_PER_LAUNCH


# ---- on a GPU ----


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    yield backend
    backend.close()


def chain(session: Session, programmatic: bool) -> tuple[Recorder, Tensor, Tensor]:
    """first, then second: (recorder, [began, ended], [x, y])."""
    times, values = (session.empty(Spec((64,), "int64")) for _ in range(2))
    weights = session.put(np.full(32, 1000, np.int64))
    rec = Recorder(90)
    rec.launch(KernelSpec(SOURCE, "first"), 1, 1, values.rows(0, 32), times.rows(32, 64), 234, 2_000_000)
    rec.launch(
        *(KernelSpec(SOURCE, "second"), 1, 1, values.rows(0, 32), weights, values.rows(32, 64), times.rows(0, 32)),
        weights=weights if programmatic else None,
    )
    assert [launch.programmatic for launch in rec.launches] == [False, programmatic]
    return rec, times, values


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["default stream", "stream", "graph"])
@pytest.mark.parametrize("programmatic", [True, False])
def test_the_second_kernel_starts_early_and_waits(gpu: Any, programmatic: bool, way: str) -> None:
    if gpu.capability < dependent.MIN_CAPABILITY:
        programmatic = False
    with Session(gpu) as session:
        rec, times, values = chain(session, programmatic)
        program, stream = gpu.load(rec.launches), gpu.stream()
        if way == "graph":
            graph = gpu.capture([program])
            graph.launch(stream)
        else:
            gpu.run(program, stream if way == "stream" else None)
        gpu.synchronize()
        (began, ended), (x, y) = session.get(times)[::32], session.get(values)[::32]
        print(f"the second began {(ended - began) / 1e3:.0f} us before the first ended")
        assert (x, y) == (234, 1234)
        if way != "default stream":  # the driver may order the legacy default stream as it likes
            assert (began < ended) == programmatic


@pytest.mark.gpu
def test_what_it_costs_the_host(gpu: Any) -> None:
    """No more than twice an ordinary launch: a prepared struct, one call."""
    cost = {}
    with Session(gpu) as session:
        values, weights = session.put(np.zeros(32, np.int64)), session.put(np.zeros(32, np.int64))
        out, began = session.put(np.zeros(32, np.int64)), session.put(np.zeros(32, np.int64))
        for early in (False, True):
            rec = Recorder(90)
            for _ in range(201):
                rec.launch(
                    *(KernelSpec(SOURCE, "second"), 1, 1, values, weights, out, began),
                    weights=None,
                )
            if early:
                from dataclasses import replace

                rec.launches = [replace(launch, programmatic=True) for launch in rec.launches]
            program, seconds, stream = gpu.load(rec.launches), [], gpu.stream()
            for _ in range(10):
                gpu.synchronize()
                start = time.perf_counter()
                gpu.run(program, stream)
                seconds.append((time.perf_counter() - start) / 201)
            gpu.synchronize()
            cost[early] = min(seconds) * 1e6
    print(f"{cost[False]:.2f} us an ordinary launch, {cost[True]:.2f} us a programmatic one")
    assert cost[True] <= 2 * cost[False] + 1
