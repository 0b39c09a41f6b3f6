"""Device memory, loads and stores of every space, and everything that can be wrong with one of them."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from cupyllm.errors import BackendError, OutOfMemory
from cupyllm.sim.memory import ALIGNMENT, DTYPE, LOCAL_WINDOW, RED_ZONE, SHARED_WINDOW, DeviceMemory, Extent
from cupyllm.sim.names import plain_name
from cupyllm.sim.ptx import Location
from cupyllm.sim.report import Site
from tests.sim.launchkit import TILE, Launch

B, T = 2, 64
t = np.arange(T).reshape(1, T)
row = np.arange(B).reshape(B, 1)
lane = T * row + t
OUT, MISALIGNED, UNINITIALISED, COPY = "out-of-bounds", "misaligned", "uninitialised-read", "cp-async"
X = np.arange(B * T, dtype=np.float32).reshape(B, T) + 1


def launch(**options):
    return Launch(**{"B": B, "T": T, "shared": {TILE: 4096}, **options})


# ---- allocations ----


def test_allocations_are_aligned_and_apart():
    memory = DeviceMemory(1 << 20)
    found = [memory.allocate(n) for n in (1, 1000, 256, 7)]
    for one, two in pairwise(found):
        assert one.address % ALIGNMENT == 0 and two.address - (one.address + one.nbytes) >= RED_ZONE
    assert memory.find(found[1].address + 999) == found[1] and memory.find(found[1].address + 1000) is None
    assert memory.holds(found[1].address, 1000) and not memory.holds(found[1].address + 1, 1000)


def test_copies_between_host_and_device():
    memory = DeviceMemory(1 << 20)
    one, two = memory.allocate(512), memory.allocate(512)
    values = np.arange(128, dtype=np.float32)
    memory.upload(one.address, values)
    memory.copy(two.address + 4, one.address, 508)
    memory.fill(two.address, 4, 255)
    back = np.empty(128, np.float32)
    memory.download(back, two.address)
    assert np.isnan(back[0]) and (back[1:] == values[:-1]).all()
    memory.copy(two.address + 8, two.address + 4, 400)  # onto itself
    memory.download(back, two.address)
    assert (back[2:102] == values[:100]).all()


def test_what_is_initialised_is_copied_along():
    memory = DeviceMemory(1 << 20)
    one, two = memory.allocate(8), memory.allocate(8)
    memory.upload(one.address, np.zeros(4, np.uint8))
    memory.fill(two.address, 8, 0)
    assert memory.initialised(one.address, 4) and not memory.initialised(one.address, 8)
    memory.copy(two.address, one.address, 8)
    assert memory.initialised(two.address, 4) and not memory.initialised(two.address, 5)


@pytest.mark.parametrize("what", ["upload", "download", "copy from", "copy to", "fill"])
def test_host_accesses_are_checked(what):
    memory = DeviceMemory(1 << 20)
    one, two = memory.allocate(16), memory.allocate(64)
    array = np.zeros(17, np.uint8)
    with pytest.raises(BackendError, match="17 bytes"):
        if what == "upload":
            memory.upload(one.address, array)
        elif what == "download":
            memory.download(array, one.address)
        elif what == "copy from":
            memory.copy(two.address, one.address, 17)
        elif what == "copy to":
            memory.copy(one.address, two.address, 17)
        else:
            memory.fill(one.address, 17, 0)


def test_memory_ends_and_comes_back():
    memory = DeviceMemory(1 << 20)
    half = memory.allocate(1 << 19, "half")
    with pytest.raises(OutOfMemory, match="logits needs 600000 bytes, 524288 of 1048576 are free"):
        memory.allocate(600000, "logits")
    memory.free(half)
    assert memory.live_bytes == 0 and memory.find(half.address) is None
    memory.allocate(1 << 20)
    with pytest.raises(BackendError, match="freed before"):
        memory.free(half)


def test_addresses_are_used_again_when_new_ones_run_out():
    memory = DeviceMemory(1 << 20)
    seen = set()
    for _ in range(200):
        allocation = memory.allocate(1 << 20)
        assert not memory.initialised(allocation.address, 1)
        memory.fill(allocation.address, 1 << 20, 1)
        seen.add(allocation.address)
        memory.free(allocation)
    assert 1 < len(seen) < 200


def test_a_large_reservation_costs_nothing():
    memory = DeviceMemory(40 << 30)
    allocation = memory.allocate(1 << 20)
    memory.fill(allocation.address, 1 << 20, 3)
    assert memory.initialised(allocation.address, 1 << 20)


# ---- global loads and stores ----

SHAPES = [4 * lane, 4 * t, 4 * T * row, np.array([[12]])]


@pytest.mark.parametrize("offset", SHAPES, ids=str)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("origin", ["same", None, (0, 1)])
def test_global_loads(offset, check, origin):
    run = launch(arrays=[X, X + 5], check=check)
    found = run.read(1, 0, offset, origin=origin)
    assert found.dtype == np.float32 and found.shape == offset.shape
    assert (found == X.reshape(-1)[offset // 4]).all()
    assert run.problems() == []


@pytest.mark.parametrize(
    ("type", "vec"),
    [
        (type, vec)
        for type in ("u8", "s8", "u16", "b32", "s64", "f16", "bf16", "f64")
        for vec in (1, 2, 4)
        if DTYPE[type].itemsize * vec <= 16  # no access is wider
    ],
)
@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_types_and_vectors(type, vec, space):
    dtype = DTYPE[type]
    size = dtype.itemsize * vec
    run = launch(arrays=[np.zeros(B * T * 16, np.uint8)], local=64, empty=(0,))
    random = np.random.default_rng(1)
    bits = [random.integers(0, 256, (B, T, dtype.itemsize), np.uint8) for _ in range(vec)]
    values = [b.view(f"u{dtype.itemsize}")[..., 0].view(dtype) for b in bits]
    of, offset = {"global": (0, size * lane), "shared": (TILE, size * t), "local": ("stack", np.array([[size]]))}[space]
    run.write(1, of, offset, *values, space=space, type=type)
    found = run.read(2, of, offset, space=space, type=type, vec=vec)
    for value, loaded in zip(values, found if vec > 1 else (found,), strict=True):
        assert loaded.dtype == dtype and loaded.shape == (B, T) and loaded.flags.c_contiguous
        assert loaded.tobytes() == value.tobytes()
    assert run.problems() == []


@pytest.mark.parametrize("origin", ["same", None, (0, 1)])
def test_global_stores(origin):
    run = launch(arrays=[np.zeros((B, T), np.float32)] * 2, empty=(0, 1))
    run.write(1, 0, 4 * lane, X, origin=origin)
    back = np.empty((B, T), np.float32)
    run.device.download(back, run.extents[0].address)
    assert (back == X).all()
    assert run.device.initialised(run.extents[0].address, X.nbytes)
    assert run.problems() == []


def test_masked_stores_leave_the_rest_alone():
    canary = np.full((B, T), 7, np.float32)
    for mask in (t < 5, row == 1, (t + row) % 3 == 0):
        run = launch(arrays=[canary])
        run.write(1, 0, np.where(mask, 4 * lane, -(10**9)), X, mask=mask)
        back = np.empty((B, T), np.float32)
        run.device.download(back, run.extents[0].address)
        assert (back == np.where(np.broadcast_to(mask, (B, T)), X, canary)).all()
        assert run.problems() == []


@pytest.mark.parametrize("mask", [t < 40, row == 1, (t + row) % 3 == 0])
@pytest.mark.parametrize("garbage", [-4, 1 << 45, 3, 2**63 - 2**41])
def test_lanes_left_out_may_have_any_address(mask, garbage):
    run = launch(arrays=[X])
    found = run.read(1, 0, np.where(mask, 4 * lane, garbage), mask=mask)
    assert (np.where(mask, found, 0) == np.where(mask, X, 0)).all()
    assert run.problems() == []


def test_uniform_addresses_take_the_last_lanes_value():
    run = launch(arrays=[np.zeros(4, np.float32)], empty=(0,), check=False)
    run.write(1, 0, 4, X)
    assert run.read(2, 0, 4)[0, 0] == X[-1, -1]
    run.write(3, TILE, 8, X)
    assert (run.read(4, TILE, 8) == X[:, -1:]).all()


# ---- out of bounds ----


@pytest.mark.parametrize(
    ("offset", "where"),
    [
        (4 * B * T, "reads 4 bytes at a.cu:1, right after the end of x0 (512 bytes)"),
        (4 * B * T + 256, "reads 4 bytes at a.cu:1, 256 bytes after the end of x0 (512 bytes)"),
        (-4, "reads 4 bytes at a.cu:1, 4 bytes before the start of x0"),
        (-1, "reads 4 bytes at a.cu:1, 1 byte before the start of x0"),
        (1 << 42, "bytes after the end of x0"),
        (2**63, "bytes after the end of x0"),
        (-(1 << 40), "reads 4 bytes at a.cu:1, through a null pointer"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_global_out_of_bounds(offset, where, check):
    run = launch(arrays=[X, X], check=check)
    params, symbols = run.origin(0)
    site = run.site(1, "ld.global.f32 %f1, [%rd1];", params, symbols)
    address = run.address("global", 0, 4 * lane)
    address[1, 5] = (run.extents[0].address + offset) % 2**64
    found = run.M.load("global", site, address, None, "f32")
    assert found[1, 5] == 0 and (np.delete(found, 5, axis=1) == np.delete(X, 5, axis=1)).all()
    (report,) = run.reports_of()
    assert (report.kind, report.cta, report.thread, report.count) == (OUT, (1, 0, 0), (5, 0, 0), 1)
    assert where in report.line


@pytest.mark.parametrize("type", ["u8", "u16", "f32", "f64"])
@pytest.mark.parametrize(
    "address", [0, 1, 2**63, 2**64 - 1, 2**64 - 16, 1 << 40, 1 << 60, (1 << 61) + 5, (1 << 40) - 8]
)
@pytest.mark.parametrize("space", ["global", "shared", "local", "generic"])
@pytest.mark.parametrize("origin", [None, (0,), (TILE,)])
def test_no_address_leaves_the_arena(type, address, space, origin):
    for check in (True, False):
        run = launch(arrays=[X], local=32, check=check)
        site = Site("test", f"st.{space}.{type} [%rd1], %r1;", (Location("a.cu", 1),), *run.origin(origin))
        addresses = np.full((B, T), address, np.uint64)
        before = run.device.arena[run.extents[0].address - (1 << 40) :][:512].copy()
        run.M.store(space, site, addresses, None, type, (np.ones((1, 1), f"u{4 if type == 'f32' else 8}"),))
        run.M.load(space, site, addresses, None, type)
        kinds = {report.kind for report in run.reports_of()}
        inside = address == 1 << 60 if space == "generic" else space == "shared" and address < 2  # bytes of the tile
        assert inside or kinds <= {OUT, MISALIGNED}
        if space == "global":
            assert OUT in kinds
        assert (run.device.arena[run.extents[0].address - (1 << 40) :][:512] == before).all()


def test_the_next_tensor_of_an_allocation_is_out_of_bounds():
    """Two arguments are rows of one allocation: only the site's origin can tell that the first has ended."""
    owner = launch(arrays=[np.zeros((4, T), np.float32)])
    start = owner.extents[0].address
    rows = [Extent(start + 256 * i, 256, f"row{i}", 4, (T,)) for i in range(2)]
    run = launch(arrays=rows, device=owner.device)
    run.read(1, 0, 4 * t)
    run.read(2, 0, 4 * t + 4)
    (report,) = run.reports_of()
    assert report.kind == OUT and "thread (63,0,0) reads 4 bytes at a.cu:2, right after the end of row0" in report.line
    run = launch(arrays=rows, device=owner.device)
    run.read(2, 0, 4 * t + 4, origin=None)
    run.read(3, 0, 4 * t + 4, origin=(0, 1))
    assert run.problems() == []


