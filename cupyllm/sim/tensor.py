"""Matrix instructions of a warp: mma.sync, ldmatrix, stmatrix, movmatrix.

mma computes D [M,8] = A [M,K] B [K,8] + C [M,8], one product a warp, on fragments that are spread over its 32 lanes.
With lane = 4 g + t (g 0..7, t 0..3) and p elements in a register (1 tf32 or f64, 2 f16 or bf16, 4 s8 or u8), every
layout of the PTX manual for sm_80 is one rule:

    A: register (c, h), element e  ->  row 8 h + g,  column 4 p c + p t + e      c: chunk of 4 p columns, h: half of M
    B: register c, element e       ->  row 4 p c + p t + e,  column g
    C, D: register (h, e)          ->  row 8 h + g,  column 2 t + e              f16: e counts inside the register

so a fragment becomes a matrix by one transposition, and no index tables are needed.

Numerics. Products of f16, bf16 and tf32 are exact in float64; they are summed with c in float64 and rounded once to
the accumulator's type. The hardware aligns the terms of a block to the largest exponent and cuts off what lies below
about 24 to 26 bits (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 7:e330,
2021; Khattak, Mikaitis, "Accurate models of NVIDIA tensor cores", arXiv:2512.07004, 2025), in a way that differs
between generations. Following one generation's truncation was rejected: it costs an elementwise pass over M x 8 x K
and would be right for one chip only. `mma_bound` states the distance. Integer products are exact; f64 is a chain of
fused multiply-adds in the order of k.

Method. All warps of all CTAs are one batched np.matmul: for 128 warps of m16n8k16, 15 us in float64 (einsum 330, a
loop over k 230 to 500; float32 would be 15 as well, with a rounding at every step). What costs is turning fragments
into matrices and back. A lane quartet moves as one 16-byte item, which is 5 times faster than transposing single
registers; C and D go through tiles of 8 x 8, of which a register is a strided view; and `Fragments` keeps the matrices
of A and B that a warp tile uses again and again. One product of 64 warps (2048 lanes) takes, in us alone and in a tile
of 4 x 8 with shared Fragments: m16n8k16 of bf16 73 and 38, of f16 93 and 41, m16n8k8 of tf32 48 and 30; of 128 warps
114 and 64, 163 and 71, 67 and 50 (best of many, one x86 core with AVX-512, freed memory kept by the allocator).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cupyllm.sim import numeric
from cupyllm.sim.report import UnknownInstruction
from cupyllm.sim.warp import WARP

Array = np.ndarray


@dataclass(frozen=True)
class Shape:
    """What an mma opcode says: D [M,8] = A [M,K] B [K,8] + C, and the element types."""

    M: int
    K: int
    a: str
    b: str
    accumulator: str  # of d and c
    satfinite: bool

    @property
    def packed(self) -> int:
        """Elements of A or B in a register."""
        return {"f16": 2, "bf16": 2, "s8": 4, "u8": 4}.get(self.a, 1)


_OPCODE = re.compile(
    r"mma\.sync\.aligned\.m(8|16)n8k(\d+)\.row\.col(\.satfinite)?\.(f16|f32|f64|s32)\.(\w+)\.(\w+)\.(\w+)"
)
_SHAPES = {  # element type of A -> (M, K) that sm_80 has
    "f16": {(16, 8), (16, 16)},
    "bf16": {(16, 8), (16, 16)},
    "tf32": {(16, 4), (16, 8)},
    "f64": {(8, 4)},
    "s8": {(8, 16), (16, 16), (16, 32)},
    "u8": {(8, 16), (16, 16), (16, 32)},
}
_ACCUMULATOR_DTYPES = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}
_ACCUMULATORS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "f64": ("f64",)}


@lru_cache(maxsize=256)
def shape_of(opcode: str) -> Shape:
    """Raises UnknownInstruction where sm_80 has no such mma, or it is not simulated (m8n8k4.f16, s4, b1, sparse)."""
    match = _OPCODE.fullmatch(opcode)
    if match is None:
        raise UnknownInstruction(opcode)
    M, K, satfinite, d, a, b, c = match.groups()
    integers = a in ("s8", "u8") and b in ("s8", "u8")
    known = (
        (int(M), int(K)) in _SHAPES.get(a, ())
        and (integers or a == b)
        and c == d
        and d in _ACCUMULATORS.get(a, ("s32",))
        and (integers or not satfinite)
    )
    if not known:
        raise UnknownInstruction(opcode)
    return Shape(int(M), int(K), a, b, d, bool(satfinite))


# ---- mma ----


class Fragments:
    """The matrices of the A and B fragments that were used last, found by the identity of their registers.

    The products of a warp tile share them: 4 x 8 products have 4 fragments of A and 8 of B. The registers are held, so
    that an identity is not given to another array; nothing may write into them.
    """

    def __init__(self, limit: int = 24) -> None:
        self._limit = limit
        self._held: dict[tuple[object, ...], tuple[list[Array], Array]] = {}

    def matrix(self, convert: Callable[[Shape, list[Array]], Array], shape: Shape, registers: list[Array]) -> Array:
        """`convert` of a fragment, unless that is held already."""
        key = convert, shape, *map(id, registers)
        found = self._held.pop(key, None) or (registers, convert(shape, registers))
        self._held[key] = found  # the newest is last
        if len(self._held) > self._limit:
            del self._held[next(iter(self._held))]
        return found[1]


def mma(opcode: str, a: list[Array], b: list[Array], c: list[Array], fragments: Fragments | None = None) -> list[Array]:
    """D's registers. Every register is (B, T), T % 32 == 0, every lane active.

    a, b: uint32 bits (f64: float64). c and the result: float32, float64, int32 or packed f16 in uint32, as the opcode
    has them; c may also be a view of the same bits (uint32, uint64). The registers of the result are views of one
    array. `fragments`, if given, serves any number of calls.
    """
    shape = shape_of(opcode)
    fragments = fragments or Fragments()
    A, B = fragments.matrix(_matrix_a, shape, a), fragments.matrix(_matrix_b, shape, b)
    return _registers_c(_product(shape, A, B, _tiles(shape, c)), *a[0].shape)


def _product(shape: Shape, A: Array, B: Array, C: Array) -> Array:
    """A B + C of float64 [W,M,K] and [W,K,8] and tiles C [M/8,W,8,8], as new tiles, rounded once to C's type."""
    D = np.empty_like(C)
    tiles = D.swapaxes(0, 1)  # [W,M/8,8,8], as a product has them
    sums = np.empty(tiles.shape)
    sums[...] = C.swapaxes(0, 1)
    if shape.accumulator == "f64":
        total = sums.reshape(-1, shape.M, 8)
        for k in range(shape.K):
            total = numeric.fma_f64(A[:, :, k, None], B[:, None, k, :], total)
        tiles[...] = total.reshape(sums.shape)
        return D
    sums += (A @ B).reshape(sums.shape)
    if shape.accumulator == "s32":  # every value is exact; without .satfinite it wraps
        tiles[...] = sums.clip(-(2.0**31), 2.0**31 - 1) if shape.satfinite else sums.astype(np.int64)
        return D
    tiles[...] = sums
    return numeric.nan32(D) if shape.accumulator == "f32" else numeric.nan16(D)


