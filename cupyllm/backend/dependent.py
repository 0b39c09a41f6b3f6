"""Programmatic dependent launches: a kernel starts while the one before it still runs, and waits inside.

cuLaunchKernelEx with the attribute "programmatic stream serialization", through ctypes on the driver's own library,
since CuPy wraps cuLaunchKernel alone. The configuration is a struct for each launch and stream, made once: what a
launch costs the host is one ctypes call with ready-made arguments. A stream that is being captured takes such launches
as programmatic edges of its graph.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cupyllm.backend.program import Call, Step
from cupyllm.errors import BackendError

MIN_CAPABILITY = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id padded to 8 bytes, and a union of 64."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("shape", ctypes.c_uint * 6),  # grid x y z, block x y z
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Launcher:
    """Makes steps of calls. `error`: what a status of the driver is raised as. `library` stands in for libcuda."""

    def __init__(self, error: type[Exception], library: Any = None) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1") if library is None else library
            self._function = library.cuLaunchKernelEx
        except (OSError, AttributeError) as failure:
            raise BackendError(
                f"the CUDA driver has no cuLaunchKernelEx ({' '.join(str(failure).split())}); update it"
            ) from failure

        def check(status: int) -> None:
            if status:
                raise error(status)

        self._function.restype = check
        self._attribute = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1, b""))

    def step(self, call: Call) -> Step:
        """The launch of this call, with its configuration, which lives as long as the step."""
        function, *shape, shared_bytes, stream, pointers, _ = call
        config = _Config((ctypes.c_uint * 6)(*shape), shared_bytes, stream, self._attribute, 1)
        arguments = (ctypes.byref(config), ctypes.c_void_p(function), ctypes.c_void_p(pointers), ctypes.c_void_p(None))
        return self._function, arguments
