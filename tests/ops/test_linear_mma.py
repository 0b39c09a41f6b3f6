"""linear's mma variant: who makes what, what is chosen; values and bits on the checking simulator and on GPUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend import nvrtc
from cupyllm.backend.base import NUMPY_DTYPE, Backend, Launch, Spec, Tensor, fixed
from cupyllm.backend.compile import flatten
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.config import published
from cupyllm.errors import InputError
from cupyllm.ops import linear_mma
from cupyllm.ops.linear_mma import (
    EIGHTS,
    FLAT,
    FLAT_EIGHT,
    FORMS,
    LARGE,
    LONG_LOW,
    LONG_NARROW,
    LOW,
    NARROW,
    NARROW_EIGHT,
    SMALL,
    SQUARE,
    Tile,
    choose,
    choose_slices,
    copy_bytes,
    designs,
    overlaps,
    product,
    skinny,
)
from cupyllm.ops.op import Case
from tests.hostcuda.backend import HostBackend
from tests.ops import opcheck
from tests.simulated import KERNELS

OP = ops.get("linear")
Choice = tuple[Tile, int]
EVERY = [(form, design) for form in FORMS for design in designs(form)]
TILES = list(dict.fromkeys(tile for _, (tile, _) in EVERY))
MMA, SUM, PLAIN = "linear_mma.cu", "linear_sum.cu", "linear.cu"


def label(value: object) -> str:
    return "copy".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---- who makes what: the kernel's arithmetic in Python ----


def outputs_of_a_grid(tile: Tile, rows: int, cols: int, group: int) -> np.ndarray:
    """How often each tile of C is made."""
    row_tiles, col_tiles = -(-rows // tile.rows), -(-cols // tile.cols)
    times = np.zeros((row_tiles, col_tiles), np.int32)
    for cta in range(tile.count(rows, cols)):
        base_row, place = cta // (group * col_tiles) * group, cta % (group * col_tiles)
        in_group = min(row_tiles - base_row, group)
        times[base_row + place % in_group, place // in_group] += 1
    return times


@pytest.mark.parametrize("group", [1, 2, 8, 16])
@pytest.mark.parametrize("tile", TILES, ids=label)
def test_every_tile_is_made_once(tile: Tile, group: int) -> None:
    row_sizes, col_sizes = ((1, n - 1, n, n + 1, 7 * n, 17 * n + 3) for n in (tile.rows, tile.cols))
    for rows, cols in itertools.product(row_sizes, col_sizes):
        assert (outputs_of_a_grid(tile, rows, cols, group) == 1).all(), (rows, cols)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 80, 127])
def test_slices_cover_k_once(steps: int) -> None:
    """first_k and last_k of the kernel, in steps."""
    for slices in (1, 2, 3, 7, 64):
        edges = [steps * s // slices for s in range(slices + 1)]
        assert edges[0] == 0 and edges[-1] == steps and edges == sorted(edges)
        assert max(b - a for a, b in itertools.pairwise(edges)) <= -(-steps // slices)


@pytest.mark.parametrize("mn", [False, True], ids=["k contiguous", "k across"])
@pytest.mark.parametrize("is_a", [True, False], ids="AB")
@pytest.mark.parametrize("tile", TILES, ids=label)
def test_every_chunk_of_a_stage_is_copied_once_and_found_again(tile: Tile, is_a: bool, mn: bool) -> None:
    """Operand::load's targets, and Operand::place's: what ldmatrix reads are the chunks it asks for, and the eight that
    it reads at once lie in different banks. A tile of 8 gives the same for both halves of a fragment."""
    rows, warp = (tile.rows, tile.warp_rows) if is_a else (tile.cols, tile.warp_cols)
    step = tile.step
    if tile.eight and rows == 16:
        if not mn:
            return  # no such kernel
        rows = 8
    width = min(rows, 64) if mn else step
    chunks, lines, boxes = width // 8, step if mn else rows, rows // width if mn else 1
    turn, passes = 8 // chunks, tile.threads // chunks
    chunk_of: dict[int, tuple[int, int]] = {}  # 16-byte slot -> (first row, k), or with mn (first column, k)
    for thread in range(min(tile.threads, lines * chunks)):
        row, chunk = thread // chunks, thread % chunks
        for down, box in itertools.product(range(0, lines, passes), range(boxes)):
            slot = row * chunks + (chunk ^ row // turn % chunks) + (box * lines + down) * chunks
            assert slot not in chunk_of
            chunk_of[slot] = (box * width + chunk * 8, row + down) if mn else (row + down, chunk * 8)
    assert sorted(chunk_of) == list(range(rows * step // 8))
    for first, i, k16 in itertools.product(range(0, rows, max(warp, 16)), range(warp // 16), range(step // 16)):
        slots = []
        for lane in range(32):
            by_row = is_a != mn
            r = lane % 16 if by_row else lane // 16 * 8 + lane % 8
            c = lane // 16 if by_row else lane // 8 % 2
            if mn:
                chunk = 0 if rows == 8 else first // 8 + c + i * 2
                slot = (chunk // chunks * lines + k16 * 16 + r) * chunks + (chunk % chunks ^ r // turn % chunks)
                assert chunk_of[slot] == ((first + i * 16 + c * 8) % rows, k16 * 16 + r)
            else:
                slot = (first + r) * chunks + ((c ^ r // turn % chunks) ^ k16 * 2) + i * 16 * chunks
                assert chunk_of[slot] == (first + i * 16 + r, k16 * 16 + c * 8)
            slots.append(slot)
        assert all(len({slot % 8 for slot in slots[m : m + 8]}) == 8 for m in range(0, 32, 8)), "banks"


@pytest.mark.parametrize(("form", "design"), EVERY, ids=label)
def test_launcher_and_kernel_agree_on_sizes(form: str, design: Choice) -> None:
    """The kernel's own macros, asserted while it compiles (to PTX: ptxas adds nothing to this)."""
    tile, copy = design
    spec = tile.kernel(form, copy)
    claims = {"SHARED_BYTES": tile.shared_bytes, "THREADS": tile.threads, "BK": tile.step}
    text = flatten(spec.source) + "".join(f'static_assert({k} == {v}, "{k}");\n' for k, v in claims.items())
    options = ["-arch=compute_80", "-std=c++17", *(f"-D{macro}={value}" for macro, value in spec.defines)]
    ptx, _ = nvrtc.compile_text(text, spec.source, options, "ptx")
    assert spec.symbol.encode() in ptx
    assert tile.shared_bytes <= 99 << 10, "what a CTA may have on sm_86, 89, 120 and 121"