def test_a_vector_over_the_end():
    run = launch(arrays=[np.zeros(6, np.float32)])
    run.read(1, 0, 16, vec=4)
    assert "reads x0[4] at a.cu:1, 16 bytes that run over its end (24 bytes)" in run.lines()[0]


def test_a_store_wider_than_its_tensor():
    run = launch(arrays=[np.zeros(1, np.float16)])
    run.write(1, 0, 0)
    assert "writes x0[0] at a.cu:1, 4 bytes that run over its end (2 bytes)" in run.lines()[0]


def test_bounds_of_several_possible_tensors():
    run = launch(arrays=[X, X + 1000])
    other = run.extents[1].address - run.extents[0].address
    offset = np.where(t % 2 == 0, 4 * t, other + 4 * t)
    found = run.read(1, 0, offset, origin=(0, 1))
    assert (found == np.where(t % 2 == 0, X[0], X[0] + 1000)).all()
    run.read(2, 0, other + 4 * t + 512, origin=(0, 1))
    (report,) = run.reports_of()
    assert report.kind == OUT and "after the end of x1" in report.line


def test_null_empty_and_freed_arguments():
    run = launch(arrays=[None, np.zeros(0, np.float32), X])
    params = frozenset({0, 3})
    site = Site("test", "ld.global.f32 %f1, [%rd1];", (Location("a.cu", 1),), params, frozenset())
    assert (run.M.load("global", site, np.full((1, 1), 8, np.uint64), None, "f32") == 0).all()
    run.read(2, 1, 0)
    found = {report.site.where[0].line: report.line for report in run.reports_of()}
    assert "reads 4 bytes at a.cu:1, through a null pointer plus 8 bytes" in found[1]
    assert "reads 4 bytes at a.cu:2, right after the end of x1 (0 bytes)" in found[2]

    owner = launch(arrays=[X])
    owner.device.free(owner.device.find(owner.extents[0].address))
    for check in (True, False):
        run = launch(arrays=owner.extents, device=owner.device, check=check)
        run.read(3, 0, 4 * t)
        run.read(4, 0, 4 * t, origin=None)
        run.write(5, 0, 4 * t)
        lines = run.lines()
        assert len(lines) == 3 and "reads x0[0,0] at a.cu:3, in memory that was freed" in lines[0]
        assert "which is in no live allocation" in lines[1]


