"""Micro-kernels in which lanes exchange registers: shfl, vote, match, redux, activemask.

Each warp is one trial with operands of its own. In the partial kernels only lanes i with bit i of an operand set
execute the instruction, in a branch, with that operand as member mask.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from tests.sim.micro import CTYPE, Micro, dtype_of, identifier, kernel

Array = np.ndarray

Draw = Callable[[int], tuple[Array, ...]]  # of a seed

WARPS, BLOCK = 64, 128
N = WARPS * 32


def micros() -> Iterator[Micro]:
    for mode in ("up", "down", "bfly", "idx"):
        yield _micro(f"shfl_{mode}", "shuffle", _shuffle(mode), ("u4", "u4", "u4"), ("u4", "u1"), _shuffle_operands)
        yield _micro(
            f"shfl_{mode}_partial", "shuffle", _partial_shuffle(mode), ("u4", "u4", "u4"), ("u4", "u1"),
            partial(_partial_shuffle_operands, mode),
        )  # fmt: skip
    for mode in ("all", "any", "uni", "ballot"):
        result = "b32" if mode == "ballot" else "pred"
        body = _asm(f"{{.reg .pred p, r; setp.ne.u32 p, %1, 0; {_vote(mode)}}}", "u4", "u4")
        dtype = dtype_of(result)
        yield _micro(f"vote_{mode}", "vote", body, ("u4", "u4"), (dtype,), _vote_operands)
    yield _micro("activemask", "vote", _asm("activemask.b32 %0;", "u4", "u4"), ("u4", "u4"), ("u4",), _vote_operands)
    for width in ("4", "8"):
        dtype, type_ = f"u{width}", f"b{8 * int(width)}"
        yield _micro(f"match_any_{type_}", "match", _asm(f"match.any.sync.{type_} %0, %1, %2;", "u4", dtype),
                     (dtype, "u4"), ("u4",), partial(_match_operands, dtype))  # fmt: skip
        yield _micro(f"match_all_{type_}", "match", _match_all(type_, dtype), (dtype, "u4"), ("u4", "u1"),
                     partial(_match_operands, dtype))  # fmt: skip
    for op in ("add.u32", "min.u32", "max.u32", "add.s32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32"):
        yield _micro(identifier(f"redux_{op}"), "redux", _asm(f"redux.sync.{op} %0, %1, %2;", "u4", "u4"),
                     ("u4", "u4"), ("u4",), partial(_redux_operands, op))  # fmt: skip


# ---- bodies: a the value, the last input the member mask ----


def _asm(text: str, result: str, value: str) -> str:
    """One instruction in the lanes that mask b names; the others keep all ones."""
    letter = "l" if value == "u8" else "r"
    return (
        f"  unsigned int m = b[i], x = ~0u;\n  {CTYPE[value]} v = a[i];\n"
        f'  if (m >> (threadIdx.x & 31) & 1) asm volatile("{text}" : "+r"(x) : "{letter}"(v), "r"(m));\n  d[i] = x;\n'
    )


def _vote(mode: str) -> str:
    if mode == "ballot":
        return "vote.sync.ballot.b32 %0, p, %2;"
    return f"vote.sync.{mode}.pred r, p, %2; selp.b32 %0, 1, 0, r;"


def _match_all(type_: str, dtype: str) -> str:
    letter = "l" if dtype == "u8" else "r"
    text = f"{{.reg .pred r; match.all.sync.{type_} %0|r, %2, %3; selp.b32 %1, 1, 0, r;}}"
    return (
        f"  unsigned int m = b[i], x = ~0u, y = 0xFF;\n  {CTYPE[dtype]} v = a[i];\n"
        f'  if (m >> (threadIdx.x & 31) & 1) asm volatile("{text}" : "+r"(x), "+r"(y) : "{letter}"(v), "r"(m));\n'
        "  d[i] = x;\n  e[i] = y;\n"
    )


def _shuffle(mode: str) -> str:
    text = f"{{.reg .pred r; shfl.sync.{mode}.b32 %0|r, %2, %3, %4, 0xffffffff; selp.b32 %1, 1, 0, r;}}"
    return (
        "  unsigned int v = a[i], s = b[i], t = c[i], x, y;\n"
        f'  asm volatile("{text}" : "=r"(x), "=r"(y) : "r"(v), "r"(s), "r"(t));\n  d[i] = x;\n  e[i] = y;\n'
    )


def _partial_shuffle(mode: str) -> str:
    """c is the member mask; the clamp and segment are those of __shfl_sync with width 16."""
    clamp = "0x1000" if mode == "up" else "0x101f"
    text = f"{{.reg .pred r; shfl.sync.{mode}.b32 %0|r, %2, %3, {clamp}, %4; selp.b32 %1, 1, 0, r;}}"
    return (
        "  unsigned int v = a[i], s = b[i], m = c[i], x = ~0u, y = 0xFF;\n"
        f'  if (m >> (threadIdx.x & 31) & 1) asm volatile("{text}" : "+r"(x), "+r"(y) : "r"(v), "r"(s), "r"(m));\n'
        "  d[i] = x;\n  e[i] = y;\n"
    )


def _micro(name: str, family: str, body: str, inputs: tuple[str, ...], outputs: tuple[str, ...], draw: Draw) -> Micro:
    return Micro(
        name=name,
        family=family,
        source=kernel(name, list(inputs), list(outputs), body),
        draw=partial(draw, zlib.crc32(name.encode())),
        outputs=tuple((dtype, N) for dtype in outputs),
        grid=N // BLOCK,
        block=BLOCK,
    )


# ---- operands ----


def _per_warp(values: Array) -> Array:
    return np.repeat(values, 32).astype(np.uint32)


def _threads() -> Array:
    """A different value in every thread."""
    return np.arange(N, dtype=np.uint32) * np.uint32(0x00010001) + np.uint32(0x80000000)


def _masks(rng: np.random.Generator) -> Array:
    """A member mask a warp: full, single lanes, halves, random."""
    masks = rng.integers(1, 1 << 32, WARPS, dtype=np.uint32)
    masks[:16] = 0xFFFFFFFF
    masks[16:24] = [1, 1 << 31, 0xFFFF, 0xFFFF0000, 0x55555555, 0xAAAAAAAA, 0x80000001, 0x7FFFFFFE]
    return masks


def _shuffle_operands(seed: int) -> tuple[Array, Array, Array]:
    """Values, sources and clamps: uniform ones of every width in the first half, then different in every lane."""
    rng = np.random.default_rng(seed)
    value = _threads()
    half = WARPS // 2
    widths = np.array([32, 16, 8, 4, 2, 1])[np.arange(half) % 6]
    low = rng.integers(0, 2, half)  # the clamp of shfl.up is 0, of the others 31: both for every mode
    clamp = _per_warp(np.concatenate(((32 - widths) << 8 | low * 31, np.zeros(half))))
    source = _per_warp(np.concatenate((rng.integers(0, 40, half), np.zeros(half))))
    clamp[N // 2 :] = rng.integers(0, 1 << 13, N // 2)
    source[N // 2 :] = rng.integers(0, 1 << 32, N // 2, dtype=np.uint32)
    return value, source, clamp


def _partial_shuffle_operands(mode: str, seed: int) -> tuple[Array, Array, Array]:
    """Sources such that every member reads a member: itself, or a lane of its segment found by search."""
    rng = np.random.default_rng(seed)
    value = _threads()
    masks = _masks(rng)
    source = np.zeros((WARPS, 32), np.uint32)
    for warp, mask in enumerate(masks):
        members = [lane for lane in range(32) if mask >> lane & 1]
        for lane in members:
            target = int(rng.choice([m for m in members if m // 16 == lane // 16]))
            distance = {"up": lane - target, "down": target - lane, "bfly": lane ^ target, "idx": target % 16}[mode]
            source[warp, lane] = max(distance, 0)  # 0 reads itself
    return value, source.reshape(-1), _per_warp(masks)


def _vote_operands(seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    likely = np.repeat(rng.choice([0.0, 0.03, 0.5, 0.97, 1.0], WARPS), 32)
    return (rng.random(N) < likely).astype(np.uint32), _per_warp(_masks(rng))


def _match_operands(dtype: str, seed: int) -> tuple[Array, Array]:
    """Few different values a warp, some of which differ in the high bits only."""
    rng = np.random.default_rng(seed)
    kinds = np.repeat(rng.choice([1, 2, 5, 100], WARPS), 32)
    value = (rng.integers(0, 1 << 30, N) % kinds).astype(dtype)
    return value << np.dtype(dtype).type(8 * np.dtype(dtype).itemsize - 8) | value, _per_warp(_masks(rng))


def _redux_operands(op: str, seed: int) -> tuple[Array, Array]:
    """Mostly ones for `and`, mostly zeros for `or`; values near the ends of the range for the others."""
    rng = np.random.default_rng(seed)
    value = rng.integers(0, 1 << 32, N, dtype=np.uint32)
    if op.startswith(("and", "or")):
        for _ in range(4):
            value &= rng.integers(0, 1 << 32, N, dtype=np.uint32)
        value = ~value if op.startswith("and") else value
    value[: N // 4] = rng.choice(np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32), N // 4)
    return value, _per_warp(_masks(rng))
