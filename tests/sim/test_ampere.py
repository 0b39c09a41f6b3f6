"""Whole kernels against NumPy, of what only later ones will use: cp.async, ldmatrix, mma, __syncwarp, atomics.

Tolerance of the products: a product of two bfloat16 is exact in float32, and each of the K additions errs by at most
2^-23 of the sum of magnitudes so far (mma may truncate), so |error| <= K 2^-23 (|a| |b|). The rest is exact, or sums in
an order that NumPy can repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyllm.backend.base import KernelSpec, Spec
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.backend.sim import SimBackend
from tests.simulated import new_simulator

SOURCE = str(Path(__file__).parent / "kernels" / "ampere.cu")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def sim() -> Iterator[SimBackend]:
    with new_simulator() as backend:
        yield backend


def launch(session: Session, name: str, grid: tuple[int, ...], block: int, *args: object, shared: int = 0) -> None:
    rec = Recorder(80)
    rec.launch(KernelSpec(SOURCE, name), grid, block, *args, shared_bytes=shared)  # type: ignore[arg-type]
    session.execute(rec)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 8, 8), (63, 64, 24), (64, 64, 32), (65, 72, 40), (33, 136, 104), (130, 72, 200)]
)
@pytest.mark.parametrize("name", ["gemm_nt", "gemm_nn"])
def test_matrix_products(sim: SimBackend, name: str, m: int, n: int, k: int) -> None:
    a = RNG.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    b = RNG.standard_normal((n, k)).astype(ml_dtypes.bfloat16)
    stored = b if name == "gemm_nt" else np.ascontiguousarray(b.T)
    with Session(sim) as session:
        c = session.empty(Spec((m, n), "float32"))
        launch(session, name, (-(-n // 64), -(-m // 64)), 128, session.put(a), session.put(stored), c, m, n, k)
        got = session.get(c).astype(np.float64)
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    error, bound = np.abs(got - a64 @ b64.T), k * 2.0**-23 * (np.abs(a64) @ np.abs(b64).T)
    print(f"{name} {m}x{n}x{k}: largest error {(error / bound).max():.2e} of the bound")
    assert (error <= bound).all()


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_stencil(sim: SimBackend, n: int) -> None:
    x = RNG.standard_normal(n).astype(np.float32)
    with Session(sim) as session:
        y = session.empty(Spec((n,), "float32"))
        launch(session, "stencil", (2,), 128, session.put(x), y, n, shared=2 * 130 * 4)
        padded = np.pad(x, 1)
        np.testing.assert_array_equal(session.get(y), padded[:-2] + padded[1:-1] + padded[2:])


@pytest.mark.parametrize("n", [1, 4, 5])
def test_warp_transpose(sim: SimBackend, n: int) -> None:
    x = RNG.standard_normal((n, 32, 32)).astype(np.float32)
    with Session(sim) as session:
        y = session.empty(Spec(x.shape, "float32"))
        launch(session, "warp_transpose", (-(-n // 4),), 128, session.put(x), y, n)
        np.testing.assert_array_equal(session.get(y), x.transpose(0, 2, 1))


@pytest.mark.parametrize("n", [1, 256, 700])
def test_scan(sim: SimBackend, n: int) -> None:
    x = RNG.integers(-8, 9, n).astype(np.float32)  # sums of integers are exact in any order
    with Session(sim) as session:
        y = session.empty(Spec((n,), "float32"))
        launch(session, "scan", (-(-n // 256),), 256, session.put(x), y, n)
        want = np.concatenate([np.cumsum(x[start : start + 256]) for start in range(0, n, 256)])
        np.testing.assert_array_equal(session.get(y), want)


@pytest.mark.parametrize("n", [1, 300, 5000])
def test_histogram(sim: SimBackend, n: int) -> None:
    ids = RNG.integers(-3, 70, n).astype(np.int32)
    before = RNG.integers(0, 100, 64).astype(np.int32)
    with Session(sim) as session:
        counts = session.put(before)
        launch(session, "histogram", (3,), 128, session.put(ids), counts, n)
        inside = ids[(ids >= 0) & (ids < 64)]
        np.testing.assert_array_equal(session.get(counts), before + np.bincount(inside, minlength=64))
