"""Which parameters a model has: Hugging Face's names, with shapes, in the order in which a forward reads them.

Letters: V vocabulary, C hidden, HQ/HK query/KV heads, D head size, F feed-forward. Linear weights are [out, in].
"""

from __future__ import annotations

from cupyllm.config import ModelConfig

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """What precedes a layer's parameter names."""
    return f"model.layers.{layer}."


def layer_params(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of one layer (all layers are alike), names relative to the layer."""
    c, d, f = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    params: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (c,)}
    for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        params[f"self_attn.{name}.weight"] = (out, c)
        if config.qkv_bias:
            params[f"self_attn.{name}.bias"] = (out,)
    if config.qk_norm:
        params["self_attn.q_norm.weight"] = (d,)
        params["self_attn.k_norm.weight"] = (d,)
    params["self_attn.o_proj.weight"] = (c, q)
    if config.o_bias:
        params["self_attn.o_proj.bias"] = (c,)
    params["post_attention_layernorm.weight"] = (c,)
    for name, out, inner in (("gate_proj", f, c), ("up_proj", f, c), ("down_proj", c, f)):
        params[f"mlp.{name}.weight"] = (out, inner)
        if config.mlp_bias:
            params[f"mlp.{name}.bias"] = (out,)
    return params


def layer_names(config: ModelConfig, layer: int) -> list[str]:
    """Full names of a layer's parameters."""
    return [layer_prefix(layer) + name for name in layer_params(config)]


def head_name(config: ModelConfig) -> str:
    """Full name of the LM head's weight [V,C]: the embedding when tied."""
    return EMBED if config.tie_word_embeddings else HEAD


def model_params(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by full name; a tied model has no lm_head.weight."""
    params: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, config.hidden_size)}
    shapes = layer_params(config)
    for layer in range(config.num_hidden_layers):
        prefix = layer_prefix(layer)
        params.update((prefix + name, shape) for name, shape in shapes.items())
    params[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        params[HEAD] = (config.vocab_size, config.hidden_size)
    return params


def streamed_names(config: ModelConfig, num_layers: int | None = None) -> list[str]:
    """What a forward moves: the (first `num_layers`) layers, the final norm, the LM head; not the embedding's rows."""
    count = config.num_hidden_layers if num_layers is None else num_layers
    names = [name for layer in range(count) for name in layer_names(config, layer)]
    return [*names, FINAL_NORM, head_name(config)]
