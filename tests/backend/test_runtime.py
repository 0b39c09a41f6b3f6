"""Which backend is taken, and what is said when the wish cannot be met."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupyllm import runtime
from cupyllm.errors import BackendError, InputError
from cupyllm.runtime import Runtime

GPU = {"index": 0, "name": "NVIDIA H200", "capability": 90, "memory_bytes": 1 << 37}
MACHINES = {
    "no driver": (None, [], "no NVIDIA driver"),
    "no GPU": ("CUDA 13.0 (cuInit failed with 100)", [], "shows no GPU.*CUDA_VISIBLE_DEVICES"),
    "old GPU": ("CUDA 12.4", [{**GPU, "name": "T4", "capability": 75}], "T4 is sm_75, kernels need sm_80"),
    "no CuPy": ("CUDA 13.0", [GPU], r"H200 is there but CuPy is not.*pip install 'cupyllm\[cuda12\]'"),
}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine without a usable GPU; gives the reason to expect."""
    driver, gpus, reason = MACHINES[request.param]
    monkeypatch.setattr(runtime, "ask_driver", lambda: (driver, gpus))
    found = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return None if name == "cupy" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return reason


def test_auto_takes_the_reference_and_says_why(machine: str) -> None:
    with Runtime.open("auto") as opened:
        assert (opened.name, opened.backend) == ("reference", None)
        assert "\n" not in opened.reason
        assert re.search(machine, opened.reason)


def test_explicit_cuda_is_an_error_with_a_remedy(machine: str) -> None:
    with pytest.raises(BackendError, match=machine) as caught:
        Runtime.open("cuda")
    assert "\n" not in str(caught.value) and "--backend reference" in str(caught.value)


def test_reference_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "ask_driver", lambda: pytest.fail("asked"))
    assert Runtime.open("reference").name == "reference"


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="--backend gpu: expected one of auto, cuda, sim, reference"):
        Runtime.open("gpu")


def test_choosing_without_a_gpu_never_imports_cupy() -> None:
    code = (
        "import sys\n"
        "import cupyllm.backend.cuda, cupyllm.backend.compile\n"
        "from cupyllm.runtime import Runtime\n"
        "opened = Runtime.open('reference')\n"
        "sys.exit(int(any(name.split('.')[0] == 'cupy' for name in sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
