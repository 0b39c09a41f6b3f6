"""What holds for every op, from its own variants and cases; a new op is covered without a line here."""

from __future__ import annotations

import itertools
import math
import re
from importlib import import_module
from pathlib import Path

import pytest

import cupyllm
from cupyllm import ops
from cupyllm.backend.base import Backend, Spec
from cupyllm.backend.record import Recorder
from cupyllm.ops.cases import op_attrs, specs
from cupyllm.ops.op import ACTIVATION_DTYPES, SIMULATED_CAPABILITY, Case, Cost, InferenceOp, Variant
from tests.ops import opcheck
from tests.simulated import left_out

PACKAGE = Path(cupyllm.__file__).parent
TESTS = Path(__file__).parent
NOT_OPS = {
    "ops": {"__init__", "op", "cases"},
    "reference": {"__init__", "qwen3", "engine", "runner"},
    "tests": {"every_op", "cases"},
}
APART = {"rope_table"}  # launched once a batch, outside the graph; tested by its op's own tests
FASTER = re.compile(r"(_(sm\d+|mma|skinny|sum|rows|tf32|cublas))+$")
SHORT = {"quantized": "quantized_linear"}  # quantized_rows.cu belongs to quantized_linear
KERNEL = re.compile(r"^KERNEL\((\w+)\)", re.MULTILINE)
ALL_CASES = [(op, case) for op in ops.GRAPH_OPS for case in ops.get(op).cases()]
CASES = [(op, case) for op, case in ALL_CASES if case.size == "small"]
# of kernels of ours: a library's have tests of their own
VARIANTS = [(op, variant) for op in ops.GRAPH_OPS for variant in ops.get(op).variants if not variant.library]


def label(value: object) -> str:
    return value.name if isinstance(value, (Case, Variant)) else str(value)


def op_of(stem: str) -> str:
    """The op that a file belongs to."""
    base = FASTER.sub("", stem)
    return SHORT.get(base, base)


def limit(case: Case, dtype: str) -> float:
    """No sum is longer than the largest dimension; two sums may follow each other (a norm's gradient, attention's), a
    result may be rounded twice, and 32 rounded steps are more than any op has. Each op's own tests are tighter."""
    longest = max(max(shape, default=1) for shape in (*case.inputs, *case.params))
    return 2 * opcheck.tolerance("float32", longest, stages=32) + 2 * opcheck.U16.get(dtype, 0.0)


def test_an_op_is_four_same_named_files() -> None:
    found = {
        # linear_sm90.cu lies beside linear.cu and belongs to the same op, as do its launcher and its tests
        "cu": {op_of(path.stem) for path in (PACKAGE / "cu").glob("*.cu")},
        "ops": {op_of(path.stem) for path in (PACKAGE / "ops").glob("*.py")} - NOT_OPS["ops"],
        "reference": {path.stem for path in (PACKAGE / "reference").glob("*.py")} - NOT_OPS["reference"],
        "tests": {op_of(path.stem.removeprefix("test_")) for path in TESTS.glob("test_*.py")} - NOT_OPS["tests"],
    }
    every = set().union(*found.values())
    missing = {folder: sorted(every - names) for folder, names in found.items() if every - names}
    assert not missing, f"an op is cu/X.cu, ops/X.py, reference/X.py and tests/ops/test_X.py; missing: {missing}"
    assert set(ops.GRAPH_OPS) <= every


@pytest.mark.parametrize("op", ops.GRAPH_OPS)
def test_cases_cover_small_and_model_sizes(op: str) -> None:
    instance = ops.get(op)
    assert instance.name == op
    names = [case.name for case in instance.cases()]
    assert len(set(names)) == len(names), "two cases share a name"
    sizes = [case.size for case in instance.cases()]
    assert sizes.count("small") >= 5 and sizes.count("model") >= 1 and set(sizes) == {"small", "model"}


@pytest.mark.parametrize("op", ops.GRAPH_OPS)
def test_an_op_without_a_backward_says_so(op: str) -> None:
    """On both sides, so that a forgotten backward cannot pass for an op of generation. What it writes is compared."""
    instance = ops.get(op)
    reference = import_module(f"cupyllm.reference.{op}")
    assert instance.inference_only == isinstance(instance, InferenceOp) == (not hasattr(reference, "backward"))
    if instance.inference_only:
        assert not any(instance.differentiable)
        with pytest.raises(AssertionError, match=f"{op} is for inference only"):
            instance.backward(Recorder(80), (), [], [], [], {}, False)
    for case in instance.cases():
        inputs, params = specs(case)
        assert len(inputs) == len(instance.differentiable)
        assert instance.infer(inputs, params, op_attrs(op, case, "float32")) or instance.in_place