# ---- which variant, which tile, which copies ----


def operands(form: str, rows: int, cols: int, depth: int) -> tuple[Spec, Spec, Spec]:
    a_mn, b_mn, dtype = FORMS[form]
    a, b = (depth, rows) if a_mn else (rows, depth), (depth, cols) if b_mn else (cols, depth)
    return Spec(a, "bfloat16"), Spec(b, "bfloat16"), Spec((rows, cols), dtype)


def recorded(form: str, rows: int, cols: int, depth: int, invariant: bool = False, **options: Any) -> list[Launch]:
    rec = Recorder(80, num_sms=132, batch_invariant=invariant)
    a, b, c = (fixed((i + 1) << 40, s.shape, s.dtype) for i, s in enumerate(operands(form, rows, cols, depth)))
    product(rec, form, a, b, c, **options)
    return rec.launches


def taken(n: int, m: int, k: int, dtype: str, weight_dtype: str, capability: int = 80, **options: Any) -> list[str]:
    """Files of the kernels of forward and backward."""
    case = Case("x", ((n, k),), ((m, k), (m,)), options)
    rec = opcheck.record("linear", case, dtype, weight_dtype, capability=capability)
    sources = [launch.kernel.source for launch in rec.launches]
    assert rec.chosen == {"linear": "mma" if sources[0] == MMA else "plain"}
    return sources


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120, 121])
def test_bfloat16_products_of_any_shape(capability: int) -> None:
    """The bias's gradient has one kernel only."""
    for n, m, k in ((1, 1, 1), (66, 24, 40), (65, 33, 18), (300, 8, 16)):
        assert taken(n, m, k, "bfloat16", "bfloat16", capability) == [MMA, MMA, MMA, PLAIN]


