"""Chunked = whole, bit for bit in float32: a layer over a tail of rows, its keys and values from the whole."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm import check, graph, ops
from cupyllm.backend.base import Backend
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.model.decoder import layer_nodes

TOKENS = 70


@pytest.mark.parametrize("start", [1, 31, 32, 64, 69])
def test_a_tail_gives_the_rows_of_the_whole(start: int, backend: Backend) -> None:
    config = check.small_layer()
    x, params, _ = check.layer_inputs(config, TOKENS, "float32", 0)
    cos, sin = check.rope_tables(config, TOKENS, np.float32)
    whole = _run(backend, params, 0, TOKENS, {"x": x, "cos": cos, "sin": sin}, None)
    kv = {name: whole[name] for name in ("k_roped", "v")}
    tail = _run(backend, params, start, TOKENS, {"x": x, "cos": cos, "sin": sin}, kv)
    for name, rows in tail.items():
        assert rows.tobytes() == whole[name][start:].tobytes(), name


def _run(
    backend: Backend,
    params: dict[str, np.ndarray],
    start: int,
    stop: int,
    inputs: dict[str, np.ndarray],
    kv: dict[str, np.ndarray] | None,
) -> dict[str, np.ndarray]:
    """Every value of a layer over rows [start, stop); attention reads all keys, from `kv` or its own."""
    config = check.small_layer()
    rows = stop - start
    nodes = layer_nodes(config, 0, 1, rows, False)
    at = next(i for i, node in enumerate(nodes) if node.op == "attention")
    values = {name: array[start:stop] for name, array in inputs.items()}
    values |= _walk(backend, nodes[:at], values, params)
    attention = nodes[at]
    keys = [kv["k_roped"], kv["v"]] if kv else [values["k_roped"], values["v"]]
    operands = [a[None] for a in (values["q_roped"], *keys)]
    out = run_op(backend, ops.get("attention"), [*operands, None, None], attrs=attention.attrs).outputs[0]
    values["attended"] = out[0]
    values |= _walk(backend, nodes[at + 1 :], values, params)
    return {name: value for name, value in values.items() if value.shape[0] == rows}


def _walk(
    backend: Backend, nodes: list[graph.Node], values: dict[str, np.ndarray], params: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    with Session(backend) as session:
        rec = Recorder.of(backend)
        device = {name: session.put(value) for name, value in values.items()}
        weights = {name: session.put(p) for name, p in params.items()}
        specs = graph.infer(nodes, device, weights)
        names = [name for node in nodes for name in node.outputs]
        bind = {name: session.empty(specs[name], name) for name in names}
        graph.forward(rec, nodes, device, weights, bind)
        session.execute(rec)
        return {name: session.get(bind[name]) for name in names}
