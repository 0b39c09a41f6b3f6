"""Layer upload: weights travel from their source to device slots while the previous layer computes.

Two pinned host buffers and two device slots alternate. A reader thread fills host buffer i % 2 with several helpers
(pread, so no page of the mapping becomes resident; one thread alone copies 4 to 8 GB/s from the page cache); the
calling thread issues the copy on a copy stream and records an event, and the compute stream waits for that event. A
slot is overwritten only after the event of its last reader. Peak memory is two slots, whatever the depth. Everything on
the device is issued from the calling thread; the readers only read.

A slot has a canonical layout: every tensor at a fixed, 256-byte-aligned offset, so programs bound to a slot serve every
layer of the same layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cupyllm.backend.base import Backend, Buffer, Spec, Tensor, fixed
from cupyllm.backend.record import align
from cupyllm.engine import WeightSource

STAGING_BYTES = 64 << 20  # pinned bytes of the staging buffer of what stays resident
PIECE_BYTES = 8 << 20  # one read of one helper
READERS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True)
class Layout:
    """Offsets of a group of parameters inside a slot. Keys are the names that programs use."""

    offsets: tuple[tuple[str, int], ...]  # key -> byte offset
    specs: tuple[tuple[str, Spec], ...]
    nbytes: int  # slot bytes, padding included
    stored_bytes: int  # bytes of the tensors themselves

    def tensors(self, base: int) -> dict[str, Tensor]:
        """The parameters of a slot at device address `base`."""
        specs = dict(self.specs)
        return {key: fixed(base + at, specs[key].shape, specs[key].dtype, key) for key, at in self.offsets}


def layout(source: WeightSource, names: dict[str, str]) -> Layout:
    """Canonical layout of `names` (key -> full parameter name)."""
    offsets, specs, at, stored = [], [], 0, 0
    for key, name in names.items():
        dtype, shape = source.spec(name)
        spec = Spec(shape, dtype)
        offsets.append((key, at))
        specs.append((key, spec))
        at += align(spec.nbytes)
        stored += spec.nbytes
    return Layout(tuple(offsets), tuple(specs), at, stored)


@dataclass
class Slot:
    """One layer's weights on the device, valid until the next one is asked for."""

    index: int  # which of the groups
    parity: int  # which slot
    layout: Layout
    address: int


