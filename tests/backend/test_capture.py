"""CUDA graphs on a GPU: what was captured runs again and again; what fails ends the capture, in one error."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.backend.base import KernelSpec, Tensor
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.errors import BackendError

pytestmark = pytest.mark.gpu

SOURCE = str(Path(__file__).parents[1] / "hostcuda" / "selftest.cu")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    yield backend
    backend.close()


def reverse(gpu: Any, source: Tensor, target: Tensor) -> Any:
    rec = Recorder(80)
    rec.node = "reverse it"
    rec.launch(KernelSpec(SOURCE, "reverse"), source.shape[0], source.shape[1], source, target)
    return gpu.load(rec.launches)


@pytest.mark.parametrize("how", ["programs", "callable"])
def test_a_graph_runs_what_was_captured_and_nothing_before(gpu: Any, how: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    with Session(gpu) as session:
        a, b, c = session.put(x), session.put(np.zeros_like(x)), session.put(np.zeros_like(x))
        programs, stream = [reverse(gpu, a, b), reverse(gpu, b, c)], gpu.stream()

        def work(on: Any) -> None:
            for program in programs:
                gpu.run(program, on)

        graph = gpu.capture(programs if how == "programs" else work)
        assert graph.programs == tuple(programs)
        gpu.synchronize()
        assert not session.get(b).any(), "capturing ran it"
        for scale in (1, 2, 3):
            gpu.upload(a.address, x * np.float32(scale))
            graph.launch(stream)
            gpu.synchronize()
            np.testing.assert_array_equal(session.get(b), scale * x[:, ::-1])
            np.testing.assert_array_equal(session.get(c), scale * x)
        graph.free()
        graph.free()


def test_its_programs_live_as_long_as_it(gpu: Any) -> None:
    x = np.arange(256, dtype=np.float32)[None]
    with Session(gpu) as session:
        a, b = session.put(x), session.put(np.zeros_like(x))
        graph = gpu.capture([reverse(gpu, a, b)])
        gc.collect()
        graph.launch()
        gpu.synchronize()
        np.testing.assert_array_equal(session.get(b), x[:, ::-1])


def test_an_empty_graph_runs(gpu: Any) -> None:
    gpu.capture([]).launch()
    gpu.synchronize()


def test_what_cannot_be_captured_is_one_error_and_the_end_of_it(gpu: Any) -> None:
    """Waiting for the captured stream. The backend is as good as new behind it."""

    def waits(stream: Any) -> None:
        stream.synchronize()

    with pytest.raises(BackendError, match="CUDA, capturing a graph: cudaErrorStreamCapture"):
        gpu.capture(waits)
    with pytest.raises(KeyError):  # an error of the caller's stays what it is
        gpu.capture(lambda stream: {}["x"])
    test_an_empty_graph_runs(gpu)
    x = np.arange(256, dtype=np.float32)[None]
    with Session(gpu) as session:
        a, b = session.put(x), session.put(np.zeros_like(x))
        gpu.run(reverse(gpu, a, b))
        gpu.synchronize()
        np.testing.assert_array_equal(session.get(b), x[:, ::-1])
