"""The pages' memory: layout, copies and poison on the device and in pinned host memory, and the two ops on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyllm import graph
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Tensor
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.check import small_layer
from cupyllm.errors import OutOfMemory
from cupyllm.graph import Node
from cupyllm.kvcache.blocks import Copy, OutOfPages, Pool, Sequence
from cupyllm.kvcache.pool import DevicePool, Geometry, HostPool, bytes_per_token
from cupyllm.ops.attention import OP as ATTENTION
from tests.hostcuda.backend import HostBackend
from tests.ops.opcheck import assert_same_bits

HEADS, KV_HEADS, HEAD_DIM, P = 2, 1, 16, 32
GEOMETRY = Geometry(num_layers=2, num_pages=10, page_tokens=P, width=KV_HEADS * HEAD_DIM, dtype="float32")


def fetch(backend: Backend, tensor: Tensor) -> np.ndarray:
    array = np.empty(tensor.shape, NUMPY_DTYPE[tensor.dtype])
    backend.download(array, tensor.address)
    return array


def test_sizes() -> None:
    config = small_layer()  # 1 layer, 2 KV heads of 16
    assert bytes_per_token(config, "bfloat16") == 2 * 2 * 16 * 2
    assert Geometry.of(config, 7, "float32") == Geometry(1, 7, 64, 32, "float32")
    assert Geometry.of(config, 7, "float32").layer_bytes == 7 * 64 * bytes_per_token(config, "float32")


def test_places_do_not_overlap() -> None:
    k, v = GEOMETRY.place(1 << 20)
    assert k.shape == v.shape == (10, P, 16) and k.address == 1 << 20 and v.address == k.address + k.nbytes
    assert k.nbytes + v.nbytes == GEOMETRY.layer_bytes
    assert GEOMETRY.offsets(3) == (3 * P * 16 * 4, k.nbytes + 3 * P * 16 * 4)
    for page in (-1, 10):
        with pytest.raises(AssertionError):
            GEOMETRY.offsets(page)


def numbers(backend: Backend, pool: DevicePool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Fill every layer with its own values and return them."""
    filled = []
    for layer in range(pool.geometry.num_layers):
        pair = []
        for half, tensor in enumerate(pool.layer(layer)):
            values = np.arange(tensor.size, dtype=np.float32).reshape(tensor.shape) + 1e5 * (2 * layer + half)
            backend.upload(tensor.address, values)
            pair.append(values)
        filled.append((pair[0], pair[1]))
    return filled


def test_device_pool_copies_and_poisons_every_layer(backend: Backend) -> None:
    with DevicePool(backend, GEOMETRY) as pool:
        want = numbers(backend, pool)
        pool.copy([Copy(1, 4), Copy(4, 9), Copy(0, 1)])
        pool.poison(7)
        for layer, pair in enumerate(want):
            for tensor, values in zip(pool.layer(layer), pair, strict=True):
                values[4], values[9], values[1], values[7] = values[1], values[1], values[0], np.nan
                got = fetch(backend, tensor)
                np.testing.assert_array_equal(got, values)
                assert np.isnan(got[7]).all()


