"""quantized_linear: the plain kernels everywhere, rows on the checking simulator and on GPUs; choices and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.base import Backend, Spec, fixed
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.errors import InputError
from cupyllm.ops import quantized_rows
from cupyllm.ops.cases import draw, specs
from cupyllm.ops.op import Case
from cupyllm.ops.quantized_rows import CLUSTERS, DESIGNS, MAX_ROWS, SHARED_BYTES, Choice, Design, choose, row_groups
from cupyllm.quant import int4, int8, layout, nf4
from cupyllm.reference import quantized_linear as reference
from tests.ops import opcheck
from tests.simulated import KERNELS

NAME = "quantized_linear"
OP = ops.get(NAME)
CASES = opcheck.small_cases(NAME)
FORMATS = ("int8", "int4", "nf4", "nf4 double")
PLAIN = {NAME: "plain"}
CAPABILITIES = (80, 86, 89, 90, 100, 120, 121)


def by_name(case: Case) -> str:
    return case.name


def a_case(format: str, num_rows: int, num_out: int, depth: int) -> Case:
    """Parameters drawn in the device layout, padding and all."""
    found = next(case for case in CASES if case.name == f"{format}, few rows")
    name, groups = format.split()[0], {"int4": 128, "nf4": 64}
    blocks = -(-num_out // 16)
    codes = layout.codes_shape(name, num_out, depth)
    scales = (num_out,) if name == "int8" else (blocks, depth // groups[name], 16)
    nested = ((257 + -(-num_out * depth // 64 // 256),),) if "double" in format else ()
    attrs = {"format": name, "out_features": num_out}
    return Case("made", ((num_rows, depth),), (codes, scales, *nested), attrs, param_kinds=found.param_kinds)


# ---- the plain kernels ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_plain_matches_the_reference(backend: Backend, case: Case, dtype: str) -> None:
    """The weight is rounded once where it is decoded, twice where its absmax is: within the stages of a sum."""
    longest = max(case.inputs[0][1], case.attrs["out_features"])
    opcheck.check(backend, NAME, case, dtype, limit=opcheck.tolerance(dtype, longest), forced=PLAIN)


def test_plain_writes_float32_logits_of_bfloat16(backend: Backend) -> None:
    case = a_case("int4", 5, 33, 256)
    drawn, attrs = draw(case, "bfloat16"), {**case.attrs, "out_dtype": "float32"}
    d_y = np.random.default_rng(3).standard_normal((5, 33)).astype(np.float32)
    done = run_op(backend, OP, drawn.inputs, drawn.params, attrs, [d_y], forced=PLAIN)
    want = opcheck.reference(NAME, case, drawn, [d_y])
    assert done.outputs[0].dtype == np.float32 and done.d_inputs[0] is not None and done.d_params == []
    assert opcheck.relative_error(done.outputs[0], want["output0"]) < opcheck.tolerance("float32", 256)
    assert opcheck.relative_error(done.d_inputs[0], want["d_input0"]) < opcheck.tolerance("bfloat16", 33)


def test_plain_sums_a_long_row_in_two_levels(backend: Backend) -> None:
    """A sum left in one sequence has five times the error at this length."""
    case = a_case("int8", 2, 3, 25600)
    opcheck.check(backend, NAME, case, "float32", limit=opcheck.tolerance("float32", 25600), forced=PLAIN)


@pytest.mark.parametrize("format", FORMATS)
def test_plain_bits_do_not_depend_on_the_number_of_rows(backend: Backend, format: str) -> None:
    case = a_case(format, 70, 20, 128)
    drawn = draw(case, "bfloat16")
    x = drawn.inputs[0]
    assert x is not None
    whole = run_op(backend, OP, [x], drawn.params, case.attrs, forced=PLAIN).outputs[0]
    for rows in (slice(0, 1), slice(69, 70), slice(3, 9)):
        part = run_op(backend, OP, [x[rows].copy()], drawn.params, case.attrs, forced=PLAIN).outputs[0]
        opcheck.assert_same_bits(part, whole[rows], str(rows))


def test_padding_of_the_layout_is_not_read_as_weight(backend: Backend) -> None:
    """Packed weights of 17 x 100: rows 17 to 31 and k 100 to 127 are padding, which may hold anything."""
    rng = np.random.default_rng(0)
    packed = layout.pack(int8.quantize(rng.standard_normal((17, 100))))
    x = rng.standard_normal((3, 100)).astype(np.float32)
    attrs, d_y = {"format": "int8", "out_features": 17}, rng.standard_normal((3, 17)).astype(np.float32)
    clean = run_op(backend, OP, [x], packed, attrs, [d_y], forced=PLAIN)
    spoilt = packed[0].copy()
    everything = layout.Int8(np.full((32, 128), 99, np.int8), packed[1])
    inside = layout.Int8(np.pad(np.ones((17, 100), np.int8), ((0, 15), (0, 28))), packed[1])
    padding = layout.pack(inside)[0] == 0
    spoilt[padding] = layout.pack(everything)[0][padding]
    assert (spoilt != packed[0]).sum() == 32 * 128 - 17 * 100
    opcheck.assert_same_run(clean, run_op(backend, OP, [x], (spoilt, packed[1]), attrs, [d_y], forced=PLAIN))


@pytest.mark.parametrize("double", [False, True])
def test_a_bitsandbytes_weight_gives_its_dequantised_product(backend: Backend, double: bool) -> None:
    """From codec to product: what a checkpoint goes through."""
    rng = np.random.default_rng(4)
    weight = nf4.quantize(rng.standard_normal((33, 320)), double)
    x = rng.standard_normal((5, 320)).astype(np.float32)
    attrs = {"format": "nf4", "out_features": 33}
    got = run_op(backend, OP, [x], layout.pack(weight), attrs, forced=PLAIN).outputs[0]
    want = x.astype(np.float64) @ nf4.dequantize(weight).astype(np.float64).T
    assert opcheck.relative_error(got, want) < opcheck.tolerance("float32", 320)


# ---- rows ----


@pytest.fixture(scope="module", params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made: Backend
    if request.param == "sim":
        from cupyllm.backend.sim import SimBackend

        made = SimBackend(cache=KERNELS)
    else:
        from cupyllm.backend.cuda import CudaBackend

        made = CudaBackend()
    yield made
    made.close()


def rows_product(backend: Backend, case: Case, choice: Choice, out: str = "bfloat16", seed: int = 0) -> np.ndarray:
    drawn = draw(case, "bfloat16", seed=seed)
    (num_rows, _), num_out = case.inputs[0], case.attrs["out_features"]
    with Session(backend) as session:
        rec = Recorder.of(backend)
        assert drawn.inputs[0] is not None
        x, params = session.put(drawn.inputs[0]), [session.put(param) for param in drawn.params]
        y = session.empty(Spec((num_rows, num_out), out))
        form = "forward" if out == "bfloat16" else "head"
        quantized_rows.product(rec, form, case.attrs["format"], x, params, y, choice=choice)
        session.execute(rec)
        return session.get(y)


def rows_limit(format: str, depth: int, out: str) -> float:
    """Relative to `scale`. One rounding where y is bfloat16; nf4's levels are off by 1.2e-3 of them (relative L2 over
    uniform indices; 0.8e-3 over a Gaussian's); sums of a group by the tensor core, then of groups. int4's sums are of
    16 + n, whose root mean square is 4 times that of n - zero, but within a group of 128 alone: they stay below."""
    levels = 1.6e-3 if format.startswith("nf4") else 0.0
    rounding = opcheck.U16["bfloat16"] if out == "bfloat16" else 0.0
    return levels + rounding + opcheck.tolerance("float32", depth, roundings=0)


def scaled_error(got: np.ndarray, want: np.ndarray, case: Case) -> float:
    """L2 error over the root of the sums of squared products: a sum may cancel to much less than its terms."""
    drawn, num_out, depth = draw(case, "bfloat16"), case.attrs["out_features"], case.inputs[0][1]
    codes, scales, nested = (*drawn.params, None)[:3]
    assert drawn.inputs[0] is not None and codes is not None and scales is not None
    weight = reference.decode(codes, scales, nested, case.attrs["format"], num_out, depth)
    squares = drawn.inputs[0].astype(np.float64) ** 2 @ (weight**2).T
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.sqrt(squares.sum()))


EXTENTS = {"int8": (640, 1032, 264), "int4": (640, 1024, 128), "nf4": (640, 1088, 64)}


TALL = (Design(1, 4, 3, 1), Design(2, 2, 2, 2))  # warps with several blocks, whatever DESIGNS has


@pytest.mark.parametrize("format", FORMATS)
def test_rows_match_the_reference(device: Backend, format: str) -> None:
    """Each design; 1 to 16 rows, blocks that fill no pass, K that fills no step, slices, float32 logits."""
    number = FORMATS.index(format)
    depths = EXTENTS[format.split()[0]]
    shapes = (
        (1, 1, 0, 1, 1),
        (3, 33, 0, 1, 2),
        (8, 100, 1, 2, 1),
        (9, 50, 1, 1, 3),
        (16, 17, 2, 1, 1),
        (13, 170, 0, 1, 1),
    )
    for rows, cols, depth, slices, groups in shapes:
        for design in (*DESIGNS[number, row_groups(rows)], *TALL):
            case = a_case(format, rows, cols, depths[depth])
            taken = Choice(design, min(slices, design.chunks(depths[depth])), groups)
            for out in ("bfloat16", "float32") if rows == 3 else ("bfloat16",):
                check_rows(device, format, case, taken, out)


def check_rows(device: Backend, format: str, case: Case, choice: Choice, out: str = "bfloat16") -> None:
    (rows, depth), cols = case.inputs[0], case.attrs["out_features"]
    got = rows_product(device, case, choice, out)
    want = opcheck.reference(NAME, case, draw(case, "bfloat16"), None)["output0"]
    error, limit = scaled_error(got, want, case), rows_limit(format, depth, out)
    print(f"{format} {choice} {rows} x {cols} x {depth}, {out}: {error:.2e} of {limit:.2e}")
    assert error < limit, (choice, case)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_clusters_give_the_bits_of_a_second_launch(format: str) -> None:
    """Slices are added in the same order by a cluster; passes whose sums cross each other, and rows past N, too."""
    from cupyllm.backend.cuda import CudaBackend

    backend, depth = CudaBackend(), EXTENTS[format.split()[0]][1]
    if backend.capability < 90:
        pytest.skip("clusters need 9.0")
    for rows, slices, design in itertools.product((1, 3, 8, 11, 16), (2, 4), (Design(1, 2, 3, 1), Design(2, 2, 1, 2))):
        case = a_case(format, rows, 340, depth)
        alone = rows_product(backend, case, Choice(design, slices, 2))
        opcheck.assert_same_bits(
            rows_product(backend, case, Choice(design, slices, 2, True)), alone, f"{rows} {design}"
        )
        check_rows(backend, format, case, Choice(design, slices, 3, True))
    backend.close()


@pytest.mark.parametrize("format", FORMATS)
def test_rows_bits_depend_on_the_order_of_k_alone(device: Backend, format: str) -> None:
    """Neither on the number of rows nor on the groups of CTAs."""
    depth = EXTENTS[format.split()[0]][1]
    design = Design(2, 2, 2, 1)
    drawn = draw(a_case(format, MAX_ROWS, 50, depth), "bfloat16")
    x = drawn.inputs[0]
    assert x is not None

    def run(rows: slice, groups: int) -> np.ndarray:
        with Session(device) as session:
            rec = Recorder.of(device)
            part, params = session.put(x[rows].copy()), [session.put(param) for param in drawn.params]
            y = session.empty(Spec((part.shape[0], 50), "bfloat16"))
            quantized_rows.product(rec, "forward", format.split()[0], part, params, y, choice=Choice(design, 1, groups))
            session.execute(rec)
            return session.get(y)

    whole = run(slice(0, 16), 1)
    for rows, groups in ((slice(0, 16), 3), (slice(0, 1), 1), (slice(15, 16), 4), (slice(4, 12), 2), (slice(7, 16), 1)):
        opcheck.assert_same_bits(run(rows, groups), whole[rows], f"{rows} {groups}")


def test_rows_of_nf4_are_no_worse_than_bitsandbytes(device: Backend) -> None:
    """It rounds level times absmax to bfloat16. Both against the exact weight, before y is rounded."""
    rng = np.random.default_rng(1)
    weight = nf4.quantize(rng.standard_normal((128, 1024)))
    params = layout.pack(weight)
    x = rng.standard_normal((8, 1024)).astype(ml_dtypes.bfloat16)
    exact = reference.decode(params[0], params[1], params[2], "nf4", 128, 1024)
    want = x.astype(np.float64) @ exact.T
    theirs = x.astype(np.float64) @ nf4.dequantize(weight).astype(ml_dtypes.bfloat16).astype(np.float64).T
    attrs = {"format": "nf4", "out_features": 128, "out_dtype": "float32"}
    ours = run_op(device, OP, [x], params, attrs, forced={NAME: "rows"}).outputs[0]
    errors = opcheck.relative_error(ours, want), opcheck.relative_error(theirs, want)
    print(f"ours {errors[0]:.2e}, theirs {errors[1]:.2e}")
    assert errors[0] < 0.6 * errors[1]


def test_rows_of_int4_are_exact_where_sums_are(device: Backend) -> None:
    """Integers in, no rounding anywhere: every code, every zero point and every place of the layout is right."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (32, 256)).astype(np.uint8)
    codes[0, :16] = np.arange(16)
    weight = int4.Int4(codes, np.ones((32, 2), np.float32), rng.integers(0, 17, (32, 2)).astype(np.uint8))
    x = np.zeros((16, 256), ml_dtypes.bfloat16)
    x[np.arange(16), np.arange(16) * 16 + 3] = 1
    x[:, 200] = 2
    attrs = {"format": "int4", "out_features": 32, "out_dtype": "float32"}
    got = run_op(device, OP, [x], layout.pack(weight), attrs, forced={NAME: "rows"}).outputs[0]
    np.testing.assert_array_equal(got, x.astype(np.float32) @ int4.dequantize(weight).T)


