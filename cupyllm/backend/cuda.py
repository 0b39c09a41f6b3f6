"""The GPU: memory, streams and launches through CuPy's thin runtime and driver layers.

CuPy's arrays and memory pool are not used: the pool is per stream and knows nothing of other streams' readers
(design: backend/record.py lays memory out beforehand). Kernels come from backend/compile.py as cubins, are loaded with
cupy.RawModule(path=...) and launched with arguments packed once (backend/program.py): by cuLaunchKernel, programmatic
launches by cuLaunchKernelEx (backend/dependent.py), products of cuBLAS by the library (backend/cublas.py).
Importing this module touches no device; making a CudaBackend does.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupyllm.backend import compile as kernels
from cupyllm.backend import cublas, dependent, nvrtc, tensor_map
from cupyllm.backend.base import KernelSpec, Launch, TensorMap
from cupyllm.backend.graph import Graph
from cupyllm.backend.nvml import Meter
from cupyllm.backend.program import Call, Program, Step
from cupyllm.errors import BackendError, OutOfMemory

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
_REMEMBERED_PROGRAMS = 4


class CudaBuffer:
    """Device bytes; `free` gives them back, once."""

    def __init__(self, backend: CudaBackend, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self._backend: CudaBackend | None = backend

    def free(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend._release(self.address, self.nbytes)


class CudaBackend:
    """Backend (base.py) on one NVIDIA GPU. Raises BackendError when CuPy, NVRTC, driver or device do not do."""

    name = "cuda"
    tensor_cores = True

    def __init__(self, device: int = 0) -> None:
        try:
            import cupy
            from cupy.cuda import driver, runtime
        except ImportError as error:
            raise BackendError(f"CuPy does not import ({error}); {nvrtc.REMEDY}") from error
        nvrtc.version()
        self._cupy, self._runtime = cupy, runtime
        self._launch = driver.launchKernel
        self._driver_error: type[Exception] = driver.CUDADriverError
        self._device, self._pid, self._local = device, os.getpid(), threading.local()
        self._lock = threading.Lock()
        self._live_bytes = self._peak_bytes = 0
        self._functions: dict[KernelSpec, int] = {}
        self._loaded: dict[KernelSpec, tuple[Any, Any, int]] = {}  # module, function, dynamic shared bytes it may have
        self._driver: Any = None  # libcuda, when a tensor map was asked for
        self._dependent: dependent.Launcher | None = None  # when a programmatic launch was loaded
        self._cublas: cublas.Cublas | None = None  # when a product of it was loaded
        self._recent: deque[Program] = deque(maxlen=_REMEMBERED_PROGRAMS)
        self._captured: list[Program] | None = None  # what runs while a graph is captured
        with self._errors("opening the GPU"):
            self._meter = Meter(runtime.deviceGetPCIBusId(device))
            self._enter()
            properties = runtime.getDeviceProperties(device)
            self._meter.sample()
        self.device_name = properties["name"].decode()
        self.capability = 10 * properties["major"] + properties["minor"]
        self.num_sms = int(properties["multiProcessorCount"])
        self.l2_bytes = int(properties["l2CacheSize"])
        self.architecture = kernels.architecture(self.capability)

    # ---- memory ----

    def allocate(self, nbytes: int, name: str = "") -> CudaBuffer:
        self._enter()
        try:
            address = self._runtime.malloc(nbytes)
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise self._failure(f"allocating {nbytes} bytes", error) from error
            free, total = self._runtime.memGetInfo()
            raise OutOfMemory(
                f"GPU memory: {name or 'a buffer'} needs {nbytes} bytes, {free} of {total} are free "
                f"({self._live_bytes} are ours); take fewer tokens or rows, --stream, or a larger GPU"
            ) from error
        with self._lock:
            self._live_bytes += nbytes
            if self._live_bytes > self._peak_bytes:
                self._peak_bytes = self._live_bytes
                self._meter.sample()
        return CudaBuffer(self, address, nbytes)

    def _release(self, address: int, nbytes: int) -> None:
        self._enter()
        with self._errors("freeing memory"):
            self._runtime.free(address)
        with self._lock:
            self._live_bytes -= nbytes

    def allocate_host(self, nbytes: int) -> np.ndarray:
        self._enter()
        try:
            address = self._runtime.hostAlloc(max(nbytes, 1), self._runtime.hostAllocDefault)
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise self._failure(f"pinning {nbytes} bytes", error) from error
            raise OutOfMemory(
                f"host memory: {nbytes} bytes cannot be pinned; free some, or raise the memlock limit"
            ) from error
        owner = (ctypes.c_uint8 * nbytes).from_address(address)
        finalizer = weakref.finalize(owner, _free_host, self._runtime, address, self._pid)
        finalizer.atexit = False  # the process's end frees it
        return np.frombuffer(memoryview(owner), np.uint8)

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def process_peak_bytes(self) -> int | None:
        self._meter.sample()
        return self._meter.peak_bytes

    @property
    def process_peak_source(self) -> str | None:
        """What process_peak_bytes counts: "this process", or "growth of the whole device" where ids are hidden."""
        return self._meter.source

    def free_bytes(self) -> int:
        self._enter()
        with self._errors("asking for free memory"):
            return int(self._runtime.memGetInfo()[0])

    # ---- order ----

    def stream(self) -> Any:
        self._enter()
        return self._cupy.cuda.Stream(non_blocking=True)

    def event(self) -> Any:
        self._enter()
        return self._cupy.cuda.Event(block=True)  # blocking: a waiting reader thread must not burn a core

    def record(self, event: Any, stream: Any) -> None:
        self._enter()
        with self._errors("recording an event"):
            self._runtime.eventRecord(event.ptr, _pointer(stream))

    def wait(self, stream: Any, event: Any) -> None:
        self._enter()
        with self._errors("waiting for an event"):
            self._runtime.streamWaitEvent(_pointer(stream), event.ptr)

    def wait_host(self, event: Any) -> None:
        self._enter()
        with self._errors("waiting for an event"):
            self._runtime.eventSynchronize(event.ptr)

    def synchronize(self) -> None:
        self._enter()
        with self._errors("waiting for the GPU"):
            self._runtime.deviceSynchronize()

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        self.wait_host(stop)
        return float(self._runtime.eventElapsedTime(start.ptr, stop.ptr))

    # ---- work ----

    def upload(self, address: int, source: np.ndarray, stream: Any = None) -> None:
        assert source.flags.c_contiguous
        self._copy(address, source.ctypes.data, source.nbytes, _HOST_TO_DEVICE, stream)

    def download(self, target: np.ndarray, address: int, stream: Any = None) -> None:
        assert target.flags.c_contiguous and target.flags.writeable
        self._copy(target.ctypes.data, address, target.nbytes, _DEVICE_TO_HOST, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        self._copy(target, source, nbytes, _DEVICE_TO_DEVICE, stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        if nbytes == 0:
            return
        self._enter()
        with self._errors(f"copying {nbytes} bytes"):
            self._runtime.memcpyAsync(target, source, nbytes, kind, _pointer(stream))
            if stream is None:  # plain memcpy returns once pageable memory is staged, which is too early
                self._runtime.streamSynchronize(0)

    def fill(self, address: int, nbytes: int, byte: int, stream: Any = None) -> None:
        self._enter()
        with self._errors(f"filling {nbytes} bytes"):
            self._runtime.memsetAsync(address, byte, nbytes, _pointer(stream))
            if stream is None:
                self._runtime.streamSynchronize(0)

    def compile(self, wanted: Iterable[KernelSpec]) -> None:
        """Compile what the cache lacks, in parallel, for later loads."""
        kernels.compile_many(wanted, self.architecture)

    def load(self, launches: Sequence[Launch]) -> Program:
        self._enter()
        dynamic: dict[KernelSpec, int] = {}
        for launch in launches:
            if launch.kernel.source == cublas.SOURCE:
                self._functions[launch.kernel] = 0  # it has no handle of a kernel
                self._open_cublas()
            else:
                dynamic[launch.kernel] = max(launch.shared_bytes, dynamic.get(launch.kernel, 0))
        if self._dependent is None and any(self._starts_early(launch) for launch in launches):
            self._dependent = dependent.Launcher(self._driver_error)
        missing = [kernel for kernel in dynamic if kernel not in self._functions]
        cubins = kernels.compile_many(missing, self.architecture)
        for kernel, cubin in cubins.items():
            self._functions[kernel] = self._load_kernel(kernel, str(cubin.path))
        for kernel, nbytes in dynamic.items():
            self._allow_shared(kernel, nbytes)
        return Program(launches, self._functions, self._encode)

    def _encode(self, wanted: TensorMap) -> bytes:
        if self._driver is None:
            self._driver = tensor_map.driver()
        return tensor_map.encode(self._driver, wanted)

    def _load_kernel(self, kernel: KernelSpec, path: str) -> int:
        with self._errors(f"loading {kernel.symbol} from {path}"):
            module = self._cupy.RawModule(path=path)
            function = module.get_function(kernel.symbol)
            self._loaded[kernel] = (module, function, 0)
            return int(function.kernel.ptr)

    def _allow_shared(self, kernel: KernelSpec, nbytes: int) -> None:
        """Let launches of a loaded kernel have this much dynamic shared memory: a later list may want more."""
        module, function, allowed = self._loaded[kernel]
        if nbytes > allowed:
            with self._errors(f"asking for {nbytes} bytes of shared memory for {kernel.symbol}"):
                function.max_dynamic_shared_size_bytes = nbytes
            self._loaded[kernel] = (module, function, nbytes)

    def _open_cublas(self) -> None:
        if self._cublas is None:
            self._cublas = cublas.Cublas(self.allocate)

    def _starts_early(self, launch: Launch) -> bool:
        return launch.programmatic and self.capability >= dependent.MIN_CAPABILITY

    def _bind(self, launch: Launch, call: Call) -> Step:
        if launch.kernel.source == cublas.SOURCE:
            assert self._cublas is not None
            return self._cublas.step(launch, call[8])
        if self._starts_early(launch):
            assert self._dependent is not None
            return self._dependent.step(call)
        return self._launch, call

    def run(self, program: Program, stream: Any = None) -> None:
        self._enter()
        self._recent.append(program)
        if self._captured is not None:
            self._captured.append(program)
        done = 0
        try:
            for call, arguments in program.steps(_pointer(stream), self._bind):
                call(*arguments)
                done += 1
        except (self._driver_error, cublas.CublasError) as error:
            failed = program.launches[done]
            raise self._failure(f"launching {failed.kernel.symbol} (node {failed.node or '-'})", error) from error

    def capture(self, work: Sequence[Program] | Callable[[Any], None]) -> Graph:
        """A graph of these programs, or of what `work` starts on the stream that it is called with.

        The stream is a new one, and nothing runs yet. Programs of cuBLAS among `work` must have been loaded before.
        Raises BackendError, with the capture ended, where something cannot be captured.
        """
        self._enter()
        stream, runtime = self.stream(), self._runtime
        if self._cublas is not None:
            with self._errors("opening cuBLAS"):
                self._cublas.open(stream.ptr)  # it allocates, which a capture forbids
        before, programs = self._captured, []  # type: tuple[list[Program] | None, list[Program]]
        with self._errors("capturing a graph"):
            runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeRelaxed)
            self._captured, ended = programs, False
            try:
                if callable(work):
                    work(stream)
                else:
                    for program in work:
                        self.run(program, stream)
                ended = True  # also when it fails, the stream is no longer captured
                graph = runtime.streamEndCapture(stream.ptr)
                executable = runtime.graphInstantiate(graph)
            except BaseException:
                self._abandon(stream, ended)
                raise
            finally:
                self._captured = before
                for program in programs:
                    program.forget(stream.ptr)  # another stream may get its handle
        return Graph(self, runtime, (graph, executable), programs, lambda: self._forget(stream))

    def _abandon(self, stream: Any, ended: bool) -> None:
        """End a capture that failed; what it made is dropped, and its error is the one that counts."""
        try:
            if not ended:
                self._runtime.graphDestroy(self._runtime.streamEndCapture(stream.ptr))
        except self._runtime.CUDARuntimeError:
            pass  # the capture was invalid: this ended it
        self._forget(stream)

    def _forget(self, stream: Any) -> None:
        if self._cublas is not None:
            self._cublas.forget(stream.ptr)

    def launch_graph(self, graph: Graph, executable: int, stream: Any) -> None:
        """Graph.launch."""
        self._enter()
        if graph.programs:
            self._recent.append(graph.programs[-1])
        with self._errors("launching a graph"):
            self._runtime.graphLaunch(executable, _pointer(stream))

    def close(self) -> None:
        if os.getpid() == self._pid:
            self.synchronize()

    # ---- threads, processes, errors ----

    def _enter(self) -> None:
        """Make our device the calling thread's; refuse in a forked child, where CUDA cannot work."""
        if getattr(self._local, "pid", None) == os.getpid():
            return
        if os.getpid() != self._pid:
            raise BackendError(
                "the GPU was opened before this process was forked, and CUDA does not survive a fork; "
                "start workers with multiprocessing's spawn method, or open the backend after the fork"
            )
        with self._errors("choosing the GPU"):
            self._runtime.setDevice(self._device)
        self._local.pid = self._pid

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (self._runtime.CUDARuntimeError, self._driver_error, cublas.CublasError) as error:
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: Exception) -> BackendError:
        recent = "; ".join(program.describe() for program in reversed(self._recent))
        after = f"; last started, newest first: {recent}" if recent else ""
        return BackendError(f"CUDA, {doing}: {' '.join(str(error).split())}{after}")


def _pointer(stream: Any) -> int:
    return 0 if stream is None else stream.ptr


def _free_host(runtime: Any, address: int, pid: int) -> None:
    if os.getpid() == pid:
        runtime.freeHost(address)
