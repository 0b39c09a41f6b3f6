"""cuBLAS, NVIDIA's library: products beside our own kernels, as a peer and for GPUs that ours are not tuned for.

A product is recorded like any launch, with KernelSpec.source "cublas" and the arguments below, so lifetimes, arenas and
programs treat it as they treat kernels. Only the GPU's backend can run it; `refuse` is for the others. The library
is loaded as CuPy loads it (cuda.pathfinder), when the first program that names it is loaded, and never otherwise, and
called through ctypes: CuPy's own binding sets the stream at every call, which takes the workspace away, and refuses
streams that are being captured.

Every stream has a handle and a workspace of its own: cuBLAS promises the same bits run after run only then, and a
workspace of ours is what a captured graph may keep. Sums are float32: reduced precision is switched off, TF32 not on.
C [M,N] row-major = A B^T is, in cuBLAS's column-major terms, C^T = B A^T.

Arguments of a launch: A, B, C, M, N, K, whether A's and B's contiguous axis is M and N (else K), whether C is added to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from cupyllm.backend.base import Buffer, KernelSpec, Launch, Tensor
from cupyllm.backend.program import Step
from cupyllm.errors import BackendError

SOURCE = "cublas"
REMEDY = "pip install 'cupyllm[cublas]' (with CUDA 13: 'cupyllm[cublas13]')"
WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper, the largest
MAX_EXTENT = 1 << 31
_TYPES = {"float32": 0, "bfloat16": 14}  # cudaDataType
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_NO_REDUCED_PRECISION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, over the default mode, which has no TF32
_FUNCTIONS = (
    *("cublasCreate_v2", "cublasDestroy_v2", "cublasSetStream_v2", "cublasSetMathMode", "cublasSetWorkspace_v2"),
    "cublasGemmEx",
)
_STATUSES = {1: "not initialised", 3: "allocation failed", 7: "invalid value", 8: "architecture mismatch"} | {
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}
_SCALARS = (ctypes.c_float * 2)(0, 1)  # beta and alpha: read by the host during the call


def kernel(form: str, a_dtype: str, c_dtype: str) -> KernelSpec:
    """How a launch names it."""
    return KernelSpec(SOURCE, f"gemm_{form}_{a_dtype}_{c_dtype}")


def refuse(launches: Iterable[Launch], device: str) -> None:
    """Raise BackendError when a launch is a library's and `device` cannot run it."""
    for launch in launches:
        if launch.kernel.source == SOURCE:
            raise BackendError(
                f"{launch.kernel.symbol} (node {launch.node or '-'}) is cuBLAS's, which runs on NVIDIA GPUs only, and "
                f"this is {device}; leave out --variant linear=cublas"
            )


class CublasError(Exception):
    """A call that the library refused."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cuBLAS: status {status} ({_STATUSES.get(status, 'unknown')})")


def _check(status: int) -> None:
    if status:
        raise CublasError(status)


class Cublas:
    """The library, with a handle and a workspace a stream. Raises BackendError where it does not load.

    `library` stands in for it.
    """

    def __init__(self, allocate: Callable[[int, str], Buffer], library: Any = None) -> None:
        self._library, self._allocate = _load() if library is None else library, allocate
        for name in _FUNCTIONS:
            getattr(self._library, name).restype = _check
        self._gemm = self._library.cublasGemmEx
        self._streams: dict[int, tuple[ctypes.c_void_p, Buffer]] = {}

    def open(self, stream: int) -> ctypes.c_void_p:
        """The handle of a stream, made at the first use: not while the stream is being captured."""
        found = self._streams.get(stream)
        if found is None:
            handle, library = ctypes.c_void_p(), self._library
            library.cublasCreate_v2(ctypes.byref(handle))
            workspace = self._allocate(WORKSPACE_BYTES, "cuBLAS's workspace")
            found = self._streams[stream] = (handle, workspace)
            library.cublasSetStream_v2(handle, ctypes.c_void_p(stream))
            library.cublasSetMathMode(handle, _NO_REDUCED_PRECISION)
            size = ctypes.c_size_t(workspace.nbytes)
            library.cublasSetWorkspace_v2(handle, ctypes.c_void_p(workspace.address), size)
        return found[0]

    def forget(self, stream: int) -> None:
        """Let the stream's handle and workspace go, if it has any. Nothing may be running with them."""
        found = self._streams.pop(stream, None)
        if found is not None:
            self._library.cublasDestroy_v2(found[0])
            found[1].free()

    def step(self, launch: Launch, stream: int) -> Step:
        """The call of a recorded product."""
        a, b, c, rows, cols, depth, a_mn, b_mn, accumulate = launch.args
        assert isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(c, Tensor), launch
        zero, one = (ctypes.c_void_p(ctypes.addressof(_SCALARS) + 4 * i) for i in (0, 1))
        left = (ctypes.c_void_p(b.address), _TYPES[b.dtype], cols if b_mn else depth)
        right = (ctypes.c_void_p(a.address), _TYPES[a.dtype], rows if a_mn else depth)
        result = (one if accumulate else zero, ctypes.c_void_p(c.address), _TYPES[c.dtype], cols)
        sizes = (int(not b_mn), int(bool(a_mn)), cols, rows, depth, one)  # first whether each is transposed
        return self._gemm, (self.open(stream), *sizes, *left, *right, *result, _COMPUTE_32F, _DEFAULT_ALGORITHM)


def _load() -> Any:
    try:
        from cuda import pathfinder

        found = pathfinder.load_nvidia_dynamic_lib("cublas")
        return ctypes.CDLL(found.abs_path)
    except (ImportError, OSError, RuntimeError) as error:  # pathfinder's own is a RuntimeError
        raise BackendError(f"cuBLAS does not load ({' '.join(str(error).split())}); {REMEDY}") from error