def test_rows_of_int8_are_exact_where_sums_are(device: Backend) -> None:
    codes = np.arange(-128, 128).astype(np.int8).reshape(2, 128).repeat(9, axis=0)
    weight = int8.Int8(codes, np.linspace(1, 18, 18).astype(np.float32))
    x = np.eye(16, 128, 5).astype(ml_dtypes.bfloat16)
    attrs = {"format": "int8", "out_features": 18, "out_dtype": "float32"}
    got = run_op(device, OP, [x], layout.pack(weight), attrs, forced={NAME: "rows"}).outputs[0]
    np.testing.assert_array_equal(got, x.astype(np.float32) @ int8.dequantize(weight).T)


@pytest.mark.gpu
def test_the_op_at_model_shapes() -> None:
    """Unforced, at the sizes that matter; the rows kernel's choice of slices and all."""
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    for format, rows, (num_out, depth) in itertools.product(FORMATS, (1, 16), ((6144, 5120), (640, 25600))):
        case = a_case(format, rows, num_out, depth)
        drawn = draw(case, "bfloat16")
        got = run_op(backend, OP, drawn.inputs, drawn.params, case.attrs).outputs[0]
        want = opcheck.reference(NAME, case, drawn, None)["output0"]
        assert scaled_error(got, want, case) < rows_limit(format, depth, "bfloat16"), case
    backend.close()


