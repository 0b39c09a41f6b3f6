"""Layer upload: what arrives is what was stored, in order, in two slots, whatever fails on the way.

The consumer only issues a device copy of each slot on the compute stream. On the emulator that copy runs as late as the
events allow, so a slot or a host buffer that is written again too early shows as wrong bytes; or, in a hurry, as early
as they allow, so a slot that is read before its upload shows.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.backend.base import ALIGNMENT, Backend
from cupyllm.config import ModelConfig
from cupyllm.errors import CheckpointError, OutOfMemory
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.names import layer_names
from cupyllm.stream import prefetch
from cupyllm.stream.prefetch import LayerStream, Slot, layout, upload_group
from tests.hostcuda.backend import HostBackend
from tests.reference.sources import tiny_config

H1 = Path(__file__).parents[1] / "fixtures" / "goldens" / "h1"
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
Group = dict[str, str]


class Arrays:
    """A WeightSource over named arrays. `before_read` may raise in place of a read."""

    config: ModelConfig = tiny_config()

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.before_read: Callable[[str], None] = lambda name: None
        self.num_checks = 0
        self.changed_at: int | None = None  # the check, counted from 0, that finds a changed file

    def names(self) -> list[str]:
        return list(self.arrays)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.arrays[name].dtype.name, self.arrays[name].shape

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        self.before_read(name)
        out[...] = raw(self.arrays[name])[start : start + out.size]

    def check_unchanged(self) -> None:
        number, self.num_checks = self.num_checks, self.num_checks + 1
        if number == self.changed_at:
            raise CheckpointError("it was changed while in use")


def raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def model(num_groups: int, seed: int = 0) -> tuple[Arrays, list[Group]]:
    """Groups of three parameters; shapes and dtypes change from group to group, and sizes are no multiples of 256."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    groups: list[Group] = []
    for index in range(num_groups):
        group: Group = {}
        for key, shape in (("norm", (7,)), ("up", (30 + index, 9)), ("down", (5, 61))):
            dtype = DTYPES[(index + len(group)) % 3]
            arrays[f"{index}.{key}"] = rng.standard_normal(shape).astype(dtype)
            group[key] = f"{index}.{key}"
        groups.append(group)
    return Arrays(arrays), groups


class Consumer:
    """Keeps a device copy of every slot, made on the compute stream as a layer's program would read it."""

    def __init__(self, backend: Backend, source: Any, hurry: bool = False) -> None:
        self.backend, self.source, self.hurry = backend, source, hurry
        self.compute = backend.stream()
        self.stream = LayerStream(backend, source, self.compute)
        self.buffers: list[Any] = []
        self.slots: list[Slot] = []

    def run(self, groups: Sequence[Group], each: Callable[[int], None] = lambda index: None) -> None:
        """Stream the groups, then compare every byte with the source."""
        self.free()
        for slot in self.stream.iterate(groups, [layout(self.source, group) for group in groups]):
            self.buffers.append(self.backend.allocate(slot.layout.nbytes, "copy"))
            self.backend.copy(self.buffers[-1].address, slot.address, slot.layout.nbytes, self.compute)
            self.slots.append(slot)
            if self.hurry:
                issued = self.backend.event()
                self.backend.record(issued, self.compute)
                self.backend.wait_host(issued)
            each(slot.index)
        self.backend.synchronize()
        assert len(self.slots) == len(groups)
        for slot, buffer, group in zip(self.slots, self.buffers, groups, strict=True):
            for key, tensor in slot.layout.tensors(buffer.address).items():
                host, stored = (np.empty(tensor.nbytes, np.uint8) for _ in range(2))
                self.backend.download(host, tensor.address)
                self.source.read_into(group[key], stored)
                assert (host == stored).all(), (slot.index, key)

    def free(self) -> None:
        self.backend.synchronize()
        for buffer in self.buffers:
            buffer.free()
        self.buffers, self.slots = [], []

    def close(self) -> None:
        self.free()
        self.stream.close()


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("cupyllm-piece", "cupyllm-reader"))]


@pytest.mark.parametrize("number", range(5))
def test_a_change_between_groups_stops_the_stream(backend: Backend, number: int) -> None:
    """Every group is checked before it is read: the group that changed is not handed out, those before it are."""
    source, groups = model(5)
    source.changed_at = number
    consumer = Consumer(backend, source)
    seen: list[int] = []
    try:
        with pytest.raises(CheckpointError, match="changed while in use"):
            consumer.run(groups, seen.append)
        assert seen == list(range(number))
        source.changed_at = None
        consumer.run(groups)
    finally:
        consumer.close()