@pytest.mark.parametrize("dtypes", [pair for pair in opcheck.DTYPE_PAIRS if pair != ("bfloat16", "bfloat16")])
def test_other_dtypes_are_plain(dtypes: tuple[str, str]) -> None:
    """The weight's gradient is a product of activations, whatever dtype the weight has."""
    assert taken(8, 24, 40, *dtypes) == [PLAIN, PLAIN, MMA if dtypes[0] == "bfloat16" else PLAIN, PLAIN]


def test_float32_logits_have_float32_gradients() -> None:
    assert taken(66, 24, 40, "bfloat16", "bfloat16", out_dtype="float32") == [MMA, PLAIN, PLAIN, PLAIN]


def test_a_device_without_tensor_cores_takes_the_plain_one() -> None:
    """The emulator runs kernels as C++, which has no inline PTX."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(NUMPY_DTYPE["bfloat16"]) for shape in ((3, 8), (5, 8)))
    rec = Recorder.of(HostBackend())
    assert OP.select(rec, [Spec(x.shape, "bfloat16")], [Spec(w.shape, "bfloat16")], {}).name == "plain"
    assert run_op(HostBackend(), OP, [x], [w]).outputs[0].shape == (3, 5)
    with pytest.raises(InputError, match=r"no variant fits \(forced: mma, .*--variant linear=NAME"):
        run_op(HostBackend(), OP, [x], [w], forced={"linear": "mma"})


def test_copies_are_as_wide_as_the_contiguous_axes_allow() -> None:
    for form, contiguous in (("forward", "k"), ("head", "k"), ("dgrad", "kn"), ("wgrad", "mn")):
        for m, n, k in itertools.product((1, 6, 8, 24, 33), repeat=3):
            extents = [{"m": m, "n": n, "k": k}[axis] for axis in contiguous]
            common = math.gcd(*extents)
            want = 16 if common % 8 == 0 else 4 if common % 2 == 0 else 2
            assert copy_bytes(form, m, n, k) == want
            tile, copy = choose(form, m, n, k, 132)
            assert copy == want and (tile, copy) in designs(form)


def test_large_tiles_where_they_fill_half_of_the_sms() -> None:
    assert choose("forward", 512, 1024, 4096, 132) == (SMALL, 16), "32 tiles"
    assert choose("forward", 1024, 1024, 4096, 132) == (SMALL, 16), "64 tiles"
    assert choose("forward", 1152, 1024, 4096, 132) == (LARGE, 16), "72 tiles"
    assert choose("forward", 1024, 1024, 4096, 108) == (LARGE, 16)
    assert choose("forward", 8192, 8192, 4097, 132) == (SMALL, 2), "large tiles have 16-byte copies only"


def test_every_projection_gets_a_design() -> None:
    for size in ("0.6b", "8b", "32b"):
        c = published(size)
        h, f, q = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
        for n, (out, depth) in itertools.product((1, 65, 2048), ((q, h), (h, q), (f, h), (h, f), (c.vocab_size, h))):
            for form, m, cols, k in (("forward", n, out, depth), ("dgrad", n, depth, out), ("wgrad", out, depth, n)):
                launch = recorded(form, m, cols, k)[0]
                assert dict(launch.kernel.defines)["COPY"] == "16" and launch.shared_bytes <= 99 << 10


def test_skinny_products_get_skinny_tiles() -> None:
    """LoRA's six, of every rank that 16-byte copies can load."""
    for r, t in itertools.product((8, 16, 24, 32, 40, 64), (1, 512, 8192)):
        room, few = next(n for n in (16, 32, 64) if n >= r), r == 8
        assert skinny("forward", t, r, 5120, 132) == NARROW[room]
        assert skinny("dgrad", t, r, 5120, 132) == (NARROW_EIGHT if few else NARROW[room])
        assert skinny("forward", t, 5120, r, 132) == (FLAT_EIGHT if few else FLAT[room])
        assert skinny("dgrad", t, 5120, r, 132) == FLAT[room]
        for hidden, long in ((5120, t > 4096), (25600, True)):
            low, narrow = (LONG_LOW, LONG_NARROW) if long and room < 64 else (LOW, NARROW)
            assert skinny("wgrad", r, hidden, t, 132) == replace(low[room], eight=few)
            assert skinny("wgrad", hidden, r, t, 132) == replace(narrow[room], eight=few)
    for form, rows, cols, depth in (("forward", 512, 72, 5120), ("head", 512, 16, 5120), ("wgrad", 72, 5120, 16)):
        assert skinny(form, rows, cols, depth, 132) is None
    assert skinny("dgrad", 512, 5, 5120, 132) is None, "rows of 10 bytes"


