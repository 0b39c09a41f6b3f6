"""Every kernel once or more, small shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck  python scripts/sanitize.py
    compute-sanitizer --tool racecheck python scripts/sanitize.py [OP ...]

Runs the small cases (up to one tile plus one) of every op, or of those named, forward and backward, in both activation
dtypes and by every variant that this GPU has, then (with no op named) a tiny model's loss and gradients, a norm and an
AdamW update. Results are not judged here; the tests do that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from cupyllm import ops
from cupyllm.backend.base import Spec
from cupyllm.backend.cuda import CudaBackend
from cupyllm.backend.eager import run_op
from cupyllm.cache import cached_synthetic
from cupyllm.check import small_layer
from cupyllm.config import ModelConfig
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.model.engine import DeviceEngine
from cupyllm.ops.cases import draw, draw_cotangents, op_attrs


def every_op(backend: CudaBackend, names: Sequence[str]) -> int:
    """Number of op calls made."""
    count = 0
    for name in names:
        op = ops.get(name)
        for case in (case for case in op.cases() if case.size == "small"):
            for dtype in ("float32", "bfloat16"):
                drawn, attrs = draw(case, dtype), op_attrs(name, case, dtype)
                inputs = [None if a is None else Spec(a.shape, a.dtype.name) for a in drawn.inputs]
                specs = op.infer(inputs, [Spec(p.shape, p.dtype.name) for p in drawn.params], attrs)
                present = [spec for spec in inputs if spec is not None]
                params = [Spec(p.shape, p.dtype.name) for p in drawn.params]
                for variant in op.variants:
                    if variant.library or not variant.runs_on(backend.capability):
                        continue
                    if variant.fits(present, params, attrs):
                        forced = {name: variant.name}
                        run_op(backend, op, drawn.inputs, drawn.params, attrs, draw_cotangents(specs), forced=forced)
                        count += 1
    return count


def tiny_model(backend: CudaBackend) -> None:
    """Forward, backward, norm and update of a two-layer model in both modes and dtypes."""
    config: ModelConfig = small_layer().with_layers(1)
    with Checkpoint.open(cached_synthetic(config, 0)) as checkpoint:
        ids = np.arange(66).reshape(2, 33) % config.vocab_size
        for dtype in ("float32", "bfloat16"):
            with DeviceEngine(checkpoint, backend, dtype) as engine:
                grads: dict[str, np.ndarray] = {}
                engine.forward(ids, labels=ids, mode="resident", want_logits=True)
                engine.loss_and_grads(ids, ids, grads.__setitem__)
                engine.sum_of_squares(grads)
                for gradient in grads.values():
                    arrays = [np.ones_like(gradient) for _ in range(3)]
                    engine.adamw(
                        arrays[0], gradient, arrays[1], arrays[2], lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8,
                        weight_decay=0.1, step=1, grad_scale=1.0,
                    )  # fmt: skip


def main() -> int:
    backend = CudaBackend()
    count = every_op(backend, sys.argv[1:] or ops.GRAPH_OPS)
    if len(sys.argv) == 1:
        tiny_model(backend)
    print(f"{count} op calls ran on {backend.device_name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
