"""Numeric traps that other engines fell into, with values worked out by hand: rope tables (C1), grouped heads (C3),
queries that see nothing (C5), labels (C6), clipping (C8), sliding windows (D5)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyllm.config import RopeConfig
from cupyllm.errors import ConfigError, InputError
from cupyllm.reference import adamw, attention, cross_entropy, embedding, grad_norm, rope
from cupyllm.reference.engine import ReferenceEngine
from tests.reference.sources import random_source

DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_c1_rope_table_at_large_positions(dtype: type) -> None:
    inv_freq, factor = rope.inverse_frequencies(RopeConfig(theta=1e6), 128)
    assert inv_freq.dtype == np.float32 and inv_freq.shape == (64,) and factor == 1.0
    cos, sin = rope.table(np.array([256, 257, 40959]), inv_freq, factor, dtype)
    assert cos.dtype == sin.dtype == dtype
    assert abs(cos[0, 0] + 0.0397908) < 1e-6
    assert abs(cos[1, 0] - 0.8193055) < 1e-6
    # The angle's float32 rounding: 40959 * 2^-24 = 0.0024 at most.
    assert abs(cos[2, 0] - 0.4668972) < 1e-6 and abs(cos[2, 1] - 0.6076) < 2e-3
    np.testing.assert_allclose(cos**2 + sin**2, 1, atol=4 * np.finfo(dtype).eps)


def test_c1_rope_pairs_i_with_i_plus_half() -> None:
    inv_freq, factor = rope.inverse_frequencies(RopeConfig(theta=1e6), 4)
    cos, sin = rope.table(np.array([1]), inv_freq, factor, np.float64)
    x = np.array([[1.0, 2.0, 3.0, 4.0]])
    (q, k), _ = rope.forward(x, x, cos, sin, head_dim=4)
    np.testing.assert_allclose(q, [[-1.9841106, 1.9959990, 2.4623779, 4.0019980]], atol=1e-7)
    np.testing.assert_array_equal(q, k)


def test_rope_types_that_need_the_original_length_say_so() -> None:
    for kind in ("llama3", "yarn"):
        with pytest.raises(ConfigError, match="original_max_position_embeddings"):
            rope.inverse_frequencies(RopeConfig(theta=1e4, rope_type=kind, factor=4.0), 16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rope_type 'longrope'"):
        rope.inverse_frequencies(RopeConfig(theta=1e4, rope_type="longrope"), 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_c3_query_heads_share_neighbouring_kv_heads(dtype: type) -> None:
    q, k = np.zeros((1, 1, 4), dtype), np.zeros((1, 1, 2), dtype)
    v = np.array([[[0, 1]]], dtype)
    out, saved = attention.forward(q, k, v, num_heads=4, num_kv_heads=2)
    assert out[0, 0].tolist() == [0, 0, 1, 1]
    d_v = attention.backward(saved, np.ones_like(out))[2]
    assert d_v[0, 0].tolist() == [2, 2]
    with pytest.raises(InputError, match="whole multiple"):
        attention.forward(np.zeros((1, 1, 6), dtype), k, v, num_heads=3, num_kv_heads=2)


def left_padded(dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, heads * 8)).astype(dtype) for heads in (4, 2, 2))
    return q, k, v, np.array([[-1, -1, 0, 0], [0, 0, 0, 0]], np.int32)


@pytest.mark.parametrize("block_scores", [1 << 20, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_c5_padded_rows_are_zero_and_pass_no_gradient(
    dtype: type, block_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK_SCORES", block_scores)
    q, k, v, segments = left_padded(dtype)
    heads = {"num_heads": 4, "num_kv_heads": 2}
    out, saved = attention.forward(q, k, v, segments, segments, **heads)
    d_out = np.random.default_rng(1).standard_normal(out.shape).astype(dtype)
    d_q, d_k, d_v = attention.backward(saved, d_out)[:3]
    assert (out[0, :2] == 0).all() and np.isneginf(saved[6][0, :, :2]).all()
    for grad in (d_q, d_k, d_v):
        assert (grad[0, :2] == 0).all() and np.isfinite(grad).all()
    alone, alone_saved = attention.forward(q[:1, 2:], k[:1, 2:], v[:1, 2:], **heads)
    np.testing.assert_allclose(out[:1, 2:], alone, atol=1e-6)
    for grad, solo in zip((d_q, d_k, d_v), attention.backward(alone_saved, d_out[:1, 2:]), strict=False):
        np.testing.assert_allclose(grad[:1, 2:], solo, atol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_c5_a_bad_visible_score_surfaces_and_a_hidden_one_does_not(bad: float) -> None:
    q, k, v, segments = left_padded(np.float32)
    k[0, 3, 0] = bad  # seen by query 3 of row 0 alone, through query heads 0 and 1
    out, _ = attention.forward(q, k, v, segments, segments, num_heads=4, num_kv_heads=2)
    touched = q[0, 3].reshape(4, 8)[:2, 0] * np.float32(bad)
    for head in range(4):
        values = out[0, 3, head * 8 : (head + 1) * 8]
        # -inf is a score like any other: its key gets probability 0.
        assert np.isnan(values).all() == (head < 2 and not np.isneginf(touched[head]))
    out[0, 3] = 0
    assert np.isfinite(out).all()


def test_c5_a_bad_score_in_padding_stays_there() -> None:
    q, k, v, segments = left_padded(np.float32)
    expected, _ = attention.forward(q, k, v, segments, segments, num_heads=4, num_kv_heads=2)
    q[0, 0], k[0, 1] = np.inf, np.nan
    with np.errstate(invalid="ignore"):  # the product of inf and nan, which the mask then hides
        out, saved = attention.forward(q, k, v, segments, segments, num_heads=4, num_kv_heads=2)
    np.testing.assert_array_equal(out, expected)
    assert saved[6].dtype == np.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_c6_last_label_of_an_odd_vocabulary(dtype: type) -> None:
    logits = np.zeros((2, 1001), dtype)
    (loss, argmax), saved = cross_entropy.forward(logits, np.array([1000, -100]))
    assert abs(loss[0] - math.log(1001)) < 1e-6 and loss[1] == 0
    assert argmax.tolist() == [0, 0] and argmax.dtype == np.int64
    d_logits = cross_entropy.backward(saved, np.ones(2, dtype))[0]
    np.testing.assert_allclose(d_logits[0, :-1], 1 / 1001, rtol=1e-6)
    assert abs(d_logits[0, -1] - (1 / 1001 - 1)) < 1e-6 and abs(d_logits[0].sum()) < 1e-6
    assert (d_logits[1] == 0).all()


@pytest.mark.parametrize("label", [-4, -1, -101, 1001])
def test_c6_labels_out_of_range_are_value_errors(label: int) -> None:
    with pytest.raises(ValueError, match=f"got label {label}"):
        cross_entropy.forward(np.zeros((1, 1001)), np.array([label]))


@pytest.mark.parametrize(
    ("labels", "segments"),
    [
        (np.full((2, 5), -100), None),
        (np.array([[3]]), None),  # one token has no successor
        (np.array([[1, 2, 3, 4]]), np.array([[0, 1, 2, -1]], np.int32)),  # every pair crosses segments
    ],
    ids=["all ignored", "one token", "no pair in a segment"],
)
def test_c6_nothing_scored_is_a_loss_of_zero_with_zero_gradients(
    labels: np.ndarray, segments: np.ndarray | None
) -> None:
    source = random_source()
    engine = ReferenceEngine(source)
    ids = np.zeros_like(labels)
    result = engine.forward(ids, labels=labels, segments=segments)
    assert result.loss == 0.0 and result.num_targets == 0
    grads: dict[str, np.ndarray] = {}
    losses = engine.loss_and_grads(
        ids, labels, lambda name, grad: grads.__setitem__(name, grad.copy()), segments=segments
    )
    assert losses.loss == 0.0 and losses.num_targets == 0
    assert {name: grad.shape for name, grad in grads.items()} == {n: a.shape for n, a in source.arrays.items()}
    assert all((grad == 0).all() for grad in grads.values())


def test_c6_ignored_labels_do_not_count_in_the_denominator() -> None:
    source = random_source(vocab_size=1001)
    source.arrays["lm_head.weight"][:] = 0  # uniform logits
    result = ReferenceEngine(source).forward(np.array([[5, 6, 7]]), labels=np.array([[0, -100, 7]]))
    assert result.num_targets == 1 and abs(result.loss - math.log(1001)) < 1e-5


def test_argmax_lowest_id_wins_and_padding_never_does() -> None:
    logits = np.array([[1, 3, 3, 9], [0, 0, 0, 0], [-np.inf, -5, -9, 7]], np.float32)
    labels = np.zeros(3, np.int64)
    assert cross_entropy.forward(logits, labels)[0][1].tolist() == [3, 0, 3]
    assert cross_entropy.forward(logits, labels, valid_vocab=3)[0][1].tolist() == [1, 0, 1]


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_vocabulary_in_slices_is_the_vocabulary_at_once(width: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 4, (50, 7)).astype(np.float64)  # many ties
    logits[:5, :3] = -np.inf
    labels = rng.integers(0, 7, 50)
    labels[:5] = 6
    labels[7] = -100
    (loss, argmax), _ = cross_entropy.forward(logits, labels, valid_vocab=6)
    rows = cross_entropy.Rows(labels, 6, np.float64)
    for first in range(0, 7, width):
        rows.add(logits[:, first : first + width], first)
    np.testing.assert_allclose(rows.loss(), loss, atol=1e-14)
    np.testing.assert_array_equal(rows.argmax, argmax)
    assert np.isfinite(loss).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_logit_surfaces_in_the_loss_of_its_row(bad: float) -> None:
    logits = np.zeros((2, 6), np.float32)
    logits[0, 1] = bad
    rows = cross_entropy.Rows(np.array([4, 4]), None, np.float32)
    for first in (0, 2, 4):
        rows.add(logits[:, first : first + 2], first)
    assert np.isnan(rows.loss()[0]) and np.isfinite(rows.loss()[1])


def clipped(gradients: list[np.ndarray], max_norm: float) -> tuple[float, list[np.ndarray]]:
    norm = math.sqrt(sum(grad_norm.sum_of_squares(g) for g in gradients))
    coefficient = grad_norm.clip_coefficient(norm, max_norm)
    return norm, [g * g.dtype.type(coefficient) for g in gradients]


def test_c8_clip() -> None:
    norm, (g,) = clipped([np.array([3, 4], np.float32)], 1.0)
    assert norm == 5.0
    np.testing.assert_allclose(g, [0.6, 0.8], rtol=1e-6)  # 1e-6 / 5 from the guard in the denominator


def test_c8_clip_where_float32_squares_overflow() -> None:
    norm, parts = clipped([np.full(1, 1e20, np.float32)] * 100, 1.0)
    assert abs(norm / 1e21 - 1) < 1e-6
    np.testing.assert_allclose(np.concatenate(parts), 0.1, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_c8_a_norm_that_is_not_finite_is_refused(bad: float) -> None:
    gradients = np.ones((3, 700_000), np.float32)
    gradients[1, 5] = bad
    total = grad_norm.sum_of_squares(gradients)
    assert not math.isfinite(total)
    with pytest.raises(InputError, match="skip this step"):
        grad_norm.clip_coefficient(math.sqrt(total), 1.0)


def test_c8_zero_gradients_are_left_alone() -> None:
    norm, (g,) = clipped([np.zeros(3, np.float32)], 1.0)
    assert norm == 0 and (g == 0).all()
    assert grad_norm.clip_coefficient(0.5, 1.0) == 1.0


def mean_of_visible(q_tokens: int, keys: int, window: int | None) -> list[float]:
    """q = k = 0 and v[j] = j: the output is the mean of the visible positions."""
    v = np.arange(keys, dtype=np.float64).reshape(1, keys, 1)
    out, _ = attention.forward(
        np.zeros((1, q_tokens, 1)), np.zeros((1, keys, 1)), v, num_heads=1, num_kv_heads=1, window=window
    )
    return out[0, :, 0].tolist()


def test_d5_a_window_counts_the_query_itself() -> None:
    assert mean_of_visible(8, 8, 4) == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert mean_of_visible(8, 8, None) == [i / 2 for i in range(8)]


@pytest.mark.parametrize("tokens", [3, 4, 5, 8])
def test_d5_prefill_equals_decode(tokens: int) -> None:
    decoded = [mean_of_visible(1, t + 1, 4)[0] for t in range(tokens)]
    assert mean_of_visible(tokens, tokens, 4) == decoded


def test_embedding_refuses_ids_out_of_range() -> None:
    for bad in (-1, 7):
        with pytest.raises(InputError, match=f"token id {bad}"):
            embedding.forward(np.array([0, bad]), np.zeros((7, 2)))


def test_adamw_first_step_by_hand() -> None:
    """After one step m / (1 - beta1) = g and v / (1 - beta2) = g^2: p moves by lr g / (|g| + eps), after the decay."""
    p, g = np.array([1.0, -2.0, 0.5]), np.array([4.0, -8.0, 0.0])
    m, v = np.zeros(3), np.zeros(3)
    expected = p * (1 - 0.1 * 0.01) - 0.1 * (g / 2) / (np.abs(g / 2) + 1e-8)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
    adamw.update(p, g, m, v, step=1, grad_scale=0.5, **options)
    np.testing.assert_allclose(p, expected, rtol=1e-14)
    np.testing.assert_allclose(m, 0.1 * g / 2, rtol=1e-14)
    np.testing.assert_allclose(v, 0.05 * (g / 2) ** 2, rtol=1e-14)


def test_adamw_in_pieces_is_adamw_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for piece in (1 << 20, 7):
        monkeypatch.setattr(adamw, "PIECE", piece)
        rng = np.random.default_rng(0)
        state = [rng.random((5, 6), dtype=np.float32) for _ in range(4)]
        adamw.update(*state, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.3)
        states.append(state)
    for once, pieces in zip(*states, strict=True):
        np.testing.assert_array_equal(once, pieces)


def test_adamw_refuses_what_it_could_not_update_in_place() -> None:
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    good = np.zeros((4, 4), np.float32)
    with pytest.raises(InputError, match="C-contiguous"):
        adamw.update(good.T[:, :2], good[:, :2], good, good, step=1, **options)
    with pytest.raises(InputError, match="step 0"):
        adamw.update(good, good.copy(), good.copy(), good.copy(), step=0, **options)