def test_elements_are_named_by_all_their_indices():
    run = launch(arrays=[np.zeros((3, 4, 5), np.float32)], empty=(0,))
    run.read(1, 0, 4 * (2 * 20 + 3 * 5 + 4))
    assert "reads x0[2,3,4] at a.cu:1" in run.lines()[0]
    unnamed = launch(arrays=[X])
    unnamed = launch(arrays=[Extent(unnamed.extents[0].address, 512, "", 4, (B, T))], device=unnamed.device)
    unnamed.read(1, 0, 512)
    assert "after the end of argument 0" in unnamed.lines()[0]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZZ21attention_forward_bf16E4tile", "tile"),
        ("_ZZ6attendI10ContiguousEvPKfRKT_PKiS7_PfS8_xxxxfxxE11key_segment", "key_segment"),
        ("_ZZN5Block3sumEfE6shared_0", "shared"),
        ("_ZN5Block5groupE", "group"),
        ("_ZL5table", "table"),
        ("__local_depot0", "__local_depot0"),
        ("buffer", "buffer"),
    ],
)
def test_names_of_variables(symbol, name):
    assert plain_name(symbol) == name


# ---- alignment, initialisation ----


@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_misaligned_accesses(space):
    of = {"global": 0, "shared": TILE, "local": "stack"}[space]
    for clean in (True, False):
        run = launch(arrays=[X], local=64)
        offset = np.array([[8 if clean else 4]])
        first = (t == 0) & (row == 0)
        run.write(1, of, offset, X[:1, :1], X[:1, :1], space=space, mask=first)
        run.read(2, of, offset, space=space, vec=2, mask=first)
        assert run.problems() == ([] if clean else [(MISALIGNED, 1), (MISALIGNED, 2)])


