"""Device memory as the driver accounts for it, through NVML (ctypes: one small library, no wheel).

An allocator's own peak leaves out the context, the loaded modules and the local-memory pool, which are a few hundred
MB. NVML gives a process's total. It knows host process ids only, so inside a container with its own id namespace the
growth of the whole device since before our context is the nearest there is; `source` says which it was.
"""

from __future__ import annotations

import ctypes
import os

SUCCESS = 0
INSUFFICIENT_SIZE = 7
NOT_AVAILABLE = 2**64 - 1


class _ProcessInfo(ctypes.Structure):  # nvmlProcessInfo_v2_t
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Memory(ctypes.Structure):  # nvmlMemory_t
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Meter:
    """Samples this process's device memory and keeps the largest. Make it before the CUDA context.

    `source` is None where NVML does not answer.
    """

    def __init__(self, bus_id: str) -> None:
        self.source: str | None = None
        self.peak_bytes: int | None = None
        self._device = ctypes.c_void_p()
        self._before = 0
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if self._library.nvmlInit_v2() != SUCCESS:
            return
        handle = self._library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(self._device))
        used = self._device_bytes() if handle == SUCCESS else None
        if used is not None:
            self._before = used
            self.source = "growth of the whole device"

    def sample(self) -> None:
        """Take the present use into the peak."""
        if self.source is None:
            return
        now = self._process_bytes()
        if now is not None:
            if self.source != "this process":
                self.source, self.peak_bytes = "this process", None
        elif self.source == "this process":
            return
        else:
            used = self._device_bytes()
            if used is None:
                return
            now = max(0, used - self._before)
        self.peak_bytes = max(now, self.peak_bytes or 0)

    def _device_bytes(self) -> int | None:
        memory = _Memory()
        if self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) != SUCCESS:
            return None
        return int(memory.used)

    def _process_bytes(self) -> int | None:
        """What NVML says of our process id; None when it lists no such process."""
        try:
            ask = self._library.nvmlDeviceGetComputeRunningProcesses_v3
        except AttributeError:
            return None  # a driver older than CUDA 11.1's
        room = 64
        while True:
            count, infos = ctypes.c_uint(room), (_ProcessInfo * room)()
            status = ask(self._device, ctypes.byref(count), infos)
            if status != INSUFFICIENT_SIZE:
                break
            room = max(2 * room, count.value + 16)
        if status != SUCCESS:
            return None
        own = [info.used_bytes for info in infos[: count.value] if info.pid == os.getpid()]
        known = [value for value in own if value != NOT_AVAILABLE]
        return sum(known) if known else None