@pytest.mark.parametrize("op", ops.GRAPH_OPS)
def test_last_variant_fits_everything(op: str) -> None:
    """The plain one: it is what every GPU can run."""
    instance = ops.get(op)
    last = instance.variants[-1]
    assert last.name == "plain" and last.min_capability == 80
    for case in instance.cases():
        inputs, params = specs(case)
        assert last.fits([spec for spec in inputs if spec is not None], params, case.attrs), case.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "case"), CASES, ids=label)
def test_forward_and_backward_match_the_reference(backend: Backend, op: str, case: Case, dtype: str) -> None:
    """On every variant that this device can run and that takes the case."""
    inputs, params = specs(case, dtype)
    present = [spec for spec in inputs if spec is not None]
    ran = 0
    for variant in (variant for name, variant in VARIANTS if name == op):
        able = variant.runs_on(backend.capability, backend.tensor_cores)
        if not able or not variant.fits(present, params, op_attrs(op, case, dtype)):
            continue
        opcheck.check(backend, op, case, dtype, limit=limit(case, dtype), forced={op: variant.name})
        ran += 1
    assert ran


@pytest.mark.parametrize(("op", "variant"), VARIANTS, ids=label)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_simulator_runs_every_variant_it_can_at_several_shapes(op: str, variant: Variant, dtype: str) -> None:
    """The test above leaves none of them out there: one element, an odd shape, and both sides of a tile's edge."""
    if not variant.simulated:
        assert not variant.runs_on(SIMULATED_CAPABILITY)  # `doctor --variants` lists it as not simulated
        return
    name = test_forward_and_backward_match_the_reference.__name__
    run = []
    for case in opcheck.small_cases(op):
        inputs, params = specs(case, dtype)
        present = [spec for spec in inputs if spec is not None]
        fits = variant.fits(present, params, op_attrs(op, case, dtype))
        if fits and not left_out(name, f"sim-{op}-{case.name}-{dtype}"):
            run.append(case.name)
    if variant.tensor_cores and (dtype == "float32") != (variant.name == "tf32x3"):
        assert not run, "tensor cores take bfloat16, or float32 split"
        return
    assert len(run) >= 5, run
    if variant.name == "plain":
        assert any("one" in case for case in run) and any("-1" in case for case in run), run


@pytest.mark.parametrize(("op", "variant"), VARIANTS, ids=label)
def test_every_kernel_of_a_variant_is_reached(op: str, variant: Variant) -> None:
    """By the small cases, so that nothing is shipped that the test above does not run."""
    source = (PACKAGE / "cu" / variant.source).read_text(encoding="utf-8")
    reached: set[str] = set()
    for case, dtype in itertools.product(opcheck.small_cases(op), ACTIVATION_DTYPES):
        inputs, params = specs(case, dtype)
        if not variant.fits([spec for spec in inputs if spec is not None], params, op_attrs(op, case, dtype)):
            continue
        rec = opcheck.record(op, case, dtype, forced={op: variant.name}, capability=variant.min_capability)
        assert set(rec.chosen.values()) == {variant.name}
        reached |= {
            name
            for name, launch in zip(opcheck.kernel_names(rec), rec.launches, strict=True)
            if launch.kernel.source == variant.source
        }
    assert set(KERNEL.findall(source)) - APART == reached


@pytest.mark.parametrize(("op", "case"), ALL_CASES, ids=label)
def test_cost_is_plausible(op: str, case: Case) -> None:
    """At least the bytes of the outputs, which must be written; model sizes included, and no array is drawn."""
    instance = ops.get(op)
    inputs, params = specs(case, "bfloat16")
    attrs = op_attrs(op, case, "bfloat16")
    outputs = instance.infer(inputs, params, attrs)
    forward, backward = instance.cost(inputs, params, attrs)
    if instance.inference_only:
        assert backward == Cost(0.0, 0.0)
    for cost in (forward,) if instance.inference_only else (forward, backward):
        assert math.isfinite(cost.flops) and cost.flops >= 0
        assert math.isfinite(cost.bytes) and cost.bytes > 0
    assert forward.bytes >= sum(spec.nbytes for spec in outputs)
    assert all(isinstance(spec, Spec) for spec in outputs)