def test_a_tile_of_eight_makes_no_more() -> None:
    for tile, rows, cols in ((EIGHTS[0], 16, 64), (EIGHTS[1], 64, 16), (EIGHTS[2], 16, 64), (EIGHTS[3], 64, 16)):
        with pytest.raises(AssertionError):
            recorded("wgrad", rows, cols, 64, choice=(tile, 16))
    with pytest.raises(AssertionError):
        recorded("forward", 64, 64, 24, choice=(FLAT[16], 16))


def test_a_launch_that_leaves_some_sms_two_ctas_waits_its_turn() -> None:
    """wgrad's 200 tiles of 128 columns on 132 SMs with two places each; what fits once or comes in waves need not."""
    for ctas, want in ((80, True), (132, True), (133, False), (200, False), (264, False), (265, True)):
        assert overlaps(SMALL, ctas, 132) == want
        assert overlaps(FLAT[16], ctas, 132)
    rec = Recorder(90, num_sms=132)
    for r, hidden in ((16, 5120), (16, 5120), (16, 25600), (16, 5120)):
        a, b, c = (fixed(256 + (i << 30), s.shape, s.dtype) for i, s in enumerate(operands("wgrad", r, hidden, 2048)))
        c = fixed((1 << 40) + (len(rec.launches) << 30), c.shape, c.dtype)
        product(rec, "wgrad", a, b, c)
    assert [launch.programmatic for launch in rec.launches] == [False, True, False, True]


def test_few_tiles_are_split_along_k() -> None:
    """Each SM has a CTA then, or two of a long sum, and no slice fewer than MIN_STEPS; a full wave stays whole."""
    for tile, rows, cols, depth, want in (
        (SMALL, 128, 1024, 5120, 4),  # 32 tiles
        (SMALL, 128, 1024, 2048, 4),
        (SMALL, 128, 1024, 1024, 2),  # 16 steps
        (SMALL, 64, 5120, 8192, 3),  # 80 tiles
        (SMALL, 64, 5120, 2048, 1),
        (SMALL, 128, 1024, 64, 1),
        (SMALL, 64, 64, 1 << 20, 64),
        (SMALL, 1024, 1024, 5120, 1),
        (LARGE, 128, 128, 5120, 1),
    ):
        assert choose_slices(tile, rows, cols, depth, 132) == want, (tile, rows, cols, depth)