# ---- choices ----


@pytest.mark.parametrize("number", range(4))
def test_every_choice_fits_its_gpu(number: int) -> None:
    shapes = ((51200, 5120), (5120, 25600), (1024, 5120), (16, 128), (8192, 64000))
    for capability, rows, (cols, depth) in itertools.product(CAPABILITIES, (1, 8, 9, 16), shapes):
        choice = choose(number, rows, cols, depth, 132, capability)
        limit = SHARED_BYTES.get(capability, 99 << 10)
        assert choice.design.shared_bytes(number, rows, depth, choice.slices, choice.cluster) <= limit
        assert not choice.cluster or (choice.slices in CLUSTERS and capability >= 90)
        assert choice.slices * choice.groups <= 132 and choice.slices <= choice.design.chunks(depth)


def test_who_takes_a_product() -> None:
    def chosen(rows: int, dtype: str = "bfloat16", **how: bool) -> str:
        case = a_case("int4", rows, 32, 128)
        rec = Recorder(80, **how)  # type: ignore[arg-type]
        x, params = specs(case, dtype)
        tensors = [fixed(256, spec.shape, spec.dtype) for spec in (*x, *params) if spec is not None]
        y = fixed(256, (rows, 32), dtype)
        OP.forward(rec, tensors[:1], tensors[1:], [y], case.attrs)
        return rec.chosen[NAME]

    assert chosen(16) == "rows"
    assert chosen(1, batch_invariant=True) != "rows" and chosen(17) != "rows"
    assert chosen(1, tensor_cores=False) == chosen(1, "float32") == "plain"


