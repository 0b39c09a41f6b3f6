"""A decoder layer as a list of nodes.

y = h + down(silu(gate m) * up m),  m = post_attention_layernorm(h)
h = x + o(attention(rope(q_norm(q n)), rope(k_norm(k n)), v n)),  n = input_layernorm(x)

N = B*T rows, C hidden, HQ/HK query/KV heads, D head size, F feed-forward. Parameters are named as Hugging Face names
them, relative to the layer. Qwen2 and Llama are the same list without q_norm and k_norm, with biases where the
configuration has them.
"""

from __future__ import annotations

from cupyllm.config import ModelConfig
from cupyllm.graph import Node


def layer_nodes(config: ModelConfig, layer: int, batch: int, tokens: int, segments: bool) -> list[Node]:
    """Nodes from "x" [N,C] to "y" [N,C]; they read "cos", "sin" [N,D/2], and "segments" [B,T] when asked for."""
    eps = {"eps": config.rms_norm_eps}
    window = config.layer_windows[layer] if config.layer_windows else None
    segment_input = "segments" if segments else ""

    def linear(name: str, source: str, target: str, bias: bool) -> Node:
        params = (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)
        return Node(name.rsplit(".", 1)[1], "linear", (source,), (target,), params)

    nodes = [
        Node("input_layernorm", "rmsnorm", ("x",), ("n",), ("input_layernorm.weight",), eps),
        linear("self_attn.q_proj", "n", "q", config.qkv_bias),
        linear("self_attn.k_proj", "n", "k", config.qkv_bias),
        linear("self_attn.v_proj", "n", "v", config.qkv_bias),
    ]
    q, k = "q", "k"
    if config.qk_norm:
        nodes += [
            Node("q_norm", "rmsnorm", ("q",), ("q_normed",), ("self_attn.q_norm.weight",), eps),
            Node("k_norm", "rmsnorm", ("k",), ("k_normed",), ("self_attn.k_norm.weight",), eps),
        ]
        q, k = "q_normed", "k_normed"
    return [
        *nodes,
        Node("rope", "rope", (q, k, "cos", "sin"), ("q_roped", "k_roped"), (), {"head_dim": config.head_dim}),
        Node(
            "attention",
            "attention",
            ("q_roped", "k_roped", "v", segment_input, segment_input),
            ("attended",),
            (),
            {
                "num_heads": config.num_attention_heads,
                "num_kv_heads": config.num_key_value_heads,
                "scale": config.head_dim**-0.5,
                "causal": True,
                "window": window,
            },
            rows=(batch, tokens),
        ),
        linear("self_attn.o_proj", "attended", "o", config.o_bias),
        Node("attention_add", "add", ("x", "o"), ("h",)),
        Node("post_attention_layernorm", "rmsnorm", ("h",), ("m",), ("post_attention_layernorm.weight",), eps),
        linear("mlp.gate_proj", "m", "gate", config.mlp_bias),
        linear("mlp.up_proj", "m", "up", config.mlp_bias),
        Node("swiglu", "swiglu", ("gate", "up"), ("activated",)),
        linear("mlp.down_proj", "activated", "down", config.mlp_bias),
        Node("mlp_add", "add", ("h", "down"), ("y",)),
    ]
