"""Numeric failure cases that people met with comparable engines, each by its id, on the reference and on the kernels.

C1 rope tables and pairing, C3 grouped heads, C5 rows with nothing to attend to, C6 labels, C8 clipping with inf, NaN
and overflow, D5 the sliding window. Cases about checkpoints lie in tests/model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cupyllm.backend.base import Backend
from cupyllm.errors import InputError
from cupyllm.train.trainer import Trainer, TrainingStopped
from tests import casekit
from tests.hostcuda.backend import HostBackend
from tests.simulated import new_simulator

GOLDEN = Path(__file__).parent / "fixtures" / "goldens" / "h1"


@pytest.fixture(params=["reference", "host", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend | None]:
    """None is the reference; see conftest.py for the others."""
    if request.param == "reference":
        yield None
    elif request.param == "host":
        device = HostBackend()
        yield device
        device.close()
    elif request.param == "sim":
        with new_simulator() as simulator:
            yield simulator
    else:
        from cupyllm.backend.cuda import CudaBackend
        from cupyllm.errors import BackendError

        try:
            gpu = CudaBackend()
        except BackendError as error:
            pytest.skip(str(error))
        yield gpu
        gpu.close()


def test_c1_rope_tables_hold_large_positions(backend: Backend | None) -> None:
    cos, _ = casekit.rope_table([256, 257, 40959], theta=1e6, dim=128, backend=backend)
    assert abs(cos[0, 0] - -0.0397908) < 1e-5
    assert abs(cos[1, 0] - 0.8193055) < 1e-5
    assert abs(cos[2, 0] - 0.4668972) < 1e-3
    assert abs(cos[2, 1] - 0.6076) < 2e-3
    # What a bf16 position would have given: 257 becomes 256, so the test above can tell.
    assert casekit.low(np.float32([257]))[0] == 256


def test_c1_half_split_pairing(backend: Backend | None) -> None:
    """Qwen3 pairs i with i + D/2. Interleaved pairs would give [-1.1426396, 1.9220756, 2.9959985, 4.0029980]."""
    turned = casekit.rope(np.float32([1, 2, 3, 4]), 1, theta=1e6, backend=backend)
    np.testing.assert_allclose(turned, [-1.9841106, 1.9959990, 2.4623779, 4.0019980], rtol=2e-7)


def test_c3_query_heads_share_their_group_s_kv_head(backend: Backend | None) -> None:
    q, k = np.zeros((1, 1, 4, 16), np.float32), np.zeros((1, 1, 2, 16), np.float32)
    v = np.zeros((1, 1, 2, 16), np.float32)
    v[:, :, 1] = 1
    got = casekit.attn_fwd_bwd(q, k, v, np.ones_like(q), backend=backend)
    assert got.out[0, 0, :, 0].tolist() == [0, 0, 1, 1]
    assert (got.d_v == 2).all()
    odd = np.zeros((1, 1, 3, 16), np.float32)
    casekit.expect_raises(InputError, lambda: casekit.attention(q, odd, odd, backend=backend), "multiple")


def _c5_arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, d_out = (rng.standard_normal((2, 4, 4, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 4, 2, 16)).astype(np.float32) for _ in range(2))
    return q, k, v, d_out


def test_c5_rows_with_no_key_are_zero_and_pass_no_gradient(backend: Backend | None) -> None:
    q, k, v, d_out = _c5_arrays()
    got = casekit.attn_fwd_bwd(q, k, v, d_out, np.array([[0, 0, 1, 1], [1, 1, 1, 1]]), backend=backend)
    solo = casekit.attn_fwd_bwd(q[:1, 2:], k[:1, 2:], v[:1, 2:], d_out[:1, 2:], backend=backend)
    for name in ("out", "d_q", "d_k", "d_v"):
        array, alone = getattr(got, name), getattr(solo, name)
        assert (array[0, :2] == 0).all(), name
        assert np.isfinite(array).all(), name
        np.testing.assert_allclose(array[0, 2:], alone[0], rtol=0, atol=1e-6, err_msg=name)
    everything = casekit.attn_fwd_bwd(q, k, v, d_out, np.zeros((2, 4), int), backend=backend)
    assert all((getattr(everything, name) == 0).all() for name in ("out", "d_q", "d_k", "d_v"))


def test_c5_a_very_negative_score_is_not_a_mask(backend: Backend | None) -> None:
    """Scores of -3.4e38 on all visible keys are finite: the row is their mean, and only the mask makes zeros."""
    _, k, v, _ = _c5_arrays()
    q, k = np.zeros((2, 4, 4, 16), np.float32), np.zeros_like(k)
    q[..., 0], k[..., 0] = -1.0, 3.4e38
    out = casekit.attention(q, k, v, backend=backend, scale=1.0)
    np.testing.assert_allclose(out[0, 3, 0], v[0, :, 0].mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_c5_inf_and_nan_in_a_valid_score_surface(backend: Backend | None, value: float) -> None:
    q, k, v, d_out = _c5_arrays()
    q[0, 3], k[0, 2] = 1.0, value
    with np.errstate(invalid="ignore"):  # inf - inf in the reference: the NaN is the answer
        got = casekit.attn_fwd_bwd(q, k, v, d_out, np.array([[0, 0, 1, 1], [1, 1, 1, 1]]), backend=backend)
    assert np.isnan(got.out[0, 3]).all()
    assert (got.out[0, :2] == 0).all() and np.isfinite(got.out[1]).all()


def test_c6_all_ignored(backend: Backend | None) -> None:
    loss, count, gradient = casekit.ce(np.zeros((3, 1001), np.float32), [-100] * 3, backend)
    assert loss == 0.0 and count == 0 and (gradient == 0).all()


def test_c6_the_last_id(backend: Backend | None) -> None:
    loss, count, gradient = casekit.ce(np.zeros((1, 1001), np.float32), [1000], backend)
    assert count == 1 and abs(loss - 6.9087548) < 1e-5
    np.testing.assert_allclose(gradient[0, :1000], 1 / 1001, rtol=1e-6)
    assert abs(gradient[0, 1000] - (1 / 1001 - 1)) < 1e-6
    assert abs(gradient.sum(dtype=np.float64)) < 1e-6


@pytest.mark.parametrize("label", [-4, 1001])
def test_c6_labels_out_of_range(backend: Backend | None, label: int) -> None:
    error = casekit.expect_raises(ValueError, lambda: casekit.ce(np.zeros((1, 1001), np.float32), [label], backend))
    assert str(label) in str(error)


def test_c6_the_denominator_counts_scored_tokens(backend: Backend | None) -> None:
    loss, count, gradient = casekit.ce(np.zeros((2, 1001), np.float32), [-100, 7], backend)
    assert count == 1 and abs(loss - 6.9087548) < 1e-5
    assert (gradient[0] == 0).all() and gradient[1, 7] < 0


@pytest.mark.parametrize("what", ["one token", "all ignored"])
def test_c6_nothing_to_score_in_a_model(backend: Backend | None, what: str) -> None:
    """A sequence of length 1 has no target after the shift: loss 0, gradients 0, optimizer state untouched."""
    ids = np.array([[5]] if what == "one token" else [[5, 6, 7]])
    labels = ids if what == "one token" else np.full_like(ids, -100)
    with casekit.load(GOLDEN) as source:
        trainer = Trainer(lambda weights: casekit.engine_of(weights, backend), source, lr=0.1)
        try:
            seen: dict[str, bool] = {}
            result = trainer.engine.loss_and_grads(
                ids, labels, lambda name, gradient: seen.update({name: bool((gradient == 0).all())})
            )
            assert result.loss == 0.0 and result.num_targets == 0
            assert set(seen) == set(source.names()) and all(seen.values())
            before = casekit.state(trainer)
            assert trainer.step(ids, labels).skipped
            assert casekit.state(trainer) == before
        finally:
            trainer.close()


def test_c8_clips_to_the_global_norm(backend: Backend | None) -> None:
    norm, (clipped,) = casekit.clip([np.float32([3, 4])], 1.0, backend)
    assert norm == 5.0
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)
    norm, parts = casekit.clip([np.float32([3]), np.float32([4])], 1.0, backend)
    assert norm == 5.0
    np.testing.assert_allclose(np.concatenate(parts), [0.6, 0.8], rtol=1e-6)


def test_c8_a_norm_beyond_float32_still_clips(backend: Backend | None) -> None:
    norm, clipped = casekit.clip([np.float32([1e20])] * 100, 1.0, backend)
    assert norm == pytest.approx(1e21, rel=1e-7)
    np.testing.assert_allclose(np.concatenate(clipped), 0.1, rtol=1e-6)


def test_c8_a_zero_gradient_stays_zero(backend: Backend | None) -> None:
    norm, (clipped,) = casekit.clip([np.zeros(3, np.float32)], 1.0, backend)
    assert norm == 0.0 and (clipped == 0).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_c8_a_bad_step_changes_nothing(backend: Backend | None, value: float) -> None:
    weights = {"good.weight": np.ones((2, 3), np.float32), "bad.weight": np.ones(5, np.float32)}
    good = {name: np.full_like(array, 0.5) for name, array in weights.items()}
    bad = {name: array.copy() for name, array in good.items()}
    bad["bad.weight"][3] = value
    trainer = casekit.trainer_of(weights, backend, lr=0.1, max_skips=3)
    ids = np.array([[1, 2]])
    trainer.engine.gradients = good  # type: ignore[attr-defined]
    fresh = casekit.state(trainer)
    assert not trainer.step(ids, ids).skipped
    before = casekit.state(trainer)
    assert before != fresh and before["step"] == 1
    trainer.engine.gradients = bad  # type: ignore[attr-defined]
    for count in (1, 2):
        result = trainer.step(ids, ids)
        assert "bad.weight" in result.skipped and "good.weight" not in result.skipped
        assert trainer.total_skips == count and casekit.state(trainer) == before
    casekit.expect_raises(TrainingStopped, lambda: trainer.step(ids, ids), "bad.weight")
    assert casekit.state(trainer) == before


def test_c8_clipped_update_equals_the_update_with_the_clipped_gradient(backend: Backend | None) -> None:
    """The trainer hands the coefficient to AdamW instead of scaling first: the same numbers to an ulp."""
    weight, gradient = np.ones((2, 2), np.float32), np.float32([[3, 4], [0, 12]])
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    _, (clipped,) = casekit.clip([gradient], 1.0, backend)
    want, _, _ = casekit.adamw_run(weight, [clipped], backend, **numbers)
    trainer = casekit.trainer_of({"weight": weight}, backend, lr=0.1)
    trainer.engine.gradients = {"weight": gradient}  # type: ignore[attr-defined]
    result = trainer.step(np.array([[1, 2]]), np.array([[1, 2]]))
    assert result.grad_norm == 13.0 and result.clip_coef == pytest.approx(1 / 13, rel=1e-6)
    np.testing.assert_allclose(trainer.state.master["weight"], want, rtol=2e-7)


def test_d5_a_window_counts_the_token_itself(backend: Backend | None) -> None:
    got = casekit.attn_mean(W=4, T=8, backend=backend)
    np.testing.assert_allclose(got, [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5], rtol=1e-6)
    np.testing.assert_allclose(casekit.attn_mean(W=None, T=8, backend=backend), np.arange(8) / 2, rtol=1e-6)


@pytest.mark.parametrize("tokens", [3, 4, 5, 8])
def test_d5_prefill_equals_token_by_token(backend: Backend | None, tokens: int) -> None:
    prefill = casekit.attn_mean(W=4, T=tokens, backend=backend)
    decoded = [casekit.attn_mean(W=4, T=t, num_queries=1, backend=backend)[0] for t in range(1, tokens + 1)]
    if backend is None:
        np.testing.assert_allclose(prefill, decoded, rtol=1e-6)
    else:
        assert prefill.tolist() == decoded


def test_d5_null_means_no_window() -> None:
    for keys in (
        {"sliding_window": None},
        {"sliding_window": None, "use_sliding_window": False},
        {"sliding_window": 4, "use_sliding_window": False},
    ):
        assert [casekit.check_cfg(keys).window(layer) for layer in range(2)] == [None, None]
    config = casekit.check_cfg({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1})
    assert [config.window(layer) for layer in range(2)] == [None, 4]
