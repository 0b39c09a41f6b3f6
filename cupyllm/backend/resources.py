"""What ptxas -v says about each kernel of a cubin: registers, shared memory, stack, spills, remarks.

    ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are ... in the function 'gemm'
    ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
    ptxas info    : Function properties for gemm
    ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 168 registers, used 1 barriers, 38528 bytes smem, 416 bytes cmem[0]
    ptxas info    : Function properties for _Z6calleefPi
    ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads

A device function that was not inlined follows the kernel that calls it, or comes before all kernels: then any of them
may call it, and its stack and spills are counted in each. Remarks come before the kernels. Most name the function; one
that does not (C7508, setmaxnreg ignored) is given to every kernel of the cubin, since it is true of one of them.

Reading the cubin's ELF sections was rejected: .nv.info has registers and frames, but neither spills nor remarks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '[^']+'")
_REMARK = re.compile(r"\(C\d+\) .*\S")
_NAMED = re.compile(r"function '([^']+)'")


@dataclass(frozen=True)
class Resources:
    """What one thread block of a kernel takes, as ptxas reports it. Stack and spills are bytes a thread."""

    registers: int  # a thread
    shared_bytes: int  # static
    stack_bytes: int
    spill_bytes: int  # stores and loads
    remarks: tuple[str, ...] = ()  # "(C7510) Potential Performance Loss: ..."


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources of each kernel in a cubin, by symbol, from ptxas's -v output."""
    before, *parts = _ENTRY.split(log)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    remarks = list(dict.fromkeys(_REMARK.findall(log)))
    return {
        symbol: Resources(
            registers=_numbers(r"Used (\d+) registers", body)[0],
            shared_bytes=sum(_numbers(r"(\d+)(?:\+\d+)? bytes smem", body, needed=False)),
            stack_bytes=sum(_numbers(r"(\d+) bytes stack frame", body))
            + sum(_numbers(r"(\d+) bytes stack frame", before, needed=False)),
            spill_bytes=sum(_numbers(r"(\d+) bytes spill (?:stores|loads)", body))
            + sum(_numbers(r"(\d+) bytes spill (?:stores|loads)", before, needed=False)),
            remarks=tuple(remark for remark in remarks if _concerns(remark, symbol, bodies)),
        )
        for symbol, body in bodies.items()
    }


def _concerns(remark: str, symbol: str, kernels: dict[str, str]) -> bool:
    """Whether a remark may be about this kernel: it names it, or names no kernel."""
    named = _NAMED.search(remark)
    return named is None or named[1] == symbol or named[1] not in kernels


def _numbers(pattern: str, text: str, needed: bool = True) -> list[int]:
    found = [int(number) for number in re.findall(pattern, text)]
    assert found or not needed, f"ptxas printed no {pattern!r} in {text!r}"
    return found
