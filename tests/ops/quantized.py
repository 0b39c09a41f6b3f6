"""Weights of every format for the tests of quantised products: parameters in the device layout, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import ml_dtypes
import numpy as np

from cupyllm.backend.base import Backend, Spec
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.ops.linear_sm90 import FORMS as PRODUCTS
from cupyllm.quant import int4, int8, layout, nf4
from tests.ops import opcheck

FORMATS = ("int8", "int4", "nf4", "nf4 double")
FORMS = ("forward", "head", "dgrad")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Weight:
    """A random weight [num_out, num_in]."""

    format: str  # of a maker: "nf4" of both
    params: tuple[np.ndarray, ...]
    value: np.ndarray  # float32, by the codec

    def in_product(self, form: str) -> np.ndarray:
        """float64: what is multiplied. Rounded to bfloat16, but int8's forward, where codes are exact."""
        exact = self.format == "int8" and form != "dgrad"
        return (self.value if exact else self.value.astype(BFLOAT16)).astype(np.float64)


def draw(format: str, num_out: int, num_in: int, seed: int = 0) -> Weight:
    """Rows of several sizes; zero points of both signs."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.integers(-6, 3, (num_out, 1))
    weight = ((rng.standard_normal((num_out, num_in)) + rng.standard_normal((num_out, 1))) * size).astype(np.float32)
    if format == "int8":
        q8 = int8.quantize(weight)
        return Weight("int8", layout.pack(q8), int8.dequantize(q8))
    if format == "int4":
        q4 = int4.quantize(weight)
        return Weight("int4", layout.pack(q4), int4.dequantize(q4))
    qn = nf4.quantize(weight, double="double" in format)
    return Weight("nf4", layout.pack(qn), nf4.dequantize(qn))


def activations(form: str, weight: Weight, rows: int, seed: int = 0) -> np.ndarray:
    """x or d_y, bfloat16."""
    num_out, num_in = weight.value.shape
    rng = np.random.default_rng((seed, 1))
    return rng.standard_normal((rows, num_out if form == "dgrad" else num_in)).astype(BFLOAT16)


def run(backend: Backend, maker: ModuleType, form: str, a: np.ndarray, weight: Weight, **options: object) -> np.ndarray:
    """One product by a maker, between guard bytes."""
    num_out, num_in = weight.value.shape
    guarded = opcheck.GuardedBackend(backend)
    with Session(guarded) as session:
        x, params = session.put(a), [session.put(part) for part in weight.params]
        c = session.empty(Spec((a.shape[0], num_in if form == "dgrad" else num_out), PRODUCTS[form][2]))
        rec = Recorder.of(backend)
        maker.product(rec, form, weight.format, x, params, c, **options)
        session.execute(rec)
        got = session.get(c)
    assert not guarded.broken, guarded.broken
    return got


def run_dequantised(backend: Backend, maker: ModuleType, form: str, a: np.ndarray, weight: Weight) -> np.ndarray:
    """The same product by a maker of bfloat16 weights."""
    with Session(backend) as session:
        x, w = session.put(a), session.put(weight.value.astype(BFLOAT16))
        num_out, num_in = weight.value.shape
        c = session.empty(Spec((a.shape[0], num_in if form == "dgrad" else num_out), PRODUCTS[form][2]))
        rec = Recorder.of(backend)
        maker.product(rec, form, x, w, c)
        session.execute(rec)
        return session.get(c)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float64 rounded to 8 bits, to even, in float64: at once, where a cast may round to float32 first."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)


def judge(form: str, got: np.ndarray, a: np.ndarray, weight: Weight, what: str = "", slack: float = 0.0) -> None:
    """Against fp64, element by element.

    The adders cut what lies below 2^-23 of a step's largest addend, the sum so far or a product: at most 1.5 such
    units a step of 16 k (test_linear_mma.py). Where a few blocks of a row are much larger than the others, as
    double-quantised absmax may be, the sum stays that large from there on, and every step cuts as much: so the limit
    follows the sum. In fp32, int8's scale rounds once more; bf16 rounds by at most 2^-8 of the value.

    `slack`: a weight v scale may be multiplied by 1 + d, |d| <= slack, before it is rounded to bf16 (the split scales
    of quantized_pairs.cuh: low = scale - bf16(scale) is at most 2^-8 scale, and v low is rounded by 2^-8 of itself:
    2^-16; int8's low is rounded, too: 2^-15). Rounding is monotone, so the weight lies between what both ends round to:
    for nearly all that is one number, for the others two, which differ by a unit. The sum may move by |a| times that.
    """
    a64, b64 = a.astype(np.float64), weight.in_product(form)
    b64 = b64 if form == "dgrad" else b64.T
    want, limit, spread = np.zeros(got.shape), np.zeros(got.shape), np.zeros(b64.shape)
    if slack > 0:
        exact = (weight.value if form == "dgrad" else weight.value.T).astype(np.float64)
        ends = [to_bfloat16(exact * (1 + d)) for d in (-slack, slack)]
        spread = np.maximum(np.abs(ends[0] - b64), np.abs(ends[1] - b64))
    for k in range(0, len(b64), 16):
        part, of_b = a64[:, k : k + 16], b64[k : k + 16]
        limit += 1.5 * 2.0**-23 * (np.abs(want) + np.abs(part) @ (np.abs(of_b) + spread[k : k + 16]))
        want += part @ of_b
    moved = np.abs(a64) @ spread
    limit += moved + (np.abs(want) + moved) * (2.0**-23 + (2.0**-8 if got.dtype == BFLOAT16 else 0.0)) + 1e-30
    assert np.isfinite(got.astype(np.float64)).all(), f"{what}: not every element was written"
    worst = float((np.abs(got.astype(np.float64) - want) / limit).max())
    print(f"{form} {what}: {worst:.3f} of the limit")
    assert worst <= 1, what
