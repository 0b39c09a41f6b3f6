"""Micro-kernels of the matrix instructions: mma, ldmatrix, movmatrix. One warp is one trial.

For mma the first EXACT warps hold small integers, whose sums are exact in every order, so that a wrong fragment layout
shows in the bits. The float warps after them hold ordinary numbers, a wide range of exponents, cancellation,
subnormals, and infinities and NaNs; they are judged by the bound of cupyllm.sim.tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial

import ml_dtypes
import numpy as np

from tests.sim.micro import CTYPE, Micro, identifier, kernel

Array = np.ndarray

EXACT = 4
WARPS = {"float": 16, "integer": 8}
MMAS = {  # opcode after "mma.sync.aligned." -> registers of A, B, C
    "m16n8k16.row.col.f32.f16.f16.f32": (4, 2, 4),
    "m16n8k16.row.col.f16.f16.f16.f16": (4, 2, 2),
    "m16n8k8.row.col.f32.f16.f16.f32": (2, 1, 4),
    "m16n8k8.row.col.f16.f16.f16.f16": (2, 1, 2),
    "m16n8k16.row.col.f32.bf16.bf16.f32": (4, 2, 4),
    "m16n8k8.row.col.f32.bf16.bf16.f32": (2, 1, 4),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (4, 2, 4),
    "m16n8k4.row.col.f32.tf32.tf32.f32": (2, 1, 4),
    "m8n8k4.row.col.f64.f64.f64.f64": (1, 1, 2),
    "m16n8k16.row.col.s32.s8.s8.s32": (2, 1, 4),
    "m16n8k16.row.col.s32.u8.s8.s32": (2, 1, 4),
    "m16n8k16.row.col.satfinite.s32.s8.u8.s32": (2, 1, 4),
    "m16n8k32.row.col.s32.s8.s8.s32": (4, 2, 4),
    "m16n8k32.row.col.s32.u8.u8.s32": (4, 2, 4),
    "m16n8k32.row.col.satfinite.s32.s8.s8.s32": (4, 2, 4),
    "m8n8k16.row.col.s32.s8.s8.s32": (1, 1, 2),
    "m8n8k16.row.col.satfinite.s32.u8.s8.s32": (1, 1, 2),
}
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32, "f64": np.float64}


def micros() -> Iterator[Micro]:
    for name, counts in MMAS.items():
        yield _mma(name, counts)
    for num in (1, 2, 4):
        for trans in (False, True):
            yield _ldmatrix(num, trans)
    yield _movmatrix()


def types_of(opcode: str) -> tuple[str, str, str]:
    """(type of A, of B, of C and D)"""
    d, a, b, _ = opcode.split(".")[-4:]
    return a, b, d


# ---- mma ----


def _mma(opcode: str, counts: tuple[int, int, int]) -> Micro:
    """Arguments: a, b, c and d as [warp, register, lane]."""
    name = identifier(f"mma_{opcode}")
    d_type = types_of(opcode)[2]
    dtype = "u8" if d_type == "f64" else "u4"
    letter = "d" if d_type == "f64" else "f" if d_type == "f32" else "r"
    nd = counts[2]
    groups, place = [], 0
    for count in (nd, *counts):
        groups.append("{" + ", ".join(f"%{place + k}" for k in range(count)) + "}")
        place += count
    read = {"d": "__longlong_as_double({})", "f": "__uint_as_float({})", "r": "{}"}[letter]
    write = {"d": "__double_as_longlong({})", "f": "__float_as_uint({})", "r": "{}"}[letter]
    ctype = {"d": "double", "f": "float", "r": "unsigned int"}[letter]
    ab = "d" if d_type == "f64" else "r"
    loads = [
        f'"{kind}"({form.format(f"{array}[(w * {count} + {k}) * 32 + l]")})'
        for array, count, kind, form in (
            ("a", counts[0], ab, read if ab == "d" else "{}"),
            ("b", counts[1], ab, read if ab == "d" else "{}"),
            ("c", nd, letter, read),
        )
        for k in range(count)
    ]
    out = ", ".join(f'"={letter}"(x{k})' for k in range(nd))
    body = (
        f"  int w = i / 32, l = i % 32;\n  {ctype} {', '.join(f'x{k}' for k in range(nd))};\n"
        f'  asm volatile("mma.sync.aligned.{opcode} {", ".join(groups)};" : {out} : {", ".join(loads)});\n'
    )
    body += "".join(f"  d[(w * {nd} + {k}) * 32 + l] = {write.format(f'x{k}')};\n" for k in range(nd))
    warps = WARPS["integer" if d_type == "s32" else "float"]
    return Micro(
        name=name,
        family="mma",
        source=kernel(name, [dtype] * 3, [dtype], body),
        draw=partial(_mma_operands, opcode, counts, zlib.crc32(name.encode())),
        outputs=((dtype, warps * nd * 32),),
        grid=warps // 4,
        block=128,
        opcode=f"mma.sync.aligned.{opcode}",
    )


def _mma_operands(opcode: str, counts: tuple[int, int, int], seed: int) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    if types_of(opcode)[2] == "s32":
        return _integer_operands(counts, rng)
    return _float_operands(opcode, counts, rng)


def _integer_operands(counts: tuple[int, int, int], rng: np.random.Generator) -> tuple[Array, ...]:
    a, b, c = (rng.integers(0, 1 << 32, (8, count, 32), dtype=np.uint32) for count in counts)
    c[:EXACT] %= 1000
    c[EXACT:] = rng.choice(np.array([0x7FFFFFFF, 0x80000000, 0x7FFFFF00, 0x800000FF], np.uint32), c[EXACT:].shape)
    a[-1], b[-1] = 0x80808080, 0x80808080  # the largest products of every signedness
    return a, b, c


def _float_operands(opcode: str, counts: tuple[int, int, int], rng: np.random.Generator) -> tuple[Array, ...]:
    a_type, _, d_type = types_of(opcode)
    arrays = []
    for count, type_, role in zip(counts, (a_type, a_type, d_type), "abc", strict=True):
        dtype = np.dtype(DTYPES[type_])
        bits = np.uint64 if type_ == "f64" else np.uint32
        values = _float_values((16, count, 32, np.dtype(bits).itemsize // dtype.itemsize), dtype, role, rng)
        arrays.append(values.view(bits)[..., 0])
    return tuple(arrays)


def _float_values(shape: tuple[int, ...], dtype: np.dtype, role: str, rng: np.random.Generator) -> Array:
    """[warp, register, lane, element]: what the warps hold is said at the top of the file."""
    small = 100 if role == "c" else 9
    x = rng.integers(-small, small, shape).astype(np.float64)
    x[EXACT:] = rng.standard_normal(x[EXACT:].shape)
    spread = {np.dtype(np.float16): 6}.get(dtype, 20)
    x[8:10] *= 2.0 ** rng.integers(-spread, spread // 2 + 1, x[8:10].shape)
    x[10:12] = np.abs(x[10:12]) * (-4.0 if role == "c" else 1.0)  # cancellation: c against a sum of one sign
    tiny = 2.0**-8 if dtype == np.float16 else 2.0**-66
    x[12:13] *= tiny**2 if role == "c" else tiny  # results about the subnormals of d (f32, or f16)
    smallest = {np.dtype(np.float16): 2.0**-24, np.dtype(ml_dtypes.bfloat16): 2.0**-133}.get(dtype, 2.0**-139)
    if role == "a":
        x[13] = rng.integers(-100, 100, shape[1:]) * smallest  # subnormal operands against large ones
    elif role == "b":
        x[13] *= 1024.0
    else:
        x[13] = 0
    with np.errstate(all="ignore"):
        values = x.astype(dtype)
        odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0]).astype(dtype)
    values[14] = rng.choice(odd, shape[1:], p=[0.02, 0.02, 0.01, 0.05, 0.2, 0.7])
    values[15] = rng.choice(odd[3:5], shape[1:])  # signs of zero
    return values


# ---- ldmatrix, movmatrix ----


def _ldmatrix(num: int, trans: bool) -> Micro:
    """a: 32 rows of 16 bytes a warp; b: the row whose address each lane gives; d: [warp, register, lane]."""
    name = f"ldmatrix_x{num}" + ("_trans" if trans else "")
    registers = ", ".join(f"%{k}" for k in range(num))
    mode = ".trans" if trans else ""
    names = [f"x{k}" for k in range(num)]
    outputs = ", ".join(f'"=r"({x})' for x in names)
    body = (
        "  __shared__ __align__(16) unsigned int s[4][128];\n  int w = threadIdx.x / 32, l = threadIdx.x % 32;\n"
        "  for (int k = 0; k < 4; ++k) s[w][l * 4 + k] = a[i * 4 + k];\n  __syncwarp();\n"
        f"  unsigned int {', '.join(names)};\n"
        "  unsigned int p = (unsigned int)__cvta_generic_to_shared(&s[w][b[i] * 4]);\n"
        f'  asm volatile("ldmatrix.sync.aligned.m8n8.x{num}{mode}.shared.b16 {{{registers}}}, [%{num}];"\n'
        f'    : {outputs} : "r"(p) : "memory");\n'
    )
    body += "".join(f"  d[(i / 32 * {num} + {k}) * 32 + l] = x{k};\n" for k in range(num))
    return Micro(
        name=name,
        family="ldmatrix",
        source=kernel(name, ["u4", "u4"], ["u4"], body),
        draw=partial(_ldmatrix_operands, zlib.crc32(name.encode())),
        outputs=(("u4", 4 * num * 32),),
        grid=1,
        block=128,
    )


def _ldmatrix_operands(seed: int) -> tuple[Array, Array]:
    """The last warp gives some rows twice."""
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.permutation(32) for _ in range(3)] + [rng.integers(0, 32, 32)])
    return rng.integers(0, 1 << 32, 4 * 128, dtype=np.uint32), rows.astype(np.uint32)


def _movmatrix() -> Micro:
    body = (
        f'  {CTYPE["u4"]} x;\n  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(a[i]));\n'
        "  d[i] = x;\n"
    )
    return Micro(
        name="movmatrix",
        family="ldmatrix",
        source=kernel("movmatrix", ["u4"], ["u4"], body),
        draw=lambda: (np.random.default_rng(1).integers(0, 1 << 32, 128, dtype=np.uint32),),
        outputs=(("u4", 128),),
        grid=1,
        block=128,
    )
