"""CUDA graphs: launches captured once and started together, without the host's cost of each.

What a graph needs to run stays alive with it: its programs, and the stream that it was captured on, to which a
library's workspace belongs. The memory that its kernels name is the caller's to keep.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from cupyllm.backend.program import Program


class Graph:
    """A captured graph, ready to run. Made by CudaBackend.capture.

    Two launches of one graph follow each other, whatever their streams. `free` lets the device's side go, once; so
    does the end of the object.
    """

    def __init__(
        self,
        backend: Any,
        runtime: Any,
        handles: tuple[int, int],
        programs: Sequence[Program],
        release: Callable[[], None],
    ) -> None:
        self.programs = tuple(programs)
        self._backend, self._runtime = backend, runtime
        self._executable = handles[1]
        self._free = weakref.finalize(self, _destroy, runtime, os.getpid(), handles, release)
        self._free.atexit = False  # the process's end frees it

    def launch(self, stream: Any = None) -> None:
        """Start it behind what `stream` has (None: the default stream). Returns at once."""
        assert self._free.alive, "the graph was freed"
        self._backend.launch_graph(self, self._executable, stream)

    def free(self) -> None:
        """Wait for nothing: the caller has seen its last launch end."""
        self._free()


def _destroy(runtime: Any, pid: int, handles: tuple[int, int], release: Callable[[], None]) -> None:
    if os.getpid() == pid:
        graph, executable = handles
        runtime.graphExecDestroy(executable)
        runtime.graphDestroy(graph)
        release()
