"""Every backward of the reference against finite differences in float64, op by op and for whole layers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.model.names import layer_params
from cupyllm.reference import add, attention, cross_entropy, embedding, linear, qwen3, rmsnorm, rope, swiglu
from tests.reference.finite_differences import LIMIT, check_op, relative_error
from tests.reference.sources import random_arrays, tiny_config

few = partial(relative_error, max_elements=32, num_directions=12)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding(padding_idx: int | None) -> None:
    ids = np.array([3, 0, 2, 3, 3, 6])
    forward = partial(embedding.forward, padding_idx=padding_idx)
    weight = normal(7, 5)
    if padding_idx is None:
        check_op(forward, embedding.backward, [ids, weight])
    _, saved = forward(ids, weight)
    d_y = normal(6, 5)
    d_weight = embedding.backward(saved, d_y)[1]
    np.testing.assert_array_equal(d_weight[0], d_y[1])
    np.testing.assert_array_equal(d_weight[3], d_y[0] + d_y[3] + d_y[4])
    np.testing.assert_array_equal(d_weight[1], 0)
    np.testing.assert_array_equal(d_weight[2], 0 if padding_idx == 2 else d_y[2])


@pytest.mark.parametrize(("rows", "chunks", "size"), [(1, 1, 1), (3, 1, 7), (5, 4, 8), (2, 3, 33), (40, 1, 32)])
def test_rmsnorm(rows: int, chunks: int, size: int) -> None:
    # eps of 0.1 so that its place inside the root matters to the gradient
    check_op(partial(rmsnorm.forward, eps=0.1), rmsnorm.backward, [normal(rows, chunks * size), normal(size)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (3, 7, 5), (17, 33, 19)])
def test_linear(n: int, k: int, m: int, bias: bool) -> None:
    check_op(linear.forward, linear.backward, [normal(n, k), normal(m, k), normal(m) if bias else None])


def test_linear_has_no_gradient_for_an_absent_bias() -> None:
    _, saved = linear.forward(normal(2, 3), normal(4, 3))
    assert linear.backward(saved, normal(2, 4))[2] is None


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 8), (3, 1, 6)])
def test_rope(heads: int, kv_heads: int, head_dim: int) -> None:
    inv_freq, _ = rope.inverse_frequencies(RopeConfig(theta=100.0), head_dim)
    # a factor other than 1: the backward must carry it too
    cos, sin = rope.table(np.array([0, 1, 5, 3, 900]), inv_freq, 1.3, np.float64)
    q, k = normal(5, heads * head_dim), normal(5, kv_heads * head_dim)
    check_op(partial(rope.forward, head_dim=head_dim), rope.backward, [q, k, cos, sin], constants=[2, 3])


def test_swiglu() -> None:
    gate = normal(5, 9)
    gate[0, :4] = (-40.0, 40.0, 0.0, 1e-3)
    check_op(swiglu.forward, swiglu.backward, [gate, normal(5, 9, seed=2)])


def test_swiglu_far_out_is_the_limit() -> None:
    gate = np.array([[-1e4, 1e4]], np.float32)
    y, saved = swiglu.forward(gate, np.ones_like(gate))
    np.testing.assert_array_equal(y, [[0, 1e4]])
    np.testing.assert_array_equal(swiglu.backward(saved, np.ones_like(gate))[0], [[0, 1]])


def test_add() -> None:
    check_op(add.forward, add.backward, [normal(3, 4), normal(3, 4, seed=2)])


@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (1, 2), (5, 33), (9, 130)])
def test_cross_entropy(n: int, vocab: int) -> None:
    labels = np.random.default_rng(0).integers(0, vocab, n)
    labels[1::3] = -100
    logits = 3 * normal(n, vocab)
    if vocab == 1:  # the loss is 0 whatever the logit: nothing to divide by
        _, saved = cross_entropy.forward(logits, labels)
        np.testing.assert_array_equal(cross_entropy.backward(saved, np.ones(n))[0], 0)
        return
    check_op(lambda x: cross_entropy.forward(x, labels), cross_entropy.backward, [logits])


SEGMENTS = np.array([[-1, -1, 0, 0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 4, 4, 2, -1, -1]], np.int32)
ATTENTION = {
    "causal": {},
    "one token": {"tokens": 1, "keys": 1},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "not causal": {"causal": False},
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "scale": {"scale": 0.7},
    "query tail": {"tokens": 4, "keys": 9},
    "query tail, window": {"tokens": 4, "keys": 9, "window": 2},
    "more queries than keys": {"tokens": 9, "keys": 5},
    "segments": {"segments": True},
    "segments, window": {"segments": True, "window": 2},
    "segments, not causal": {"segments": True, "causal": False},
    "segments, query tail": {"segments": True, "tokens": 5},
}


@pytest.mark.parametrize("block_scores", [1 << 20, 40])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, block_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_SCORES", block_scores)  # 40: a block is one to four queries
    case = dict(ATTENTION[name])
    tokens, keys, kv_heads = case.pop("tokens", 9), case.pop("keys", 9), case.pop("kv_heads", 2)
    segments = case.pop("segments", False)
    arguments = [normal(2, tokens, 4 * 5), normal(2, keys, kv_heads * 5), normal(2, keys, kv_heads * 5, seed=2)]
    arguments += [SEGMENTS[:, 9 - tokens :], SEGMENTS] if segments else [None, None]
    forward = partial(attention.forward, num_heads=4, num_kv_heads=kv_heads, **case)
    check_op(forward, attention.backward, arguments, seed=3)
    np.testing.assert_allclose(forward(*arguments)[0], naive_attention(*arguments, heads=4, **case), atol=1e-13)


def naive_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_segments: np.ndarray | None,
    k_segments: np.ndarray | None,
    heads: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> np.ndarray:
    """One query, one head at a time, straight from the definition."""
    size = q.shape[2] // heads
    group = heads // (k.shape[2] // size)
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(q.shape[0], q.shape[1], heads):
        keys = []
        for j in range(k.shape[1]):
            at = i + k.shape[1] - q.shape[1]
            same = q_segments is None or q_segments[b, i] == k_segments[b, j] >= 0
            if same and (not causal or j <= at) and (window is None or j > at - window):
                keys.append(j)
        if keys:
            kv = slice(h // group * size, (h // group + 1) * size)
            head = slice(h * size, (h + 1) * size)
            scores = np.array([q[b, i, head] @ k[b, j, kv] for j in keys]) * (scale or size**-0.5)
            weights = np.exp(scores - scores.max())
            out[b, i, head] = weights / weights.sum() @ v[b, keys, kv]
    return out


LAYERS = {
    "qwen3": tiny_config(),
    "qwen3 attention_bias": tiny_config(qkv_bias=True, o_bias=True, num_key_value_heads=4),
    "qwen2": tiny_config(family="qwen2", qk_norm=False, qkv_bias=True),
    "llama": tiny_config(family="llama", qk_norm=False, num_key_value_heads=1),
    "llama biases": tiny_config(family="llama", qk_norm=False, qkv_bias=True, o_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str, window: int | None) -> None:
    """dx and every parameter: 12 of 12 tensors for Qwen3. Two rows of 9 tokens, padded and packed."""
    config = LAYERS[name]
    prefix = "model.layers.1."
    arrays = random_arrays(config, seed=4, dtype=np.float64)
    params = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    x = normal(18, config.hidden_size)
    inv_freq, factor = rope.inverse_frequencies(config.rope, config.head_dim)
    cos, sin = rope.table(np.tile(np.arange(9), 2), inv_freq, factor, np.float64)
    options = {"batch": 2, "cos": cos, "sin": sin, "segments": SEGMENTS, "window": window}
    factors = normal(18, config.hidden_size, seed=5)

    def value() -> float:
        return float(np.sum(qwen3.layer_forward(x, params, config, **options)[0] * factors))

    d_x, grads = qwen3.layer_backward(qwen3.layer_forward(x, params, config, **options)[1], factors)
    assert set(grads) == set(layer_params(config)) and (name != "qwen3" or len(grads) == 11)
    errors = {"x": few(value, x, d_x)}
    errors |= {parameter: few(value, params[parameter], grad) for parameter, grad in grads.items()}
    print({tensor: f"{error:.1e}" for tensor, error in errors.items()})
    assert max(errors.values()) < LIMIT, errors


@pytest.mark.parametrize("tied", [False, True])
def test_whole_model(tied: bool) -> None:
    """The mean loss's gradient by every parameter, through embedding, windows, head and cross-entropy."""
    config: ModelConfig = tiny_config(tie_word_embeddings=tied, layer_windows=(None, 3))
    params = random_arrays(config, seed=6, dtype=np.float64)
    rng = np.random.default_rng(7)
    ids = rng.integers(0, config.vocab_size, SEGMENTS.shape)
    labels = np.where(rng.random(ids.shape) < 0.2, -100, ids)

    def value() -> float:
        return qwen3.forward(params, config, ids, labels, segments=SEGMENTS)[0]

    grads = qwen3.backward(qwen3.forward(params, config, ids, labels, segments=SEGMENTS)[3])
    assert set(grads) == set(params)
    errors = {name: few(value, params[name], grad) for name, grad in grads.items()}
    print({tensor: f"{error:.1e}" for tensor, error in errors.items()})
    assert max(errors.values()) < LIMIT, errors
