"""linear's rows variant: who makes what, what is chosen; values and bits on the checking simulator and on GPUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from cupyllm.backend import nvrtc
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Launch, Spec, fixed
from cupyllm.backend.compile import flatten
from cupyllm.backend.eager import Session
from cupyllm.backend.record import Recorder
from cupyllm.config import published
from cupyllm.ops import linear_rows
from cupyllm.ops.linear_rows import (
    DESIGNS,
    MAX_ROWS,
    OTHERS_PREFERRED_ROWS,
    SHARED_BYTES,
    Choice,
    Design,
    choose,
    cost,
    makes,
    product,
)
from cupyllm.ops.linear_sm90 import FORMS
from cupyllm.ops.op import Case
from tests.ops import opcheck
from tests.simulated import KERNELS

FORWARD = ("forward", "head")
CAPABILITIES = (80, 86, 89, 90, 100, 120, 121)


# ---- who makes what: the kernel's arithmetic in Python ----


def elements_of_a_launch(choice: Choice, cols: int, depth: int) -> np.ndarray:
    """How often each 8 elements of weight are multiplied, [cols, depth / 8]."""
    design, slices, groups = choice.design, choice.slices, choice.groups
    times = np.zeros((cols, depth // 8), np.int32)
    all_chunks = -(-depth // design.chunk)
    for cta in range(groups * slices):
        part, group = cta % slices, cta // slices
        first = part * all_chunks // slices
        chunks = (part + 1) * all_chunks // slices - first
        assert 1 <= chunks <= design.chunks(depth, slices), "shared memory holds the largest slice of x"
        first_row = group * cols // groups
        count = (group + 1) * cols // groups - first_row
        passes = -(-count // design.pass_rows)
        each, longer = divmod(count, passes)
        starts = [first_row + i * each + min(i, longer) for i in range(passes + 1)]
        for start, end in itertools.pairwise(starts):
            assert 1 <= end - start <= design.pass_rows
            for chunk, warp, t, half in itertools.product(range(chunks), range(design.warps), range(4), range(2)):
                k = (first + chunk) * design.chunk + warp * 64 + t * 8 + half * 32
                if k < depth:
                    times[start:end, k // 8] += 1
    return times


@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_every_weight_is_multiplied_once(design: Design) -> None:
    for cols, chunks, slices, groups in ((1, 1, 1, 1), (16, 1, 1, 1), (17, 2, 1, 2), (100, 3, 2, 3), (99, 5, 5, 7)):
        for depth in (design.chunk * chunks, design.chunk * chunks - 8, design.chunk * (chunks - 1) + 8):
            choice = Choice(design, slices, groups)
            assert (elements_of_a_launch(choice, cols, depth) == 1).all(), (cols, depth, slices, groups)


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_every_x_has_a_place_of_its_own(rows: int) -> None:
    """my_x and its offsets: no two of a slice's 16-byte pieces overlap, and all lie in the bytes that are asked for."""
    for design in DESIGNS:
        m, chunks, places = rows + 8 * (design.row_groups - 1), 3, []
        for chunk, warp, half, row, t in itertools.product(
            range(chunks), range(design.warps), range(2), range(m), range(4)
        ):
            g, nt = row % 8, row // 8
            place = m * warp * 128 + g * 64 + t * 16 + chunk * m * design.warps * 128 + half * m * 64 + nt * 512
            places.append(place)
        assert sorted(places) == list(range(0, m * chunks * design.chunk * 2, 16))


@pytest.mark.parametrize("design", DESIGNS, ids=str)
@pytest.mark.parametrize("form", FORWARD)
def test_launcher_and_kernel_agree_on_sizes(form: str, design: Design) -> None:
    """The kernel's own macros, asserted while it compiles (to PTX: ptxas adds nothing to this)."""
    spec = design.kernel(form)
    claims = {
        "RING_BYTES": design.ring_bytes,
        "SUMS_BYTES": design.sums_bytes,
        "THREADS": design.threads,
        "CHUNK": design.chunk,
    }
    text = flatten(spec.source) + "".join(f'static_assert({k} == {v}, "{k}");\n' for k, v in claims.items())
    options = ["-arch=compute_80", "-std=c++17", *(f"-D{macro}={value}" for macro, value in spec.defines)]
    ptx, _ = nvrtc.compile_text(text, spec.source, options, "ptx")
    assert spec.symbol.encode() in ptx


