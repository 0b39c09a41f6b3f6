"""Run a Case of an op on a backend and judge it by the fp64 reference: what every test of an op is made of.

Error measure: relative L2, |got - want| / |want| over a whole tensor, with `want` the fp64 reference on the very values
that the kernel got. Tolerance (see `tolerance`): u is half an eps, u32 = 2^-24, u16 = 2^-8 for bfloat16.
- A sum of L terms in one sequence: the error of the i-th addition is at most u |S_i|, and for terms of random sign
  |S_i| grows as sqrt(i), so the errors add in quadrature to u sqrt(1^2 + .. + L)/sqrt(L) = u sqrt(L/2) relative.
- Two levels: runs of at most 128 terms, then ceil(L/128) partial sums: u (sqrt(64) + sqrt(L/256)), less for short L.
- `stages`: roundings of fp32 steps around the sums, each at most u32 (2 u32 for exp and the like).
- `roundings`: how often a value is rounded to the activation dtype, each at most u16 relative.
These are the sizes that a right kernel stays under, with a factor of 2 to 3 to spare in fp32 (rounding errors are
uniform, not extreme); a sum left in one sequence at L = 25600, or a value rounded once too often, does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from cupyllm import ops
from cupyllm.backend.base import ALIGNMENT, Backend, Buffer, Spec, Tensor, fixed
from cupyllm.backend.eager import CANARY, OpRun, run_op
from cupyllm.backend.record import Recorder
from cupyllm.ops.cases import FLOAT_DTYPES, Drawn, draw, draw_cotangents, op_attrs, reference_attrs, specs, widen
from cupyllm.ops.op import Case

U32 = 2.0**-24
U16 = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def tolerance(dtype: str, terms: int, *, roundings: int = 1, stages: int = 4) -> float:
    """Largest relative L2 error of a right kernel: `terms` is the length of its longest sum (derivation above)."""
    sums = math.sqrt(min(terms, 128) / 2) + math.sqrt(math.ceil(terms / 128) / 2)
    return U32 * (sums + stages) + roundings * U16.get(dtype, 0.0)


DTYPE_PAIRS = (  # activations, parameters
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "float16"),
)


def small_cases(op: str) -> list[Case]:
    return [case for case in ops.get(op).cases() if case.size == "small"]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error; the absolute one where `want` is all zero. inf where `got` is not finite and `want` is."""
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isfinite(got64), np.isfinite(want64)):
        return math.inf
    finite = np.isfinite(want64)
    norm = float(np.linalg.norm(want64[finite]))
    return float(np.linalg.norm(got64[finite] - want64[finite])) / (norm or 1.0)


class GuardedBackend:
    """A backend whose allocations lie between guard bytes, which no kernel may touch."""

    GUARD_BYTES = 4 * ALIGNMENT

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.broken: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def allocate(self, nbytes: int, name: str = "") -> Buffer:
        whole = self._backend.allocate(nbytes + 2 * self.GUARD_BYTES, name)
        self._backend.fill(whole.address, whole.nbytes, CANARY)
        return _Guarded(self, whole, nbytes, name)

    def inspect(self, whole: Buffer, nbytes: int, name: str) -> None:
        """Note in `broken` a guard that changed."""
        guard = np.empty(self.GUARD_BYTES, np.uint8)
        for side, offset in (("before", 0), ("behind", self.GUARD_BYTES + nbytes)):
            self._backend.download(guard, whole.address + offset)
            if not (guard == CANARY).all():
                self.broken.append(f"{name}: {int((guard != CANARY).sum())} bytes written {side} it")


class _Guarded:
    def __init__(self, guard: GuardedBackend, whole: Buffer, nbytes: int, name: str) -> None:
        self._guard, self._whole, self._name = guard, whole, name
        self.nbytes = nbytes
        self.address = whole.address + guard.GUARD_BYTES

    def free(self) -> None:
        self._guard.inspect(self._whole, self.nbytes, self._name)
        self._whole.free()


@dataclass
class Result:
    """One checked call. Tensors by name: output0.., d_input0.., d_param0.. (only those that exist)."""

    drawn: Drawn
    cotangents: list[np.ndarray | None] | None  # None: the op has no backward
    got: dict[str, np.ndarray]
    want: dict[str, np.ndarray]  # fp64; integers as they are
    errors: dict[str, float] = field(default_factory=dict)
    worst: float = 0.0


def reference(
    op: str, case: Case, drawn: Drawn, cotangents: Sequence[np.ndarray | None] | None
) -> dict[str, np.ndarray]:
    """The fp64 reference's outputs and gradients under the names of `Result`."""
    module = import_module(f"cupyllm.reference.{op}")
    outputs, saved = module.forward(*widen(drawn.inputs), *widen(drawn.params), **reference_attrs(case))
    want = _named("output", outputs if isinstance(outputs, tuple) else (outputs,))
    if cotangents is not None:
        gradients = module.backward(saved, *widen(cotangents))
        count = len(drawn.inputs)
        want |= _named("d_input", gradients[:count]) | _named("d_param", gradients[count:])
    return want


def run(
    backend: Backend,
    op: str,
    case: Case,
    drawn: Drawn,
    cotangents: Sequence[np.ndarray | None] | None,
    dtype: str,
    *,
    start: Sequence[np.ndarray] | None = None,
    forced: dict[str, str] | None = None,
) -> OpRun:
    """`run_op` between guard bytes; fails when a guard was touched. `start`: values that d_params are added to."""
    guarded = GuardedBackend(backend)
    attrs = op_attrs(op, case, dtype)
    instance = ops.get(op)
    done = run_op(guarded, instance, drawn.inputs, drawn.params, attrs, cotangents, d_params=start, forced=forced)
    assert not guarded.broken, f"{op} {case.name}: {guarded.broken}"
    return done


