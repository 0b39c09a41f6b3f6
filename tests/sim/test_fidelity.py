"""The simulator against a GPU, instruction by instruction, through stored outputs (tests/sim/micro).

Every kernel goes the whole way: CUDA C, NVRTC, PTX for compute_80, translation, NumPy, with the checks on. Outputs must
have the GPU's bits, but for two families: approximate functions, within the bounds of isa.APPROXIMATE, and float mma,
within tensor.mma_bound where the sum is not exact.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.sim import isa, tensor
from tests.sim.micro import Micro, goldens, matrices, micros, values
from tests.sim.micro.run import run_micro
from tests.sim.micro.simulate import SimRunner

Array = np.ndarray

TABLE = micros()
STORED = goldens.read(goldens.PATH) if goldens.PATH.exists() else None
REMEDY = "run scripts/make_sim_goldens.py on a machine with a GPU"


@pytest.fixture(scope="module")
def runner() -> SimRunner:
    return SimRunner(TABLE.values())


def test_stored_outputs_are_of_this_table() -> None:
    """Every kernel has outputs that a GPU made of the same source and the same operands."""
    assert STORED is not None, f"{goldens.PATH} is missing; {REMEDY}"
    assert not STORED.about["refused"]
    assert set(STORED.outputs) == set(TABLE), REMEDY
    stale = [name for name, micro in TABLE.items() if goldens.fingerprint(micro) != STORED.hashes[name]]
    assert not stale, f"operands or source changed: {stale}; {REMEDY}"


@pytest.mark.parametrize("name", sorted(STORED.outputs) if STORED is not None else [])
def test_instruction(name: str, runner: SimRunner) -> None:
    assert STORED is not None
    micro, inputs = TABLE[name], TABLE[name].draw()
    found, stored = run_micro(micro, inputs, runner), STORED.outputs[name]
    if micro.family == "approximate":
        check_approximate(micro, inputs, found[0], stored[0])
    elif micro.family == "mma" and matrices.types_of(micro.opcode)[2] in ("f32", "f16"):
        check_mma(micro, inputs, found[0], stored[0])
    else:
        for one, other in zip(found, stored, strict=True):
            differing = np.flatnonzero(one != other)
            assert not len(differing), describe(micro, inputs, one, other, differing)


def describe(micro: Micro, inputs: tuple[Array, ...], found: Array, stored: Array, differing: Array) -> str:
    """The first differing elements, in hexadecimal, with their operands where those have the same index."""
    lines = [f"{micro.opcode or micro.name}: {len(differing)} of {len(stored)} elements differ"]
    for i in differing[:12]:
        operands = [f"{array.reshape(-1)[i]:#x}" for array in inputs if array.size == stored.size]
        lines.append(f"[{i}] {', '.join(operands)}: simulator {found[i]:#x}, GPU {stored[i]:#x}")
    return "\n".join(lines)


# ---- approximate functions ----


def check_approximate(micro: Micro, inputs: tuple[Array, ...], found: Array, stored: Array) -> None:
    """The simulator gives the exact value rounded to nearest, so the GPU may differ by its bound and half a unit.

    NaN, infinity and zero come from the same operands on both, unless the bound allows it: a result next to the
    largest finite number, or below the smallest.
    """
    packed = micro.results[0] in ("f16x2", "bf16x2")
    type_ = micro.results[0].removesuffix("x2") if packed else micro.results[0]
    dtype = values.FLOAT[type_]
    bounds = isa.APPROXIMATE[micro.opcode.replace(".ftz", "").replace("f16x2", "f16")]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x, one, other = (array.view(dtype).astype(np.float64) for array in (inputs[-1], found, stored))
    assert np.array_equal(np.isnan(one), np.isnan(other)), describe_floats(
        x, one, other, np.isnan(one) != np.isnan(other)
    )
    with np.errstate(all="ignore"):
        limit = limits(bounds, np.abs(x), np.abs(one), dtype)
        off = ~np.isnan(one) & ~(one == other) & ~(np.abs(one - other) <= limit)
        worst = np.nanmax(np.where(one == other, 0, np.abs(one - other) / limit))
    print(f"{micro.opcode}: largest error {worst:.3f} of the bound")
    assert not off.any(), describe_floats(x, one, other, off)
    nan = np.isnan(one)
    assert np.array_equal(found.view(bits_of(dtype))[nan], stored.view(bits_of(dtype))[nan])
    zero = (one == 0) & (other == 0)
    assert np.array_equal(np.signbit(one[zero]), np.signbit(other[zero]))


def limits(bounds: tuple[isa.Bound, ...], x: Array, y: Array, dtype: np.dtype) -> Array:
    """The largest |difference| for operands of magnitude x and results of magnitude y; infinite outside all bounds."""
    finite = np.minimum(np.where(np.isfinite(y), y, np.inf), float(np.finfo(np.float64).max))
    if dtype != np.float64:
        finite = np.minimum(finite, float(np.nextafter(dtype.type(np.inf), dtype.type(0))))
    ulp = np.spacing(finite.astype(dtype)).astype(np.float64)
    limit = np.full(x.shape, np.inf)
    for bound in reversed(bounds):
        one = np.maximum(np.maximum(bound.ulp * ulp, bound.relative * finite), bound.absolute) + ulp / 2
        limit = np.where((x >= bound.low) & (x <= bound.high), one, limit)
    return limit


def bits_of(dtype: np.dtype) -> str:
    return f"u{dtype.itemsize}"


def describe_floats(x: Array, found: Array, stored: Array, off: Array) -> str:
    return "\n".join(
        f"{float(x[i]).hex()}: simulator {float(found[i]).hex()}, GPU {float(stored[i]).hex()}"
        for i in np.flatnonzero(off)[:12]
    )


# ---- mma ----


def check_mma(micro: Micro, inputs: tuple[Array, ...], found: Array, stored: Array) -> None:
    """[warp, register, lane]: the exact warps, infinities and NaNs bit for bit, the others within the bound."""
    d_type = matrices.types_of(micro.opcode)[2]
    dtype = values.FLOAT[d_type]
    warps = matrices.WARPS["float"]
    found, stored = (array.reshape(warps, -1, 32) for array in (found, stored))
    exact = slice(0, matrices.EXACT)
    assert np.array_equal(found[exact], stored[exact]), "the fragment layout differs"
    a, b, c = ([array[:, k] for k in range(array.shape[1])] for array in inputs)
    with np.errstate(all="ignore"):
        bounds = tensor.mma_bound(micro.opcode, a, b, c)
    bound = np.stack(bounds, axis=1).reshape(-1)  # the elements of a register are neighbours in both
    bits_one, bits_other = (np.ascontiguousarray(array).reshape(-1).view(bits_of(dtype)) for array in (found, stored))
    one, other = (bits.view(dtype).astype(np.float64) for bits in (bits_one, bits_other))
    special = ~np.isfinite(one) | ~np.isfinite(other)
    assert np.array_equal(bits_one[special], bits_other[special])
    ratio = np.abs(one[~special] - other[~special]) / bound[~special]
    print(f"{micro.opcode}: largest difference {ratio.max():.3f} of the bound; {np.mean(ratio == 0):.1%} equal bits")
    assert (ratio <= 1).all()