def test_a_tensor_that_starts_at_an_odd_address():
    owner = launch(arrays=[np.arange(64, dtype=np.uint8)])
    run = launch(arrays=[Extent(owner.extents[0].address + 2, 60, "y", 2, (30,))], device=owner.device)
    assert run.read(1, 0, 2, type="u32")[0, 0] == 0x07060504
    run.read(2, 0, 4, type="u32")
    assert run.problems() == [(MISALIGNED, 2)]


def test_uninitialised_global_memory():
    run = launch(arrays=[np.zeros((B, T), np.float32)], empty=(0,))
    run.write(1, 0, 4 * lane, X, mask=lane != 70)
    assert (run.read(2, 0, 4 * lane, mask=lane != 70) == np.where(lane == 70, 0, X))[lane != 70].all()
    assert run.M.reports.total == 0
    found = run.read(3, 0, 4 * lane)
    assert found[1, 6] == 0 and found[1, 7] == X[1, 7]
    (report,) = run.reports_of()
    assert (report.kind, report.count) == (UNINITIALISED, 1)
    assert "CTA (1,0,0), thread (6,0,0) reads x0[1,6] at a.cu:3" in report.line


def test_a_vector_with_one_byte_uninitialised():
    run = launch(arrays=[np.zeros(8, np.float32)], empty=(0,))
    for byte in range(16):
        run.write(1, 0, byte, 1, type="u8", mask=(t == 0) & (row == 0))
        if byte == 14:
            run.read(2, 0, 0, vec=4, mask=(t == 0) & (row == 0))
    run.read(3, 0, 0, vec=4, mask=(t == 0) & (row == 0))
    assert run.problems() == [(UNINITIALISED, 2)]


def test_unchecked_launches_initialise_as_well():
    run = launch(arrays=[np.zeros(T, np.float32)], empty=(0,), check=False)
    run.read(1, 0, 4 * t)
    run.write(2, 0, 4 * t, t)
    assert run.problems() == []
    run = launch(arrays=run.extents, device=run.device)
    run.read(1, 0, 4 * t)
    assert run.problems() == []


# ---- shared memory ----


