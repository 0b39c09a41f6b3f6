"""Matrix instructions against loops over lanes and elements, with the fragment formulas of the PTX manual."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from cupyllm.sim import tensor
from cupyllm.sim.report import UnknownInstruction

Array = np.ndarray

FLOATS = [
    "m16n8k16.row.col.f32.f16.f16.f32",
    "m16n8k16.row.col.f16.f16.f16.f16",
    "m16n8k8.row.col.f32.f16.f16.f32",
    "m16n8k8.row.col.f16.f16.f16.f16",
    "m16n8k16.row.col.f32.bf16.bf16.f32",
    "m16n8k8.row.col.f32.bf16.bf16.f32",
    "m16n8k8.row.col.f32.tf32.tf32.f32",
    "m16n8k4.row.col.f32.tf32.tf32.f32",
    "m8n8k4.row.col.f64.f64.f64.f64",
]
INTEGERS = [
    f"{shape}.row.col{sat}.s32.{a}.{b}.s32"
    for shape in ("m16n8k16", "m16n8k32", "m8n8k16")
    for sat in ("", ".satfinite")
    for a in ("s8", "u8")
    for b in ("s8", "u8")
]

# Where element i of lane l lies, from the figures of the manual: (shape, bits of an element) -> row and column of A,
# row (k) of B. B's column is l // 4 and C's place is (l // 4 + 8 (i // 2), 2 (l % 4) + i % 2) throughout.
PLACES = {
    ("m16n8k16", 16): (lambda g, t, i: (g + 8 * (i // 2 % 2), t * 2 + i % 2 + 8 * (i >= 4)),
                       lambda t, i: t * 2 + i % 2 + 8 * (i >= 2), 8, 4),
    ("m16n8k8", 16): (lambda g, t, i: (g + 8 * (i >= 2), t * 2 + i % 2), lambda t, i: t * 2 + i, 4, 2),
    ("m16n8k8", 32): (lambda g, t, i: (g + 8 * (i % 2), t + 4 * (i >= 2)), lambda t, i: t + 4 * i, 4, 2),
    ("m16n8k4", 32): (lambda g, t, i: (g + 8 * i, t), lambda t, i: t, 2, 1),
    ("m8n8k4", 64): (lambda g, t, i: (g, t), lambda t, i: t, 1, 1),
    ("m8n8k16", 8): (lambda g, t, i: (g, t * 4 + i), lambda t, i: t * 4 + i, 4, 4),
    ("m16n8k16", 8): (lambda g, t, i: (g + 8 * (i >= 4), t * 4 + i % 4), lambda t, i: t * 4 + i, 8, 4),
    ("m16n8k32", 8): (lambda g, t, i: (g + 8 * (4 <= i < 8 or i >= 12), t * 4 + i % 4 + 16 * (i >= 8)),
                      lambda t, i: t * 4 + i % 4 + 16 * (i >= 4), 16, 8),
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8, "f32": 32, "s32": 32}
DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "s32": np.dtype(np.int32),
}


def parts(name: str) -> tuple[str, int, int, str, str, str]:
    """(shape, M, K, type of A, of B, of C and D)"""
    fields = [field for field in name.split(".") if field not in ("row", "col", "satfinite")]
    shape, d, a, b, _ = fields
    M, K = shape[1:].split("n8k")
    return shape, int(M), int(K), a, b, d


def to_registers(elements: Array) -> list[Array]:
    """[B,T,n] elements of a lane -> 32-bit registers (64-bit for f64), first element lowest."""
    width = 8 if elements.dtype == np.float64 else 4
    packed = np.ascontiguousarray(elements).view(np.uint64 if width == 8 else np.uint32)
    return [np.ascontiguousarray(packed[:, :, r]) for r in range(packed.shape[2])]


def fragments(name: str, A: Array, B: Array, C: Array) -> tuple[list[Array], list[Array], list[Array]]:
    """Matrices [B,W,..] -> the registers of each operand."""
    shape, M, _, a_type, b_type, c_type = parts(name)
    a_place, b_place, na, nb = PLACES[shape, BITS[a_type]]
    rows, W = A.shape[:2]
    a = np.zeros((rows, W * 32, na), DTYPES[a_type])
    b = np.zeros((rows, W * 32, nb), DTYPES[b_type])
    c = np.zeros((rows, W * 32, M // 4), DTYPES[c_type])
    for w, lane in itertools.product(range(W), range(32)):
        g, t = lane // 4, lane % 4
        for i in range(na):
            row, column = a_place(g, t, i)
            a[:, w * 32 + lane, i] = A[:, w, row, column]
        for i in range(nb):
            b[:, w * 32 + lane, i] = B[:, w, b_place(t, i), g]
        for i in range(M // 4):
            c[:, w * 32 + lane, i] = C[:, w, g + 8 * (i // 2), t * 2 + i % 2]
    return to_registers(a), to_registers(b), to_registers(c)


def product(name: str, A: Array, B: Array, C: Array) -> tuple[Array, Array, list[Array]]:
    """(D [B,W,M,8] of the instruction, its bound, the registers that it gave)"""
    _, M, _, _, _, d_type = parts(name)
    a, b, c = fragments(name, A, B, C)
    if d_type == "f32":
        c = [register.view(np.float32) for register in c]
    registers = tensor.mma("mma.sync.aligned." + name, a, b, c)
    rows, W = A.shape[:2]
    elements = np.stack([r.view(np.uint64 if d_type == "f64" else np.uint32) for r in registers], axis=2)
    elements = elements.view(DTYPES[d_type])
    D = np.zeros((rows, W, M, 8), DTYPES[d_type])
    for w, lane, i in itertools.product(range(W), range(32), range(M // 4)):
        D[:, w, lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = elements[:, w * 32 + lane, i]
    bound = np.zeros((rows, W, M, 8))
    if d_type not in ("s32", "f64"):
        bounds = tensor.mma_bound("mma.sync.aligned." + name, a, b, c)
        flat = np.concatenate([x.reshape(rows, W * 32, -1) for x in bounds], axis=2)
        for w, lane, i in itertools.product(range(W), range(32), range(M // 4)):
            bound[:, w, lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = flat[:, w * 32 + lane, i]
    return D, bound, registers


@pytest.mark.parametrize("name", FLOATS)
def test_small_integers_are_exact(name: str) -> None:
    """Every partial sum is a small integer, so any right layout gives these bits."""
    _, M, K, *_ = parts(name)
    rng = np.random.default_rng(1)
    A = rng.integers(-8, 9, (3, 2, M, K)).astype(np.float64)
    B = rng.integers(-8, 9, (3, 2, K, 8)).astype(np.float64)
    C = rng.integers(-100, 101, (3, 2, M, 8)).astype(np.float64)
    D, _, registers = product(name, A, B, C)
    assert np.array_equal(D.astype(np.float64), A @ B + C)
    assert all(register.shape == (3, 64) for register in registers)


@pytest.mark.parametrize("name", FLOATS)
def test_random_values_are_rounded_once(name: str) -> None:
    """The sum of exact products, then one rounding: half an ulp, and nothing for 2^-53 against 2^-24 or 2^-11."""
    _, M, K, a_type, b_type, d_type = parts(name)
    rng = np.random.default_rng(2)
    A = rng.standard_normal((2, 2, M, K)).astype(DTYPES[a_type])
    B = rng.standard_normal((2, 2, K, 8)).astype(DTYPES[b_type])
    C = rng.standard_normal((2, 2, M, 8)).astype(DTYPES[d_type])
    if a_type == "tf32":
        kept_A, kept_B = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (A, B))
    else:
        kept_A, kept_B = A, B
    D, bound, _ = product(name, A, B, C)
    exact = kept_A.astype(np.longdouble) @ kept_B.astype(np.longdouble) + C.astype(np.longdouble)
    error = np.abs(D.astype(np.longdouble) - exact)
    scale = np.abs(kept_A.astype(float)) @ np.abs(kept_B.astype(float)) + np.abs(C.astype(float))
    ulps = K * 2.0**-53 * scale if d_type == "f64" else np.spacing(np.abs(D)).astype(float) * 0.5001
    print(f"{name}: largest error {float(error.max()):.3g}, {float((error / ulps).max()):.3f} of the limit")
    assert (error <= ulps).all()
    if d_type != "f64":
        assert (error <= bound).all() and (bound < 64 * 2.0**-11 * scale).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    _, M, K, a_type, b_type, _ = parts(name)
    rng = np.random.default_rng(4)
    A, B = (rng.integers(np.iinfo(DTYPES[t]).min, np.iinfo(DTYPES[t]).max, shape, endpoint=True)
            for t, shape in ((a_type, (2, 2, M, K)), (b_type, (2, 2, K, 8))))  # fmt: skip
    C = rng.choice(np.array([-(2**31), 2**31 - 1, 0, 12345]), (2, 2, M, 8))
    exact = A @ B + C
    assert (exact > 2**31 - 1).any()
    D, _, _ = product(name, A, B, C)
    if "satfinite" in name:
        assert np.array_equal(D, exact.clip(-(2**31), 2**31 - 1))
    else:
        assert np.array_equal(D, exact.astype(np.int32))


@pytest.mark.parametrize("name", [name for name in FLOATS if "f64" not in name])
def test_nan_and_infinity(name: str) -> None:
    """Infinities travel; every NaN is the canonical one."""
    _, M, K, a_type, b_type, d_type = parts(name)
    A, B, C = np.ones((1, 1, M, K)), np.ones((1, 1, K, 8)), np.zeros((1, 1, M, 8))
    A[0, 0, 0, 1], A[0, 0, 1, 2], A[0, 0, 2, 0] = np.inf, np.nan, np.inf
    C[0, 0, 2] = -np.inf
    with np.errstate(all="ignore"):
        D, _, _ = product(name, A.astype(DTYPES[a_type]), B.astype(DTYPES[b_type]), C.astype(DTYPES[d_type]))
    bits = D.view(np.uint32 if d_type == "f32" else np.uint16)
    assert (D[0, 0, 0] == np.inf).all() and (D[0, 0, 3:] == K).all()
    assert (bits[0, 0, 1:3] == (0x7FFFFFFF if d_type == "f32" else 0x7FFF)).all()


def test_unsupported_shapes_are_named() -> None:
    for name in (
        "m8n8k4.row.col.f32.f16.f16.f32",
        "m16n8k16.row.col.f16.bf16.bf16.f16",
        "m16n8k16.row.col.f32.f16.bf16.f32",
        "m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "m16n8k8.row.col.s32.s8.s8.s32",
        "m16n8k64.row.col.s32.s4.s4.s32",
    ):
        with pytest.raises(UnknownInstruction, match=name.replace(".", r"\.")):
            tensor.shape_of("mma.sync.aligned." + name)


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(num: int, trans: bool) -> None:
    rng = np.random.default_rng(num)
    memory = rng.integers(0, 1 << 16, (2, 3, 32, 8), dtype=np.uint16)  # [B,W,row,element]
    words = memory.view(np.uint32).reshape(2, 96, 4)
    registers = tensor.ldmatrix([np.ascontiguousarray(words[:, :, i]) for i in range(4)], num, trans)
    assert len(registers) == num and all(r.dtype == np.uint32 and r.shape == (2, 96) for r in registers)
    for w, lane, m in itertools.product(range(3), range(32), range(num)):
        g, t = lane // 4, lane % 4
        matrix = memory[:, w, 8 * m : 8 * m + 8]
        low, high = (matrix[:, 2 * t, g], matrix[:, 2 * t + 1, g]) if trans else (matrix[:, g, 2 * t],
                                                                                  matrix[:, g, 2 * t + 1])  # fmt: skip
        assert np.array_equal(registers[m][:, w * 32 + lane], low.astype(np.uint32) | high.astype(np.uint32) << 16)
    stored = np.stack(tensor.stmatrix(registers, num, trans), axis=2).view(np.uint16).reshape(2, 3, 32, 8)
    assert np.array_equal(stored[:, :, : 8 * num], memory[:, :, : 8 * num])


def test_movmatrix_transposes() -> None:
    matrix = np.arange(2 * 64, dtype=np.uint16).reshape(2, 8, 8)
    register = matrix.view(np.uint32).reshape(2, 32)
    got = tensor.movmatrix(register).view(np.uint16).reshape(2, 8, 8)
    assert np.array_equal(got, matrix.transpose(0, 2, 1))


def test_products_of_a_tile_share_their_fragments() -> None:
    """A tile of 2 x 3 chains of products gives with shared fragments, and with few held, what it gives without."""
    rng = np.random.default_rng(6)
    opcode = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"

    def registers(count: int, dtype: str) -> list[Array]:
        elements = rng.standard_normal((2, 64, count * 4 // np.dtype(dtype).itemsize)).astype(dtype)
        return to_registers(elements)

    c = [registers(4, "float32") for _ in range(6)]
    for fragments in (tensor.Fragments(), tensor.Fragments(1)):
        shared, alone = list(c), list(c)
        for _ in range(3):
            a, b = ([registers(count, "bfloat16") for _ in range(n)] for count, n in ((4, 2), (2, 3)))
            for i, (x, y) in enumerate(itertools.product(a, b)):
                shared[i] = tensor.mma(opcode, x, y, shared[i], fragments)
                alone[i] = tensor.mma(opcode, x, y, [np.array(register) for register in alone[i]])
        assert np.array_equal(np.array(shared), np.array(alone))
