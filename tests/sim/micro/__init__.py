"""Micro-kernels: one instruction each, on chosen operands, so that the simulator can be compared with a GPU bit by bit.

`micros()` is the whole table. A kernel is CUDA C with inline PTX; its arguments are its inputs, then its outputs, all
arrays of bits. `run.py` runs kernels on the simulator or on a GPU, `goldens.py` stores what the GPU gave,
scripts/make_sim_goldens.py writes that file, and tests/sim/test_fidelity.py compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.sim.micro.values import bits_dtype

Array = np.ndarray

CONSTRAINT = {8: "r", 16: "h", 32: "r", 64: "l"}  # by bits; predicates go through 32-bit registers
INPUTS, OUTPUTS = "abcf", "de"  # names of the arguments
CTYPE = {"u1": "unsigned char", "u2": "unsigned short", "u4": "unsigned int", "u8": "unsigned long long"}


@dataclass(frozen=True)
class Micro:
    """One kernel. Its launch is grid x block threads; outputs are filled with 0xCD bytes before."""

    name: str  # the kernel's, a C identifier
    family: str
    source: str  # CUDA C of the kernel alone
    draw: Callable[[], tuple[Array, ...]]  # the inputs
    outputs: tuple[tuple[str, int], ...]  # (NumPy dtype of bits, elements)
    grid: int
    block: int
    opcode: str = ""  # of a register-to-register instruction: what `sources` and `results` belong to
    sources: tuple[str, ...] = ()  # PTX types of its operands
    results: tuple[str, ...] = ()


def kernel(name: str, inputs: list[str], outputs: list[str], body: str) -> str:
    """CUDA C of a kernel with arguments a, b, c, f, then d, e; `i` is the thread's index in the grid."""
    names = [f"const {CTYPE[dtype]}* {letter}" for dtype, letter in zip(inputs, INPUTS, strict=False)]
    names += [f"{CTYPE[dtype]}* {letter}" for dtype, letter in zip(outputs, OUTPUTS, strict=False)]
    return (
        f'extern "C" __global__ void {name}({", ".join(names)}) {{\n'
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n" + body + "}\n"
    )


def dtype_of(type_: str) -> str:
    return bits_dtype(type_).str[1:]


def identifier(opcode: str) -> str:
    return opcode.replace(".", "_").replace("::", "_").replace(" ", "_").replace(",", "_")


def micros() -> dict[str, Micro]:
    """Every micro-kernel by name."""
    from tests.sim.micro import lanes, matrices, memory, scalar

    table: dict[str, Micro] = {}
    for micro in (*scalar.micros(), *lanes.micros(), *matrices.micros(), *memory.micros()):
        assert micro.name not in table, micro.name
        table[micro.name] = micro
    return table