def test_a_change_stops_what_would_become_resident(backend: Backend) -> None:
    source, (group,) = model(1)
    lay = layout(source, group)
    target = backend.allocate(lay.nbytes, "target")
    backend.fill(target.address, lay.nbytes, 0x5A)
    source.changed_at = 0
    with pytest.raises(CheckpointError, match="changed while in use"):
        upload_group(backend, source, group, lay, target.address)
    host = np.empty(lay.nbytes, np.uint8)
    backend.download(host, target.address)
    target.free()
    assert (host == 0x5A).all()  # nothing was uploaded


def test_a_layout_is_canonical() -> None:
    source, groups = model(1)
    lay = layout(source, groups[0])
    assert [key for key, _ in lay.offsets] == [key for key, _ in lay.specs] == list(groups[0])
    end = 0
    for (_, at), (_, spec) in zip(lay.offsets, lay.specs, strict=True):
        assert at % ALIGNMENT == 0 and end <= at < end + ALIGNMENT
        end = at + spec.nbytes
    assert end <= lay.nbytes < end + ALIGNMENT and lay.nbytes % ALIGNMENT == 0
    assert lay.stored_bytes == sum(array.nbytes for array in source.arrays.values())
    assert {spec.dtype for _, spec in lay.specs} == {"float32", "bfloat16", "float16"}
    base = 1 << 20
    assert {key: t.address - base for key, t in lay.tensors(base).items()} == dict(lay.offsets)


def test_layers_alike_share_a_layout_and_others_do_not() -> None:
    """Layouts are keys of the programs' cache."""
    source, groups = model(4)
    source.arrays.update({f"3.{key}": source.arrays[f"0.{key}"] + 1 for key in groups[0]})
    layouts = [layout(source, group) for group in groups]
    assert layouts[0] == layouts[3] and hash(layouts[0]) == hash(layouts[3])
    assert len(set(layouts)) == 3


