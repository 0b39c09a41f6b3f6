"""Which machine a command runs on: chosen once, with a reason, and passed down.

`auto` takes the GPU when there is one and CuPy to drive it, else the NumPy reference. The simulator runs the GPU's
kernels, thousands of times slower, and is only ever an explicit choice. One that cannot be had is an error, never a
fallback. The driver is asked through its own library before CuPy is imported, so on a machine
without a GPU the choice costs milliseconds.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from cupyllm.backend.base import Backend
from cupyllm.backend.compile import MIN_CAPABILITY
from cupyllm.backend.nvrtc import REMEDY
from cupyllm.doctor import ask_driver
from cupyllm.errors import BackendError, InputError

NAMES = ("auto", "cuda", "sim", "reference")


@dataclass
class Runtime:
    """An opened choice. `backend` is None on the reference, which has no device."""

    name: str  # "cuda" | "sim" | "reference"
    reason: str  # one line, for the command's first
    backend: Backend | None = None

    @classmethod
    def open(cls, name: str = "auto") -> Runtime:
        """The runtime called `name`. Raises BackendError when an explicit "cuda" or "sim" cannot be had."""
        if name not in NAMES:
            raise InputError(f"--backend {name}: expected one of {', '.join(NAMES)}")
        if name == "reference":
            return cls("reference", "NumPy on the CPU, as asked")
        if name == "sim":
            return _simulator()
        obstacle = why_no_gpu()
        if obstacle is None:
            from cupyllm.backend.cuda import CudaBackend

            backend = CudaBackend()
            why = "as asked" if name == "cuda" else "the first GPU found"
            return cls("cuda", f"{backend.device_name} (sm_{backend.capability}), {why}", backend)
        if name == "cuda":
            raise BackendError(f"--backend cuda: {obstacle}; or take --backend reference")
        return cls("reference", f"NumPy on the CPU, because {obstacle}")

    def close(self) -> None:
        """Wait for the device and let it go."""
        if self.backend is not None:
            self.backend.close()
            self.backend = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _simulator() -> Runtime:
    try:
        from cupyllm.backend.sim import SimBackend

        backend = SimBackend()
    except BackendError as error:
        raise BackendError(f"--backend sim: {error}; or take --backend reference") from error
    return Runtime("sim", f"{backend.device_name}, kernels as on sm_{backend.capability}, as asked", backend)


def why_no_gpu() -> str | None:
    """What stands between us and a GPU, with its remedy; None when nothing does."""
    driver, gpus = ask_driver()
    if driver is None:
        return "there is no NVIDIA driver (libcuda.so.1 is not found): install one if this machine has a GPU"
    if not gpus:
        return f"the driver ({driver}) shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if gpus[0]["capability"] < MIN_CAPABILITY:
        return f"{gpus[0]['name']} is sm_{gpus[0]['capability']}, kernels need sm_{MIN_CAPABILITY} (Ampere) or later"
    if importlib.util.find_spec("cupy") is None:
        return f"{gpus[0]['name']} is there but CuPy is not: {REMEDY}"
    return None
