"""The emulator itself: what it computes, what it refuses, and that its stricter orders show missing synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm.backend.base import KernelSpec, Spec, fixed
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.errors import BackendError, OutOfMemory
from tests.hostcuda.backend import HostBackend

SOURCE = str(Path(__file__).parent / "selftest.cu")
RNG = np.random.default_rng(0)


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(HostBackend()) as opened:
        yield opened


def launch(session: Session, symbol: str, grid: Any, block: Any, *args: Any) -> None:
    rec = Recorder(80)
    rec.node = "test"
    rec.launch(KernelSpec(SOURCE, symbol), grid, block, *args)
    session.execute(rec)


def floats(session: Session, count: int) -> Any:
    return session.empty(Spec((count,), "float32"))


def test_every_thread_of_every_block_runs_once(session: Session) -> None:
    out = session.empty(Spec((2 * 3 * 4 * 30,), "int64"))
    launch(session, "index", (2, 3, 4), (5, 3, 2), out, out.size)
    np.testing.assert_array_equal(session.get(out), np.arange(out.size))


@pytest.mark.parametrize("descending", [False, True])
def test_barrier(descending: bool) -> None:
    x = RNG.standard_normal((5, 256)).astype(np.float32)
    with Session(HostBackend(descending=descending)) as session:
        y = floats(session, x.size)
        launch(session, "reverse", 5, 256, session.put(x), y)
        np.testing.assert_array_equal(session.get(y).reshape(5, 256), x[:, ::-1])


def test_missing_barrier_shows_in_one_of_two_orders() -> None:
    x = np.arange(1, 257, dtype=np.float32)
    results = []
    for descending in (False, True):
        with Session(HostBackend(descending=descending)) as session:
            y = floats(session, 256)
            launch(session, "reverse_racy", 1, 256, session.put(x), y)
            results.append(session.get(y))
    assert not np.array_equal(results[0], results[1])


def test_block_sum_gives_every_thread_the_same_sum(session: Session) -> None:
    x = RNG.standard_normal((3, 256)).astype(np.float32)
    y = floats(session, x.size)
    launch(session, "sum_blocks", 3, 256, session.put(x), y)
    got = session.get(y).reshape(3, 256)
    assert (got == got[:, :1]).all()
    # 13 roundings at most on the way of one term, 5 in the warp and 8 across warps, each at most u times the sum of |x|
    bound = 13 * 2.0**-24 * np.abs(x).sum(1)
    assert (np.abs(got[:, 0] - x.astype(np.float64).sum(1)) <= bound).all()


def test_shuffles_and_votes(session: Session) -> None:
    x = RNG.standard_normal(64).astype(np.float32)
    y = floats(session, 6 * 64)
    launch(session, "shuffles", 1, 64, session.put(x), y)
    xor, broadcast, up, down, ballot, vote = session.get(y).reshape(6, 2, 32)
    lanes, warps = np.arange(32), x.reshape(2, 32)
    np.testing.assert_array_equal(xor, warps[:, lanes ^ 5])
    np.testing.assert_array_equal(broadcast, warps[:, [3] * 32])
    np.testing.assert_array_equal(up, warps[:, np.maximum(lanes - 1, 0)])
    np.testing.assert_array_equal(down, warps[:, np.where(lanes + 2 < 32, lanes + 2, lanes)])
    bits = ((warps > 0) * 2.0**lanes).sum(1)
    np.testing.assert_array_equal(ballot, np.repeat(bits.astype(np.float32)[:, None], 32, 1))
    np.testing.assert_array_equal(vote, np.repeat((warps > 0).any(1) + 2.0 * (warps > 0).all(1), 32).reshape(2, 32))


def test_returned_threads_do_not_hold_up_a_barrier(session: Session) -> None:
    y = floats(session, 40)
    launch(session, "early_exit", 1, 64, y)
    np.testing.assert_array_equal(session.get(y), np.full(40, 7, np.float32))


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("divergent_barrier", "divergent barrier: thread 0 waits at line 56, thread 33 at line 58"),
        ("divergent_shuffle", "lane 7 in a warp operation at line 65, but that lane has returned"),
        ("barrier_against_shuffle", "lane 7 in a warp operation at line 74, but that lane waits at line 72"),
    ],
)
def test_divergence_is_an_error_that_names_the_lines(session: Session, symbol: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        launch(session, symbol, 1, 64, floats(session, 64))
    launch(session, "early_exit", 1, 64, floats(session, 64))  # the fibers that were given up do no harm


def test_vector_loads(session: Session) -> None:
    x, d = RNG.standard_normal(64).astype(np.float32), RNG.standard_normal(32)
    y, bits = floats(session, 64), floats(session, 32)
    launch(session, "vector_loads", 1, 16, session.put(x), y, session.put(d), bits)
    np.testing.assert_array_equal(session.get(y).reshape(16, 4), x.reshape(16, 4)[:, ::-1])
    np.testing.assert_array_equal(session.get(bits), d.astype(np.float32))


def around_every_16_bit_value(dtype: Any) -> np.ndarray:
    """Every value of a 16-bit format, each midpoint to the next, and their float32 neighbours on both sides."""
    values = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(invalid="ignore", over="ignore"):
        following = np.nextafter(values.astype(dtype), np.array(np.inf, dtype)).astype(np.float32)
        middle = (values.astype(np.float64) + following) / 2
        points = np.concatenate([values, middle[np.isfinite(middle)].astype(np.float32)])
        below, above = np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))
    return np.concatenate([points, below, above, np.array([np.inf, -np.inf, np.nan, -np.nan, 3.4e38], np.float32)])


@pytest.mark.parametrize(("symbol", "dtype"), [("round_bf16", ml_dtypes.bfloat16), ("round_f16", np.float16)])
def test_rounding_to_16_bits_is_numpys(session: Session, symbol: str, dtype: Any) -> None:
    x = around_every_16_bit_value(dtype)
    y = session.empty(Spec(x.shape, np.dtype(dtype).name))
    back = floats(session, x.size)
    launch(session, symbol, -(-x.size // 256), 256, session.put(x), y, back, x.size)
    with np.errstate(over="ignore"):
        want = x.astype(dtype)
    got, nan = session.get(y), np.isnan(x)
    np.testing.assert_array_equal(got.view(np.uint16)[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(got[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(session.get(back), want.astype(np.float32))


def test_maths(session: Session) -> None:
    x = np.array([1.1, 1.3, -1.43, np.nan, np.inf], np.float32)
    y = floats(session, 16)
    launch(session, "maths", 1, 1, session.put(x), y, np.float32(2.5), np.float64(0.1))
    a, b, c = (float(value) for value in x[:3])
    fused = np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))  # exact: 48 bits in 64
    separate = x[0] * x[1] + x[2]
    assert fused != separate  # the compiler must not contract one into the other
    got = session.get(y)
    want = [fused, separate, 1, 1, np.exp(a), np.log(a), a**-0.5, a**0.5, np.sin(a), np.cos(a), a**2.5, 0.1]
    np.testing.assert_array_equal(got[:4], np.array(want[:4], np.float32))
    np.testing.assert_allclose(got[4:12], want[4:], rtol=2 * 2.0**-23)  # CUDA promises 2 ulp or better for these
    np.testing.assert_array_equal(got[12:], np.array([1, 1, 0, 3], np.float32))


def test_writes_outside_a_buffer_are_errors(session: Session) -> None:
    y = floats(session, 3)
    with pytest.raises(BackendError, match=r"write_past \(test\) wrote outside .*12 bytes.*: 0 bytes after"):
        launch(session, "write_past", 1, 1, y, 3)
    session.buffers.clear()  # its guards stay broken
    y = floats(session, 3)
    with pytest.raises(BackendError, match=r"write_before \(test\) wrote outside .*: 4 bytes before"):
        launch(session, "write_before", 1, 1, y)
    session.buffers.clear()


def test_wrong_arguments_are_refused(session: Session) -> None:
    y = floats(session, 3)
    with pytest.raises(AssertionError, match="arguments are 'p', the kernel takes 'pl'"):
        launch(session, "write_past", 1, 1, y)
    with pytest.raises(AssertionError, match=r"arguments are 'l', the kernel takes '\?'"):
        launch(session, "wrong_abi", 1, 1, 3)
    with pytest.raises(BackendError, match="in no live allocation"):
        launch(session, "early_exit", 1, 40, fixed(y.address, (100,), "float32"))
    with pytest.raises(BackendError, match="defines no kernel nonsense"):
        launch(session, "nonsense", 1, 1, y)


def test_use_after_free_is_an_error() -> None:
    backend = HostBackend()
    buffer = backend.allocate(160)
    rec = Recorder(80)
    rec.launch(KernelSpec(SOURCE, "early_exit"), 1, 40, fixed(buffer.address, (40,), "float32"))
    program = backend.load(rec.launches)
    backend.run(program)
    buffer.free()
    buffer.free()  # once more does nothing
    with pytest.raises(BackendError, match="memory that has been freed"):
        backend.run(program)


def test_memory_is_counted_and_limited() -> None:
    backend = HostBackend(memory_bytes=1000)
    first = backend.allocate(600)
    with pytest.raises(OutOfMemory, match="the weights needs 500 bytes, 400 are free"):
        backend.allocate(500, "the weights")
    first.free()
    assert backend.free_bytes() == 1000
    backend.allocate(700).free()
    assert backend.peak_bytes() == 700


def test_deferred_streams_run_late_and_only_events_order_them() -> None:
    backend = HostBackend(deferred=True)
    copies, work = backend.stream(), backend.stream()
    buffer, host, back = backend.allocate(16), backend.allocate_host(16), backend.allocate_host(16)
    host.view(np.float32)[:] = [1, 2, 3, 4]
    rec = Recorder(80)
    rec.launch(KernelSpec(SOURCE, "add_one"), 1, 4, fixed(buffer.address, (4,), "float32"))
    program, uploaded, done = backend.load(rec.launches), backend.event(), backend.event()

    backend.fill(buffer.address, 16, 0)
    backend.upload(buffer.address, host, copies)
    backend.run(program, work)  # does not wait for the upload: must be seen as wrong
    backend.download(back, buffer.address, work)
    backend.record(done, work)
    backend.wait_host(done)
    np.testing.assert_array_equal(back.view(np.float32), [1, 1, 1, 1])

    backend.upload(buffer.address, host, copies)
    backend.record(uploaded, copies)
    backend.wait(work, uploaded)
    backend.run(program, work)
    backend.download(back, buffer.address, work)
    host.fill(0)  # too early: the pinned source is read only when the upload runs
    backend.record(done, work)
    backend.wait_host(done)
    np.testing.assert_array_equal(back.view(np.float32), [1, 1, 1, 1])
    assert backend.elapsed_ms(uploaded, done) >= 0