def test_a_split_product_is_two_launches() -> None:
    first, second = recorded("wgrad", 72, 136, 770, slices=3)
    parts, shape = first.args[3], (3, 72, 136)
    assert isinstance(parts, Tensor) and parts.shape == shape and parts.dtype == "float32" and first.grid[1] == 3
    assert first.args[2] is None and first.args[7] == 0 and first.kernel.symbol == "linear_mma_float32"
    assert second.kernel.source == SUM and second.args[0] is parts and second.args[3:] == (72 * 136, 136, 3, 0)
    assert second.programmatic and dict(second.kernel.defines)["WIDTH"] == "4"
    first, second = recorded("forward", 70, 9, 770, slices=2, choice=(SMALL, 4))
    assert first.kernel.symbol == "linear_mma_float32" and second.kernel.symbol == "linear_sum_bfloat16"
    assert dict(second.kernel.defines)["WIDTH"] == "1" and second.grid == (-(-630 // 128), 1, 1)


@pytest.mark.parametrize("form", FORMS)
def test_every_launch_may_start_before_the_one_before_has_ended(form: str) -> None:
    """Unless the launch before it names C, which it would wait for anyway."""
    rec = Recorder(90, num_sms=132)
    a, b, c = (fixed((i + 1) << 40, s.shape, s.dtype) for i, s in enumerate(operands(form, 128, 1024, 5120)))
    product(rec, form, a, b, c)
    product(rec, form, a, b, c, slices=1)
    product(rec, form, a, b, fixed(1 << 50, c.shape, c.dtype))
    assert [launch.programmatic for launch in rec.launches] == [False, True, False, True, True]


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_must_not_matter_split_nothing(form: str) -> None:
    """But wgrad, whose rows are not those of x."""
    assert len(recorded(form, 128, 1024, 5120)) == 2
    assert len(recorded(form, 128, 1024, 5120, invariant=True)) == (2 if form == "wgrad" else 1)


def test_arguments_in_the_kernels_order() -> None:
    (launch,) = recorded("wgrad", 200, 136, 77)
    a, b, bias, c, *numbers = launch.args
    assert [t.shape for t in (a, b, c) if isinstance(t, Tensor)] == [(77, 200), (77, 136), (200, 136)]
    assert bias is None and numbers == [200, 136, 77, 0, linear_mma.GROUP]
    assert launch.kernel.symbol == "linear_mma_float32" and launch.grid == (4 * 3, 1, 1) and launch.block[0] == 128


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


def drawn(form: str, rows: int, cols: int, depth: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b, _ = operands(form, rows, cols, depth)
    return tuple(rng.standard_normal(spec.shape).astype(NUMPY_DTYPE["bfloat16"]) for spec in (a, b))  # type: ignore[return-value]


def run(
    backend: Backend,
    form: str,
    a: np.ndarray,
    b: np.ndarray,
    *,
    choice: Choice | None = None,
    slices: int | None = None,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
    group: int = linear_mma.GROUP,
) -> np.ndarray:
    """One product between guard bytes. `start`: what C is added to."""
    a_mn, b_mn, dtype = FORMS[form]
    rows, cols = a.shape[1 if a_mn else 0], b.shape[1 if b_mn else 0]
    guarded = opcheck.GuardedBackend(backend)
    with Session(guarded) as session:
        x, y = session.put(a), session.put(b)
        c = session.empty(Spec((rows, cols), dtype)) if start is None else session.put(start)
        z = None if bias is None else session.put(bias)
        rec = Recorder.of(backend)
        product(rec, form, x, y, c, z, accumulate=start is not None, choice=choice, slices=slices, group=group)
        session.execute(rec)
        got = session.get(c)
    assert not guarded.broken, guarded.broken
    return got


def judge(
    form: str,
    got: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
    what: str = "",
) -> None:
    """Against fp64, element by element. mma's adders cut: at most 1.5 units of 2^-23 of the sum's size a step of k, and
    no more than 2^-20 of it was ever seen; bf16 rounds once more, by at most 2^-8 of the value."""
    a_mn, b_mn, dtype = FORMS[form]
    a64, b64 = (m.astype(np.float64).T if mn else m.astype(np.float64) for m, mn in ((a, a_mn), (b, b_mn)))
    want, size = a64 @ b64.T, np.abs(a64) @ np.abs(b64).T
    for added in (bias, start):
        if added is not None:
            want, size = want + added.astype(np.float64), size + np.abs(added.astype(np.float64))
    limit = size * 2.0**-20 + (np.abs(want) * 2.0**-8 if dtype == "bfloat16" else 0.0) + 1e-30
    error = np.abs(got.astype(np.float64) - want)
    assert np.isfinite(got.astype(np.float64)).all(), f"{what}: not every element was written"
    worst = float((error / limit).max())
    print(f"{form} {what}: {worst:.3f} of the limit")
    assert worst <= 1, what


def around(form: str, design: Choice) -> Iterator[tuple[int, int, int]]:
    """(rows, cols, depth) on both sides of a tile's edges and of the stages' end, as the copies need them."""
    tile, copy = design
    m, n, k, stages = tile.rows, tile.cols, tile.step, tile.stages
    a_mn, b_mn, _ = FORMS[form]
    unit = copy // 2
    for rows, cols, depth in (
        (1, 1, 1),
        (m, n, k * stages),
        (m + 1, n + 1, k * (stages + 2) + 1),
        (m - 1, n - 1, k - 1),
        (37, 2 * n + 3, 3 * k + 17),
        (2 * m + 5, 3, 5),
        (9, max(n - 9, 1), k + 16),
    ):
        rows, cols, depth = (min(pair) for pair in zip((rows, cols, depth), tile.most, strict=True))
        up = (-(-extent // unit) * unit for extent in (rows, cols, depth))
        aligned_rows, aligned_cols, aligned_depth = up
        across = a_mn and b_mn
        yield aligned_rows if a_mn else rows, aligned_cols if b_mn else cols, depth if across else aligned_depth


def fits(tile: Tile, *shape: int) -> bool:
    return all(extent <= most for extent, most in zip(shape, tile.most, strict=True))


@pytest.mark.parametrize(("form", "design"), EVERY, ids=label)
def test_values(device: Backend, form: str, design: Choice) -> None:
    """Tile edges, all copies; every other product with a bias or (wgrad) added to what is there; several groups; whole
    and in slices, some of them empty."""
    rng = np.random.default_rng(1)
    for index, (rows, cols, depth) in enumerate(around(form, design)):
        a, b = drawn(form, rows, cols, depth, index)
        bias = start = None
        if index % 2 and form in ("forward", "head"):
            bias = rng.standard_normal(cols).astype(NUMPY_DTYPE["bfloat16"])
        if index % 2 and form == "wgrad":
            start = rng.standard_normal((rows, cols)).astype(np.float32)
        for slices in (1, 2 + index) if design[0].sliced else (1,):
            how: dict[str, Any] = {"slices": slices, "group": 1 + index % 3}
            got = run(device, form, a, b, choice=design, bias=bias, start=start, **how)
            judge(form, got, a, b, bias, start, f"{label(design)} {rows}x{cols}x{depth} in {slices}")


@pytest.mark.parametrize("form", FORMS)
def test_every_design_has_the_same_bits(device: Backend, form: str) -> None:
    """What lets the number of rows choose the tile."""
    for rows, cols, depth in ((72, 136, 8), (72, 136, 24), (72, 136, 64), (72, 136, 200), (8, 136, 200), (72, 8, 200)):
        a, b = drawn(form, rows, cols, depth)
        able = [design for design in designs(form) if fits(design[0], rows, cols, depth)]
        first, *others = (run(device, form, a, b, choice=design) for design in able)
        judge(form, first, a, b)
        for design, got in zip(able[1:], others, strict=True):
            opcheck.assert_same_bits(got, first, label(design))


def test_slices_are_added_in_order(device: Backend) -> None:
    """Exactly: float32 sums of ranges of k, one after the other, then the bias, then one rounding."""
    bias = np.random.default_rng(3).standard_normal(20).astype(NUMPY_DTYPE["bfloat16"])
    a, b = drawn("head", 33, 20, 456)
    edges = [8 * s // 3 * 64 for s in range(4)]
    parts = [
        run(device, "head", *(np.ascontiguousarray(m[:, i:j]) for m in (a, b))) for i, j in itertools.pairwise(edges)
    ]
    want = (parts[0] + parts[1]) + parts[2] + bias.astype(np.float32)
    for form in ("head", "forward"):
        got = run(device, form, a, b, choice=(SMALL, 16), slices=3, bias=bias)
        opcheck.assert_same_bits(got, want.astype(got.dtype), form)


@pytest.mark.parametrize("form", ["forward", "dgrad", "head"])
def test_rows_have_the_same_bits_alone_and_in_company(device: Backend, form: str) -> None:
    a, b = drawn(form, 140, 72, 136)
    whole = run(device, form, a, b, choice=(LARGE, 16))
    for start, stop in ((0, 1), (77, 78), (139, 140), (0, 2), (3, 66), (64, 129)):
        part = run(device, form, np.ascontiguousarray(a[start:stop]), b, slices=1)
        opcheck.assert_same_bits(part, whole[start:stop], f"rows {start} to {stop}")


def test_accumulates(device: Backend) -> None:
    """C += the product: exactly the float32 sum of what stood there and what = writes."""
    for rows, cols, depth, design in ((8, 8, 1, (LARGE, 16)), (72, 136, 77, (SMALL, 16)), (33, 5, 66, (SMALL, 2))):
        a, b = drawn("wgrad", rows, cols, depth)
        start = np.random.default_rng(2).standard_normal((rows, cols)).astype(np.float32)
        for slices in (1, 2) if design[0].sliced else (1,):
            got = run(device, "wgrad", a, b, start=start, choice=design, slices=slices)
            opcheck.assert_same_bits(got, start + run(device, "wgrad", a, b, choice=design, slices=slices))


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_inf_stay_in_their_row_and_column(device: Backend, form: str) -> None:
    """Zeros that stand for what is outside a matrix must not meet an infinity that ends up in C."""
    a_mn, b_mn, _ = FORMS[form]
    for design in designs(form):
        rows, cols, depth = (min(pair) for pair in zip((72, 136, 24), design[0].most, strict=True))
        a, b = drawn(form, rows, cols, depth)
        (a.T if a_mn else a)[rows - 1, depth - 1] = np.inf
        (a.T if a_mn else a)[0, 0] = np.nan
        (b.T if b_mn else b)[cols - 1, 1] = np.nan
        slices = 3 if design[0].sliced else 1
        bad = ~np.isfinite(run(device, form, a, b, choice=design, slices=slices).astype(np.float64))
        want = np.zeros((rows, cols), bool)
        want[[0, rows - 1], :] = want[:, cols - 1] = True
        np.testing.assert_array_equal(bad, want, label(design))


def test_an_empty_sum_is_written(device: Backend) -> None:
    a, b = drawn("wgrad", 70, 9, 0)
    assert (run(device, "wgrad", a, b) == 0).all()
    assert (run(device, "wgrad", a, b, start=np.ones((70, 9), np.float32)) == 1).all()


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_large_products(gpu: Backend, form: str) -> None:
    """Every design, the same bits, 20 times over; rows alone and in company at real depths."""
    a, b = drawn(form, 1160, 1416, 2056)
    first = run(gpu, form, a, b, choice=SQUARE[0])
    judge(form, first, a, b)
    for design in SQUARE:
        for _ in range(20):
            opcheck.assert_same_bits(run(gpu, form, a, b, choice=design), first, label(design))
    if not FORMS[form][0]:
        for start, stop in ((0, 1), (77, 78), (1159, 1160), (3, 66), (5, 517), (0, 1159)):
            part = run(gpu, form, np.ascontiguousarray(a[start:stop]), b, slices=1)
            opcheck.assert_same_bits(part, first[start:stop], f"rows {start} to {stop}")


@pytest.mark.gpu
def test_skinny_products(gpu: Backend) -> None:
    """LoRA's six at real sizes, 20 times over."""
    for r in (8, 16, 64):
        for form, rows, cols, depth in (
            ("forward", 2051, r, 5120),
            ("forward", 2051, 5120, r),
            ("dgrad", 2051, r, 5120),
            ("dgrad", 2051, 5120, r),
            ("wgrad", r, 5120, 2051),
            ("wgrad", 5120, r, 2051),
        ):
            a, b = drawn(form, rows, cols, depth)
            first = run(gpu, form, a, b)
            judge(form, first, a, b, what=f"{rows}x{cols}x{depth}")
            for _ in range(20):
                opcheck.assert_same_bits(run(gpu, form, a, b), first)


@pytest.mark.gpu
def test_real_shapes_through_the_op(gpu: Backend) -> None:
    """Forward and backward of Qwen3-0.6B's projections forced to mma; float32 logits too."""
    rng = np.random.default_rng(0)
    for n, m, k, out in ((1, 2048, 1024, "bfloat16"), (333, 1024, 3072, "bfloat16"), (65, 4096, 1024, "float32")):
        x, w, bias = (rng.standard_normal(s).astype(NUMPY_DTYPE["bfloat16"]) for s in ((n, k), (m, k), (m,)))
        d_y = rng.standard_normal((n, m)).astype(NUMPY_DTYPE[out])
        done = run_op(gpu, OP, [x], [w, bias], {"out_dtype": out}, [d_y], forced={"linear": "mma"})
        judge("forward" if out == "bfloat16" else "head", done.outputs[0], x, w, bias=bias)
        if out == "bfloat16":
            assert done.d_inputs[0] is not None
            judge("dgrad", done.d_inputs[0], d_y, w)
            judge("wgrad", done.d_params[0], d_y, x)
