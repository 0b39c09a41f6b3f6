"""The simulator and the GPU in one process, kernel by kernel: the same launches on the same bytes.

Kernels without approximate instructions must give equal bits. The simulator rounds an approximate function correctly,
the GPU is off by what the PTX manual allows; which kernels have one is read from their PTX. exp is made of ex2.approx,
2 ulp at most, and everything behind it scales with it: a relative L2 difference of 2^-20 in float32 (four such errors
in quadrature, twice over), and in 16 bits one rounding that falls the other way in a few elements: half a unit, 2^-9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Launch, Spec, Tensor
from cupyllm.backend.compile import compile_ptx_many
from cupyllm.backend.eager import OpRun, Session
from cupyllm.backend.record import Recorder
from cupyllm.backend.sim import SimBackend
from cupyllm.ops import adamw, grad_norm, linear_mma, linear_rows, rope
from cupyllm.ops.cases import draw, draw_cotangents, op_attrs, specs
from cupyllm.ops.op import Case
from cupyllm.sim import ptx
from tests.backend.every_kernel import every_kernel, every_mma_design, every_rows_design
from tests.ops import opcheck
from tests.simulated import new_simulator

APPROXIMATE = {"float32": 2.0**-20, "bfloat16": 2.0**-9}


@dataclass(frozen=True)
class Call:
    """One case of one variant of an op, for one pair of activation and parameter dtypes."""

    op: str
    variant: str
    case: Case
    dtype: str
    weight_dtype: str
    accumulate: bool

    def __str__(self) -> str:
        sign = "+=" if self.accumulate else "="
        return f"{self.op}-{self.variant}-{self.case.name}-{self.dtype}-{self.weight_dtype}-{sign}"

    def launches(self) -> list[Launch]:
        forced = {self.op: self.variant}
        rec = opcheck.record(
            self.op, self.case, self.dtype, self.weight_dtype, forced=forced, accumulate=self.accumulate
        )
        return rec.launches


def calls() -> Iterator[Call]:
    """Everything that differs: parameter dtypes and accumulation matter to ops with parameters only."""
    for name in ops.GRAPH_OPS:
        for variant in ops.get(name).variants:
            if not variant.simulated:
                continue
            for case in opcheck.small_cases(name):
                for dtype, weight_dtype in opcheck.DTYPE_PAIRS if case.params else _SAME:
                    inputs, params = specs(case, dtype, weight_dtype)
                    if variant.fits([spec for spec in inputs if spec is not None], params, case.attrs):
                        for accumulate in (False, True) if case.params else (False,):
                            yield Call(name, variant.name, case, dtype, weight_dtype, accumulate)


_SAME = (("float32", "float32"), ("bfloat16", "bfloat16"))
CALLS = list(calls())


@pytest.fixture(scope="module")
def devices() -> Iterator[tuple[SimBackend, Backend]]:
    from cupyllm.backend.cuda import CudaBackend

    cuda = CudaBackend()
    with new_simulator() as sim:
        yield sim, cuda
    cuda.close()


def is_approximate(launches: Sequence[Launch]) -> bool:
    """Whether one of the kernels uses an approximate instruction or a tensor core."""
    for spec, unit in compile_ptx_many({launch.kernel for launch in launches}).items():
        body = ptx.parse(unit.path.read_text()).kernels[spec.symbol].body
        if any(".approx" in i.opcode or i.opcode.startswith("mma") for i in body):
            return True
    return False


def compare(name: str, ours: np.ndarray, theirs: np.ndarray, approximate: bool) -> None:
    if not approximate or np.issubdtype(ours.dtype, np.integer):
        opcheck.assert_same_bits(ours, theirs, name)
        return
    error = opcheck.relative_error(ours, theirs.astype(np.float64))
    print(f"{name}: {error:.1e}")
    assert error <= APPROXIMATE[ours.dtype.name], (name, error)


def arrays(run: OpRun) -> dict[str, np.ndarray]:
    groups = {"output": run.outputs, "d_input": run.d_inputs, "d_param": run.d_params}
    return {f"{name}{i}": a for name, group in groups.items() for i, a in enumerate(group) if a is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_ops(devices: tuple[SimBackend, Backend], call: Call) -> None:
    op, case, forced = call.op, call.case, {call.op: call.variant}
    drawn = draw(case, call.dtype, call.weight_dtype)
    inputs, params = specs(case, call.dtype, call.weight_dtype)
    outputs = ops.get(op).infer(inputs, params, op_attrs(op, case, call.dtype))
    cotangents = None if ops.get(op).inference_only else draw_cotangents(outputs)
    rng = np.random.default_rng(2)
    start = [rng.standard_normal(p.shape).astype(np.float32) for p in drawn.params] if call.accumulate else None
    ours, theirs = (
        arrays(opcheck.run(device, op, case, drawn, cotangents, call.dtype, start=start, forced=forced))
        for device in devices
    )
    approximate = is_approximate(call.launches())
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        compare(f"{op} {case.name} {name}", array, theirs[name], approximate)


def both(
    devices: tuple[SimBackend, Backend],
    given: Sequence[np.ndarray],
    results: Sequence[Spec],
    record: Callable[[Recorder, list[Tensor], list[Tensor]], None],
) -> None:
    """Record a launcher on both devices and compare its results and what it may have changed of its inputs."""
    found, launches = [], []
    for device in devices:
        with Session(device) as session:
            x, y = [session.put(a) for a in given], [session.empty(spec) for spec in results]
            rec = Recorder(SimBackend.capability)
            record(rec, x, y)
            launches = rec.launches
            session.execute(rec)
            found.append([session.get(t) for t in (*x, *y)])
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        compare(f"{launches[0].kernel.symbol} array {i}", ours, theirs, is_approximate(launches))


@pytest.mark.gpu
@pytest.mark.parametrize("p16", [None, "bfloat16", "float16"])
def test_adamw(devices: tuple[SimBackend, Backend], p16: str | None) -> None:
    rng = np.random.default_rng(0)
    p, g, m = (rng.standard_normal(1000).astype(np.float32) for _ in range(3))
    scalars = adamw.pack_scalars(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)

    def record(rec: Recorder, x: list[Tensor], y: list[Tensor]) -> None:
        adamw.adamw(rec, *x, *(y or [None]))

    results = [] if p16 is None else [Spec((1000,), p16)]
    both(devices, [p, g, m, m * m, scalars], results, record)


@pytest.mark.gpu
def test_grad_norm(devices: tuple[SimBackend, Backend]) -> None:
    g = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    both(devices, [g, np.zeros(2)], [], lambda rec, x, y: grad_norm.sum_of_squares(rec, x[0], x[1]))
    factor = np.array([0.37], np.float32)
    both(devices, [g, factor], [], lambda rec, x, y: grad_norm.scale(rec, x[0], x[1]))


@pytest.mark.gpu
def test_rope_table(devices: tuple[SimBackend, Backend]) -> None:
    positions = np.array([0, 1, 2, 77, 4095, 40959, 131071], np.int32)
    frequencies = (1e6 ** (-np.arange(64) / 64)).astype(np.float32)
    table = Spec((7, 64), "float32")
    both(devices, [positions, frequencies], [table, table], lambda rec, x, y: rope.rope_table(rec, x[0], x[1], 1.0, *y))


@pytest.mark.gpu
def test_the_head(devices: tuple[SimBackend, Backend]) -> None:
    """float32 logits of bfloat16 activations."""
    rng = np.random.default_rng(3)
    linear = ops.get("linear")
    for weight_dtype in ("float32", "bfloat16", "float16"):
        drawn = draw(Case("head", ((3, 64),), ((320, 64),)), "bfloat16", weight_dtype)
        d_y = rng.standard_normal((3, 320)).astype(np.float32)

        def record(rec: Recorder, x: list[Tensor], y: list[Tensor]) -> None:
            attrs = {"out_dtype": "float32"}
            saved = linear.forward(rec, x[:1], x[1:2], y[:1], attrs)
            linear.backward(rec, saved, x[2:], y[1:2], y[2:], attrs, False)

        results = [Spec((3, 320), "float32"), Spec((3, 64), "bfloat16"), Spec((320, 64), "float32")]
        both(devices, [drawn.inputs[0], drawn.params[0], d_y], results, record)


MMA_DESIGNS = [(form, choice) for form in linear_mma.FORMS for choice in linear_mma.designs(form)]


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "choice"), MMA_DESIGNS, ids=str)
def test_designs_of_mma(devices: tuple[SimBackend, Backend], form: str, choice: Any) -> None:
    """Each tile and each width of copies, also where the chooser would take another."""
    a_mn, b_mn, dtype = linear_mma.FORMS[form]
    tile, _ = choice
    rows, cols, depth = (min(pair) for pair in zip((72, 136, 88), tile.most, strict=True))
    rng = np.random.default_rng(5)
    shapes = ((depth, rows) if a_mn else (rows, depth), (depth, cols) if b_mn else (cols, depth))
    a, b = (rng.standard_normal(shape).astype(NUMPY_DTYPE["bfloat16"]) for shape in shapes)

    def record(rec: Recorder, x: list[Tensor], y: list[Tensor]) -> None:
        linear_mma.product(rec, form, x[0], x[1], y[0], choice=choice)

    both(devices, [a, b], [Spec((rows, cols), dtype)], record)


@pytest.mark.gpu
@pytest.mark.parametrize("design", linear_rows.DESIGNS, ids=str)
@pytest.mark.parametrize("form", ["forward", "head"])
def test_designs_of_rows(devices: tuple[SimBackend, Backend], form: str, design: linear_rows.Design) -> None:
    """Each of them, k whole and in two slices."""
    rows, cols, depth = 8 * design.row_groups - 3, 50, 2 * design.chunk + 72
    while design.shared_bytes(rows, depth, 1) > linear_rows.SHARED_BYTES[SimBackend.capability]:
        rows, depth = rows - 1, design.chunk + 72
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(shape).astype(NUMPY_DTYPE["bfloat16"]) for shape in ((rows, depth), (cols, depth)))
    for slices in (1, 2):
        choice = linear_rows.Choice(design, slices, 2)

        def record(rec: Recorder, x: list[Tensor], y: list[Tensor], choice: linear_rows.Choice = choice) -> None:
            linear_rows.product(rec, form, x[0], x[1], y[0], choice=choice)

        both(devices, [a, b], [Spec((rows, cols), linear_mma.FORMS[form][2])], record)


def test_every_kernel_is_compared() -> None:
    """By test_ops, or by one of the tests of the launchers outside the graph."""
    compared = {launch.kernel for call in CALLS for launch in call.launches()}
    compared |= {launch.kernel for launch in every_mma_design(SimBackend.capability)}
    compared |= {launch.kernel for launch in every_rows_design(SimBackend.capability)}
    missing = {spec.symbol for spec in every_kernel(SimBackend.capability) if spec not in compared}
    # Other designs of quantised products have the bits of these, or limits of their own: test_quantized_*.py
    outside = ("adamw_", "sum_of_squares_", "scale_", "rope_table", "linear_", "quantized_mma_", "quantized_rows_")
    assert not {symbol for symbol in missing if not symbol.startswith(outside)}
    # The head's logits; tiles of tf32x3, which all have the same bits (test_linear_tf32.py, on both devices).
    linear = {symbol for symbol in missing if symbol.startswith("linear_") and not symbol.startswith("linear_tf32_")}
    assert all("_float32" in symbol for symbol in linear)
