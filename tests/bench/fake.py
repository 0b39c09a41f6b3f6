"""A GPU that computes nothing and on which time is what a test says: a launch takes what its kernel's file takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cupyllm.backend.base import KernelSpec
from cupyllm.backend.null import NullBackend, NullEvent
from cupyllm.backend.program import Program


class FakeGraph:
    def __init__(self, gpu: FakeGpu, programs: Sequence[Program]) -> None:
        self.gpu, self.programs, self.freed = gpu, list(programs), False
        gpu.graphs.append(self)

    def launch(self, stream: Any = None) -> None:
        assert not self.freed and stream is self.gpu.the_stream
        for program in self.programs:
            self.gpu.run(program, stream)

    def free(self) -> None:
        self.freed = True


class FakeGpu(NullBackend):
    """`us` of a launch by the kernel's source (else `other`); `noise` is a share of it, drawn anew each time."""

    l2_bytes = 50 << 20
    architecture = "sm_90a"
    device_name = "a fake"

    def __init__(
        self, us: Mapping[str, float], other: float = 5.0, noise: float = 0.0, memory_bytes: int = 80 << 30
    ) -> None:
        super().__init__(90)
        self.us, self.other, self.noise, self.memory_bytes = dict(us), other, noise, memory_bytes
        self.now, self.rng = 0.0, random.Random(0)
        self.the_stream = object()
        self.compiled: list[KernelSpec] = []
        self.graphs: list[FakeGraph] = []
        self.output: Callable[[np.ndarray], None] = lambda target: target.fill(1)  # what is downloaded
        self.closed = False

    def stream(self) -> Any:
        return self.the_stream

    def free_bytes(self) -> int:
        return self.memory_bytes - self.live_bytes

    def record(self, event: NullEvent, stream: Any) -> None:
        event.seconds = self.now * 1e-6

    def download(self, target: np.ndarray, address: int, stream: Any = None) -> None:
        self.output(target)

    def compile(self, wanted: Iterable[KernelSpec]) -> None:
        self.compiled += wanted

    def run(self, program: Program, stream: Any = None) -> None:
        super().run(program, stream)
        for launch in program.launches:
            us = self.us.get(launch.kernel.source, self.other)
            self.now += us * (1 + self.noise * self.rng.uniform(-1, 1))

    def capture(self, work: Sequence[Program]) -> FakeGraph:
        return FakeGraph(self, work)

    def close(self) -> None:
        self.closed = True
