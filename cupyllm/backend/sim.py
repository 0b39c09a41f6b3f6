"""A device made of NumPy: our kernels' PTX, compiled by NVRTC for compute_80, executed and checked without a GPU.

The launchers, the graph and the .cu files are those of the GPU; what differs is who executes. cupyllm/sim finds what
numbers alone do not show: accesses outside their tensor, reads of what was never written, races, misused cp.async,
divergent barriers. Everything found in one launch is raised at its end as SimError, with the node's name in front.

Order. Streams and events are kept in issue order: whatever is submitted has happened when the call returns, so `wait`
has nothing to wait for, and events are host times. That cannot show a missing wait between two streams; the GPU's tests
and the emulator's deferred streams do. One lock serves all threads, since readers upload while programs run.

The simulated device is an sm_80: variants that need more are not simulated. A host emulator that compiles kernels with
a C++ compiler was rejected as the only checker: it is blind to inline PTX, fragment layouts and cp.async.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm.backend import compile as kernels
from cupyllm.backend import cublas, nvrtc
from cupyllm.backend.base import Argument, KernelSpec, Launch, Tensor, TensorMap
from cupyllm.errors import BackendError
from cupyllm.hostmem import available_bytes
from cupyllm.ops.op import SIMULATED_CAPABILITY
from cupyllm.sim.machine import DEFAULT_BUDGET, LANES, Simulator
from cupyllm.sim.memory import Allocation, DeviceMemory
from cupyllm.sim.module import SimKernel, SimModule, load_module

MEMORY_BYTES = 16 << 30  # of the device; addresses alone, since pages cost memory when they are touched


class SimBuffer:
    """Device bytes; `free` gives them back, once."""

    def __init__(self, backend: SimBackend, allocation: Allocation) -> None:
        self.address, self.nbytes = allocation.address, allocation.nbytes
        self._backend: SimBackend | None = backend
        self._allocation = allocation

    def free(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend._release(self._allocation)


class SimEvent:
    """The host's time when it was recorded."""

    def __init__(self) -> None:
        self.seconds = 0.0


@dataclass
class SimProgram:
    """Launches whose kernels are loaded and whose arguments are checked."""

    calls: list[tuple[SimModule, Launch]]