def check(
    backend: Backend,
    op: str,
    case: Case,
    dtype: str,
    weight_dtype: str | None = None,
    *,
    limit: float | dict[str, float],
    seed: int = 0,
    accumulate: bool = False,
    drawn: Drawn | None = None,
    forced: dict[str, str] | None = None,
) -> Result:
    """Forward and, where there is one, backward of `case` against the fp64 reference; asserts that each tensor's error
    is within `limit`.

    `limit`: one number, or numbers by tensor name with "" for the others. Integer outputs must be equal. With
    `accumulate` the parameter gradients are added to random values, and the sum is compared.
    """
    drawn = drawn or draw(case, dtype, weight_dtype, seed)
    attrs = op_attrs(op, case, dtype)
    out_specs = ops.get(op).infer(_specs(drawn.inputs), _specs(drawn.params), attrs)  # type: ignore[arg-type]
    cotangents = None if ops.get(op).inference_only else draw_cotangents(out_specs, seed + 1)
    rng = np.random.default_rng(seed + 2)
    start = [rng.standard_normal(p.shape).astype(np.float32) for p in drawn.params] if accumulate else None
    done = run(backend, op, case, drawn, cotangents, dtype, start=start, forced=forced)
    got = _named("output", done.outputs) | _named("d_input", done.d_inputs) | _named("d_param", done.d_params)
    want = reference(op, case, drawn, cotangents)
    for index, values in enumerate(start or []):
        want[f"d_param{index}"] = want[f"d_param{index}"] + values
    assert got.keys() == want.keys(), (op, case.name, sorted(got), sorted(want))
    result = Result(drawn, cotangents, got, want)
    for name, spec_array in got.items():
        assert spec_array.shape == want[name].shape, (op, case.name, name, spec_array.shape, want[name].shape)
        if np.issubdtype(spec_array.dtype, np.integer):
            np.testing.assert_array_equal(spec_array, want[name], f"{op} {case.name} {name}")
            continue
        result.errors[name] = relative_error(spec_array, want[name])
    assert got, f"{op} {case.name}: nothing was written, so nothing was compared"
    result.worst = max(result.errors.values())
    shown = ", ".join(f"{name} {error:.2e}" for name, error in result.errors.items())
    print(f"{op} {case.name} {dtype}/{weight_dtype or dtype}: {shown}")
    for name, error in result.errors.items():
        bound = limit if isinstance(limit, float) else limit.get(name, limit.get("", 0.0))
        assert error <= bound, f"{op} {case.name} {dtype}/{weight_dtype or dtype} {name}: {error:.3e} > {bound:.3e}"
    return result


def record(
    op: str,
    case: Case,
    dtype: str = "float32",
    weight_dtype: str | None = None,
    *,
    forced: dict[str, str] | None = None,
    capability: int = 80,
    want_inputs: bool = True,
    want_params: bool = True,
    accumulate: bool = False,
) -> Recorder:
    """What forward and backward of `case` record, on tensors without memory. Nothing runs."""
    instance, attrs = ops.get(op), op_attrs(op, case, dtype)
    rec = Recorder(capability, forced)

    def tensor(spec: Spec | None) -> Tensor | None:
        return None if spec is None else fixed(ALIGNMENT, spec.shape, spec.dtype)

    input_specs, param_specs = specs(case, dtype, weight_dtype)
    x, w = [tensor(spec) for spec in input_specs], [tensor(spec) for spec in param_specs]
    out_specs = instance.infer(x, w, attrs)  # type: ignore[arg-type]
    saved = instance.forward(rec, x, w, [tensor(spec) for spec in out_specs], attrs)  # type: ignore[arg-type, misc]
    if instance.inference_only:
        return rec
    d_outputs = [tensor(spec) if spec.dtype in FLOAT_DTYPES else None for spec in out_specs]
    wanted = [want_inputs and differentiable for differentiable in instance.differentiable]
    d_inputs = [t if want else None for t, want in zip(x, wanted, strict=True)]
    d_params = [tensor(Spec(spec.shape, "float32")) if want_params else None for spec in param_specs]
    instance.backward(rec, saved, d_outputs, d_inputs, d_params, attrs, accumulate)
    return rec


def kernel_names(rec: Recorder) -> list[str]:
    """Names of the recorded kernels without their dtype suffix, in order."""
    suffixes = [dict(launch.kernel.defines).get("SUFFIX", "") for launch in rec.launches]
    return [launch.kernel.symbol.removesuffix(suffix) for launch, suffix in zip(rec.launches, suffixes, strict=True)]


def assert_same_bits(a: np.ndarray, b: np.ndarray, what: str = "") -> None:
    """Equal shape, dtype and bits (NaN equals the same NaN, 0 differs from -0)."""
    assert a.shape == b.shape and a.dtype == b.dtype, what
    a_bytes = np.ascontiguousarray(a).view(np.uint8)
    assert np.array_equal(a_bytes, np.ascontiguousarray(b).view(np.uint8)), f"{what}: bits differ"


def assert_same_run(a: OpRun, b: OpRun, what: str = "") -> None:
    """Two calls that wrote the same bits everywhere."""
    ours, theirs = ((*run.outputs, *run.d_inputs, *run.d_params) for run in (a, b))
    for first, second in zip(ours, theirs, strict=True):
        assert (first is None) == (second is None), what
        if first is not None and second is not None:
            assert_same_bits(first, second, what)


def _named(prefix: str, arrays: Any) -> dict[str, np.ndarray]:
    return {f"{prefix}{index}": array for index, array in enumerate(arrays) if array is not None}


def _specs(arrays: Any) -> list[Spec | None]:
    return [None if a is None else Spec(a.shape, a.dtype.name) for a in arrays]
