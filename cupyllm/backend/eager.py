"""Run one op on NumPy arrays: what tests, grad-check and benchmarks need around a launcher.

Outputs and gradients are filled with NaN (integers: -1) before the run, so an element that a kernel does not write
cannot pass for a result. Where the backend can tell (the simulator), they count as never written, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.backend.base import NUMPY_DTYPE, Backend, Buffer, Spec, Tensor, fixed
from cupyllm.backend.record import Recorder, arena_layout, place
from cupyllm.ops.op import Op

CANARY = 0xFF  # every byte: NaN in all float formats, -1 in integers


@dataclass
class OpRun:
    """Host copies of what one call wrote."""

    outputs: list[np.ndarray]  # and behind them the inputs that the op writes in place
    d_inputs: list[np.ndarray | None]
    d_params: list[np.ndarray]


class Session:
    """Device arrays of one call, freed together."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.buffers: list[Buffer] = []

    def empty(self, spec: Spec, name: str = "") -> Tensor:
        """A device tensor filled with the canary."""
        buffer = self.backend.allocate(max(spec.nbytes, 1), name)
        self.buffers.append(buffer)
        spoil(self.backend, buffer.address, max(spec.nbytes, 1))
        return fixed(buffer.address, spec.shape, spec.dtype, name)

    def put(self, array: np.ndarray, name: str = "") -> Tensor:
        """A device copy of `array` (its dtype must be one that kernels know)."""
        array = np.ascontiguousarray(array)
        tensor = self.empty(Spec(array.shape, array.dtype.name), name)
        if array.size:
            self.backend.upload(tensor.address, array)
        return tensor

    def get(self, tensor: Tensor) -> np.ndarray:
        """A host copy."""
        array = np.empty(tensor.shape, NUMPY_DTYPE[tensor.dtype])
        if array.size:
            self.backend.download(array, tensor.address)
        return array

    def execute(self, rec: Recorder) -> None:
        """Place the recorder's temporaries in an arena, run every launch once and wait."""
        offsets, total = arena_layout(rec.launches)
        arena = self.backend.allocate(max(total, 1), "arena")
        try:
            spoil(self.backend, arena.address, max(total, 1))
            self.backend.run(self.backend.load(place(rec.launches, offsets, arena.address)))
            self.backend.synchronize()
        finally:
            arena.free()

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.free()
        self.buffers.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def spoil(backend: Backend, address: int, nbytes: int) -> None:
    """Fill with the canary; a backend that knows which bytes were written forgets that these were."""
    backend.fill(address, nbytes, CANARY)
    forget = getattr(backend, "forget", None)
    if forget is not None:
        forget(address, nbytes)


def run_op(
    backend: Backend,
    op: Op,
    inputs: Sequence[np.ndarray | None],
    params: Sequence[np.ndarray] = (),
    attrs: Mapping[str, Any] | None = None,
    d_outputs: Sequence[np.ndarray | None] | None = None,
    *,
    d_params: Sequence[np.ndarray] | None = None,
    forced: dict[str, str] | None = None,
    batch_invariant: bool = False,
) -> OpRun:
    """Forward, and backward when `d_outputs` is given and the op has one (Op.inference_only). `d_params`: starting
    values, which backward then adds to."""
    attrs = attrs or {}
    with Session(backend) as session:
        x = [None if a is None else session.put(a, f"input{i}") for i, a in enumerate(inputs)]
        w = [session.put(a, f"param{i}") for i, a in enumerate(params)]
        y = [session.empty(spec, f"output{i}") for i, spec in enumerate(op.infer(x, w, attrs))]
        rec = Recorder.of(backend, forced, batch_invariant)
        saved = op.forward(rec, x, w, y, attrs)
        dx: list[Tensor | None] = []
        dw: list[Tensor] = []
        if d_outputs is not None and not op.inference_only:
            dy = [None if a is None else session.put(a, f"d_output{i}") for i, a in enumerate(d_outputs)]
            dx = [
                session.empty(Spec(t.shape, t.dtype), f"d_input{i}") if t is not None and op.differentiable[i] else None
                for i, t in enumerate(x)
            ]
            if op.frozen:
                dw = []
            elif d_params is None:
                dw = [session.empty(Spec(t.shape, "float32"), f"d_param{i}") for i, t in enumerate(w)]
            else:
                dw = [session.put(a, f"d_param{i}") for i, a in enumerate(d_params)]
            op.backward(rec, saved, dy, dx, dw, attrs, accumulate=d_params is not None)
        session.execute(rec)
        return OpRun(
            [session.get(t) for t in (*y, *(x[i] for i in op.in_place)) if t is not None],
            [None if t is None else session.get(t) for t in dx],
            [session.get(t) for t in dw],
        )
