"""The graph: gradients add up where values are read twice, nothing is recorded that nobody needs, plans are right."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm import check, graph
from cupyllm.backend.base import Backend, Spec, fixed
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder, arena_layout
from cupyllm.graph import Node
from cupyllm.model.decoder import layer_nodes


def test_a_value_read_three_times_gets_three_gradients(backend: Backend) -> None:
    """y = (x + x) + (x + x) through shared values: d_x = 4 d_y exactly (powers of two)."""
    nodes = [
        Node("first", "add", ("x", "x"), ("a",)),
        Node("second", "add", ("a", "a"), ("y",)),
    ]
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    with Session(backend) as session:
        rec = Recorder.of(backend)
        values = {"x": session.put(x)}
        y, d_x = session.empty(Spec((3, 8), "float32")), session.empty(Spec((3, 8), "float32"))
        known, saved = graph.forward(rec, nodes, values, {}, {"y": y})
        result = graph.backward(rec, nodes, known, saved, {"y": session.put(x)}, {}, ["x"], {"x": d_x})
        assert result["x"] is d_x
        session.execute(rec)
        assert (session.get(y) == 4 * x).all() and (session.get(d_x) == 4 * x).all()


def test_gradients_of_frozen_parameters_are_not_computed(backend: Backend) -> None:
    """Only the parameters in d_params get launches of their own; the input's gradient is the same bits either way."""
    config = check.small_layer()
    x, params, d_y = check.layer_inputs(config, 5, "float32", 0)
    cos, sin = check.rope_tables(config, 5, np.float32)
    launches, gradients = [], []
    for trained in ([], ["self_attn.q_proj.weight"], list(params)):
        with Session(backend) as session:
            rec = Recorder.of(backend)
            values = {"x": session.put(x), "cos": session.put(cos), "sin": session.put(sin)}
            weights = {name: session.put(p) for name, p in params.items()}
            nodes = layer_nodes(config, 0, 1, 5, False)
            d_x = session.empty(Spec(x.shape, "float32"))
            known, saved = graph.forward(rec, nodes, values, weights)
            d_params = {name: session.empty(Spec(params[name].shape, "float32")) for name in trained}
            graph.backward(rec, nodes, known, saved, {"y": session.put(d_y)}, d_params, ["x"], {"x": d_x})
            session.execute(rec)
            launches.append(len(rec.launches))
            gradients.append(session.get(d_x).tobytes())
    assert launches[0] < launches[1] < launches[2]
    assert len(set(gradients)) == 1


def test_a_tail_of_the_list_without_gradient_is_skipped(backend: Backend) -> None:
    """A branch that leads nowhere costs no backward launch."""
    nodes = [Node("used", "add", ("x", "x"), ("y",)), Node("unused", "add", ("y", "y"), ("z",))]
    with Session(backend) as session:
        x = session.put(np.ones((2, 4), np.float32))
        rec = Recorder.of(backend)
        known, saved = graph.forward(rec, nodes, {"x": x}, {})
        before = len(rec.launches)
        graph.backward(rec, nodes, known, saved, {"y": x}, {}, ["x"])
        assert {launch.node for launch in rec.launches[before:]} == {"used.backward", "used.backward.sum"}


def test_layer_gradients_match_the_reference(backend: Backend) -> None:
    for finding in check.layer_parity(check.small_layer(), 33, backend, "float32"):
        print(finding)
        assert finding.ok, finding


def test_the_arena_is_smaller_than_the_sum_of_its_tensors() -> None:
    """Lifetimes are used: a layer's forward fits in well under half of what its values add up to."""
    config = check.small_layer()
    x, params, _ = check.layer_inputs(config, 64, "float32", 0)
    rec = Recorder(80)
    values = {
        name: fixed(256, shape, "float32") for name, shape in {"x": x.shape, "cos": (64, 8), "sin": (64, 8)}.items()
    }
    weights = {name: fixed(256, p.shape, "float32") for name, p in params.items()}
    y = fixed(256, x.shape, "float32")
    graph.forward(rec, layer_nodes(config, 0, 1, 64, False), values, weights, {"y": y})
    offsets, total = arena_layout(rec.launches)
    assert total < 0.5 * sum(storage.nbytes for storage in offsets)


def test_table_and_cost_name_every_node() -> None:
    config = check.small_layer()
    nodes = layer_nodes(config, 0, 1, 7, False)
    x, params, _ = check.layer_inputs(config, 7, "float32", 0)
    text = graph.table(nodes)
    values = {"x": Spec(x.shape, "float32"), "cos": Spec((7, 8), "float32"), "sin": Spec((7, 8), "float32")}
    costs = graph.cost(nodes, values, {name: Spec(p.shape, "float32") for name, p in params.items()})
    assert len(nodes) == 16 and set(costs) == {node.name for node in nodes}
    for node in nodes:
        assert node.name in text
    products = sum(p.size for p in params.values() if p.ndim == 2)
    matmuls = [costs[n.name] for n in nodes if n.op == "linear"]
    assert sum(forward.flops for forward, _ in matmuls) == 2 * 7 * products
    assert sum(backward.flops for _, backward in matmuls) == 4 * 7 * products


@pytest.mark.parametrize("batch, tokens", [(1, 1), (3, 1), (2, 5)])
def test_rows_are_seen_as_batches_by_attention_only(batch: int, tokens: int) -> None:
    config = check.small_layer()
    rows = batch * tokens
    values = {
        "x": Spec((rows, 48), "float32"),
        "cos": Spec((rows, 8), "float32"),
        "sin": Spec((rows, 8), "float32"),
        "segments": Spec((batch, tokens), "int32"),
    }
    _, params, _ = check.layer_inputs(config, 1, "float32", 0)
    specs = {name: Spec(p.shape, "float32") for name, p in params.items()}
    known = graph.infer(layer_nodes(config, 0, batch, tokens, True), values, specs)
    assert known["attended"].shape == (rows, 64) and known["y"].shape == (rows, 48)