def mma_bound(opcode: str, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """How far the hardware's D may be from `mma`'s, float64 registers laid out as D's (f16: two a register, axis 2).

    Terms are the K products and c. A block of n products is summed with the running sum after every term is cut to
    a multiple of u = 2^-23 m, m the largest magnitude among them (f32 accumulators keep at least 24 bits; studies
    find 1 to 3 more), so each of the n + 1 terms loses less than u, and normalisation of the sum less than another
    2^-23 of it. No partial sum exceeds S = |c| + sum |a b|, and m <= S. Over K products in at most K / 4 blocks that
    is (K + 2 K / 4) cuts; one more for our own rounding. A f16 result is rounded once more, by half of its ulp each
    on both sides. bf16, tf32 and f16 subnormals are kept by the hardware, so there is no underflow term but f32's own.
    """
    shape = shape_of(opcode)
    rows, T = a[0].shape
    total = (np.abs(_matrix_a(shape, a)) @ np.abs(_matrix_b(shape, b))).reshape(-1, shape.M // 8, 8, 8).swapaxes(0, 1)
    total = total + np.abs(_tiles(shape, c).astype(np.float64))
    cuts = shape.K + shape.K // 2 + 1
    bound = cuts * 2.0**-23 * total + 2.0**-149
    if shape.accumulator == "f16":
        bound = bound + 2.0**-11 * total + 2.0**-24
        return list(bound.reshape(-1, rows, T, 2))
    return _registers_c(bound, rows, T)


def _elements(kind: str, registers: Array) -> Array:
    """Registers [..., n], contiguous bits, of p packed elements -> float64 [..., n p]."""
    *lead, n = registers.shape
    if kind == "f64":
        return registers.view(np.float64)
    if kind == "tf32":  # the low 13 bits are not looked at
        return (registers & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind == "bf16":  # a bf16 is the upper half of a float32; ml_dtypes' own conversion is slower
        pair = np.empty((*lead, n, 2), np.uint32)
        np.left_shift(registers, np.uint32(16), out=pair[..., 0])
        np.bitwise_and(registers, np.uint32(0xFFFF0000), out=pair[..., 1])
        return pair.view(np.float32).astype(np.float64).reshape(*lead, 2 * n)
    if kind == "f16":  # through float32, for which NumPy has vector code
        return registers.view(np.float16).astype(np.float32).astype(np.float64)
    return registers.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)


def _lines(register: Array) -> Array:
    """A register (B, T) of 32 bits -> [W,8]: the four lanes of a g as one item of 16 bytes, which moves as one."""
    return np.ascontiguousarray(register).view(np.complex128).reshape(-1, 8)


def _matrix_a(shape: Shape, registers: list[Array]) -> Array:
    """Fragments -> float64 [W,M,K], contiguous, as BLAS wants it."""
    if shape.a == "f64":
        return np.ascontiguousarray(registers[0]).view(np.float64).reshape(-1, 8, 4)
    halves = shape.M // 8
    lines = [_lines(register) for register in registers]
    gathered = np.empty((len(lines[0]), halves, 8, len(lines) // halves), np.complex128)  # [W,h,g,c]
    for r, line in enumerate(lines):
        gathered[:, r % halves, :, r // halves] = line
    return _elements(shape.a, gathered.view(np.uint32)).reshape(-1, shape.M, shape.K)


def _matrix_b(shape: Shape, registers: list[Array]) -> Array:
    """Fragments -> float64 [W,K,8], contiguous: BLAS takes twice as long on the transposed view of [W,8,K]."""
    if shape.b == "f64":
        elements = np.ascontiguousarray(registers[0]).view(np.float64)
    else:
        gathered = np.stack([_lines(register) for register in registers], axis=2)  # [W,g,c]
        elements = _elements(shape.b, gathered.view(np.uint32))
    return np.ascontiguousarray(elements.reshape(-1, 8, shape.K).transpose(0, 2, 1))


def _tiles(shape: Shape, registers: list[Array]) -> Array:
    """Fragments of C -> [M/8,W,8,8] of the accumulator's type."""
    tiles = np.empty((shape.M // 8, registers[0].size // WARP, 8, 8), _ACCUMULATOR_DTYPES[shape.accumulator])
    for place, register in zip(_registers_c(tiles, *registers[0].shape), registers, strict=True):
        place[...] = register.view(place.dtype)
    return tiles


def _registers_c(tiles: Array, rows: int, T: int) -> list[Array]:
    """[M/8,W,8,8] -> registers (rows, T), views: two a tile, or one of two f16."""
    if tiles.dtype == np.float16:
        return list(tiles.view(np.uint32).reshape(-1, rows, T))
    pairs = tiles.reshape(-1, rows, T, 2)
    return [pairs[h, :, :, e] for h in range(len(pairs)) for e in range(2)]


# ---- matrices of 8 x 8 elements of 16 bits ----


def ldmatrix(rows: list[Array], num: int, trans: bool) -> list[Array]:
    """ldmatrix.sync.aligned.m8n8.x<num>[.trans].shared.b16: num registers uint32 (B, T).

    rows: four uint32 (B, T); lane 8 m + r holds the 16 bytes of row r of matrix m. Lane 4 g + t of register m gets
    elements 2 t and 2 t + 1 of row g (trans: of column g, from rows 2 t and 2 t + 1), the first one low.
    """
    B, T = rows[0].shape
    words = np.stack(rows, axis=-1).reshape(-1, 4, 8, 4)[:, :num]  # [W,m,r,word]
    if trans:
        words = _transposed(words)
    return [words[:, m].reshape(B, T) for m in range(num)]


def stmatrix(regs: list[Array], num: int, trans: bool) -> list[Array]:
    """stmatrix.sync.aligned.m8n8.x<num>[.trans].shared.b16: the inverse of ldmatrix.

    It needs sm_90, so no PTX for the simulated sm_80 has it; it is here for the day when sm_90 is simulated.

    Four uint32 (B, T): lane 8 m + r gets the 16 bytes of row r of matrix m; lanes from 8 num on get zeros.
    """
    B, T = regs[0].shape
    words = np.stack(regs[:num], axis=-1).reshape(-1, 8, 4, num).transpose(0, 3, 1, 2)  # [W,m,g,t]
    if trans:
        words = _transposed(words)
    full = np.zeros((words.shape[0], 4, 8, 4), np.uint32)
    full[:, :num] = words
    full = full.reshape(B, T, 4)
    return [np.ascontiguousarray(full[:, :, word]) for word in range(4)]


def movmatrix(reg: Array) -> Array:
    """movmatrix.sync.aligned.m8n8.trans.b16: the transpose of a matrix that lies across the warp, uint32 (B, T)."""
    return _transposed(reg.reshape(-1, 8, 4)).reshape(reg.shape)


def _transposed(words: Array) -> Array:
    """uint32 [...,8,4] of 16-bit pairs -> the same of the transposed 8 x 8 matrices."""
    halves = np.ascontiguousarray(words).view(np.uint16)  # [...,8,8]
    return np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.uint32)