# ---- which variant, which design, how many slices ----


def operands(form: str, rows: int, cols: int, depth: int) -> tuple[Spec, Spec, Spec]:
    return Spec((rows, depth), "bfloat16"), Spec((cols, depth), "bfloat16"), Spec((rows, cols), FORMS[form][2])


def recorded(form: str, rows: int, cols: int, depth: int, slices: int = 0, capability: int = 80) -> list[Launch]:
    """The launches, behind another one."""
    rec = Recorder(capability, num_sms=132)
    a, b, c = (fixed(2**32 * (i + 1), s.shape, s.dtype) for i, s in enumerate(operands(form, rows, cols, depth)))
    rec.launch(opcheck.record("linear", Case("x", ((1, 8),), ((8, 8),))).launches[0].kernel, 1, 32, a)
    choice = choose(rows, cols, depth, 132, capability)
    if slices:
        choice = Choice(choice.design, slices, 3)
    product(rec, form, a, b, c, choice=choice)
    return rec.launches[1:]


def test_what_is_made() -> None:
    for form in FORWARD:
        for rows, cols, depth in ((1, 1, 8), (64, 33, 40), (16, 51200, 5120)):
            assert makes(form, *operands(form, rows, cols, depth))
        for rows, cols, depth in ((0, 8, 8), (65, 8, 8), (1, 8, 0), (1, 8, 12)):
            assert not makes(form, *operands(form, rows, cols, depth)), (rows, cols, depth)
        a, b, c = operands(form, 4, 16, 16)
        assert not makes(form, Spec(a.shape, "float32"), b, c) and not makes(form, a, Spec(b.shape, "float16"), c)
        assert not makes(form, a, b, Spec(c.shape, "float16"))
    for form in ("dgrad", "wgrad"):
        assert not makes(form, *operands(form, 8, 8, 8))


