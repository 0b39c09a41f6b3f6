"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy loads: workers run side by side, BLAS must not spin

import pytest

from cupyllm.backend.base import Backend
from cupyllm.runtime import why_no_gpu
from tests.hostcuda.backend import HostBackend
from tests.simulated import KERNELS, left_out


@lru_cache(maxsize=None)
def missing_gpu() -> str | None:
    return why_no_gpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu say that they did not run. Where there is a GPU, nothing skips: a broken backend must fail.
    What takes too long on the simulator is deselected."""
    long = [item for item in items if _on_the_simulator(item) and left_out(*item.name.rstrip("]").split("[", 1))]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    for item in items:
        if item.get_closest_marker("gpu") and missing_gpu() is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU; {missing_gpu()}"))


def _on_the_simulator(item: pytest.Item) -> bool:
    return (
        isinstance(item, pytest.Function)
        and getattr(item, "callspec", None) is not None
        and (item.callspec.params.get("backend") == "sim")
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.getreports("skipped") if "gpu" in r.keywords]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests marked gpu could not run: {missing_gpu()}")


@pytest.fixture(scope="session", params=["host", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The emulator, the simulator with every check on, and the GPU where there is one."""
    device: Backend
    if request.param == "host":
        device = HostBackend(deferred=True)
    elif request.param == "sim":
        from cupyllm.backend.sim import SimBackend

        device = SimBackend(cache=KERNELS)
    else:
        from cupyllm.backend.cuda import CudaBackend

        device = CudaBackend()
    yield device
    device.close()