class SimBackend:
    """Backend (base.py) on host memory. Raises BackendError when CuPy or NVRTC is missing.

    `check`: whether memory accesses and synchronisation are judged; `budget`: instructions that one launch may execute
    (None: the simulator's default); `lanes`: threads executed at once; `memory_bytes`: the device's size; `cache`
    stands in for the user's cache directory.
    """

    name = "sim"
    device_name = "PTX simulator (NumPy)"
    capability = SIMULATED_CAPABILITY
    num_sms = 108  # an A100's; simulated CTAs run one batch after another anyway
    tensor_cores = True

    def __init__(
        self,
        *,
        check: bool = True,
        budget: int | None = None,
        lanes: int = LANES,
        memory_bytes: int = MEMORY_BYTES,
        cache: Path | None = None,
    ) -> None:
        nvrtc.version()
        self._cache = cache
        self._peak_bytes = 0
        self._lock = threading.RLock()
        self._modules: dict[Path, SimModule] = {}  # by PTX file
        self._kernels: dict[KernelSpec, SimModule] = {}
        try:
            self._memory: DeviceMemory | None = DeviceMemory(memory_bytes)
        except OSError as error:
            raise BackendError(
                f"the simulator cannot reserve addresses for {memory_bytes} bytes of device memory ({error}); raise "
                "the limit of virtual memory (ulimit -v)"
            ) from error
        limit = DEFAULT_BUDGET if budget is None else budget
        self._simulator: Simulator | None = Simulator(self._memory, check=check, budget=limit, lanes=lanes)

    # ---- memory ----

    @property
    def memory(self) -> DeviceMemory:
        """All device memory. Raises BackendError after `close`."""
        if self._memory is None:
            raise BackendError("the simulator was closed; open another one")
        return self._memory

    def allocate(self, nbytes: int, name: str = "") -> SimBuffer:
        assert nbytes > 0, nbytes
        with self._lock:
            allocation = self.memory.allocate(nbytes, name)
            self._peak_bytes = max(self._peak_bytes, self.memory.live_bytes)
        return SimBuffer(self, allocation)

    def _release(self, allocation: Allocation) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.free(allocation)

    def allocate_host(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def process_peak_bytes(self) -> int | None:
        return None

    def free_bytes(self) -> int:
        return min(self.memory.nbytes - self.memory.live_bytes, available_bytes())

    # ---- order ----

    def stream(self) -> Any:
        return None

    def event(self) -> SimEvent:
        return SimEvent()

    def record(self, event: SimEvent, stream: Any) -> None:
        event.seconds = time.perf_counter()

    def wait(self, stream: Any, event: SimEvent) -> None:
        pass

    def wait_host(self, event: SimEvent) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_ms(self, start: SimEvent, stop: SimEvent) -> float:
        return (stop.seconds - start.seconds) * 1e3

    # ---- work ----

    def upload(self, address: int, source: np.ndarray, stream: Any = None) -> None:
        assert source.flags.c_contiguous
        with self._lock:
            if source.nbytes:
                self.memory.upload(address, source)

    def download(self, target: np.ndarray, address: int, stream: Any = None) -> None:
        assert target.flags.c_contiguous and target.flags.writeable
        with self._lock:
            if target.nbytes:
                self.memory.download(target, address)

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        with self._lock:
            if nbytes:
                self.memory.copy(target, source, nbytes)

    def fill(self, address: int, nbytes: int, byte: int, stream: Any = None) -> None:
        with self._lock:
            if nbytes:
                self.memory.fill(address, nbytes, byte)

    def forget(self, address: int, nbytes: int) -> None:
        """Count these bytes as never written, whatever they hold: reading them is an error until they are."""
        with self._lock:
            if nbytes:
                self.memory.forget(address, nbytes)

    def load(self, launches: Sequence[Launch]) -> SimProgram:
        cublas.refuse(launches, "the simulator")
        with self._lock:
            self._load_kernels(dict.fromkeys(launch.kernel for launch in launches))
            for launch in launches:
                check_arguments(launch, self._kernels[launch.kernel].kernels[launch.kernel.symbol])
        return SimProgram([(self._kernels[launch.kernel], launch) for launch in launches])

    def _load_kernels(self, specs: dict[KernelSpec, None]) -> None:
        missing = [spec for spec in specs if spec not in self._kernels]
        if not missing:
            return
        kernel_folder = None if self._cache is None else _made(self._cache / "kernels")
        for spec, ptx in kernels.compile_ptx_many(missing, kernel_folder).items():
            module = self._modules.get(ptx.path)
            if module is None:
                module = self._modules[ptx.path] = load_module(ptx.path.read_text(), self._source_folder())
            if spec.symbol not in module.kernels:
                raise BackendError(f"{spec.source} defines no kernel {spec.symbol}")
            self._kernels[spec] = module

    def _source_folder(self) -> Path:
        """Where the NumPy source that kernels are translated to is kept."""
        if self._cache is not None:
            return _made(self._cache / "sim")
        from cupyllm.cache import cache_subdir  # here, since it imports the checkpoint reader

        return cache_subdir("sim")

    def run(self, program: SimProgram, stream: Any = None) -> None:
        with self._lock:
            if self._simulator is None:
                raise BackendError("the simulator was closed; open another one")
            for module, launch in program.calls:
                try:
                    self._simulator.launch(module, launch)
                except BackendError as error:
                    lines = str(error).splitlines()  # one a finding
                    error.args = ("\n".join(f"node {launch.node or '-'}: {line}" for line in lines),)
                    raise

    def close(self) -> None:
        """Let the memory go; a second call does nothing."""
        with self._lock:
            self._memory = self._simulator = None
            self._kernels.clear()
            self._modules.clear()


def check_arguments(launch: Launch, kernel: SimKernel) -> None:
    """Raise BackendError where they do not match the kernel's parameters; the simulator checks grid and block."""
    where, parameters = f"{launch.kernel.symbol} (node {launch.node or '-'})", kernel.kernel.parameters
    if len(launch.args) != len(parameters):
        raise BackendError(f"{where}: got {len(launch.args)} arguments, the kernel takes {len(parameters)}")
    for index, (arg, parameter) in enumerate(zip(launch.args, parameters, strict=True)):
        kind, nbytes, types = _kind(arg)
        if parameter.nbytes != nbytes or parameter.type not in types:
            raise BackendError(f"{where}: argument {index} is {kind}, the kernel takes .{parameter.type} there")
        if isinstance(arg, Tensor) and arg.address % 16:
            raise BackendError(f"{where}: argument {index} at {arg.address:#x} is not 16-byte aligned")


def _kind(arg: Argument) -> tuple[str, int, tuple[str, ...]]:
    """What an argument is, its bytes, and the PTX types of a parameter that takes it (a pointer is an integer)."""
    if isinstance(arg, np.float32):
        return "a float32", 4, ("f32", "b32")
    if isinstance(arg, np.float64):
        return "a float64", 8, ("f64", "b64")
    if isinstance(arg, TensorMap):
        return f"a tensor map, which sm_{SIMULATED_CAPABILITY} does not have", 0, ()
    if arg is None or isinstance(arg, Tensor):
        return "a pointer", 8, ("u64", "b64")
    if isinstance(arg, (int, np.integer)) and not isinstance(arg, bool):
        return "an integer", 8, ("u64", "s64", "b64")
    return f"{arg!r}, which is no tensor, integer, np.float32 or np.float64", 0, ()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