@pytest.mark.parametrize("offset", [4 * t, 4 * (t + row), 4 * row, np.array([[12]])], ids=str)
def test_shared_loads(offset):
    run = launch()
    everything = np.arange(1024, dtype=np.float32).reshape(16, T)
    for part in range(16):
        run.write(1, TILE, 4 * (T * part + t), everything[part] + 5000 * row)
    run.barrier()
    found = run.read(2, TILE, offset)
    shape = (B, offset.shape[1])
    assert found.shape == shape
    assert (found == np.broadcast_to(offset // 4, shape) + 5000 * row).all()
    assert run.problems() == []


def test_uninitialised_shared_memory():
    run = launch()
    run.write(1, TILE, 4 * t, t, mask=t != 9)
    run.barrier()
    run.read(2, TILE, 4 * t, mask=t != 9)
    found = run.read(3, TILE, 4 * t)
    assert (found[:, 9] == 0).all() and (found[:, 10] == 10).all()
    (report,) = run.reports_of()
    assert report.kind == UNINITIALISED and "thread (9,0,0) reads tile[9] at a.cu:3" in report.line


def test_shared_memory_that_one_cta_has_not_written():
    run = launch()
    run.write(1, TILE, 4 * t, t, mask=row == 0)
    run.barrier()
    found = run.read(2, TILE, 4 * t, mask=row == 0)
    assert (found[0] == t).all() and run.M.reports.total == 0
    found = run.read(3, TILE, 4 * t)
    assert (found[0] == t).all() and (found[1] == 0).all()
    (report,) = run.reports_of()
    assert (report.kind, report.cta, report.site.where[0].line) == (UNINITIALISED, (1, 0, 0), 3)


def test_shared_memory_that_the_ctas_write_one_after_another():
    run = launch()
    run.write(1, TILE, 4 * t, t, mask=row == 0)
    run.write(2, TILE, 4 * t, 2 * t, mask=row == 1)
    run.write(3, TILE, 1024 + 4 * t, t)
    run.barrier()
    assert (run.read(4, TILE, 4 * t) == t * (row + 1)).all()
    assert (run.read(5, TILE, 1024 + 16 * (t // 4), vec=4)[3] == t // 4 * 4 + 3).all()
    assert run.problems() == []


def test_a_batch_starts_with_uninitialised_shared_memory():
    run = launch(grid=(4, 1, 1))
    run.write(1, TILE, 4 * t, t)
    run.barrier()
    run.read(2, TILE, 4 * t)
    run.batch(2)
    run.read(3, TILE, 4 * t)
    assert run.problems() == [(UNINITIALISED, 3)]


def test_a_last_batch_of_fewer_ctas():
    run = launch(grid=(3, 1, 1), arrays=[np.zeros((3, T), np.float32)], empty=(0,))
    for first, count in ((0, 2), (2, 1)):
        run.batch(first, count)
        run.write(1, TILE, 4 * t, t)
        run.barrier()
        value = run.read(2, TILE, 4 * (T - 1 - t))
        place = np.arange(count).reshape(count, 1) + first
        run.write(3, 0, 4 * (T * place + t), value)
    back = np.empty((3, T), np.float32)
    run.device.download(back, run.extents[0].address)
    assert (back == T - 1 - t).all()
    assert run.problems() == []


@pytest.mark.parametrize("origin", ["same", None])
@pytest.mark.parametrize("check", [True, False])
def test_shared_out_of_bounds(origin, check):
    run = launch(shared={TILE: 260, "other": 64}, check=check)
    run.write(1, TILE, 4 * t, t, origin=origin)
    run.barrier()
    run.write(2, TILE, 4 * t + 12, t, origin=origin)
    (report,) = run.reports_of()
    assert (report.kind, report.count) == (OUT, 2)
    assert "thread (62,0,0) writes 4 bytes at a.cu:2, right after the end of tile (260 bytes)" in report.line


def test_red_zones_between_shared_variables():
    run = launch(shared={TILE: 256, "other": 64})
    gap = run.M.address_of("other") - run.M.address_of(TILE) - 256
    assert gap >= 16
    for offset in range(256, 256 + gap, 16):
        run.write(offset, TILE, offset, 1, origin=None, mask=t == 0)
    assert [kind for kind, _ in run.problems()] == [OUT] * (gap // 16)


def test_dynamic_shared_memory_comes_last_and_has_its_exact_size():
    run = launch(shared={"buffer": 0, "first": 100, "alias": 0}, dynamic=200)
    assert run.M.address_of("buffer") == run.M.address_of("alias") > run.M.address_of("first")
    run.write(1, "buffer", 196, 1, mask=t == 0)
    run.barrier()
    assert (run.read(2, "alias", 196) == 1).all()
    run.write(3, "buffer", 200, 1, mask=t == 0)
    run.write(4, "first", 100, 1, mask=t == 0)
    assert run.problems() == [(OUT, 3), (OUT, 4)]
    run = launch(shared={"buffer": 0})
    run.write(1, "buffer", 0, 1)
    assert run.problems() == [(OUT, 1)]


# ---- other spaces ----


def test_local_memory_is_each_threads_own():
    run = launch(local=64)
    run.write(1, "stack", 8, X, space="local")
    run.write(2, "stack", 16 + 4 * (t % 4), -X, space="local")
    assert (run.read(3, "stack", 8, space="local") == X).all()
    assert (run.read(4, "stack", 16 + 4 * (t % 4), space="local") == -X).all()
    assert run.M.reports.total == 0
    found = run.read(5, "stack", 16, space="local")
    assert (found == np.where(t % 4 == 0, -X, 0)).all()
    run.read(6, "stack", 64, space="local")
    run.read(7, "stack", 60, space="local", mask=t == 7)
    lines = {report.site.where[0].line: report for report in run.reports_of()}
    assert lines[5].kind == UNINITIALISED and lines[5].count == B * T * 3 // 4 and lines[5].thread == (1, 0, 0)
    assert lines[6].kind == OUT and lines[7].kind == UNINITIALISED and lines[7].thread == (7, 0, 0)


def test_module_variables_live_in_device_memory():
    table = np.arange(T, dtype=np.float32)
    run = launch(B=1, variables={"_ZN5Block5tableE": table, "limits": table}, constants=frozenset({"limits"}))
    assert (run.read(1, "_ZN5Block5tableE", 4 * t, space="global") == table).all()
    assert (run.read(2, "limits", 4 * t, space="const") == table).all()
    run.write(3, "_ZN5Block5tableE", 4 * t, t, space="global")
    run.read(4, "_ZN5Block5tableE", 256, space="global")
    run.write(5, "limits", 0, 1, space="generic")
    lines = {report.site.where[0].line: report.line for report in run.reports_of()}
    assert sorted(lines) == [4, 5]
    assert "after the end of table" in lines[4] and "constant memory is read-only" in lines[5]


def test_generic_addresses_that_mix_spaces():
    run = launch(arrays=[X], local=16)
    run.write(1, TILE, 4 * t, 100 + t)
    run.write(2, "stack", 0, 200 + t, space="local")
    run.barrier()
    site = Site("test", "ld.f32 %f1, [%rd1];", (Location("a.cu", 3),))
    addresses = [
        run.address("global", 0, 4 * lane),
        SHARED_WINDOW + run.address("shared", TILE, 4 * t).astype(np.uint64),
        LOCAL_WINDOW + run.address("local", "stack", 0).astype(np.uint64),
    ]
    which = t % 3
    address = np.choose(which, [np.broadcast_to(a, (B, T)) for a in addresses]).astype(np.uint64)
    found = run.M.load("generic", site, address, None, "f32")
    assert (found == np.choose(which, [X, 100 + t, 200 + t])).all()
    run.M.store("generic", site, address, None, "f32", (found + 1,))
    assert (run.M.load("generic", site, address, None, "f32") == found + 1).all()
    masked = np.where(t == 5, address, np.uint64(1 << 62))
    assert run.M.load("generic", site, masked, t == 5, "f32")[0, 5] == found[0, 5] + 1
    assert run.problems() == []
    run.M.load("generic", site, masked, t >= 5, "f32")
    assert run.problems() == [(OUT, 3)]


# ---- atomics ----


def in_order(memory, index, op, b, c):
    old = np.empty_like(b)
    for place, i in np.ndenumerate(index):
        m, x = memory[i], b[place]
        old[place] = m
        with np.errstate(all="ignore"):
            memory[i] = {
                "add": lambda m, x, y: m + x,
                "min": lambda m, x, y: min(m, x),
                "max": lambda m, x, y: max(m, x),
                "and": lambda m, x, y: m & x,
                "or": lambda m, x, y: m | x,
                "xor": lambda m, x, y: m ^ x,
                "exch": lambda m, x, y: x,
                "cas": lambda m, x, y: y if m == x else m,
                "inc": lambda m, x, y: 0 if m >= x else m + 1,
                "dec": lambda m, x, y: x if m == 0 or m > x else m - 1,
            }[op](m, x, c[place])
    return old


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("places", [1, 3, 1000])
@pytest.mark.parametrize(
    ("op", "type"),
    [(op, "u32") for op in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")]
    + [("min", "s32"), ("max", "s64"), ("add", "f32"), ("add", "f64"), ("cas", "b64"), ("add", "bf16"), ("cas", "b16")],
)
def test_atomics_in_the_order_of_lanes(space, places, op, type):
    dtype = DTYPE[type]
    random = np.random.default_rng(places)
    index = random.integers(0, places, (B, T))
    b, c = (random.integers(-5, 6, (B, T)).astype(dtype) for _ in range(2))
    if dtype.kind == "u":
        b, c = b & dtype.type(7), c & dtype.type(7)
    if type in ("f32", "f64", "bf16"):
        b = (b.astype(np.float64) * random.standard_normal((B, T))).astype(dtype)
    start = np.zeros(1000, dtype)
    run = launch(arrays=[start], shared={TILE: 8000})
    of = 0 if space == "global" else TILE
    if space == "shared":
        for part in range(0, 512, T):
            run.write(1, TILE, dtype.itemsize * (part + t), np.zeros((1, 1), dtype), type=type)
        run.barrier()
        index, expected = index % 512, [np.zeros(1000, dtype) for _ in range(B)]
        old = np.concatenate(
            [in_order(expected[r], index[r : r + 1], op, b[r : r + 1], c[r : r + 1]) for r in range(B)]
        )
    else:
        expected = start.copy()
        old = in_order(expected, index, op, b, c)
    site = run.site(2, f"atom.{space}.{op}.{type} %r1, [%rd1], %r2;", *run.origin(of))
    address = run.address(space, of, dtype.itemsize * index)
    found = run.M.atom(space, site, op, type, address, None, b, c if op == "cas" else None)
    assert found.dtype == dtype and found.tobytes() == old.tobytes()
    assert run.problems() == []
    if space == "global":
        back = np.empty(1000, dtype)
        run.device.download(back, run.extents[0].address)
        assert back.tobytes() == expected.tobytes()


def test_atomics_at_one_address_for_all_and_under_a_mask():
    run = launch(arrays=[np.zeros(4, np.uint32)])
    site = run.site(1, "atom.global.add.u32 %r1, [%rd1], 1;", *run.origin(0))
    one = np.ones((1, 1), np.uint32)
    assert (run.M.atom("global", site, "add", "u32", run.address("global", 0, 0), None, one) == lane).all()
    found = run.M.atom("generic", site, "add", "u32", run.address("global", 0, 0), t % 2 == 1, one)
    assert (found[:, 1::2].reshape(-1) == B * T + np.arange(T)).all()
    run.M.atom("global", site, "add", "u32", run.address("global", 0, 16), t == 3, one)
    run.M.atom("global", site, "add", "u32", run.address("global", 0, 2), t == 3, one)
    assert run.problems() == [(MISALIGNED, 1), (OUT, 1)]


def test_packed_atomics():
    run = launch(arrays=[np.zeros(4, np.float16)])
    site = run.site(1, "atom.global.add.noftz.f16x2 %r1, [%rd1], %r2;", *run.origin(0))
    pair = np.array([1.0, 2.0], np.float16).view(np.uint32).reshape(1, 1)
    run.M.atom("global", site, "add", "f16x2", run.address("global", 0, 4), t < 5, pair)
    back = np.empty(4, np.float16)
    run.device.download(back, run.extents[0].address)
    assert back.tolist() == [0, 0, 5 * B, 10 * B]


# ---- cp.async ----


class Copies:
    """A launch that copies x0, 16 bytes a lane, to the tile."""

    def __init__(self, nbytes=16, **options):
        self.nbytes = nbytes
        rows = np.arange(B * T * 4, dtype=np.float32).reshape(B, T, 4)
        self.x = rows
        self.run = launch(**{"arrays": [rows], "written": frozenset(), **options})

    def issue(self, line, place=0, mask=None, filled=None, source=None):
        run = self.run
        site = run.site(line, "cp.async.cg.shared.global [%r1], [%rd1], 16;", *run.origin(TILE))
        origin = run.site(line, "cp.async.cg.shared.global [%r1], [%rd1], 16;", *run.origin(0))
        shared = run.address("shared", TILE, place + self.nbytes * t)
        source = run.address("global", 0, self.nbytes * lane if source is None else source)
        run.M.cp_async(site, shared, source, self.nbytes, filled, mask, source=origin)

    def wait(self, pending=0, mask=None, everything=False):
        self.run.M.cp_wait(self.run.site(99, "cp.async.wait_group 0;"), pending, mask, everything)


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_copies_arrive_at_the_wait(nbytes):
    copies = Copies(nbytes)
    copies.issue(1)
    copies.run.M.cp_commit(None)
    copies.wait()
    own = copies.run.read(2, TILE, nbytes * t)
    copies.run.barrier()
    other = copies.run.read(3, TILE, nbytes * (t ^ 1))
    source = copies.x.reshape(-1)[lane * nbytes // 4]
    assert (own == source).all() and (other == source[:, (t ^ 1)[0]]).all()
    assert copies.run.problems() == []


def test_a_copy_without_a_wait():
    copies = Copies()
    copies.issue(1)
    copies.run.M.cp_commit(None)
    copies.run.barrier()
    assert (copies.run.read(2, TILE, 16 * (t ^ 1)) == 0).all()
    (report,) = copies.run.reports_of()
    assert report.line == (
        "cp.async misuse: test, CTA (0,0,0), thread (0,0,0) reads tile[4] at a.cu:2, which thread (1,0,0) copies at "
        "a.cu:1: its copy has not been waited for"
    )


def test_a_wait_without_a_barrier():
    copies = Copies()
    copies.issue(1)
    copies.run.M.cp_commit(None)
    copies.wait()
    copies.run.read(2, TILE, 16 * (t ^ 1))
    assert copies.run.problems() == [("race", 2)]


def test_a_wait_for_one_group_too_few():
    for pending, expected in ((1, []), (2, [(COPY, 3)])):
        copies = Copies()
        for stage in range(3):
            copies.issue(1, 1024 * stage)
            copies.run.M.cp_commit(None)
        copies.wait(pending)
        copies.run.barrier()
        copies.run.read(2, TILE, 16 * (t ^ 1))
        copies.run.read(3, TILE, 1024 + 16 * (t ^ 1))
        assert copies.run.problems() == expected


def test_wait_all_covers_what_is_not_committed():
    for everything, expected in ((True, []), (False, [(COPY, 2)])):
        copies = Copies()
        copies.issue(1)
        copies.wait(0, None, everything)
        copies.run.barrier()
        copies.run.read(2, TILE, 16 * (t ^ 1))
        assert copies.run.problems() == expected


def test_a_store_to_the_target_of_a_copy():
    copies = Copies()
    copies.issue(1)
    copies.run.write(2, TILE, 16 * t, t)
    assert copies.run.problems() == [(COPY, 2)]


def test_a_copy_to_the_target_of_a_copy():
    copies = Copies()
    copies.issue(1)
    copies.issue(2)
    assert copies.run.problems() == [(COPY, 2)]


def test_a_copy_onto_what_others_still_read():
    for clean in (True, False):
        copies = Copies()
        copies.run.write(1, TILE, 16 * t, t, t, t, t)
        copies.run.barrier()
        copies.run.read(2, TILE, 16 * (t ^ 1))
        if clean:
            copies.run.barrier()
        copies.issue(3)
        copies.run.M.cp_commit(None)
        copies.wait()
        assert copies.run.problems() == ([] if clean else [("race", 2)])


def test_stages_in_a_loop():
    """Two stages ahead, one barrier a step: the usual pipeline."""
    copies = Copies()
    run = copies.run
    for stage in range(2):
        copies.issue(1, 1024 * stage)
        run.M.cp_commit(None)
    for step in range(8):
        copies.wait(1)
        run.barrier()
        assert (run.read(2, TILE, 1024 * (step % 3) + 16 * (t ^ 1))[:, 1] == copies.x[:, 0, 0]).all()
        copies.issue(3, 1024 * ((step + 2) % 3))
        run.M.cp_commit(None)
    assert run.problems() == []


def test_copies_of_some_lanes():
    copies = Copies()
    mask = (t < 32) & (row == 0)
    copies.issue(1, mask=mask)
    copies.issue(2, mask=~mask)
    copies.run.M.cp_commit(mask)
    copies.run.M.cp_commit(~mask)
    copies.wait(mask=mask)
    assert (copies.run.read(3, TILE, 16 * t, mask=mask)[0, :32] == copies.x[0, :32, 0]).all()
    assert copies.run.M.reports.total == 0
    copies.run.read(4, TILE, 16 * t)
    (report,) = copies.run.reports_of()
    assert (report.kind, report.cta, report.thread, report.count) == (COPY, (0, 0, 0), (32, 0, 0), 96)


def test_bytes_to_fill():
    copies = Copies()
    filled = np.where(t == 0, 0, np.where(t == 1, 6, 16)).astype(np.uint32)
    source = np.where(t == 0, -(10**9), 16 * lane)
    source[:, 1] = 16 * B * T - 16
    copies.issue(1, filled=filled, source=source)
    copies.wait(everything=True)
    found = np.stack(copies.run.read(2, TILE, 16 * t, vec=4), axis=2)
    assert (found[:, 0] == 0).all() and (found[:, 2:] == copies.x[:, 2:]).all()
    assert (found[:, 1].view(np.uint8).reshape(B, 16)[:, :6] == copies.x[-1, -1].view(np.uint8)[:6]).all()
    assert (found[:, 1].view(np.uint8).reshape(B, 16)[:, 6:] == 0).all()
    assert copies.run.problems() == []


def test_the_source_of_a_copy_is_checked():
    copies = Copies()
    copies.issue(1, source=16 * lane + 16)
    (report,) = copies.run.reports_of()
    assert report.kind == OUT and "CTA (1,0,0), thread (63,0,0)" in report.line and "after the end of x0" in report.line
    copies = Copies(empty=(0,))
    copies.issue(1)
    assert copies.run.problems() == [(UNINITIALISED, 1)]
    copies = Copies()
    copies.issue(1, source=16 * lane + 4)
    assert MISALIGNED in [kind for kind, _ in copies.run.problems()]


@pytest.mark.parametrize("origin", ["same", None])
@pytest.mark.parametrize(
    ("when", "found"), [("before", 0), ("in flight", 1), ("before the wait", 1), ("behind the wait", 1), ("after", 0)]
)
def test_the_source_of_a_copy_is_read_until_the_wait(when, found, origin):
    """Another thread writes the source, a barrier before the issue, up to a barrier behind the wait."""
    copies = Copies(written=frozenset({0}))

    def write(now):
        if now == when:
            copies.run.write(2, 0, 16 * (lane ^ 1), origin=origin)

    write("before")
    copies.run.barrier()
    copies.issue(1)
    copies.run.barrier()
    write("in flight")
    copies.run.barrier()
    write("before the wait")
    copies.wait(everything=True)
    write("behind the wait")
    copies.run.barrier()
    write("after")
    assert [kind for kind, _ in copies.run.problems()] == ["race"] * found


@pytest.mark.parametrize(("writers", "found"), [(t < 8, 1), ((t >= 8) & (t < 40), 0), (t >= 40, 0)])
def test_only_copies_in_flight_read_the_source(writers, found):
    """Lanes below 8 do not wait, lanes from 40 on do, and those between take nothing."""
    copies = Copies(written=frozenset({0}))
    copies.issue(1, filled=np.where(t < 4, 5, np.where((t < 8) | (t >= 40), 16, 0)))
    copies.run.barrier()
    copies.wait(mask=t >= 40, everything=True)
    copies.run.barrier()
    copies.run.write(2, 0, 16 * (lane ^ 1), mask=writers)
    assert [kind for kind, _ in copies.run.problems()] == ["race"] * found


def test_a_source_that_nothing_writes_is_not_logged():
    copies = Copies()
    copies.issue(1)
    copies.run.barrier()
    copies.wait(everything=True)
    assert [access.domain.space for access in copies.run.M.log.entries] == ["shared"]
    copies.run.barrier()
    assert copies.run.problems() == []


def test_the_target_of_a_copy_is_checked():
    copies = Copies(shared={TILE: 1008})
    copies.issue(1)
    (report,) = copies.run.reports_of()
    assert (report.kind, report.thread) == (OUT, (63, 0, 0))


def test_bfloat16_travels_unchanged():
    values = np.arange(T).astype(ml_dtypes.bfloat16).reshape(1, T)
    run = launch()
    run.write(1, TILE, 2 * t, values, type="bf16")
    assert (run.read(2, TILE, 2 * t, type="bf16") == values).all()
    assert run.problems() == []
