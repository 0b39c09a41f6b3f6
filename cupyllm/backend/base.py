"""The contract between launchers and the machine.

A launcher never runs anything: it records `Launch`es into a `Recorder` (backend/record.py). A backend turns a recorded
list into a `Program` with every argument bound, and runs it as often as asked. This is what keeps 64 layers from
becoming host-bound, and what lets the same launchers drive a GPU, the null backend that measures host cost, and a
simulator. The alternative, launching while walking the graph, pays checks and argument packing on every layer.

Kernel ABI: every integer argument is a 64-bit `long long`, every pointer 64 bits, floats are `float` (np.float32) or
`double` (np.float64), a TensorMap 128 bytes by value. Tensors are contiguous, row-major and at least 16-byte aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    name: np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name) for name in ITEMSIZE
}
CTYPE = {"float64": "double", "float32": "float", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "int"}
ALIGNMENT = 256  # bytes; of every allocation and of every tensor in an arena


class Storage:
    """A run of device bytes. `address` is None until an arena has placed it (record.py)."""

    __slots__ = ("address", "name", "nbytes")

    def __init__(self, nbytes: int, address: int | None = None, name: str = "") -> None:
        self.nbytes = nbytes
        self.address = address
        self.name = name


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor that need not exist yet."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Tensor(Spec):
    """A contiguous row-major device array inside a storage. Owns nothing."""

    storage: Storage
    offset: int = 0  # bytes into the storage

    @property
    def address(self) -> int:
        assert self.storage.address is not None, f"{self.storage.name} has no address yet"
        return self.storage.address + self.offset

    def view(self, *shape: int) -> Tensor:
        """The same bytes under another shape of equal size."""
        assert math.prod(shape) == self.size, f"cannot view {self.shape} as {shape}"
        return replace(self, shape=shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the leading dimension: still contiguous."""
        assert 0 <= start <= stop <= self.shape[0]
        row_bytes = math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + start * row_bytes)


def fixed(address: int, shape: Sequence[int], dtype: str, name: str = "") -> Tensor:
    """A tensor at a known device address (weight slots, the residual stream, gradients)."""
    spec = Spec(tuple(shape), dtype)
    return Tensor(spec.shape, dtype, Storage(spec.nbytes, address, name))


@dataclass(frozen=True)
class KernelSpec:
    """One compiled symbol: a .cu file of cupyllm/cu, and the macros that fix dtypes and tiles."""

    source: str  # "rmsnorm.cu"
    symbol: str  # "rmsnorm_forward_float32_bfloat16"
    defines: tuple[tuple[str, str], ...] = ()


def kernel(source: str, name: str, *, dtypes: dict[str, str], **defines: int | str) -> KernelSpec:
    """Spec of `name` in `source` for `dtypes` (macro -> dtype name, e.g. X_T="bfloat16"); see KERNEL in common.cuh.

    The symbol is the name with the dtype names appended in the order given; common.cuh builds the same through SUFFIX.
    """
    suffix = "_".join(dtypes.values())
    macros = [(macro, CTYPE[dtype]) for macro, dtype in dtypes.items()]
    macros += [(macro, str(value)) for macro, value in defines.items()]
    if suffix:
        macros.append(("SUFFIX", "_" + suffix))
    return KernelSpec(source, f"{name}_{suffix}" if suffix else name, tuple(macros))


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor of a whole 2-D tensor, passed by value (128 bytes, `const __grid_constant__`; Hopper and later).

    `box`: rows and columns that one copy moves. Boxes lie in shared memory with rows of 64 or 128 bytes, swizzled over
    as many, or of another multiple of 16 bytes, as they are. A backend makes the descriptor when it loads the program,
    since it holds the tensor's address.
    """

    tensor: Tensor
    box: tuple[int, int]

    def __post_init__(self) -> None:
        shape, size = self.tensor.shape, ITEMSIZE[self.tensor.dtype]
        assert len(shape) == 2 and max(shape) < 2**31, shape  # coordinates are 32-bit
        assert shape[1] * size % 16 == 0 and self.tensor.offset % 16 == 0, (
            shape,
            self.tensor.dtype,
            self.tensor.offset,
        )
        assert all(1 <= extent <= 256 for extent in self.box), (self.box, self.tensor)
        assert self.box[1] * size % 16 == 0, (self.box, self.tensor)


Argument = Tensor | TensorMap | int | np.float32 | np.float64 | None  # None is a null pointer


def tensor_of(arg: Argument) -> Tensor | None:
    """The tensor that an argument names, itself or by a map: what lifetimes and placement are about."""
    if isinstance(arg, TensorMap):
        return arg.tensor
    return arg if isinstance(arg, Tensor) else None


@dataclass(frozen=True)
class Launch:
    """One kernel launch. Tensor arguments become their addresses when a backend loads the program."""

    kernel: KernelSpec
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Argument, ...]
    shared_bytes: int = 0  # dynamic shared memory
    node: str = ""  # the graph node that recorded it, for errors and profiles
    # Programmatic dependent launch, where the GPU has it (9.0 and later): the kernel may start before the one before it
    # has ended, so it waits (griddepcontrol.wait) before it touches anything but its weights.
    programmatic: bool = False


class Buffer(Protocol):
    """Device memory owned by whoever holds this object."""

    address: int
    nbytes: int

    def free(self) -> None: ...


class Backend(Protocol):
    """A device. Streams and events are opaque handles. Copies with `stream` are asynchronous when the host side is
    pinned (from `allocate_host`); without a stream they are complete on return."""

    name: str  # "cuda", "null", "sim"
    device_name: str
    capability: int  # 90 for sm_90
    num_sms: int  # multiprocessors; persistent kernels launch one CTA on each
    tensor_cores: bool  # whether kernels that use them run here; every GPU from sm_80 has them

    def allocate(self, nbytes: int, name: str = "") -> Buffer:
        """Aligned device bytes. Raises OutOfMemory with needed and free bytes."""
        ...

    def allocate_host(self, nbytes: int) -> np.ndarray:
        """Pinned host memory, uint8 [nbytes]; released with the array."""
        ...

    def stream(self) -> Any: ...

    def event(self) -> Any: ...

    def record(self, event: Any, stream: Any) -> None: ...

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work on `stream` wait for `event` (a no-op for an event never recorded)."""
        ...

    def wait_host(self, event: Any) -> None:
        """Block the calling thread until `event` has happened."""
        ...

    def synchronize(self) -> None:
        """Wait for everything; raises BackendError naming the cause when a kernel failed."""
        ...

    def upload(self, address: int, source: np.ndarray, stream: Any = None) -> None: ...

    def download(self, target: np.ndarray, address: int, stream: Any = None) -> None: ...

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None: ...

    def fill(self, address: int, nbytes: int, byte: int, stream: Any = None) -> None: ...

    def load(self, launches: Sequence[Launch]) -> Any:
        """A program: kernels compiled (missing ones in parallel) and arguments bound. Keeps no reference to memory."""
        ...

    def run(self, program: Any, stream: Any = None) -> None: ...

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Device time between two recorded events."""
        ...

    def peak_bytes(self) -> int:
        """Largest sum of `allocate`d bytes alive at once."""
        ...

    def process_peak_bytes(self) -> int | None:
        """Device memory this process has used as the driver reports it (context included); None where unknown."""
        ...

    def free_bytes(self) -> int: ...

    def close(self) -> None: ...