def test_only_codes_are_read_before_the_launch_before_has_ended() -> None:
    """The launch is programmatic unless its predecessor names the codes."""
    case = a_case("nf4 double", 1, 5120, 25600)
    x, params = specs(case, "bfloat16")
    tensors = [fixed(place + 1 << 40, spec.shape, spec.dtype) for place, spec in enumerate((*x, *params)) if spec]
    others = [fixed(place + 9 << 40, spec.shape, spec.dtype) for place, spec in enumerate(params)]
    rec = Recorder(90)
    y = fixed(1 << 50, (1, 5120), "bfloat16")
    split = Choice(DESIGNS[3, 1][0], 2, 66)
    for weight in (tensors[1:], others):
        quantized_rows.product(rec, "forward", "nf4", tensors[0], weight, y, choice=split)
    assert len(rec.launches) == 4, "K is split, so each product is a launch and the sum of its slices"
    products, sums = ([launch.programmatic for launch in rec.launches[i::2]] for i in (0, 1))
    assert products == [False, True], "nothing that may still run names the second's codes"
    assert sums == [True, False], "the first may still be writing y when the second comes"


# ---- refusals ----


def refused(inputs: list[Spec], params: list[Spec], **attrs: object) -> str:
    with pytest.raises(InputError) as error:
        OP.infer(inputs, params, attrs)
    return str(error.value)