@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize("piece_bytes", [None, 48])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8])
def test_every_group_arrives(
    count: int, piece_bytes: int | None, hurry: bool, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice over, read whole and in pieces by helpers that do not divide a tensor evenly."""
    if piece_bytes is not None:
        monkeypatch.setattr(prefetch, "PIECE_BYTES", piece_bytes)
    source, groups = model(count)
    consumer = Consumer(backend, source, hurry)
    stored = sum(array.nbytes for array in source.arrays.values())
    for _ in range(2):
        consumer.run(groups)
        assert [slot.index for slot in consumer.slots] == list(range(count))
        assert [slot.parity for slot in consumer.slots] == [index % 2 for index in range(count)]
        assert all(slot.address == consumer.stream.slots[slot.parity].address for slot in consumer.slots)
        streamed, seconds = consumer.stream.take_accounts()
        assert streamed == stored and (seconds > 0) == (count > 0)
        assert consumer.stream.take_accounts() == (0, 0.0)
    assert source.num_checks == 2 * count  # before each group
    assert reader_threads() == []
    consumer.close()


def test_reverse_order_and_other_groups_in_the_same_slots(backend: Backend) -> None:
    source, groups = model(5)
    consumer = Consumer(backend, source)
    for order in (groups, groups[::-1], groups[3:], [groups[2]] * 4):
        consumer.run(order)
    consumer.close()


@pytest.mark.parametrize("piece_bytes", [None, 48])
@pytest.mark.parametrize("bad", range(5))
def test_a_read_error_reaches_the_caller_and_the_next_pass_is_whole(
    bad: int, piece_bytes: int | None, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if piece_bytes is not None:
        monkeypatch.setattr(prefetch, "PIECE_BYTES", piece_bytes)
    source, groups = model(5)
    consumer = Consumer(backend, source)

    def fail(name: str) -> None:
        if name == f"{bad}.up":
            raise CheckpointError(f"cannot read {name}")

    for _ in range(2):
        source.before_read = fail
        with pytest.raises(CheckpointError, match=f"cannot read {bad}.up"):
            consumer.run(groups)
        assert len(consumer.slots) <= bad and reader_threads() == []
        source.before_read = lambda name: None
        consumer.run(groups[::-1])
    consumer.close()


@pytest.mark.parametrize("last", range(5))
def test_a_consumer_that_gives_up_leaves_the_stream_usable(last: int, backend: Backend) -> None:
    source, groups = model(5)
    consumer = Consumer(backend, source)

    def interrupt(index: int) -> None:
        if index == last:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            consumer.run(groups, interrupt)
        assert reader_threads() == []
        consumer.run(groups[::-1])
    consumer.close()


@pytest.mark.parametrize("change", ["touched", "truncated", "replaced", "removed"])
def test_a_file_that_changes_between_layers_is_an_error(change: str, backend: Backend, tmp_path: Path) -> None:
    shutil.copytree(H1, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        prefix = "model.layers.0."
        group = {name.removeprefix(prefix): name for name in layer_names(checkpoint.config, 0)}
        consumer = Consumer(backend, checkpoint)
        consumer.run([group] * 5)

        def alter(index: int) -> None:
            if index != 1:
                return
            if change == "touched":
                os.utime(file, ns=(1, 1))
            elif change == "truncated":
                os.truncate(file, 1000)
            elif change == "removed":
                file.unlink()
            else:
                shutil.copy(file, tmp_path / "other")
                os.replace(tmp_path / "other", file)

        with pytest.raises(CheckpointError, match="in use") as caught:
            consumer.run([group] * 6, alter)
        assert "\n" not in str(caught.value)
        # Groups 0, 1 and at most 2 (its read had begun) came before the change.
        assert 2 <= len(consumer.slots) <= 4
        consumer.close()


@pytest.mark.parametrize("missing", ["compute waits for the copy", "copy waits for the reader", "host buffer is read"])
def test_the_emulator_shows_a_missing_wait(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above rest on: without any one of the three waits, bytes are wrong."""
    source, groups = model(6)
    consumer = Consumer(HostBackend(deferred=True), source, hurry=missing == "compute waits for the copy")
    stream, backend = consumer.stream, consumer.backend
    wait, wait_host = backend.wait, backend.wait_host

    def some_wait(target: Any, event: Any) -> None:
        left_out = stream.uploaded if missing == "compute waits for the copy" else stream.released
        if missing == "host buffer is read" or event not in left_out:
            wait(target, event)

    def some_wait_host(event: Any) -> None:
        if missing != "host buffer is read" or event not in stream.uploaded:
            wait_host(event)

    monkeypatch.setattr(backend, "wait", some_wait)
    monkeypatch.setattr(backend, "wait_host", some_wait_host)
    with pytest.raises(AssertionError):
        consumer.run(groups)


def test_slots_grow_and_are_freed() -> None:
    backend = HostBackend(deferred=True)
    stream = LayerStream(backend, model(1)[0], backend.stream())
    assert stream.reserve(1000) and backend.live_bytes == 2000
    assert not stream.reserve(1000) and not stream.reserve(10)
    assert stream.reserve(3000) and backend.live_bytes == 6000
    stream.close()
    stream.close()
    gc.collect()
    assert backend.live_bytes == 0 and len(backend._pinned) == 0


@pytest.mark.parametrize("limit", [500, 1500])
def test_slots_that_do_not_fit_leave_nothing(limit: int) -> None:
    backend = HostBackend(deferred=True, memory_bytes=limit)
    stream = LayerStream(backend, model(1)[0], backend.stream())
    for _ in range(2):
        with pytest.raises(OutOfMemory, match=r"slot \d needs 1000 bytes"):
            stream.reserve(1000)
    stream.close()
    assert backend.live_bytes == 0
    backend.memory_bytes = None
    assert stream.reserve(1000)
    stream.close()
    assert backend.live_bytes == 0


@pytest.mark.parametrize("staging, piece", [(64 << 20, 8 << 20), (96, 64), (1, 1)])
def test_upload_group_in_pieces(staging: int, piece: int, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "STAGING_BYTES", staging)
    monkeypatch.setattr(prefetch, "PIECE_BYTES", piece)
    source, groups = model(2)
    sizes: list[int] = []
    for group in groups:
        lay = layout(source, group)
        buffer = backend.allocate(lay.nbytes, "resident")
        sizes.clear()
        upload_group(backend, source, group, lay, buffer.address, lambda host: sizes.append(host.size))
        for key, tensor in lay.tensors(buffer.address).items():
            host = np.empty(tensor.nbytes, np.uint8)
            backend.download(host, tensor.address)
            assert (host == raw(source.arrays[group[key]])).all(), key
        assert sum(sizes) == lay.stored_bytes and max(sizes) <= staging
        buffer.free()
    assert source.num_checks == 2 and reader_threads() == []


def test_upload_group_raises_what_the_read_raised() -> None:
    backend = HostBackend(deferred=True)
    source, groups = model(1)
    lay = layout(source, groups[0])
    buffer = backend.allocate(lay.nbytes, "resident")

    def fail(name: str) -> None:
        if name == "0.down":
            raise CheckpointError("the disk is gone")

    source.before_read = fail
    with pytest.raises(CheckpointError, match="the disk is gone") as caught:
        upload_group(backend, source, groups[0], lay, buffer.address)
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert len(backend._pinned) == 0 and reader_threads() == []  # the staging buffer went with the call
