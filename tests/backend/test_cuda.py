"""The GPU backend on a GPU: memory, order, launches, errors. Kernels are the emulator's own test kernels."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.backend.base import NUMPY_DTYPE, KernelSpec, fixed
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.errors import OutOfMemory

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "tests" / "hostcuda" / "selftest.cu")
MIB = 1 << 20
BFLOAT16 = NUMPY_DTYPE["bfloat16"]
OPEN = (
    "from cupyllm.backend.cuda import CudaBackend\n"
    "from cupyllm.backend.base import KernelSpec, fixed\n"
    "from cupyllm.backend.record import Recorder\n"
    "from cupyllm.errors import BackendError\n"
    "backend = CudaBackend()\n"
)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    yield backend
    backend.close()


def child(code: str) -> str:
    """What a fresh process prints; errors that a context does not survive are provoked there."""
    done = subprocess.run([sys.executable, "-c", OPEN + code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def launch(session: Session, symbol: str, grid: Any, block: Any, *args: Any) -> None:
    rec = Recorder(80)
    rec.node = "test"
    rec.launch(KernelSpec(SOURCE, symbol), grid, block, *args)
    session.execute(rec)


def test_device_is_described(gpu: Any) -> None:
    assert gpu.name == "cuda" and gpu.device_name and gpu.capability >= 80
    assert gpu.architecture.startswith("sm_") and gpu.free_bytes() > 0


def test_barrier_and_arguments(gpu: Any) -> None:
    x = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    with Session(gpu) as session:
        y = session.put(np.zeros_like(x))
        launch(session, "reverse", 5, 256, session.put(x), y)
        np.testing.assert_array_equal(session.get(y), x[:, ::-1])
        out = session.put(np.array([1.1, 1.3, -1.43, np.nan, np.inf], np.float32))
        values = session.put(np.zeros(16, np.float32))
        launch(session, "maths", 1, 1, out, values, np.float32(2.5), np.float64(0.1))
        got = session.get(values)
        np.testing.assert_allclose(got[10:12], [1.1**2.5, 0.1], rtol=5e-7)  # float and double arguments arrived


def test_pinned_copies_follow_their_stream_and_events(gpu: Any) -> None:
    """Upload on one stream, a kernel on another, download on a third, ordered by events alone, many times over."""
    count = 1 << 20
    copies, work, back = gpu.stream(), gpu.stream(), gpu.stream()
    uploaded, computed, downloaded = gpu.event(), gpu.event(), gpu.event()
    buffer, host, result = gpu.allocate(4 * count), gpu.allocate_host(4 * count), gpu.allocate_host(4 * count)
    rec = Recorder(80)
    rec.launch(KernelSpec(SOURCE, "add_one"), 1, 256, fixed(buffer.address, (256,), "float32"))
    program = gpu.load(rec.launches)
    for turn in range(50):
        gpu.wait(copies, downloaded)  # never recorded in the first turn: no wait
        host.view(np.float32)[:] = turn
        gpu.upload(buffer.address, host, copies)
        gpu.record(uploaded, copies)
        gpu.wait(work, uploaded)
        gpu.run(program, work)
        gpu.record(computed, work)
        gpu.wait(back, computed)
        gpu.download(result, buffer.address, back)
        gpu.record(downloaded, back)
        gpu.wait_host(downloaded)
        got = result.view(np.float32)
        assert (got[:256] == turn + 1).all() and (got[256:] == turn).all()
    assert gpu.elapsed_ms(uploaded, downloaded) > 0
    buffer.free()


def test_copies_without_a_stream_are_complete(gpu: Any) -> None:
    work = gpu.stream()
    a, b = gpu.allocate(64 * MIB), gpu.allocate(64 * MIB)
    source = np.random.default_rng(1).integers(0, 256, 64 * MIB, dtype=np.uint8)  # pageable
    gpu.upload(a.address, source)
    gpu.copy(b.address, a.address, 64 * MIB, work)
    done = gpu.event()
    gpu.record(done, work)
    gpu.wait_host(done)
    target = np.empty_like(source)
    gpu.download(target, b.address)
    np.testing.assert_array_equal(target, source)
    gpu.fill(b.address, 1000, 7)
    gpu.download(target, b.address)
    assert (target[:1000] == 7).all() and (target[1000:] == source[1000:]).all()
    a.free()
    b.free()


def test_pinned_memory_lives_as_long_as_its_views(gpu: Any) -> None:
    view = gpu.allocate_host(MIB)[100:200].view(np.float32)
    view[:] = 3
    others = [gpu.allocate_host(MIB) for _ in range(8)]
    for other in others:
        other.fill(0xFF)
    assert (view == 3).all()


def test_memory_is_counted(gpu: Any) -> None:
    before, peak = gpu.free_bytes(), gpu.peak_bytes()
    buffer = gpu.allocate(512 * MIB + peak, "the test")
    assert buffer.address % 256 == 0
    assert gpu.peak_bytes() >= 512 * MIB + peak
    assert gpu.free_bytes() <= before - 512 * MIB
    process_peak = gpu.process_peak_bytes()
    if process_peak is not None:  # the context comes on top of what we allocated
        assert process_peak > gpu.peak_bytes()
        assert gpu.process_peak_source in ("this process", "growth of the whole device")
    buffer.free()
    buffer.free()  # once more does nothing


def test_out_of_memory_names_needed_and_free(gpu: Any) -> None:
    with pytest.raises(OutOfMemory, match=r"the impossible needs 1125899906842624 bytes, \d+ of \d+ are free"):
        gpu.allocate(1 << 50, "the impossible")
    gpu.allocate(MIB).free()  # and the context is still good


def test_host_cost_of_a_launch(gpu: Any) -> None:
    """At most 8 us, the driver included (kernels so short that the queue never fills for long).

    The fastest of ten batches counts: what else runs on the machine can only add to a batch.
    """
    buffer = gpu.allocate(1024)
    x = fixed(buffer.address, (256,), "float32")
    rec = Recorder(80)
    for _ in range(500):
        rec.launch(KernelSpec(SOURCE, "add_one"), 1, 32, x)
    program, stream, costs = gpu.load(rec.launches), gpu.stream(), []
    for _ in range(10):
        gpu.synchronize()
        start = time.perf_counter()
        gpu.run(program, stream)
        costs.append((time.perf_counter() - start) / 500 * 1e6)
    gpu.synchronize()
    print(f"{min(costs):.2f} us a launch, median {statistics.median(costs):.2f}")
    assert min(costs) <= 8.0
    buffer.free()


def test_forked_child_is_refused() -> None:
    code = (
        "import os\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        backend.allocate(100)\n"
        "        text = 'allocated'\n"
        "    except BackendError as error:\n"
        "        text = str(error)\n"
        "    os.write(write, text.encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(os.read(read, 1000).decode())"
    )
    assert "forked" in child(code) and "spawn" in child(code)


def test_other_threads_can_use_the_device(gpu: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def roundtrip(value: int) -> bool:
        buffer, target = gpu.allocate(1000), np.empty(1000, np.uint8)
        gpu.fill(buffer.address, 1000, value)
        gpu.download(target, buffer.address)
        buffer.free()
        return bool((target == value).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(roundtrip, range(200)))


def test_failing_kernel_is_named() -> None:
    code = (
        "rec = Recorder(80)\n"
        "rec.node = 'layers.3.bad'\n"
        f"rec.launch(KernelSpec({SOURCE!r}, 'add_one'), 1, 32, fixed(256, (32,), 'float32'))\n"
        "backend.run(backend.load(rec.launches))\n"
        "try:\n"
        "    backend.synchronize()\n"
        "    print('no error')\n"
        "except BackendError as error:\n"
        "    print(error)"
    )
    text = child(code)
    assert "llegal" in text and "layers.3.bad" in text and "\n" not in text


def test_impossible_launch_names_kernel_and_node() -> None:
    code = (
        "import dataclasses\n"
        "rec = Recorder(80)\n"
        "rec.node = 'layers.0.wide'\n"
        f"rec.launch(KernelSpec({SOURCE!r}, 'add_one'), 1, 32, fixed(256, (32,), 'float32'))\n"
        "bad = dataclasses.replace(rec.launches[0], block=(2000, 1, 1))\n"
        "try:\n"
        "    backend.run(backend.load([bad]))\n"
        "    print('no error')\n"
        "except BackendError as error:\n"
        "    print(error)"
    )
    text = child(code)
    assert "launching add_one (node layers.0.wide)" in text


def test_importing_and_choosing_the_reference_touch_no_device() -> None:
    code = (
        "import cupyllm.backend.cuda\n"
        "from cupyllm.runtime import Runtime\n"
        "Runtime.open('reference')\n"
        "import os\n"
        "print(any('nvidia' in os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') "
        "if os.path.islink(f'/proc/self/fd/{fd}')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_later_list_may_want_more_shared_memory(gpu: Any) -> None:
    """Few rows keep as much of x as there is: the same kernel with 8 KB, then over 48 KB, then little again."""
    from cupyllm.backend.eager import run_op
    from cupyllm.ops import get

    for depth in (64, 8192, 64):
        x, w = np.ones((8, depth), BFLOAT16), np.ones((64, depth), BFLOAT16)
        assert (run_op(gpu, get("linear"), [x], [w], forced={"linear": "rows"}).outputs[0] == depth).all()