def test_refusals_name_the_argument_and_what_it_should_be() -> None:
    x, codes, scales = Spec((2, 256), "bfloat16"), Spec((2, 4, 512), "uint8"), Spec((2, 2, 16), "int32")
    good = {"format": "int4", "out_features": 20}
    assert OP.infer([x], [codes, scales], good) == [Spec((2, 20), "bfloat16")]
    assert "format is fp4, expected int8 or int4 or nf4" in refused([x], [codes, scales], **{**good, "format": "fp4"})
    assert "K of x is 192, expected a multiple of 128" in refused([Spec((2, 192), "bfloat16")], [codes, scales], **good)
    assert "codes shape is (2, 4, 512), expected (3, 4, 512)" in refused(
        [x], [codes, scales], format="int4", out_features=33
    )
    assert "codes dtype is int32" in refused([x], [Spec(codes.shape, "int32"), scales], **good)
    assert "scales dtype is float32, expected int32" in refused([x], [codes, Spec(scales.shape, "float32")], **good)
    assert "scales shape is (2, 4, 16), expected (2, 2, 16)" in refused([x], [codes, Spec((2, 4, 16), "int32")], **good)
    assert "int4 has no nested" in refused([x], [codes, scales, Spec((258,), "float32")], **good)
    nested = [codes, Spec((2, 4, 16), "uint8"), Spec((300,), "float32")]
    assert "nested shape is (300,), expected (258,)" in refused([x], nested, format="nf4", out_features=20)
    assert "x dtype is float16" in refused([Spec((2, 256), "float16")], [codes, scales], **good)
    assert "x shape is (2, 3, 256)" in refused([Spec((2, 3, 256), "bfloat16")], [codes, scales], **good)


def test_nothing_is_recorded_for_a_gradient_that_nobody_wants() -> None:
    case = CASES[0]
    names = opcheck.kernel_names(opcheck.record(NAME, case, forced=PLAIN, want_inputs=False))
    assert names == ["quantized_linear_forward"]
    names = opcheck.kernel_names(opcheck.record(NAME, case, forced=PLAIN))
    assert names == ["quantized_linear_forward", "quantized_linear_dgrad"]
