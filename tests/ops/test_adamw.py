"""AdamW: the kernel against the reference in fp64, over steps with changing scalars and one bound program.

Tolerance, u = 2^-24, G the largest scaled gradient so far, S steps. m and v see at most 4 and 5 roundings a step:
errors of 4 S u G and 5 S u G^2. sqrt(v) is at least 0.22 G after a step with G, so the ratio m / sqrt(v) is off by at
most 20 S u beside 8 roundings of its own, and p by lr times that and by its own 2 roundings a step.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyllm.backend.base import Backend, Spec
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder, arena_layout
from cupyllm.errors import InputError
from cupyllm.ops.adamw import SCALARS, adamw, pack_scalars
from cupyllm.reference import adamw as reference
from tests.ops.opcheck import U32

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.mark.parametrize("p16", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_match_the_reference(backend: Backend, size: int, p16: str | None, weight_decay: float) -> None:
    rng = np.random.default_rng(size)
    start = rng.standard_normal(size).astype(np.float32)
    want = [start.astype(np.float64), np.zeros(size), np.zeros(size)]
    largest = 0.0
    with Session(backend) as session:
        p, m, v = session.put(start), session.put(np.zeros(size, np.float32)), session.put(np.zeros(size, np.float32))
        g, scalars = session.empty(Spec((size,), "float32")), session.empty(SCALARS)
        out = session.empty(Spec((size,), p16)) if p16 else None
        rec = Recorder.of(backend)
        adamw(rec, p, g, m, v, scalars, out)
        assert len(rec.launches) == 1 and arena_layout(rec.launches)[1] == 0
        program = backend.load(rec.launches)
        for step in range(1, 6):
            grad = (rng.standard_normal(size) * 10.0 ** (step - 3)).astype(np.float32)
            numbers = {**SETTINGS, "lr": 1e-2 / step, "weight_decay": weight_decay, "step": step, "grad_scale": 0.5}
            backend.upload(g.address, grad)
            backend.upload(scalars.address, pack_scalars(**numbers))  # type: ignore[arg-type]
            backend.run(program)
            backend.synchronize()
            reference.update(want[0], grad.astype(np.float64), want[1], want[2], **numbers)  # type: ignore[arg-type]
            got = [session.get(t) for t in (p, m, v)]
            largest = max(largest, 0.5 * float(np.abs(grad).max()))
            bounds = (
                step * U32 * (numbers["lr"] * 30 * step + 2 * np.abs(want[0])),
                4 * step * U32 * largest,
                5 * step * U32 * largest**2,
            )
            for name, a, b, bound in zip("pmv", got, want, bounds, strict=True):
                error = np.abs(a - b)
                print(f"step {step} {name}: {error.max():.2e}")
                assert (error <= bound).all(), (step, name)
            np.testing.assert_array_equal(session.get(g), grad)
            if out is not None:
                dtype = ml_dtypes.bfloat16 if p16 == "bfloat16" else np.float16
                np.testing.assert_array_equal(session.get(out), got[0].astype(dtype))


def test_against_numbers_worked_out_by_hand(backend: Backend) -> None:
    """First step: m / (1 - b1) = g and v / (1 - b2) = g^2, so p moves by lr g / (|g| + eps) after its decay."""
    with Session(backend) as session:
        p, g = session.put(np.float32([1.0, -2.0, 0.5])), session.put(np.float32([4.0, -1e-8, 0.0]))
        m, v = session.put(np.zeros(3, np.float32)), session.put(np.zeros(3, np.float32))
        scalars = session.put(pack_scalars(**SETTINGS, lr=0.1, weight_decay=0.5, step=1))
        rec = Recorder.of(backend)
        adamw(rec, p, g, m, v, scalars)
        session.execute(rec)
        # 0.95 - 0.1;  -1.9 + 0.1 * 1e-8 / (1e-8 + 1e-8);  0.475
        np.testing.assert_allclose(session.get(p), [0.85, -1.85, 0.475], rtol=1e-6)
        np.testing.assert_allclose(session.get(m), [0.4, -1e-9, 0], rtol=1e-6)
        np.testing.assert_allclose(session.get(v), [0.8, 5e-18, 0], rtol=1e-6)


def test_zero_gradients_move_nothing_but_decay(backend: Backend) -> None:
    zeros = np.zeros(5, np.float32)
    with Session(backend) as session:
        p = session.put(np.arange(5, dtype=np.float32))
        rec = Recorder.of(backend)
        scalars = session.put(pack_scalars(**SETTINGS, lr=0.1, weight_decay=0.0, step=3))
        adamw(rec, p, session.put(zeros), session.put(zeros), session.put(zeros), scalars)
        session.execute(rec)
        np.testing.assert_array_equal(session.get(p), np.arange(5))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"step": 0}, "step is 0"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"lr": float("nan")}, "lr nan"),
        ({"grad_scale": float("inf")}, "grad_scale inf"),
    ],
)
def test_refused_numbers(change: dict[str, float], words: str) -> None:
    good = {**SETTINGS, "lr": 0.1, "weight_decay": 0.0, "step": 1}
    with pytest.raises(InputError, match=words):
        pack_scalars(**{**good, **change})  # type: ignore[arg-type]


def test_refused_arrays(backend: Backend) -> None:
    with Session(backend) as session:
        a, b = session.empty(Spec((4,), "float32")), session.empty(Spec((5,), "float32"))
        low, scalars = session.empty(Spec((4,), "bfloat16")), session.empty(SCALARS)
        for args, words in (
            ((a, b, a, a, scalars), "g's shape"),
            ((a, a, low, a, scalars), "m's dtype"),
            ((a, a, a, a, a), "pack_scalars"),
            ((a, a, a, a, scalars, b), "p16_out's shape"),
            ((a, a, a, a, scalars, a), "p16_out's dtype"),
        ):
            with pytest.raises(InputError, match=words):
                adamw(Recorder(80), *args)  # type: ignore[arg-type]
