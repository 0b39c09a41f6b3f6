"""What this machine has: versions, driver, GPUs, NVRTC, caches; what is missing, and the command that mends it.

The driver is asked through its own library (ctypes on libcuda), so a GPU is seen even where CuPy is not installed:
exactly then the advice is needed. No context is created.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from cupyllm import __version__
from cupyllm.cache import cache_dir
from cupyllm.files import free_space, show_path, tree_bytes
from cupyllm.model.checkpoint import hub_cache

REQUIRED = ("numpy", "ml_dtypes", "tokenizers", "click", "rich")
CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x")
MIN_CAPABILITY = 80
CUDA_SUCCESS = 0


def examine() -> dict[str, Any]:
    """Everything the command prints; `problems` lists {what, remedy}."""
    packages = {name: version_of(name) for name in (*REQUIRED, *CUPY_WHEELS)}
    driver, gpus = ask_driver()
    nvrtc, nvrtc_problem = _nvrtc() if any(packages[name] for name in CUPY_WHEELS) else (None, None)
    report: dict[str, Any] = {
        "cupyllm": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "packages": packages,
        "driver": driver,
        "gpus": gpus,
        "nvrtc": nvrtc,
        "simulator": nvrtc is not None,
        "cache": _cache_report(),
        "huggingface_cache": _hub_report(),
    }
    report["problems"] = _problems(report, nvrtc_problem)
    return report


def version_of(distribution: str) -> str | None:
    """Installed version, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def ask_driver() -> tuple[str | None, list[dict[str, Any]]]:
    """("CUDA 13.0, kernel module 580.95.05", [{index, name, capability, memory_bytes}]), (None, []) without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, []
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != CUDA_SUCCESS:
        return None, []
    driver = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    module = _kernel_module_version()
    driver += f", kernel module {module}" if module else ""
    status = cuda.cuInit(0)
    if status != CUDA_SUCCESS or cuda.cuDeviceGetCount(ctypes.byref(count)) != CUDA_SUCCESS:
        return f"{driver} (cuInit failed with {status})", []
    return driver, [_gpu(cuda, index) for index in range(count.value)]


def variants() -> list[dict[str, Any]]:
    """One entry a kernel variant, in the order in which they are tried."""
    from cupyllm import ops

    return [
        {
            "op": name,
            "variant": variant.name,
            "source": variant.source,
            "min_capability": variant.min_capability,
            "max_capability": variant.max_capability,
            "simulated": variant.simulated,
            "note": variant.note,
        }
        for name in ops.GRAPH_OPS
        for variant in ops.get(name).variants
    ]


def _gpu(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, value, total, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return {
        "index": index,
        "name": name.value.decode("utf-8", "replace"),
        "capability": capability[0] * 10 + capability[1],
        "memory_bytes": total.value,
    }


def _kernel_module_version() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _nvrtc() -> tuple[str | None, str | None]:
    """(version, None), or (None, what went wrong)."""
    try:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return None, " ".join(str(error).split())[:200]
    return f"{major}.{minor}", None


def _cache_report() -> dict[str, Any]:
    root = cache_dir()
    nearest = next(path for path in (root, *root.parents) if path.exists())
    return {
        "path": show_path(root),
        "bytes": tree_bytes(root) if root.exists() else 0,
        "free_bytes": free_space(root),
        "writable": os.access(nearest, os.W_OK),
    }


def _hub_report() -> dict[str, Any]:
    root = hub_cache()
    found = sorted(root.glob("models--*--*")) if root.is_dir() else []
    return {"path": show_path(root), "models": [path.name[8:].replace("--", "/", 1) for path in found]}


def _problems(report: dict[str, Any], nvrtc_problem: str | None) -> list[dict[str, str]]:
    packages, gpus = report["packages"], report["gpus"]
    problems = [
        {"what": f"{name} is not installed", "remedy": f"pip install {name}"} for name in REQUIRED if not packages[name]
    ]
    installed = [name for name in CUPY_WHEELS if packages[name]]
    extra = "cuda13" if report["driver"] and int(report["driver"].split()[1].split(".")[0]) >= 13 else "cuda12"
    if len(installed) > 1:
        remedy = f"pip uninstall {' '.join(installed)}, then pip install 'cupyllm[{extra}]'"
        problems.append({"what": f"{' and '.join(installed)} are installed and overwrite each other", "remedy": remedy})
    if gpus and not installed:
        problems.append({"what": "there is a GPU but no CuPy", "remedy": f"pip install 'cupyllm[{extra}]'"})
    if installed and nvrtc_problem:
        wheel = "nvidia-cuda-nvrtc-cu12" if installed[0] == "cupy-cuda12x" else "nvidia-cuda-nvrtc"
        problems.append({"what": f"NVRTC does not load: {nvrtc_problem}", "remedy": f"pip install {wheel}"})
    if report["driver"] and not gpus:
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        problems.append({"what": f"driver {report['driver']} shows no GPU", "remedy": remedy})
    for gpu in gpus:
        if gpu["capability"] < MIN_CAPABILITY:
            what = f"GPU {gpu['index']} ({gpu['name']}) is sm_{gpu['capability']}"
            problems.append({"what": what, "remedy": f"use one from sm_{MIN_CAPABILITY} on, or --backend reference"})
    if not report["cache"]["writable"]:
        what = f"the cache directory {report['cache']['path']} cannot be written"
        problems.append({"what": what, "remedy": "set XDG_CACHE_HOME to a directory that can"})
    return problems