def test_what_is_taken_unasked() -> None:
    for capability in CAPABILITIES:
        most = 2 if capability == 90 else OTHERS_PREFERRED_ROWS
        assert linear_rows.prefers(Recorder(capability), "forward", most, 64, 64)
        assert not linear_rows.prefers(Recorder(capability), "forward", most + 1, 64, 64)
        invariant = Recorder(capability, batch_invariant=True)
        assert not linear_rows.prefers(invariant, "forward", 1, 64, 64)
    for n, want in ((1, "rows"), (OTHERS_PREFERRED_ROWS, "rows"), (OTHERS_PREFERRED_ROWS + 1, "mma")):
        rec = opcheck.record("linear", Case("x", ((n, 16),), ((24, 16),)), "bfloat16", "bfloat16")
        assert rec.chosen == {"linear": want}, n


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_projection_gets_a_design_that_fits(capability: int) -> None:
    limit = {80: 163, 90: 227, 100: 227}.get(capability, 99) << 10
    for size in ("0.6b", "8b", "32b"):
        c = published(size)
        h, f, q = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
        for cols, depth in (
            (q + 2 * c.num_key_value_heads * c.head_dim, h),
            (h, q),
            (2 * f, h),
            (h, f),
            (c.vocab_size, h),
        ):
            for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64):
                choice = choose(rows, cols, depth, 132, capability)
                design = choice.design
                assert rows <= 8 * design.row_groups < max(2 * rows, 9), "no larger one than is needed"
                assert design.shared_bytes(rows, depth, choice.slices) <= limit
                assert choice.groups * choice.slices <= 132 and choice.groups <= cols
                assert choice.slices <= -(-depth // design.chunk)
                if rows == 1 and capability == 90:
                    assert choice.slices == 1, "a second launch costs more than what it evens out"


def test_the_busiest_cta_reads_little_more_than_the_mean() -> None:
    for cols, depth in ((51200, 5120), (5120, 25600), (10240, 5120), (5120, 8192)):
        for rows in (1, 8, 16):
            choice = choose(rows, cols, depth, 132, 90)
            most = math.ceil(cols / choice.groups) * choice.design.chunks(depth, choice.slices) * choice.design.chunk
            assert most < 1.05 * cols * depth / 132, (cols, depth, rows, choice)


def test_what_a_choice_costs() -> None:
    """Weight, x, the ring, uneven slices, slices at all and short passes cost something; company hides the passes."""
    long, short = Design(1, 1, 8, 6), Design(1, 1, 8, 3)

    def of(choice: Choice, rows: int = 1, cols: int = 4224, depth: int = 6144) -> float:
        return cost(choice, rows, cols, depth, 132)  # 32 columns and 12 chunks of k for each of 132 CTAs

    even, ring, weight = of(Choice(long, 1, 132)), long.ring_bytes, 2 * 32 * 6144
    assert even == weight + 0.075 * ring + 0.5 * 6144 + 2 * 8 * 160
    assert of(Choice(long, 1, 132), rows=2) == even + 0.5 * 6144
    assert of(Choice(long, 1, 131)) > even
    assert even < of(Choice(long, 2, 66)) < of(Choice(long, 3, 44))
    assert of(Choice(short, 1, 132)) == pytest.approx(even + 0.13 * weight - 0.075 * ring / 2)
    wide = of(Choice(Design(1, 1, 16, 3), 1, 132))
    assert wide == pytest.approx(even - 0.02 * weight + 2 * 8 * 160), "as many bytes in the ring, twice the sums"
    assert long.shared_bytes(1, 1024, 1) + 1024 <= 114 << 10 < long.shared_bytes(4, 1024, 1) + 1024
    company = of(Choice(long, 1, 132), depth=1024)
    assert of(Choice(long, 1, 132), rows=4, depth=1024) == company + 3 * 0.5 * 1024 + 2 * 8 * 160


@pytest.mark.parametrize(
    ("rows", "cols", "depth", "want"),
    [
        (1, 51200, 5120, "8x16x1024*4"),  # 32B gate+up
        (1, 5120, 25600, "8x16x1024*4"),  # down
        (1, 10240, 5120, "8x16x1024*4"),  # q+k+v
        (1, 5120, 8192, "8x16x1024*4"),  # o
        (8, 51200, 5120, "8x16x1024*3"),  # beside 8 rows of x
        (8, 5120, 8192, "8x16x512*4"),
        (1, 4096, 4096, "8x16x1024*3"),  # 8B o
        (1, 6144, 1024, "8x16x512*6"),  # 0.6B gate+up, in company
        (4, 6144, 1024, "8x16x512*4"),  # which these rows leave no room for
        (1, 1024, 3072, "8x16x512*4"),  # 0.6B down
    ],
)
def test_what_was_fastest_is_taken(rows: int, cols: int, depth: int, want: str) -> None:
    """Of the designs, by measurement."""
    choice = choose(rows, cols, depth, 132, 90)
    assert (str(choice.design), choice.slices) == (want, 1)


@pytest.mark.parametrize("form", FORWARD)
def test_one_slice_is_one_launch(form: str) -> None:
    (launch,) = recorded(form, 5, 100, 1032, slices=1)
    x, weight, bias, y, parts, *numbers = launch.args
    assert [t.shape for t in (x, weight, y)] == [(5, 1032), (100, 1032), (5, 100)]  # type: ignore[union-attr]
    assert bias is None and parts is None and numbers == [5, 100, 1032, 1]
    assert launch.kernel.symbol == f"linear_rows_{FORMS[form][2]}" and launch.grid == (3, 1, 1)
    assert launch.programmatic


@pytest.mark.parametrize("form", FORWARD)
def test_slices_are_added_by_a_second_launch(form: str) -> None:
    """Both may start early: the sums are of the launch before, which does not name y."""
    launch, add = recorded(form, 5, 100, 1032, slices=2)
    *_, y, parts, m, n, k, slices = launch.args
    assert y is None and parts.shape == (2, 5, 100) and (m, n, k, slices) == (5, 100, 1032, 2)  # type: ignore[union-attr]
    assert launch.args[2] is None and launch.grid == (6, 1, 1)
    assert add.args[0] is parts and add.args[2].shape == (5, 100) and add.args[3:] == (500, 100, 2, 0)  # type: ignore[union-attr]
    assert add.kernel.symbol == f"linear_sum_{FORMS[form][2]}" and dict(add.kernel.defines)["WIDTH"] == "4"
    assert launch.programmatic and add.programmatic


def test_odd_columns_are_added_one_by_one() -> None:
    _, add = recorded("forward", 3, 33, 1032, slices=2)
    assert dict(add.kernel.defines)["WIDTH"] == "1" and add.grid == (1, 1, 1)


# ---- values and bits ----


@pytest.fixture(scope="module", params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The simulator with every check on, and the GPU where there is one."""
    made: Backend
    if request.param == "sim":
        from cupyllm.backend.sim import SimBackend

        made = SimBackend(cache=KERNELS)
    else:
        from cupyllm.backend.cuda import CudaBackend

        made = CudaBackend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def gpu() -> Iterator[Backend]:
    from cupyllm.backend.cuda import CudaBackend

    made = CudaBackend()
    yield made
    made.close()


def drawn(rows: int, cols: int, depth: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, weight, bias."""
    rng = np.random.default_rng(seed)
    shapes = ((rows, depth), (cols, depth), (cols,))
    x, weight, bias = (rng.standard_normal(s, np.float32).astype(NUMPY_DTYPE["bfloat16"]) for s in shapes)
    return x, weight, bias


def run(
    backend: Backend,
    form: str,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    choice: Choice | None = None,
) -> np.ndarray:
    """One product between guard bytes."""
    guarded = opcheck.GuardedBackend(backend)
    with Session(guarded) as session:
        a, b = session.put(x), session.put(weight)
        c = session.empty(Spec((x.shape[0], weight.shape[0]), FORMS[form][2]))
        z = None if bias is None else session.put(bias)
        rec = Recorder.of(backend)
        product(rec, form, a, b, c, z, choice=choice)
        session.execute(rec)
        got = session.get(c)
    assert not guarded.broken, guarded.broken
    return got


def judge(form: str, got: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, what: str) -> None:
    """Against fp64, element by element. mma's adders cut: at most 1.5 units of 2^-23 of the sum's size a step of k, and
    no more than 2^-20 of it was ever seen; bf16 rounds once more, by at most 2^-8 of the value."""
    x64, weight64 = x.astype(np.float64), weight.astype(np.float64)
    want, size = x64 @ weight64.T, np.abs(x64) @ np.abs(weight64).T
    if bias is not None:
        want, size = want + bias.astype(np.float64), size + np.abs(bias.astype(np.float64))
    limit = size * 2.0**-20 + (np.abs(want) * 2.0**-8 if FORMS[form][2] == "bfloat16" else 0.0) + 1e-30
    assert np.isfinite(got.astype(np.float64)).all(), f"{what}: not every element was written"
    worst = float((np.abs(got.astype(np.float64) - want) / limit).max())
    print(f"{form} {what}: {worst:.3f} of the limit")
    assert worst <= 1, what


def around(design: Design) -> Iterator[tuple[int, int, int, int, int]]:
    """(rows, cols, depth, slices, groups): one chunk, and more than there are stages; whole and ragged; passes. At most
    the rows that the simulator has shared memory for, an A100's."""
    most, chunk = 8 * design.row_groups, design.chunk
    least = most // 2 + 1 if design.row_groups > 1 else 1
    for rows, cols, depth, slices, groups in (
        (least, 1, 8, 1, 1),
        (most, 16 * design.blocks, chunk, 1, 1),
        (most - 3, 50, 2 * chunk + 72, 1, 2),
        (2, 33, chunk * (design.stages + 1) + 40, 1, 1),
        (most, 52, 2 * chunk + 8, 2, 3),
        (least + 1, 17, chunk * design.stages - 24, 3, 1),
    ):
        room = SHARED_BYTES[80] - design.shared_bytes(0, depth, slices)
        yield min(rows, room // (2 * chunk * design.chunks(depth, slices))), cols, depth, slices, groups


@pytest.mark.parametrize("design", DESIGNS, ids=str)
@pytest.mark.parametrize("form", FORWARD)
def test_values(device: Backend, form: str, design: Design) -> None:
    """Every other product has a bias."""
    for index, (rows, cols, depth, slices, groups) in enumerate(around(design)):
        x, weight, bias = drawn(rows, cols, depth, index)
        added = bias if index % 2 else None
        got = run(device, form, x, weight, added, Choice(design, slices, groups))
        judge(form, got, x, weight, added, f"{design} {rows}x{cols}x{depth} slices {slices}")


def test_as_chosen(device: Backend) -> None:
    for rows, cols, depth in ((1, 40, 1032), (16, 24, 520), (40, 16, 72)):
        x, weight, bias = drawn(rows, cols, depth)
        judge("forward", run(device, "forward", x, weight, bias), x, weight, bias, f"{rows}x{cols}x{depth}")


def test_bits_depend_on_warps_and_slices_alone(device: Backend) -> None:
    """Not on the stages, the place in a pass, the other rows, nor on what C is rounded to."""
    x, weight, _ = drawn(16, 72, 1100 // 8 * 8)
    eight, four = Design(2, 1, 8, 6), Design(4, 2, 4, 3)
    for slices in (1, 2):
        whole = run(device, "head", x, weight, None, Choice(eight, slices, 1))
        for choice, rows in (
            (Choice(Design(2, 1, 8, 3), slices, 2), slice(0, 16)),
            (Choice(eight, slices, 5), slice(5, 14)),
            (Choice(Design(1, 1, 8, 6), slices, 3), slice(3, 11)),
            (Choice(Design(1, 1, 8, 4), slices, 1), slice(15, 16)),
        ):
            part = run(device, "head", np.ascontiguousarray(x[rows]), weight, None, choice)
            opcheck.assert_same_bits(part, whole[rows], str(choice))
        rounded = run(device, "forward", x, weight, None, Choice(eight, slices, 2))
        opcheck.assert_same_bits(rounded, whole.astype(NUMPY_DTYPE["bfloat16"]))
    other = run(device, "head", x, weight, None, Choice(four, 1, 1))
    assert (other != run(device, "head", x, weight, None, Choice(eight, 1, 1))).any(), "four warps add in another order"


def test_the_same_bits_again(device: Backend) -> None:
    x, weight, bias = drawn(9, 40, 1536)
    first = run(device, "forward", x, weight, bias, Choice(Design(2, 1, 8, 6), 3, 2))
    for _ in range(2):
        opcheck.assert_same_bits(run(device, "forward", x, weight, bias, Choice(Design(2, 1, 8, 6), 3, 2)), first)


def test_what_is_not_finite_stays_in_its_row(device: Backend) -> None:
    """A lane past the last row multiplies zeros, not its neighbour's values, and k past the end adds nothing."""
    x, weight, _ = drawn(3, 20, 24)
    x[1, 5], x[2, 7] = np.inf, np.nan
    weight[:, 5] = 1
    got = run(device, "head", x, weight).astype(np.float64)
    assert np.isfinite(got[0]).all() and (got[1] == np.inf).all() and np.isnan(got[2]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORWARD)
def test_model_shapes(gpu: Backend, form: str) -> None:
    """The choices for this GPU, twice."""
    for cols, depth in ((10240, 5120), (5120, 8192), (1024, 25600), (4096, 1024)):
        every, weight, bias = drawn(MAX_ROWS, cols, depth)
        for rows in (1, 7, 16, 33, MAX_ROWS):
            x = every[:rows]
            got = run(gpu, form, x, weight, bias)
            judge(form, got, x, weight, bias, f"{rows}x{cols}x{depth}")
            opcheck.assert_same_bits(run(gpu, form, x, weight, bias), got)
