"""The whole model on one page: a decoder layer, the head, and everything between ids and gradients.

    n = input_layernorm x             q, k, v = projections of n; q_norm, k_norm a head (Qwen3); rope on q and k
    h = x + o_proj attention(q, k, v)
    m = post_attention_layernorm h    y = h + down_proj swiglu(gate_proj m, up_proj m)

Qwen2 is the same without q_norm and k_norm and with biases on q, k and v; Llama without either: a bias that the
parameters hold is used, `config.qk_norm` says the rest. Parameters carry Hugging Face's names without the
"model.layers.N." prefix. Each forward returns what its backward needs; nothing else is remembered.

`forward` and `backward` at the end hold the whole model and all logits at once: the specification. engine.py does the
same with one layer in memory. Activations are rows [N,C], N = B*T; attention alone sees them as [B,T,...].

Shapes: B batch, T tokens, N = B*T, C hidden, V vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from cupyllm.config import ModelConfig
from cupyllm.reference import add, attention, cross_entropy, embedding, linear, rmsnorm, rope, swiglu

Params = Mapping[str, np.ndarray]
Gradients = dict[str, np.ndarray]
Attend = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def layer_forward(
    x: np.ndarray,
    params: Params,
    config: ModelConfig,
    *,
    batch: int,
    cos: np.ndarray,
    sin: np.ndarray,
    segments: np.ndarray | None = None,
    window: int | None = None,
    attend: Attend | None = None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """x [N,C], cos and sin [N,D/2], segments int [B,T] or None -> (y [N,C], saved).

    `attend` takes attention's place (generation over a cache): q [N,HQ*D], k, v [N,HK*D] -> [N,HQ*D]; no backward then.
    """
    saved: dict[str, Any] = {}

    def run(name: str, output: tuple[Any, Any]) -> Any:
        saved[name] = output[1]
        return output[0]

    def project(name: str, value: np.ndarray) -> np.ndarray:
        return run(name, linear.forward(value, params[name + ".weight"], params.get(name + ".bias")))

    def norm(name: str, value: np.ndarray) -> np.ndarray:
        return run(name, rmsnorm.forward(value, params[name + ".weight"], eps=config.rms_norm_eps))

    n = norm("input_layernorm", x)
    q, k, v = (project(f"self_attn.{name}_proj", n) for name in "qkv")
    if config.qk_norm:
        q, k = norm("self_attn.q_norm", q), norm("self_attn.k_norm", k)
    q, k = run("rope", rope.forward(q, k, cos, sin, head_dim=config.head_dim))
    if attend is not None:
        out = attend(q, k, v)
    else:
        attention_of = partial(
            attention.forward,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            window=window,
        )
        q, k, v = (a.reshape(batch, -1, a.shape[1]) for a in (q, k, v))
        out = run("attention", attention_of(q, k, v, segments, segments))
    h = run("add_1", add.forward(x, project("self_attn.o_proj", out.reshape(x.shape[0], -1))))

    m = norm("post_attention_layernorm", h)
    gate, up = project("mlp.gate_proj", m), project("mlp.up_proj", m)
    y = run("add_2", add.forward(h, project("mlp.down_proj", run("swiglu", swiglu.forward(gate, up)))))
    return y, saved


def layer_backward(saved: Mapping[str, Any], d_y: np.ndarray) -> tuple[np.ndarray, Gradients]:
    """d_y [N,C] -> (d_x [N,C], gradient of every parameter of the layer). A value that is read twice adds up."""
    grads: Gradients = {}

    def project(name: str, d_out: np.ndarray) -> np.ndarray:
        d_in, grads[name + ".weight"], d_bias = linear.backward(saved[name], d_out)
        if d_bias is not None:
            grads[name + ".bias"] = d_bias
        return d_in

    def norm(name: str, d_out: np.ndarray) -> np.ndarray:
        d_in, grads[name + ".weight"] = rmsnorm.backward(saved[name], d_out)
        return d_in

    d_h, d_down = add.backward(saved["add_2"], d_y)
    d_gate, d_up = swiglu.backward(saved["swiglu"], project("mlp.down_proj", d_down))
    d_m = project("mlp.gate_proj", d_gate) + project("mlp.up_proj", d_up)
    d_h = d_h + norm("post_attention_layernorm", d_m)

    d_x, d_o = add.backward(saved["add_1"], d_h)
    d_out = project("self_attn.o_proj", d_o)
    d_qkv = attention.backward(saved["attention"], d_out.reshape(saved["attention"][0].shape))
    d_q, d_k, d_v = (a.reshape(d_y.shape[0], -1) for a in d_qkv[:3])
    d_q, d_k = rope.backward(saved["rope"], d_q, d_k)[:2]
    if "self_attn.q_norm" in saved:
        d_q, d_k = norm("self_attn.q_norm", d_q), norm("self_attn.k_norm", d_k)
    d_n = project("self_attn.q_proj", d_q) + project("self_attn.k_proj", d_k) + project("self_attn.v_proj", d_v)
    return d_x + norm("input_layernorm", d_n), grads


def shifted_labels(labels: np.ndarray, segments: np.ndarray | None) -> np.ndarray:
    """labels int [B,T] unshifted -> [B,T]: the label of t+1 at t, -100 where the pair is not scored."""
    shifted = np.full(labels.shape, cross_entropy.IGNORE_INDEX, np.int64)
    shifted[:, :-1] = labels[:, 1:]
    if segments is not None:
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
        shifted[:, :-1][~same] = cross_entropy.IGNORE_INDEX
    return shifted


def default_positions(segments: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """int32 [B,T]: 0, 1, 2, ... within each run of one segment, 0 in padding."""
    index = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    if segments is None:
        return index.copy()
    starts = np.ones(shape, bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return np.where(segments >= 0, index - first, 0).astype(np.int32)


def forward(
    params: Params,
    config: ModelConfig,
    ids: np.ndarray,
    labels: np.ndarray,
    *,
    segments: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    valid_vocab: int | None = None,
) -> tuple[float, np.ndarray, np.ndarray, dict[str, Any]]:
    """ids and labels int [B,T] -> (mean loss, logits [N,V], argmax [N], saved). Full parameter names."""
    batch = ids.shape[0]
    embed = params["model.embed_tokens.weight"]
    positions = default_positions(segments, ids.shape) if positions is None else positions
    cos, sin = rope.table(positions.reshape(-1), *rope.inverse_frequencies(config.rope, config.head_dim), embed.dtype)
    x, saved_embed = embedding.forward(ids.reshape(-1), embed, padding_idx=config.pad_token_id)
    saved_layers = []
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}
        window = config.layer_windows[i] if config.layer_windows else None
        x, saved = layer_forward(x, layer, config, batch=batch, cos=cos, sin=sin, segments=segments, window=window)
        saved_layers.append(saved)
    normed, saved_norm = rmsnorm.forward(x, params["model.norm.weight"], eps=config.rms_norm_eps)
    logits, saved_head = linear.forward(normed, params.get("lm_head.weight", embed))
    targets = shifted_labels(labels, segments).reshape(-1)
    (loss, argmax), saved_loss = cross_entropy.forward(logits, targets, valid_vocab=valid_vocab)
    count = int((targets != cross_entropy.IGNORE_INDEX).sum())
    mean = float(loss.sum(dtype=np.float64)) / max(count, 1)
    saved_all = {
        "embed": saved_embed, "layers": saved_layers, "norm": saved_norm, "head": saved_head, "loss": saved_loss,
        "count": count, "tied": "lm_head.weight" not in params,
    }  # fmt: skip
    return mean, logits, argmax, saved_all


def backward(saved: Mapping[str, Any]) -> Gradients:
    """Gradient of the mean loss for every parameter (a tied head adds to model.embed_tokens.weight)."""
    grads: Gradients = {}
    logits, labels, _ = saved["loss"]
    d_loss = np.full(labels.shape, 1 / max(saved["count"], 1), logits.dtype)
    d_logits, _ = cross_entropy.backward(saved["loss"], d_loss)
    d_normed, d_head, _ = linear.backward(saved["head"], d_logits)
    d_x, grads["model.norm.weight"] = rmsnorm.backward(saved["norm"], d_normed)
    for i in reversed(range(len(saved["layers"]))):
        d_x, layer_grads = layer_backward(saved["layers"][i], d_x)
        grads |= {f"model.layers.{i}.{name}": value for name, value in layer_grads.items()}
    _, d_embed = embedding.backward(saved["embed"], d_x)
    if saved["tied"]:
        d_embed += d_head
    else:
        grads["lm_head.weight"] = d_head
    grads["model.embed_tokens.weight"] = d_embed
    return grads
