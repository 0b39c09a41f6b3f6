"""Rope: the table at large angles, the rotation against the fp64 reference, and the frequency rules.

Tolerance of the rotation: two products and a sum, each rounded (3 u32 stages), and one rounding to the dtype. The fp64
reference gets the same float32 cosines.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyllm.backend.base import Backend, Spec
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.config import RopeConfig
from cupyllm.errors import ConfigError, InputError
from cupyllm.ops.cases import draw
from cupyllm.ops.op import Case
from cupyllm.ops.rope import OP, inverse_frequencies, rope_table
from cupyllm.reference import rope as reference
from tests.ops.opcheck import assert_same_bits, check, run, tolerance

SMALL = [case for case in OP.cases() if case.size == "small"]
CONFIGS = {
    "qwen3": RopeConfig(1e6),
    "linear": RopeConfig(1e4, "linear", factor=3.0),
    "llama3": RopeConfig(5e5, "llama3", factor=8.0, original_max_position_embeddings=8192),
    "llama3-tiny": RopeConfig(1e4, "llama3", factor=4.0, original_max_position_embeddings=32),
    "yarn": RopeConfig(1e6, "yarn", factor=4.0, original_max_position_embeddings=32768),
    "yarn-untruncated": RopeConfig(1e6, "yarn", factor=4.0, original_max_position_embeddings=32768, truncate=False),
    "yarn-tiny": RopeConfig(
        1e4, "yarn", factor=2.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5
    ),
    "yarn-factor": RopeConfig(1e6, "yarn", factor=4.0, original_max_position_embeddings=32768, attention_factor=1.5),
}


def device_table(
    backend: Backend, positions: np.ndarray, inv_freq: np.ndarray, factor: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    with Session(backend) as session:
        spec = Spec((positions.size, inv_freq.size), "float32")
        cos, sin = session.empty(spec), session.empty(spec)
        rec = Recorder.of(backend)
        rope_table(rec, session.put(positions.astype(np.int32)), session.put(inv_freq), factor, cos, sin)
        session.execute(rec)
        return session.get(cos), session.get(sin)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_own_cases(backend: Backend, case: Case, dtype: str) -> None:
    check(backend, "rope", case, dtype, limit=tolerance(dtype, 1, stages=3))


@pytest.mark.parametrize("seed", [0, 1])
def test_table_is_right_at_any_angle(backend: Backend, seed: int) -> None:
    """Within 0.51 ulp of the exact cosine of the float32 angle, up to positions of 2^31 and for negative ones."""
    rng = np.random.default_rng(seed)
    positions = np.concatenate(
        [np.arange(70), [257, 40959, 131071, 2**31 - 1, -1, -40959], rng.integers(0, 2**31, 300)]
    )
    inv_freq = np.concatenate([inverse_frequencies(RopeConfig(1e6), 128)[0], rng.random(7).astype(np.float32)])
    got = device_table(backend, positions, inv_freq)
    angles = (positions.astype(np.int32).astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    for name, table in zip(("cos", "sin"), got, strict=True):
        want = getattr(np, name)(angles)  # float64, right to 1e-16 at any angle
        ulp = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
        error = (np.abs(table - want) / ulp).max()
        print(f"{name}: {error:.4f} ulp")
        assert error < 0.51


def test_table_times_factor(backend: Backend) -> None:
    """The factor multiplies the rounded cosine, once."""
    inv_freq, factor = inverse_frequencies(CONFIGS["yarn"], 64)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    plain, scaled = (device_table(backend, np.arange(300), inv_freq, f) for f in (1.0, factor))
    for a, b in zip(plain, scaled, strict=True):
        assert_same_bits(a * np.float32(factor), b)


def test_backward_is_the_transpose(backend: Backend) -> None:
    """Forward then backward of the same vector gives it back, times the squared factor of the table."""
    case = SMALL[3]
    drawn = draw(case)
    drawn.inputs[2:] = [a * np.float32(1.5) for a in drawn.inputs[2:] if a is not None]
    turned = run(backend, "rope", case, drawn, None, "float32").outputs
    back = run(backend, "rope", case, drawn, list(turned), "float32").d_inputs
    for got, x in zip(back[:2], drawn.inputs[:2], strict=True):
        assert got is not None and x is not None
        np.testing.assert_allclose(got, 2.25 * x, rtol=0, atol=20 * 2**-24 * 2.25 * np.abs(x).max())


def test_in_place_and_one_of_two(backend: Backend) -> None:
    """Each output may be its input; a gradient that is not wanted is left out."""
    case = SMALL[1]
    drawn = draw(case)
    want = run(backend, "rope", case, drawn, None, "float32").outputs
    want_back = run(backend, "rope", case, drawn, want, "float32").d_inputs
    with Session(backend) as session:
        q, k, cos, sin = (session.put(a) for a in drawn.inputs if a is not None)
        rec = Recorder.of(backend)
        saved = OP.forward(rec, [q, k, cos, sin], (), [q, k], case.attrs)
        session.execute(rec)
        assert_same_bits(session.get(q), want[0])
        assert_same_bits(session.get(k), want[1])
        for index, x in enumerate((q, k)):
            rec = Recorder.of(backend)
            d_inputs = [x if i == index else None for i in range(4)]
            OP.backward(rec, saved, [q, k], d_inputs, [], case.attrs, False)
            session.execute(rec)
            expected = want_back[index]
            assert expected is not None
            assert_same_bits(session.get(x), expected)
        rec = Recorder.of(backend)
        OP.backward(rec, saved, [q, k], [None] * 4, [], case.attrs, False)
        assert not rec.launches


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_have_the_reference_s_bits(name: str, head_dim: int) -> None:
    """Two implementations of one rule; an ulp apart would be 0.002 radians at position 40959."""
    got, factor = inverse_frequencies(CONFIGS[name], head_dim)
    want, want_factor = reference.inverse_frequencies(CONFIGS[name], head_dim)
    assert_same_bits(got, want)
    assert factor == want_factor
    assert got.dtype == np.float32 and got.shape == (head_dim // 2,) and (got > 0).all()


def test_frequencies_by_hand() -> None:
    """theta 16, D 4: 1 and 1/4. Long waves are divided by the factor, short ones kept."""
    np.testing.assert_array_equal(inverse_frequencies(RopeConfig(16.0), 4)[0], np.float32([1, 0.25]))
    np.testing.assert_array_equal(
        inverse_frequencies(RopeConfig(16.0, "linear", factor=2.0), 4)[0], np.float32([0.5, 0.125])
    )
    for kind in ("llama3", "yarn"):
        config = RopeConfig(1e6, kind, factor=4.0, original_max_position_embeddings=4096)  # type: ignore[arg-type]
        scaled, plain = inverse_frequencies(config, 128)[0], inverse_frequencies(RopeConfig(1e6), 128)[0]
        assert scaled[0] == plain[0]
        assert scaled[-1] == pytest.approx(plain[-1] / 4, rel=1e-6)
        assert (np.diff(scaled) < 0).all()
    assert inverse_frequencies(CONFIGS["yarn-factor"], 128)[1] == 1.5


def test_refused_configs() -> None:
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        inverse_frequencies(RopeConfig(1e6, "yarn", factor=4.0), 128)
    with pytest.raises(ConfigError, match="dynamic"):
        inverse_frequencies(RopeConfig(1e6, "dynamic"), 128)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "q, k, table, attrs, words",
    [
        ((3, 16), (3, 8), (3, 4), {"head_dim": 7}, "head_dim is 7"),
        ((3, 16), (3, 12), (3, 4), {"head_dim": 8}, "k's shape"),
        ((3, 16), (4, 8), (3, 4), {"head_dim": 8}, "k's shape"),
        ((3, 16), (3, 8), (3, 8), {"head_dim": 8}, "cos's shape"),
        ((3, 2, 8), (3, 8), (3, 4), {"head_dim": 8}, "q's shape"),
    ],
)
def test_refusals(q: tuple[int, ...], k: tuple[int, ...], table: tuple[int, int], attrs: dict, words: str) -> None:
    specs = [Spec(q, "float32"), Spec(k, "float32"), Spec(table, "float32"), Spec(table, "float32")]
    with pytest.raises(InputError, match=words):
        OP.infer(specs, (), attrs)


def test_refuses_other_dtypes(backend: Backend) -> None:
    table = Spec((3, 4), "float32")
    with pytest.raises(InputError, match="float16"):
        OP.infer([Spec((3, 8), "float16"), Spec((3, 8), "float16"), table, table], (), {"head_dim": 8})
    with pytest.raises(InputError, match="bfloat16"):
        low = Spec((3, 4), "bfloat16")
        OP.infer([Spec((3, 8), "float32"), Spec((3, 8), "float32"), low, low], (), {"head_dim": 8})
    with Session(backend) as session, pytest.raises(InputError, match="int64"):
        positions, freq = session.empty(Spec((3,), "int64")), session.empty(Spec((4,), "float32"))
        rope_table(Recorder(80), positions, freq, 1.0, session.empty(table), session.empty(table))
