"""The explicit op graph: a list of nodes, walked forward to compute and backward to differentiate.

No tape, no hooks, no globals. Walking records launches (backend/record.py); running the record is the backend's work.
The gradient of a value that several nodes read is the sum of what they send back, added in reverse node order, so the
order is fixed by the list alone. Recomputation is walking the list again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cupyllm import ops
from cupyllm.backend.base import Spec, Tensor
from cupyllm.backend.record import Recorder
from cupyllm.ops.op import Cost

Saved = dict[str, tuple[Tensor | None, ...]]
AnySpec = TypeVar("AnySpec", bound=Spec)


@dataclass(frozen=True)
class Node:
    """One op call. Values are named; "" stands for an absent optional input.

    `rows` = (B, T) makes the op see floating-point [B*T, W] values as [B, T, W]; everything else in a decoder layer
    works on rows alone.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[int, int] | None = None


def forward(
    rec: Recorder,
    nodes: Sequence[Node],
    values: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    bind: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Saved]:
    """Record every node in order.

    `values`: the list's inputs by name. `bind`: tensors that chosen outputs must be written to (others go to the
    arena). Returns all values by name, and what each node saved for its backward.
    """
    known = dict(values)
    saved: Saved = {}
    for node in nodes:
        rec.node, op = node.name, ops.get(node.op)
        inputs = [_seen(known[name], node) if name else None for name in node.inputs]
        weights = [params[name] for name in node.params]
        specs = op.infer(inputs, weights, node.attrs)
        outputs = []
        for name, spec in zip(node.outputs, specs, strict=True):
            tensor = (bind or {}).get(name)
            if tensor is None:
                tensor = rec.empty(spec.shape, spec.dtype, name)
            assert tensor.size == spec.size and tensor.dtype == spec.dtype, (node.name, name, tensor, spec)
            outputs.append(tensor.view(*spec.shape))
        saved[node.name] = op.forward(rec, inputs, weights, outputs, node.attrs)
        for name, tensor in zip(node.outputs, outputs, strict=True):
            known[name] = _flat(tensor, node)
    return known, saved


def backward(
    rec: Recorder,
    nodes: Sequence[Node],
    values: Mapping[str, Tensor],
    saved: Saved,
    d_values: Mapping[str, Tensor],
    d_params: Mapping[str, Tensor],
    wanted: Iterable[str] = (),
    bind: Mapping[str, Tensor] | None = None,
    accumulate: bool = False,
) -> dict[str, Tensor]:
    """Record the backward of a recorded forward.

    `d_values`: gradients of the list's results. `wanted`: list inputs whose gradients are returned; `bind` says where
    chosen gradients are written. `d_params`: float32 tensors written (=), or added to (+=) with `accumulate`; a
    parameter absent from it (frozen) gets no gradient.
    """
    produced = {name for node in nodes for name in node.outputs}
    wanted = set(wanted)
    bind = bind or {}
    remaining = dict.fromkeys(wanted | bind.keys(), 0)
    live = _live(nodes, d_values)
    for node in live:
        for index, name in enumerate(node.inputs):
            if name in remaining and ops.get(node.op).differentiable[index]:
                remaining[name] += 1
    gradients: dict[str, Tensor] = dict(d_values)
    add = ops.get("add")
    for node in reversed(live):
        rec.node, op = node.name + ".backward", ops.get(node.op)
        d_outputs = [_seen(gradients[n], node) if n in gradients else None for n in node.outputs]
        sent: list[tuple[str, Tensor]] = []
        d_inputs: list[Tensor | None] = []
        for index, name in enumerate(node.inputs):
            if not name or not op.differentiable[index] or not (name in produced or name in wanted):
                d_inputs.append(None)
                continue
            only = remaining.get(name, 0) == 1 and name not in gradients
            target = bind.get(name) if only else None
            spec = values[name]
            tensor = target or rec.empty(spec.shape, spec.dtype, f"d_{name}")
            sent.append((name, tensor))
            d_inputs.append(_seen(tensor, node))
        targets = [d_params.get(name) for name in node.params]
        op.backward(rec, saved[node.name], d_outputs, d_inputs, targets, node.attrs, accumulate)
        for name, tensor in sent:
            if name in remaining:
                remaining[name] -= 1
            if name not in gradients:
                gradients[name] = tensor
                continue
            rec.node = f"{node.name}.backward.sum"
            last = remaining.get(name, -1) == 0
            total = (bind.get(name) if last else None) or rec.empty(tensor.shape, tensor.dtype, f"d_{name}")
            add.forward(rec, [gradients[name], tensor], [], [total], {})
            gradients[name] = total
    return {name: gradients[name] for name in wanted if name in gradients}


def infer(nodes: Sequence[Node], values: Mapping[str, Spec], params: Mapping[str, Spec]) -> dict[str, Spec]:
    """Specs of every value, without recording anything."""
    known: dict[str, Spec] = dict(values)
    for node in nodes:
        inputs = [_seen(known[name], node) if name else None for name in node.inputs]
        specs = ops.get(node.op).infer(inputs, [params[name] for name in node.params], node.attrs)
        for name, spec in zip(node.outputs, specs, strict=True):
            known[name] = Spec(_flat_shape(spec, node), spec.dtype)
    return known


def cost(nodes: Sequence[Node], values: Mapping[str, Spec], params: Mapping[str, Spec]) -> dict[str, tuple[Cost, Cost]]:
    """Forward and backward cost of each node by name."""
    known = infer(nodes, values, params)
    return {
        node.name: ops.get(node.op).cost(
            [_seen(known[name], node) if name else None for name in node.inputs],
            [params[name] for name in node.params],
            node.attrs,
        )
        for node in nodes
    }


def table(nodes: Sequence[Node]) -> str:
    """The list as readable text, one node a line."""
    rows = [(n.name, n.op, ", ".join(filter(None, n.inputs)), ", ".join(n.params), ", ".join(n.outputs)) for n in nodes]
    rows.insert(0, ("node", "op", "inputs", "params", "outputs"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, (*widths, 0), strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _live(nodes: Sequence[Node], d_values: Mapping[str, Tensor]) -> list[Node]:
    """The nodes that a gradient reaches, in order: a branch that leads to no seeded value has none to send back."""
    reached, live = set(d_values), []
    for node in reversed(nodes):
        if reached.isdisjoint(node.outputs):
            continue
        live.append(node)
        reached.update(name for index, name in enumerate(node.inputs) if ops.get(node.op).differentiable[index])
    return live[::-1]


def _seen(value: AnySpec, node: Node) -> AnySpec:
    """The value as the op sees it."""
    if node.rows is None or value.dtype == "int32" or len(value.shape) != 2:
        return value
    shape = (*node.rows, value.shape[1])
    return value.view(*shape) if isinstance(value, Tensor) else Spec(shape, value.dtype)  # type: ignore[return-value]


def _flat_shape(spec: Spec, node: Node) -> tuple[int, ...]:
    return spec.shape if node.rows is None else (spec.shape[0] * spec.shape[1], *spec.shape[2:])


def _flat(tensor: Tensor, node: Node) -> Tensor:
    return tensor.view(*_flat_shape(tensor, node))