class LayerStream:
    """Iterates groups of parameters through two slots. `groups`: for each step, key -> full parameter name."""

    def __init__(self, backend: Backend, source: WeightSource, compute: object) -> None:
        self.backend, self.source, self.compute = backend, source, compute
        self.copy_stream = backend.stream()
        self.uploaded = [backend.event(), backend.event()]
        self.released = [backend.event(), backend.event()]
        self.slots: list[Buffer] = []
        self.hosts: list[np.ndarray] = []
        self.slot_bytes = 0
        self.streamed_bytes = 0
        self.transfer_seconds = 0.0
        self._marks: list[tuple[object, object]] = []

    def reserve(self, nbytes: int) -> bool:
        """Make both slots and both host buffers at least `nbytes`; True when their addresses changed."""
        if nbytes <= self.slot_bytes:
            return False
        self.close()
        for k in range(2):
            self.slots.append(self.backend.allocate(nbytes, f"slot {k}"))
        self.hosts = [self.backend.allocate_host(nbytes) for _ in range(2)]
        self.slot_bytes = nbytes
        return True

    def filled(self, index: int, host: np.ndarray) -> None:
        """Called on the reader thread when group `index` is in its host buffer; tests damage bytes here."""

    def iterate(self, groups: Sequence[dict[str, str]], layouts: Sequence[Layout]) -> Iterator[Slot]:
        """Yield each group's slot, uploaded as far as the compute stream is concerned.

        Work on a slot must be issued on the compute stream before the next slot is asked for.
        """
        self.reserve(max((lay.nbytes for lay in layouts), default=0))
        with (
            ThreadPoolExecutor(READERS, thread_name_prefix="cupyllm-piece") as self._helpers,
            ThreadPoolExecutor(1, thread_name_prefix="cupyllm-reader") as reader,
        ):
            pending: list[Future[None]] = []
            try:
                for index in range(min(2, len(groups))):
                    pending.append(reader.submit(self._read, index, groups[index], layouts[index]))
                if groups:
                    self._upload(0, pending[0], layouts[0])
                for index in range(len(groups)):
                    parity = index % 2
                    self.backend.wait(self.compute, self.uploaded[parity])
                    yield Slot(index, parity, layouts[index], self.slots[parity].address)
                    self.backend.record(self.released[parity], self.compute)
                    if index + 1 < len(groups):
                        self._upload(index + 1, pending[index + 1], layouts[index + 1])
                    if index + 2 < len(groups):
                        pending.append(reader.submit(self._read, index + 2, groups[index + 2], layouts[index + 2]))
            finally:
                for future in pending:
                    future.cancel()
        self._account()

    def _read(self, index: int, group: dict[str, str], lay: Layout) -> None:
        parity = index % 2
        self.backend.wait_host(self.uploaded[parity])  # the copy that last read this host buffer
        self.source.check_unchanged()
        host, offsets, specs = self.hosts[parity], dict(lay.offsets), dict(lay.specs)
        pieces = [
            (name, host[offsets[key] : offsets[key] + specs[key].nbytes][at : at + PIECE_BYTES], at)
            for key, name in group.items()
            for at in range(0, specs[key].nbytes, PIECE_BYTES)
        ]
        read_pieces(self.source, pieces, self._helpers)
        self.filled(index, host)

    def _upload(self, index: int, ready: Future[None], lay: Layout) -> None:
        parity = index % 2
        ready.result()
        start = self.backend.event()
        self.backend.wait(self.copy_stream, self.released[parity])
        self.backend.record(start, self.copy_stream)
        self.backend.upload(self.slots[parity].address, self.hosts[parity][: lay.nbytes], self.copy_stream)
        stop = self.backend.event()
        self.backend.record(stop, self.copy_stream)
        self.backend.record(self.uploaded[parity], self.copy_stream)
        self._marks.append((start, stop))
        self.streamed_bytes += lay.stored_bytes

    def _account(self) -> None:
        """Device time the copies took; called when the last group has been consumed."""
        for start, stop in self._marks:
            self.backend.wait_host(stop)
            self.transfer_seconds += self.backend.elapsed_ms(start, stop) / 1e3
        self._marks.clear()

    def take_accounts(self) -> tuple[int, float]:
        """(stored bytes moved, seconds the copies took) since the last call."""
        result = self.streamed_bytes, self.transfer_seconds
        self.streamed_bytes, self.transfer_seconds = 0, 0.0
        self._marks.clear()
        return result

    def close(self) -> None:
        """Free slots and host buffers (after waiting for copies that still use them)."""
        if self.slots:
            self.backend.synchronize()
        for slot in self.slots:
            slot.free()
        self.slots, self.hosts, self.slot_bytes = [], [], 0


def read_pieces(
    source: WeightSource, pieces: Sequence[tuple[str, np.ndarray, int]], helpers: ThreadPoolExecutor
) -> None:
    """Read every (name, target, start byte), in parallel where that pays; raises what the first failing read raised."""
    if sum(target.size for _, target, _ in pieces) <= PIECE_BYTES:
        for name, target, start in pieces:
            source.read_into(name, target, start)
        return
    for future in [helpers.submit(source.read_into, *piece) for piece in pieces]:
        future.result()


def upload_group(
    backend: Backend,
    source: WeightSource,
    names: dict[str, str],
    lay: Layout,
    address: int,
    filled: Callable[[np.ndarray], None] | None = None,
) -> None:
    """Upload a group through one pinned staging buffer, piece by piece; complete on return. For what stays resident."""
    source.check_unchanged()
    staging = backend.allocate_host(min(STAGING_BYTES, lay.nbytes))
    offsets, specs = dict(lay.offsets), dict(lay.specs)
    with ThreadPoolExecutor(READERS, thread_name_prefix="cupyllm-piece") as helpers:
        for key, name in names.items():
            nbytes = specs[key].nbytes
            for at in range(0, nbytes, staging.size):
                chunk = staging[: min(staging.size, nbytes - at)]
                starts = range(0, chunk.size, PIECE_BYTES)
                read_pieces(source, [(name, chunk[s : s + PIECE_BYTES], at + s) for s in starts], helpers)
                if filled is not None:
                    filled(chunk)
                backend.upload(address + offsets[key] + at, chunk)
