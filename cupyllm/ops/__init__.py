"""Every op by name. Modules load on first use; none of them imports CuPy."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from cupyllm.ops.op import Op

# Ops that a graph node may name. adamw and grad_norm are launchers outside the graph (no backward of their own).
GRAPH_OPS = (
    *("embedding", "rmsnorm", "linear", "rope", "attention", "swiglu", "add", "cross_entropy"),
    "quantized_linear",  # frozen parameters: no gradients but of x
    *("kv_append", "paged_attention"),  # generation only: no backward (Op.inference_only)
)


@lru_cache(maxsize=None)
def get(name: str) -> Op:
    """The op called `name`; each module ops/<name>.py holds one instance, OP."""
    assert name in GRAPH_OPS, name
    op = import_module(f"cupyllm.ops.{name}").OP
    assert isinstance(op, Op)
    return op
