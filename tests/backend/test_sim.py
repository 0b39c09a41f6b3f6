"""The simulator as a backend: memory, launches, refusals; what it finds names node, kernel, thread and line."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cupyllm.backend import nvrtc
from cupyllm.backend.base import KernelSpec, Launch, Spec, Tensor, fixed
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.backend.sim import SimBackend
from cupyllm.errors import BackendError, OutOfMemory
from cupyllm.runtime import Runtime
from cupyllm.sim.report import SimError
from tests.simulated import new_simulator

ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "tests" / "hostcuda" / "selftest.cu")
FAULTS = str(Path(__file__).parent / "faults.cu")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def sim() -> Iterator[SimBackend]:
    with new_simulator() as backend:
        yield backend


def launches(source: str, symbol: str, grid: Any, block: Any, *args: Any) -> list[Launch]:
    rec = Recorder(80)
    rec.node = "layers.3.test"
    rec.launch(KernelSpec(source, symbol), grid, block, *args)
    return rec.launches


def launch(session: Session, symbol: str, grid: Any, block: Any, *args: Any, source: str = SOURCE) -> None:
    session.backend.run(session.backend.load(launches(source, symbol, grid, block, *args)))


def found(session: Session, symbol: str, grid: Any, block: Any, *args: Any, source: str = FAULTS) -> str:
    """The lines of what is found in one launch."""
    with pytest.raises(SimError) as caught:
        launch(session, symbol, grid, block, *args, source=source)
    print(caught.value)
    return str(caught.value)


# ---- what runs ----


def test_device_is_described(sim: SimBackend) -> None:
    assert (sim.name, sim.capability, sim.process_peak_bytes()) == ("sim", 80, None)
    assert "simulator" in sim.device_name and sim.free_bytes() > 0


def test_barrier_and_arguments(sim: SimBackend) -> None:
    x = RNG.standard_normal((5, 256)).astype(np.float32)
    with Session(sim) as session:
        y = session.put(np.zeros_like(x))
        launch(session, "reverse", 5, 256, session.put(x), y)
        np.testing.assert_array_equal(session.get(y), x[:, ::-1])
        out = session.put(np.array([1.1, 1.3, -1.43, np.nan, np.inf], np.float32))
        values = session.put(np.zeros(16, np.float32))
        launch(session, "maths", 1, 1, out, values, np.float32(2.5), np.float64(0.1))
        got = session.get(values)
        np.testing.assert_allclose(got[10:12], [1.1**2.5, 0.1], rtol=5e-7)  # float and double arguments arrived


def test_every_thread_of_every_block_runs_once(sim: SimBackend) -> None:
    with Session(sim) as session:
        out = session.empty(Spec((2 * 3 * 4 * 30,), "int64"))
        launch(session, "index", (2, 3, 4), (5, 3, 2), out, out.size)
        np.testing.assert_array_equal(session.get(out), np.arange(out.size))


def test_a_program_runs_as_often_as_asked(sim: SimBackend) -> None:
    with Session(sim) as session:
        y = session.put(np.zeros(32, np.float32))
        program = sim.load(launches(SOURCE, "add_one", 1, 32, y))
        for _ in range(3):
            sim.run(program, sim.stream())
        assert (session.get(y) == 3).all()


def test_a_null_pointer_is_an_argument(sim: SimBackend) -> None:
    with Session(sim) as session:
        text = found(session, "read_behind", 1, 32, None, session.put(np.zeros(32, np.float32)))
        assert text.splitlines()[0].startswith("node layers.3.test: out of bounds: read_behind")


# ---- memory and order ----


def test_copies_and_fills(sim: SimBackend) -> None:
    stream, before, after = sim.stream(), sim.event(), sim.event()
    a, b = sim.allocate(5000, "a"), sim.allocate(5000, "b")
    source, target = RNG.integers(0, 256, 5000, dtype=np.uint8), np.empty(5000, np.uint8)
    host = sim.allocate_host(5000)
    host[:] = source
    sim.record(before, stream)
    sim.upload(a.address, host, stream)
    host[:] = 0  # everything has happened when the call returns
    sim.copy(b.address, a.address, 5000, stream)
    sim.record(after, stream)
    sim.wait(stream, after)
    sim.wait_host(after)
    sim.download(target, b.address, stream)
    np.testing.assert_array_equal(target, source)
    assert sim.elapsed_ms(before, after) > 0
    sim.fill(b.address + 1000, 1000, 7)
    sim.download(target, b.address)
    assert (target[1000:2000] == 7).all() and (target[2000:] == source[2000:]).all()
    for nothing in (lambda: sim.copy(a.address, b.address, 0), lambda: sim.fill(a.address, 0, 1)):
        nothing()
    a.free()
    b.free()


def test_copies_outside_an_allocation_are_errors(sim: SimBackend) -> None:
    buffer, array = sim.allocate(1000, "the buffer"), np.zeros(1001, np.uint8)
    for wrong in (
        lambda: sim.upload(buffer.address, array),
        lambda: sim.download(array, buffer.address),
        lambda: sim.fill(buffer.address - 1, 1, 0),
        lambda: sim.copy(buffer.address, buffer.address + 999, 2),
    ):
        with pytest.raises(BackendError):
            wrong()
    buffer.free()
    with pytest.raises(BackendError):
        sim.fill(buffer.address, 1, 0)


def test_memory_is_counted() -> None:
    with new_simulator(memory_bytes=1 << 20) as backend:
        first = backend.allocate(600_000, "first")
        assert first.address % 256 == 0 and backend.free_bytes() == (1 << 20) - 600_000  # a host has as much
        message = r"the second needs 600000 bytes, 448576 of 1048576 are free"
        with pytest.raises(OutOfMemory, match=message) as caught:
            backend.allocate(600_000, "the second")
        assert "\n" not in str(caught.value)
        first.free()
        first.free()  # once more does nothing
        backend.allocate(600_000, "the second").free()
        assert backend.peak_bytes() == 600_000 and backend.free_bytes() == 1 << 20


def test_other_threads_can_use_the_device(sim: SimBackend) -> None:
    def roundtrip(value: int) -> bool:
        buffer, target = sim.allocate(1000), np.empty(1000, np.uint8)
        sim.fill(buffer.address, 1000, value)
        sim.download(target, buffer.address)
        buffer.free()
        return bool((target == value).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(roundtrip, range(200)))


def test_close_gives_the_memory_back() -> None:
    with new_simulator() as backend:
        buffer = backend.allocate(1000)
        program = backend.load(launches(SOURCE, "add_one", 1, 32, fixed(buffer.address, (32,), "float32")))
        backend.close()
        backend.close()
        buffer.free()
        for use in (lambda: backend.allocate(10), lambda: backend.run(program), lambda: backend.fill(512, 1, 0)):
            with pytest.raises(BackendError, match="closed"):
                use()


# ---- what a launch must be ----


@pytest.mark.parametrize(
    ("symbol", "args", "message"),
    [
        ("add_one", lambda x: (), "got 0 arguments, the kernel takes 1"),
        ("add_one", lambda x: (x, 1), "got 2 arguments, the kernel takes 1"),
        ("add_one", lambda x: (np.float32(1),), r"argument 0 is a float32, the kernel takes \.u64 there"),
        ("maths", lambda x: (x, x, np.float64(1), np.float64(1)), r"argument 2 is a float64, the kernel takes \.f32"),
        ("maths", lambda x: (x, x, np.float32(1), 1), r"argument 3 is an integer, the kernel takes \.f64"),
        ("add_one", lambda x: (1.0,), r"argument 0 is 1\.0, which is no tensor"),
        ("add_one", lambda x: (True,), "argument 0 is True, which is no tensor"),
        ("wrong_abi", lambda x: (1,), r"argument 0 is an integer, the kernel takes \.u32"),
        ("add_one", lambda x: (dataclasses.replace(x, offset=8),), "argument 0 at 0x[0-9a-f]+ is not 16-byte aligned"),
        ("no_such", lambda x: (), r"selftest\.cu defines no kernel no_such"),
    ],
)
def test_arguments_are_checked(sim: SimBackend, symbol: str, args: Any, message: str) -> None:
    with Session(sim) as session, pytest.raises(BackendError, match=message) as caught:
        launch(session, symbol, 1, 1, *args(session.put(np.zeros(32, np.float32))))
    assert "\n" not in str(caught.value)


def test_what_a_gpu_would_refuse_names_the_node(sim: SimBackend) -> None:
    with Session(sim) as session:
        good = launches(SOURCE, "reverse", 1, 256, *[session.put(np.zeros(256, np.float32))] * 2)[0]
        for wrong in ({"block": (2000, 1, 1)}, {"grid": (0, 1, 1)}, {"shared_bytes": 163 * 1024 - 1023}):
            program = sim.load([dataclasses.replace(good, **wrong)])
            with pytest.raises(BackendError, match=r"node layers\.3\.test: reverse: .*expected") as caught:
                sim.run(program)
            assert "\n" not in str(caught.value)


# ---- what is found ----


def test_a_missing_barrier(sim: SimBackend) -> None:
    with Session(sim) as session:
        x, y = session.put(np.zeros(512, np.float32)), session.empty(Spec((512,), "float32"))
        text = found(session, "reverse_racy", 2, 256, x, y, source=SOURCE)
        assert text.startswith("node layers.3.test: race in shared memory: reverse_racy, CTA (0,0,0), thread (")
        assert all(line.startswith("node layers.3.test: race in") for line in text.splitlines())
        assert "reads tile[" in text and "selftest.cu:25, which thread (" in text and "writes at selftest.cu:24" in text
        launch(session, "reverse", 2, 256, x, y)  # and nothing of it is left


def test_an_element_behind_the_tensor_although_the_allocation_has_it(sim: SimBackend) -> None:
    with Session(sim) as session:
        whole, y = session.put(np.zeros(64, np.float32), "x"), session.empty(Spec((32,), "float32"))
        launch(session, "read_behind", 1, 32, whole, y, source=FAULTS)
        text = found(session, "read_behind", 1, 32, fixed(whole.address, (32,), "float32"), y)
        assert "out of bounds: read_behind, CTA (0,0,0), thread (31,0,0) reads" in text and "faults.cu:5" in text


def test_reads_of_what_was_never_written(sim: SimBackend) -> None:
    with Session(sim) as session:
        x, y = session.put(np.zeros(64, np.float32)), session.empty(Spec((64,), "float32"))
        text = found(session, "sum_unwritten", 1, 64, x, y)
        assert "uninitialised read: sum_unwritten, CTA (0,0,0), thread (63,0,0) reads tile[63]" in text
        text = found(session, "add_one", 1, 64, session.empty(Spec((64,), "float32")), source=SOURCE)
        assert "uninitialised read: add_one" in text, "the canary of an empty tensor is no value"


def test_blocks_that_write_the_same_element(sim: SimBackend) -> None:
    with Session(sim) as session:
        y = session.empty(Spec((4,), "float32"))
        text = found(session, "every_block_writes_the_first", 3, 32, y)
        assert "race between CTAs: every_block_writes_the_first" in text


@pytest.mark.parametrize("symbol", ["divergent_barrier", "divergent_shuffle", "barrier_against_shuffle"])
def test_divergence(sim: SimBackend, symbol: str) -> None:
    with Session(sim) as session:
        text = found(session, symbol, 1, 64, session.empty(Spec((64,), "float32")), source=SOURCE)
        assert f"{symbol}, CTA (0,0,0)" in text and "selftest.cu:" in text


def test_freed_memory(sim: SimBackend) -> None:
    buffer = sim.allocate(1024)
    sim.fill(buffer.address, 1024, 0)
    program = sim.load(launches(SOURCE, "add_one", 1, 32, fixed(buffer.address, (32,), "float32")))
    sim.run(program)
    buffer.free()
    with pytest.raises(BackendError, match=r"layers\.3\.test"):
        sim.run(program)


def test_an_endless_loop_ends() -> None:
    with new_simulator(budget=1_000_000) as backend, Session(backend) as session:
        y = session.put(np.zeros(2, np.float32))
        text = found(session, "spin", 1, 32, y)
        assert "budget" in text and "spin" in text
        launch(session, "add_one", 1, 2, y)  # which takes less


def test_unchecked_runs_find_nothing() -> None:
    x = RNG.standard_normal((1, 256)).astype(np.float32)
    with new_simulator(check=False) as backend, Session(backend) as session:
        y = session.put(np.zeros_like(x))
        launch(session, "reverse_racy", 1, 256, session.put(x), y)
        launch(session, "reverse", 1, 256, session.put(x), y)
        np.testing.assert_array_equal(session.get(y), x[:, ::-1])


@pytest.mark.parametrize("lanes", [32, 700, 1 << 20])
def test_the_batch_changes_no_bit(lanes: int) -> None:
    x = RNG.standard_normal(7 * 256).astype(np.float32)
    with new_simulator(lanes=lanes) as backend, Session(backend) as session:
        y = session.empty(Spec(x.shape, "float32"))
        launch(session, "sum_blocks", 7, 256, session.put(x), y)
        got = session.get(y).reshape(7, 256)
    want = x.reshape(7, 8, 32)
    for offset in (16, 8, 4, 2, 1):  # the warps' butterflies, then the warps in order
        want = want + want[..., np.arange(32) ^ offset]
    total = np.add.accumulate(want[..., 0], axis=1)[:, -1]
    np.testing.assert_array_equal(got, np.repeat(total[:, None], 256, 1))


# ---- how it is opened ----


def test_the_runtime_opens_it_when_asked_and_never_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime.open("sim") as runtime:
        assert runtime.name == "sim" and isinstance(runtime.backend, SimBackend)
        assert runtime.reason == "PTX simulator (NumPy), kernels as on sm_80, as asked"
    monkeypatch.setattr("cupyllm.runtime.ask_driver", lambda: (None, []))
    with Runtime.open("auto") as runtime:
        assert runtime.name == "reference"


def test_missing_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(BackendError, match=r"--backend sim: .*needs CuPy.*pip install 'cupyllm\[cuda12\]'") as caught:
        Runtime.open("sim")
    assert "\n" not in str(caught.value) and "--backend reference" in str(caught.value)


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(ModuleType):
        def getVersion(self) -> tuple[int, int]:
            raise RuntimeError("CuPy failed to load libnvrtc.so.12:\n OSError: no such file")

    monkeypatch.setattr(nvrtc, "library", lambda: Missing("nvrtc"))
    with pytest.raises(BackendError, match=r"--backend sim: NVRTC.*pip install") as caught:
        Runtime.open("sim")
    assert "\n" not in str(caught.value)


def test_it_opens_no_device() -> None:
    code = (
        "import os\n"
        "from cupyllm.runtime import Runtime\n"
        "Runtime.open('sim').close()\n"
        "paths = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]\n"
        "print(any('nvidia' in os.readlink(path) for path in paths if os.path.islink(path)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_translated_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> np.ndarray:
        backend = SimBackend(cache=tmp_path)
        with Session(backend) as session:
            y = session.put(np.zeros(32, np.float32))
            launch(session, "add_one", 1, 32, y)
            return session.get(y)

    first = run()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len({path.parent for path in kept}) == 2, "PTX and translated source"
    monkeypatch.setattr("cupyllm.backend.compile._build", lambda jobs, folder: pytest.fail("compiled again"))
    np.testing.assert_array_equal(run(), first)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_tensors_of_a_program_need_an_address(sim: SimBackend) -> None:
    unplaced: Tensor = Recorder(80).empty((32,), "float32")
    with pytest.raises(AssertionError, match="has no address yet"):
        sim.load(launches(SOURCE, "add_one", 1, 32, unplaced))
