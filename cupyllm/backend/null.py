"""A device that does nothing: what remains is the host's own cost.

Programs are packed and walked exactly as the CUDA backend does, up to the driver call. Addresses are made up, copies
move nothing, and downloads give zeros.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyllm.backend.base import ALIGNMENT, Launch
from cupyllm.backend.program import Program
from cupyllm.backend.record import DEFAULT_SMS

_FIRST_ADDRESS = 1 << 40
_DEVICE_BYTES = 80 << 30


class NullBuffer:
    """A run of made-up addresses."""

    def __init__(self, backend: NullBackend, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self._backend: NullBackend | None = backend

    def free(self) -> None:
        if self._backend is not None:
            self._backend.live_bytes -= self.nbytes
            self._backend = None


class NullEvent:
    def __init__(self) -> None:
        self.seconds = 0.0


class NullBackend:
    """Backend (base.py) without a device. `num_launches` counts what would have been launched."""

    name = "null"
    device_name = "none (host cost only)"
    tensor_cores = True

    def __init__(self, capability: int = 80) -> None:
        self.capability = capability
        self.num_sms = DEFAULT_SMS
        self.num_launches = 0
        self.live_bytes = 0
        self._peak_bytes = 0
        self._next_address = _FIRST_ADDRESS

    def allocate(self, nbytes: int, name: str = "") -> NullBuffer:
        buffer = NullBuffer(self, self._next_address, nbytes)
        self._next_address += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self.live_bytes)
        return buffer

    def allocate_host(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def stream(self) -> Any:
        return None

    def event(self) -> NullEvent:
        return NullEvent()

    def record(self, event: NullEvent, stream: Any) -> None:
        event.seconds = time.perf_counter()

    def wait(self, stream: Any, event: NullEvent) -> None:
        pass

    def wait_host(self, event: NullEvent) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def upload(self, address: int, source: np.ndarray, stream: Any = None) -> None:
        pass

    def download(self, target: np.ndarray, address: int, stream: Any = None) -> None:
        target.fill(0)

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        pass

    def fill(self, address: int, nbytes: int, byte: int, stream: Any = None) -> None:
        pass

    def load(self, launches: Sequence[Launch]) -> Program:
        return Program(launches, {launch.kernel: 0 for launch in launches})

    def run(self, program: Program, stream: Any = None) -> None:
        launch = _launch
        for call in program.calls(0):
            launch(*call)
        self.num_launches += len(program.launches)

    def elapsed_ms(self, start: NullEvent, stop: NullEvent) -> float:
        return (stop.seconds - start.seconds) * 1e3

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def process_peak_bytes(self) -> int | None:
        return None

    def free_bytes(self) -> int:
        return _DEVICE_BYTES - self.live_bytes

    def close(self) -> None:
        pass


def _launch(*call: int) -> None:
    """In place of cuLaunchKernel, with its eleven arguments."""
