"""Run the micro-kernels of tests/sim/micro on this machine's GPU and store what they give.

    python scripts/make_sim_goldens.py [--out tests/sim/goldens] [--only TEXT]

tests/sim/test_fidelity.py compares the simulator with the file, bit by bit where the instruction is exact. Run this
again when it says that a kernel's operands have changed. Kernels that do not compile are listed, here and in the file,
and make the exit status 1: the test refuses a file that lacks a kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupyllm.backend import nvrtc
from tests.sim.micro import goldens, micros
from tests.sim.micro.run import CudaRunner, run_micro


def about_this_machine() -> dict[str, str]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    driver = cupy.cuda.runtime.driverGetVersion()
    major, minor = nvrtc.version()
    return {
        "device": properties["name"].decode(),
        "capability": str(cupy.cuda.Device().compute_capability),
        "driver": f"CUDA {driver // 1000}.{driver % 1000 // 10}",
        "nvrtc": f"{major}.{minor}",
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=goldens.PATH.parent, help="folder of micro.npz")
    parser.add_argument("--only", default="", help="kernels whose name contains TEXT (for looking, not for storing)")
    args = parser.parse_args()
    table = {name: micro for name, micro in micros().items() if args.only in name}
    start = time.perf_counter()
    runner = CudaRunner(table.values())
    print(f"{len(table)} kernels compiled in {time.perf_counter() - start:.1f} s")
    outputs: dict[str, list[np.ndarray]] = {}
    for name, micro in table.items():
        if name not in runner.refused:
            outputs[name] = run_micro(micro, micro.draw(), runner)
    for name, log in runner.refused.items():
        print(f"refused: {name}: {log[:300]}")
    target = args.out / goldens.PATH.name
    goldens.write(target, {**about_this_machine(), "refused": runner.refused}, table, outputs)
    size = target.stat().st_size
    print(f"{len(outputs)} kernels, {size} bytes, {time.perf_counter() - start:.1f} s: {target}")
    return 1 if runner.refused else 0


if __name__ == "__main__":
    sys.exit(main())