def test_device_pool_gives_its_memory_back() -> None:
    backend = HostBackend(memory_bytes=GEOMETRY.layer_bytes * 5 // 2)
    pool = DevicePool(backend, GEOMETRY)
    assert backend.live_bytes == pool.nbytes == 2 * GEOMETRY.layer_bytes
    with pytest.raises(OutOfMemory, match="the KV cache of layer 0"):
        DevicePool(backend, GEOMETRY)
    pool.close()
    pool.close()
    three = Geometry(3, 10, P, 16, "float32")
    with pytest.raises(OutOfMemory, match="the KV cache of layer 2"):
        DevicePool(backend, three)
    assert backend.live_bytes == 0


def test_host_pool_travels(backend: Backend) -> None:
    """Only the pages named move, in neighbouring runs, to and from the place that the kernels see."""
    with HostPool(backend, GEOMETRY) as pool, DevicePool(backend, Geometry(1, 10, P, 16, "float32")) as slot:
        for page in range(10):
            pool.poison(page)
        (k_values, v_values) = numbers(backend, slot)[0]
        k, v = slot.layer(0)
        assert pool.nbytes == 2 * GEOMETRY.layer_bytes
        stream = backend.stream()
        pool.download(1, k.address, [2, 3, 3, 8, 0], stream)
        backend.synchronize()
        pool.copy([Copy(3, 5)])
        pool.poison(8)
        backend.fill(k.address, GEOMETRY.layer_bytes, 0)
        pool.upload(1, k.address, [5, 2, 8, 9], stream)
        backend.synchronize()
        for tensor, values in ((k, k_values), (v, v_values)):
            got = fetch(backend, tensor)
            np.testing.assert_array_equal(got[[2, 5]], values[[2, 3]])
            assert np.isnan(got[[8, 9]]).all(), "9 was never downloaded: still poison"
            assert not got[[0, 1, 3, 4, 6, 7]].any(), "not asked for"
        pool.upload(0, k.address, range(10))
        assert np.isnan(fetch(backend, k)).all(), "the other layer was not touched"


def append_and_attend(
    backend: Backend, pages: tuple[Tensor, Tensor], arrays: dict[str, np.ndarray], attrs: dict[str, Any]
) -> np.ndarray:
    """The two nodes that generation puts in attention's place."""
    nodes = [
        Node("kv_append", "kv_append", ("k", "v", "k_pages", "v_pages", "slots"), ()),
        Node(
            "attention",
            "paged_attention",
            ("q", "k_pages", "v_pages", "block_table", "q_starts", "kv_lengths"),
            ("out",),
            attrs=attrs,
        ),
    ]
    assert "paged_attention" in graph.table(nodes)
    with Session(backend) as session:
        values = {name: session.put(array) for name, array in arrays.items()}
        values |= dict(zip(("k_pages", "v_pages"), pages, strict=True))
        rec = Recorder.of(backend)
        out = session.empty(values["q"])
        graph.forward(rec, nodes, values, {}, {"out": out})
        session.execute(rec)
        return session.get(out)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("seed", range(4))
def test_generation_over_the_cache_is_contiguous_attention(backend: Backend, seed: int, place: str) -> None:
    """Random scripts: sequences share prefixes, fork, lose pages behind a window, are preempted and recomputed, while
    every free page is NaN; each row has the bits of attention over its whole sequence. Through the host it is the same.

    Keys, values and queries of a token depend on all tokens so far, so a page in the wrong place shows.
    """
    rng = np.random.default_rng(seed)
    window = 40 if seed % 2 else None
    attrs = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "window": window}
    pool, running = Pool(GEOMETRY.num_pages, P), dict[Sequence, list[int]]()
    device = DevicePool(backend, Geometry(1, 10, P, 16, "float32"))
    host = HostPool(backend, GEOMETRY) if place == "host" else None
    pages, rows, shared = device.layer(0), 0, 0
    for page in range(GEOMETRY.num_pages):
        device.poison(page)
        if host is not None:
            host.poison(page)
    for _ in range(18):
        if len(running) < 3:
            prompt = [0] * 40 + rng.integers(0, 2, rng.integers(1, 60)).tolist()
            running[pool.open(prompt)] = prompt
        elif rng.random() < 0.3:
            parent = next(iter(running))
            if 0 < parent.num_tokens == parent.num_reserved:
                running[pool.fork(parent)] = [*running[parent][: parent.num_tokens], 1, 1]
        elif rng.random() < 0.3:
            pool.close(list(running)[-1])
            running.popitem()
        step: list[tuple[Sequence, list[int], int, int]] = []
        copies: list[Copy] = []
        for sequence, ids in list(running.items()):
            shared += sequence.num_tokens == sequence.num_cached > 0
            if sequence.num_tokens == len(ids):
                ids.append(int(rng.integers(0, 2)))
            if window is not None:
                pool.free_behind(sequence, sequence.num_tokens - window + 1)
            count = min(len(ids) - sequence.num_tokens, int(rng.integers(1, 50)))
            try:
                copies += pool.reserve(sequence, count)
                step.append((sequence, ids, sequence.num_tokens, sequence.num_tokens + count))
            except OutOfPages:
                if step:  # of those already in the step none may go, so this one is preempted
                    pool.close(sequence)
                    del running[sequence]
        if not step:
            continue
        used = sorted({page for sequence, *_ in step for page in sequence.block_table if page >= 0})
        if host is None:
            device.copy(copies)
        else:
            host.copy(copies)
            backend.fill(pages[0].address, GEOMETRY.layer_bytes, 0xFF)
            host.upload(1, pages[0].address, used)
        q, k, v = (np.concatenate([content(ids, which)[a:b] for _, ids, a, b in step]) for which in range(3))
        entries = max(len(sequence.block_table) for sequence, *_ in step)
        table = np.full((len(step), entries), -1, np.int32)
        for row, (sequence, *_) in enumerate(step):
            table[row, : len(sequence.block_table)] = sequence.block_table
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            "slots": np.concatenate([sequence.slots(a, b) for sequence, _, a, b in step]),
            "block_table": table,
            "q_starts": np.cumsum([0, *(b - a for *_, a, b in step)]).astype(np.int32),
            "kv_lengths": np.array([b for *_, b in step], np.int32),
        }
        out = append_and_attend(backend, pages, arrays, attrs)
        if host is not None:
            host.download(1, pages[0].address, used)
        for row, (sequence, ids, a, b) in enumerate(step):
            pool.commit(sequence, ids[a:b])
            whole = [content(ids[:b], which)[None] for which in range(3)]
            want = run_op(backend, ATTENTION, [*whole, None, None], (), attrs).outputs[0][0]
            assert_same_bits(out[arrays["q_starts"][row] : arrays["q_starts"][row + 1]], want[a:b])
            rows += b - a
        pool.check()
        for page in pool.free_pages():
            device.poison(page)
            if host is not None:
                host.poison(page)
    assert rows > 200 and shared > 0
    for sequence in running:
        pool.close(sequence)
    assert pool.stats().used == 0
    device.close()


def content(ids: list[int], which: int) -> np.ndarray:
    """Query (0), key (1) or value (2) of each token, a function of the tokens up to it alone: [T, H*D]."""
    width = (HEADS if which == 0 else KV_HEADS) * HEAD_DIM
    seeds = np.cumsum(np.array(ids) * np.arange(3, 3 + len(ids)) + 7) + 1000 * which
    return np.stack([np.random.default_rng(int(seed)).standard_normal(width, np.float32) for seed in seeds])
