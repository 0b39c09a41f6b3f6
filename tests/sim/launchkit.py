"""A launch by hand: LaunchMemory with a made-up kernel, so that tests plant one access at a time.

Accesses go through `read` and `write`, whose sites are named after their line, "a.cu:7", and whose registers are NumPy
arrays of any of the register shapes. `problems` ends the launch and gives the reports as (kind, line) pairs.
"""

from __future__ import annotations

import numpy as np

from cupyllm.sim.access import LaunchMemory
from cupyllm.sim.memory import DeviceMemory, Extent, Geometry
from cupyllm.sim.ptx import Kernel, Location, Variable
from cupyllm.sim.report import Report, Reports, SimError, Site

TILE = "_ZZ4testE4tile"  # mangled, shown as tile


def u32(values) -> np.ndarray:
    return np.atleast_2d(np.asarray(values)).astype(np.uint32)


class Launch:
    """B CTAs of T threads at a time. arrays: host arrays that become the tensor arguments 0, 1, ..; None for null.

    A dict {name: bytes} gives the shared variables; `local` the bytes of one local variable, `stack`.
    """

    def __init__(
        self,
        arrays=(),
        *,
        B=2,
        T=32,
        grid=None,
        shared=None,
        dynamic=0,
        local=0,
        written=None,
        check=True,
        empty=(),
        variables=None,
        constants=frozenset(),
        block=None,
        device=None,
    ):
        self.device = device or DeviceMemory(64 << 20)
        self.extents = []
        for position, array in enumerate(arrays):
            if array is None:
                self.extents.append(None)
                continue
            if isinstance(array, Extent):
                self.extents.append(array)
                continue
            allocation = self.device.allocate(array.nbytes, f"x{position}")
            if position not in empty:
                self.device.upload(allocation.address, array)
            self.extents.append(Extent(allocation.address, array.nbytes, f"x{position}", array.itemsize, array.shape))
        self.variables = {}
        for name, array in (variables or {}).items():
            allocation = self.device.allocate(array.nbytes, name)
            self.device.upload(allocation.address, array)
            self.variables[name] = Extent(allocation.address, array.nbytes, name, array.itemsize, array.shape)
        declared = [Variable(name, "shared", 4, n, None, 1) for name, n in (shared or {}).items()]
        if local:
            declared.append(Variable("stack", "local", 16, local, None, 1))
        self.reports = Reports()
        self.B, self.T = B, T
        self.grid, self.block = grid or (B, 1, 1), block or (T, 1, 1)
        self.M = LaunchMemory(
            self.device,
            Kernel("test", variables=declared),
            self.variables,
            self.extents,
            dynamic,
            self.reports,
            check,
            written,
            constants,
        )
        self.sites = {}
        self.batch(0)

    def batch(self, first, B=None):
        """Begins the batch of CTAs from `first` on; the one before is over."""
        self.M.end_batch()
        self.M.begin(Geometry(self.grid, self.block, first, B or self.B, self.T))

    def site(self, line, text, params=None, symbols=None) -> Site:
        key = (line, text, params, symbols)
        if key not in self.sites:
            self.sites[key] = Site("test", text, (Location("a.cu", line),), params, symbols)
        return self.sites[key]

    def origin(self, of):
        """(params, symbols) of a site: a parameter's number, a variable's name, a tuple of them, None for unknown."""
        if of is None:
            return None, None
        names = of if isinstance(of, tuple) else (of,)
        return (
            frozenset(n for n in names if isinstance(n, int)),
            frozenset(n for n in names if isinstance(n, str)),
        )

    def address(self, space, of, offset):
        """Byte offsets from the array `of`, as the registers of an instruction of that space hold them."""
        first = of[0] if isinstance(of, tuple) else of
        if space == "shared" or space == "local":
            return (np.atleast_2d(offset).astype(np.int64) + self.M.address_of(first)).astype(np.uint32)
        base = self.extents[first].address if isinstance(first, int) else self.M.address_of(first)
        return (np.atleast_2d(offset).astype(np.int64) + base).astype(np.uint64)

    def read(self, line, of, offset, *, space=None, mask=None, type="f32", vec=1, origin="same", atomic=False):
        space = space or ("global" if isinstance(of, int) else "shared")
        params, symbols = self.origin(of if origin == "same" else origin)
        suffix = f".v{vec}" if vec > 1 else ""
        site = self.site(line, f"ld.{space}{suffix}.{type} %f1, [%r1];", params, symbols)
        return self.M.load(space, site, self.address(space, of, offset), mask, type, vec, atomic)

    def write(self, line, of, offset, *values, space=None, mask=None, type="f32", origin="same", atomic=False):
        space = space or ("global" if isinstance(of, int) else "shared")
        params, symbols = self.origin(of if origin == "same" else origin)
        site = self.site(line, f"st.{space}.{type} [%r1], %f1;", params, symbols)
        values = tuple(np.atleast_2d(np.asarray(v, np.float32 if type == "f32" else None)) for v in values or (1.0,))
        self.M.store(space, site, self.address(space, of, offset), mask, type, values, atomic)

    def barrier(self, rows=None):
        self.M.barrier(rows)

    def reports_of(self) -> tuple[Report, ...]:
        self.M.end_batch()
        self.M.finish()
        try:
            self.reports.raise_if_any()
        except SimError as error:
            return error.reports
        return ()

    def problems(self) -> list[tuple[str, int]]:
        """(kind, line of the subject) of every report, sorted."""
        return sorted((report.kind, report.site.where[0].line) for report in self.reports_of())

    def lines(self) -> list[str]:
        return [report.line for report in self.reports_of()]
