"""Every small case of our ops, forward and backward, on the simulator with the checks on.

What a kernel computes is not judged here (the tests and grad-check do that), only whether it keeps CUDA's rules. The
two launchers outside the graph, adamw and grad_norm, have a few sizes around their tiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cupyllm import ops
from cupyllm.backend.base import Backend, Spec
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops import adamw, grad_norm
from cupyllm.ops.cases import draw, draw_cotangents, op_attrs, specs
from cupyllm.ops.op import ACTIVATION_DTYPES, Case, Op, Variant
from cupyllm.sim.report import Report, SimError

OUTSIDE = ("adamw", "grad_norm")
NAMES = (*ops.GRAPH_OPS, *OUTSIDE)
_SIZES = (1, 33, 255, 256, 257, grad_norm.CTA_ELEMENTS - 1, grad_norm.CTA_ELEMENTS, grad_norm.CTA_ELEMENTS + 1)


@dataclass
class Checked:
    """One case. `reports`: of the first launch that had any, which ends the case."""

    op: str
    variant: str
    case: str
    dtype: str
    seconds: float
    reports: tuple[Report, ...] = ()
    total: int = 0


def variants(op: str, wanted: str | None) -> list[str]:
    """The simulated variants of an op, or the wanted one. Raises InputError where there is none."""
    if op in OUTSIDE:
        known = [Variant("plain", f"{op}.cu")]
    else:
        known = list(ops.get(op).variants)
    if wanted is None:
        return [variant.name for variant in known if variant.simulated]
    found = next((variant for variant in known if variant.name == wanted), None)
    if found is None:
        names = ", ".join(variant.name for variant in known)
        raise InputError(f"--variant {wanted}: {op} has no such variant, expected one of {names}")
    if not found.simulated:
        raise InputError(f"--variant {wanted}: {found.why_not_simulated}; leave it out to check those that are")
    return [wanted]


def check_op(backend: Backend, op: str, variant: str, dtype: str) -> Iterator[Checked]:
    """Run the cases of `op` that the variant takes, one after another."""
    for case, call in _outside(op, backend, dtype) if op in OUTSIDE else _cases(op, variant, backend, dtype):
        began = time.perf_counter()
        checked = Checked(op, variant, case, dtype, 0.0)
        try:
            call()
        except SimError as error:
            checked.reports, checked.total = error.reports, error.total
        checked.seconds = time.perf_counter() - began
        yield checked


def record_adamw(session: Session, rec: Recorder, size: int, p16: str | None) -> None:
    """One step on drawn values. p16: dtype of the 16-bit copy, None for none."""
    p, g, m, v = (session.put(np.abs(_floats(size, seed))) for seed in range(4))
    numbers = adamw.pack_scalars(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=2)
    out = session.empty(Spec((size,), p16)) if p16 else None
    adamw.adamw(rec, p, g, m, v, session.put(numbers), out)


def record_grad_norm(session: Session, rec: Recorder, size: int) -> None:
    """The sum of squares of drawn values, and their scaling."""
    g = session.put(_floats(size))
    grad_norm.sum_of_squares(rec, g, session.empty(Spec((3,), "float64")), slot=1)
    grad_norm.scale(rec, g, session.put(grad_norm.as_factor(0.5)))


_Call = tuple[str, Callable[[], object]]


def dtypes(op: str, wanted: str | None) -> Sequence[str]:
    """Activation dtypes to check `op` in. adamw's are of its 16-bit copy, grad_norm has float32 only."""
    if op == "grad_norm":
        return ("float32",)
    return ACTIVATION_DTYPES if wanted is None else (wanted,)


def _cases(name: str, variant: str, backend: Backend, dtype: str) -> Iterator[_Call]:
    op = ops.get(name)
    for case in op.cases():
        if case.size == "small" and _fits(op, variant, case, dtype):
            yield case.name, lambda case=case: _run(backend, op, variant, case, dtype)  # type: ignore[misc]


def _fits(op: Op, variant: str, case: Case, dtype: str) -> bool:
    inputs, params = specs(case, dtype)
    chosen = next(v for v in op.variants if v.name == variant)
    return chosen.fits([spec for spec in inputs if spec is not None], params, op_attrs(op.name, case, dtype))


def _run(backend: Backend, op: Op, variant: str, case: Case, dtype: str) -> None:
    """Parameter gradients both written and added to, where there are any."""
    drawn, attrs = draw(case, dtype), op_attrs(op.name, case, dtype)
    inputs = [None if array is None else Spec(array.shape, array.dtype.name) for array in drawn.inputs]
    outputs = op.infer(inputs, [Spec(array.shape, array.dtype.name) for array in drawn.params], attrs)
    d_outputs = None if op.inference_only else draw_cotangents(outputs)
    starts = [None]
    if drawn.params and d_outputs is not None:
        starts.append([np.ones(array.shape, np.float32) for array in drawn.params])  # type: ignore[arg-type]
    for start in starts:
        run_op(backend, op, drawn.inputs, drawn.params, attrs, d_outputs, d_params=start, forced={op.name: variant})


def _outside(name: str, backend: Backend, dtype: str) -> Iterator[_Call]:
    def run(size: int) -> None:
        with Session(backend) as session:
            rec = Recorder.of(backend)
            _LAUNCHERS[name](session, rec, size, dtype)
            session.execute(rec)

    for size in _SIZES:
        yield f"n{size}", lambda size=size: run(size)  # type: ignore[misc]


def _adamw(session: Session, rec: Recorder, size: int, dtype: str) -> None:
    record_adamw(session, rec, size, "bfloat16" if dtype == "bfloat16" else None)


def _grad_norm(session: Session, rec: Recorder, size: int, dtype: str) -> None:
    record_grad_norm(session, rec, size)


def _floats(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


_LAUNCHERS = {"adamw": _adamw, "grad_norm": _grad_norm}
