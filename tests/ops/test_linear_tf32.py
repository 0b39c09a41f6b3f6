"""linear's tf32x3 variant: who makes what, what is chosen; values, bits and range on the simulator and on GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend import nvrtc
from cupyllm.backend.base import ITEMSIZE, NUMPY_DTYPE, Backend, Spec, fixed
from cupyllm.backend.compile import flatten
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.record import Recorder
from cupyllm.ops import linear_tf32
from cupyllm.ops.linear_tf32 import (
    CAPABILITIES,
    DESIGNS,
    FORMS,
    HOPPER_DESIGNS,
    HOPPER_TILES,
    HOPPER_TIMES,
    LARGE,
    SMALL,
    STEP,
    Design,
    HopperTile,
    Tile,
    choose,
    choose_on_hopper,
    product,
)
from cupyllm.ops.op import Case
from tests.ops import opcheck
from tests.simulated import KERNELS

OP = ops.get("linear")
KINDS = [(form, dtype) for form, (_, _, dtypes) in FORMS.items() for dtype in dtypes]
EVERY = [(*kind, design) for kind in KINDS for design in DESIGNS]
HOPPERS = [(*kind, design) for kind in KINDS for design in HOPPER_DESIGNS]
TF32, WGMMA, PLAIN = "linear_tf32.cu", "linear_tf32_sm90.cu", "linear.cu"


def label(value: object) -> str:
    return f"{value[0]}{'' if value[1] else ' by element'}" if isinstance(value, tuple) else str(value)


# ---- who makes what: the kernel's arithmetic in Python ----


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("tile", [LARGE, SMALL, *HOPPER_TILES], ids=label)
def test_every_tile_is_made_once(tile: Tile | HopperTile, group: int) -> None:
    sizes = (1, tile.rows - 1, tile.rows, tile.rows + 1, 7 * tile.rows, 17 * tile.rows + 3)
    for rows, cols in itertools.product(sizes, sizes):
        row_tiles, col_tiles = -(-rows // tile.rows), -(-cols // tile.cols)
        times = np.zeros((row_tiles, col_tiles), np.int32)
        for cta in range(tile.count(rows, cols)):
            base_row, place = cta // (group * col_tiles) * group, cta % (group * col_tiles)
            in_group = min(row_tiles - base_row, group)
            times[base_row + place % in_group, place // in_group] += 1
        assert (times == 1).all(), (rows, cols)


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("mn", [False, True], ids=["k contiguous", "k across"])
@pytest.mark.parametrize("tile", [LARGE, SMALL], ids=label)
def test_every_chunk_is_copied_once_and_found_again_in_other_banks(tile: Tile, mn: bool, size: int) -> None:
    """Operand::load's targets and Operand::quad's places, of the columns of C."""
    rows, each = tile.cols, 16 // size
    width = (rows if mn else STEP) // each
    down, copies = tile.threads // width, rows * STEP // each // tile.threads
    element: dict[int, tuple[int, int]] = {}  # byte of the tile -> (row, k)
    for thread, i in itertools.product(range(tile.threads), range(copies)):
        row, chunk = thread // width, thread % width
        if mn:
            target = (row * width + (chunk ^ row // 2 % 4 * 2)) * 16 ^ i * down // 2 % 4 * 32
        elif size == 4:
            target = row * 128 + (chunk ^ row // 4 % 4 * 2) * 16
        else:
            target = row // 2 * 128 + ((row % 2 * 4 + chunk) ^ row // 4 % 8) * 16
        for e in range(each):
            byte = target + i * tile.threads * 16 + e * size
            assert byte not in element
            x, y = chunk * each + e, row + i * down
            element[byte] = (x, y) if mn else (y, x)
    assert sorted(element) == list(range(0, rows * STEP * size, size))
    for first, step in itertools.product(range(0, rows, 32), range(STEP // 8)):
        reads: dict[tuple[int, int], list[int]] = {}  # one load of a lane -> each lane's first byte
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for i, e in itertools.product(range(4), range(2)):
                if mn:
                    column = first + 4 * g
                    start = (2 * t * width + (column // each ^ 2 * t)) * 16 + column % each * size
                    load, byte = (0, e), start + (step * 8 + e) * width * 16 + i * size
                elif size == 4:
                    start = (first + 4 * g) * 128 + (t // 2 ^ g % 4 * 2) * 16 + t % 2 * 8
                    load, byte = (i, 0), (start ^ step * 32) + i * 128 + e * 4
                else:
                    start = (first // 2 + 2 * g) * 128 + g * 16 + t * 4
                    load, byte = (i, 0), (start ^ i % 2 * 64 + step * 16) + i // 2 * 128 + e * 2
                assert element[byte] == (first + 4 * g + i, step * 8 + 2 * t + e)
                if (i if mn else e) == 0:
                    reads.setdefault(load, []).append(byte)
        width_of_load = size * (4 if mn else 2)
        at_once = 128 // max(width_of_load, 4)
        for starts in reads.values():
            for lanes in range(0, 32, at_once):
                group = starts[lanes : lanes + at_once]
                banks = {(byte + word) // 4 % 32 for byte in group for word in range(0, width_of_load, 4)}
                assert len(banks) == len(group) * width_of_load // 4, "two lanes meet in a bank"


@pytest.mark.parametrize("mn", [False, True], ids=["k contiguous", "k across"])
@pytest.mark.parametrize("rows", [64, 128])
def test_hoppers_a_is_copied_once_and_found_again_in_other_banks(rows: int, mn: bool) -> None:
    """CopyA's targets and the consumers' fragments, of wgmma's a[i]: row g + 8 (i % 2), k = t + 4 (i / 2)."""
    width = rows // 4 if mn else 8
    down, copies = 128 // width, rows * STEP // 4 // 128
    element: dict[int, tuple[int, int]] = {}  # byte of the tile -> (row, k)
    for thread, i, e in itertools.product(range(128), range(copies), range(4)):
        row, chunk = thread // width, thread % width
        target = row * width * 16 + (chunk ^ (row % 4 * 2 if mn else row % 8)) * 16
        byte = target + i * down * width * 16 + e * 4
        assert byte not in element
        x, y = chunk * 4 + e, row + i * down
        element[byte] = (x, y) if mn else (y, x)
    assert sorted(element) == list(range(0, rows * STEP * 4, 4))
    for warp_row, n, r in itertools.product(range(0, rows, 16), range(STEP // 8), range(4)):
        bytes_read = []
        for lane in range(32):
            g, t = lane // 4, lane % 4
            if mn:
                place = t * rows * 4 + ((warp_row + g) // 4 ^ t * 2) * 16 + g % 4 * 4
                byte = (place ^ r % 2 * 32) + (n * 8 + r // 2 * 4) * rows * 4
            else:
                place = (warp_row + g) * 128 + g * 16 + t * 4
                byte = (place ^ (n * 2 + r // 2) * 16) + r % 2 * 1024
            assert element[byte] == (warp_row + g + r % 2 * 8, n * 8 + t + r // 2 * 4)
            bytes_read.append(byte)
        assert len({byte // 4 % 32 for byte in bytes_read}) == 32, "two lanes meet in a bank"


@pytest.mark.parametrize("mn", [False, True], ids=["k contiguous", "k across"])
@pytest.mark.parametrize("cols", [64, 128])
def test_hoppers_b_is_loaded_once_and_swizzled(cols: int, mn: bool) -> None:
    """SplitB: what a thread loads, and where it stores it: as TMA's swizzle of 128 bytes would, for the descriptor."""
    chunks, apart = cols * STEP // 4 // 128, 128 // cols
    stored: dict[int, tuple[int, int]] = {}  # byte of a plane -> (column of C, k)
    for thread in range(128):
        row, chunk = (thread % cols, thread // cols) if mn else (thread // 8, thread % 8)
        target = row * 128 + (chunk ^ row % 8) * 16
        down = chunk * 4  # `source` in pitches, for mn
        for i in range(chunks):
            for e in range(4):
                k = chunk * 4 + i * apart * 4 + e if mn else chunk * 4 + e  # what is compared with `left`
                column = row if mn else row + 16 * i
                if mn:
                    assert down == k
                    down += 1
                byte = (target ^ i * apart * 16 if mn else target + i * 2048) + e * 4
                assert byte not in stored
                stored[byte] = (column, k)
            down += (apart - 1) * 4
    for column, k in itertools.product(range(cols), range(STEP)):
        plain = column * 128 + k * 4
        assert stored[plain ^ plain >> 3 & 0x70] == (column, k)


@pytest.mark.parametrize("tile", HOPPER_TILES, ids=label)
def test_hoppers_tiles_fit_an_sm(tile: HopperTile) -> None:
    """With the kernel's own barriers, up to 1 KB, and the 1 KB that a CTA is charged."""
    assert tile.ctas * (tile.shared_bytes("float32") + 2048) <= 228 << 10
    assert tile.shared_bytes("bfloat16") < tile.shared_bytes("float32") <= 226 << 10


@pytest.mark.parametrize(("form", "dtype", "design"), [*EVERY, *HOPPERS], ids=label)
def test_launcher_and_kernel_agree_on_sizes(form: str, dtype: str, design: Design) -> None:
    """The kernel's own macros, asserted while it compiles (to PTX: ptxas adds nothing to this)."""
    tile, vector = design
    spec = tile.kernel(form, dtype, vector)
    claims = {"STAGES * STAGE_BYTES": tile.shared_bytes(dtype), "THREADS": tile.threads, "BK": STEP}
    text = flatten(spec.source) + "".join(f'static_assert({k} == {v}, "{k}");\n' for k, v in claims.items())
    arch = "-arch=compute_90a" if isinstance(tile, HopperTile) else "-arch=compute_80"
    options = [arch, "-std=c++17", *(f"-D{macro}={value}" for macro, value in spec.defines)]
    ptx, _ = nvrtc.compile_text(text, spec.source, options, "ptx")
    assert spec.symbol.encode() in ptx
    if isinstance(tile, Tile):
        assert tile.shared_bytes(dtype) <= 99 << 10, "what a CTA may have on sm_86, 89, 120 and 121"


# ---- which variant, which tile, which copies ----


def operands(form: str, rows: int, cols: int, depth: int, dtype: str = "float32") -> tuple[Spec, Spec, Spec]:
    a_mn, b_mn, _ = FORMS[form]
    a, b = (depth, rows) if a_mn else (rows, depth), (depth, cols) if b_mn else (cols, depth)
    return Spec(a, "float32"), Spec(b, dtype), Spec((rows, cols), "float32")


def taken(n: int, m: int, k: int, dtypes: tuple[str, str], capability: int = 90, **how: Any) -> list[str]:
    """Files of the kernels of forward and backward."""
    rec = opcheck.record("linear", Case("x", ((n, k),), ((m, k), (m,))), *dtypes, capability=capability, **how)
    return [launch.kernel.source for launch in rec.launches]


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_float32_on_gpus_of_data_centres(capability: int, weight_dtype: str) -> None:
    """Any number of rows, or a row's bits would depend on it; but the weight's gradient is a sum over them."""
    ours = WGMMA if capability == 90 else TF32
    for n in (1, 63, 64, 1000):
        wgrad = ours if n >= 64 else PLAIN
        assert taken(n, 64, 65, ("float32", weight_dtype), capability) == [ours, ours, wgrad, PLAIN]
        assert taken(n, 63, 65, ("float32", weight_dtype), capability) == [ours, PLAIN, wgrad, PLAIN]
        assert taken(n, 64, 63, ("float32", weight_dtype), capability) == [PLAIN, ours, wgrad, PLAIN]


@pytest.mark.parametrize("capability", [86, 87, 89, 120, 121])
def test_other_gpus_take_it_when_it_is_named(capability: int) -> None:
    assert taken(100, 100, 100, ("float32", "float32"), capability) == [PLAIN] * 4
    named = {"linear": "tf32x3"}
    assert taken(1, 1, 1, ("float32", "float32"), capability, forced=named) == [TF32, TF32, TF32, PLAIN]


@pytest.mark.parametrize("dtypes", [pair for pair in opcheck.DTYPE_PAIRS if pair[0] != "float32"])
def test_bfloat16_activations_are_not_its_own(dtypes: tuple[str, str]) -> None:
    assert TF32 not in taken(100, 100, 100, dtypes)
    a, b, c = operands("forward", 100, 100, 100)
    for wrong in ((Spec(a.shape, "bfloat16"), b, c), (a, b, Spec(c.shape, "bfloat16")), (a, Spec((1, 1), "int8"), c)):
        assert not linear_tf32.makes("forward", *wrong)
    a, b, c = operands("wgrad", 100, 100, 100, "bfloat16")
    assert not linear_tf32.makes("wgrad", a, b, c) and not linear_tf32.makes("head", *operands("forward", 1, 1, 1))


def test_few_tiles_are_small_ones() -> None:
    assert choose("forward", 4096, 4096, 4096, "float32", 132) == (LARGE, True)
    assert choose("forward", 1024, 1024, 4096, "float32", 132) == (SMALL, True)  # 64 large ones
    assert choose("forward", 4096, 4096, 4098, "float32", 132) == (SMALL, False)
    assert choose("forward", 4096, 4096, 4100, "float32", 132) == (LARGE, True)
    assert choose("forward", 4096, 4096, 4100, "bfloat16", 132) == (SMALL, False)
    assert choose("dgrad", 4096, 4096, 4100, "bfloat16", 132) == (LARGE, True)
    assert choose("wgrad", 4098, 4096, 7, "float32", 132) == (SMALL, False)
    assert choose("wgrad", 4096, 4096, 7, "float32", 132) == (LARGE, True)


def test_on_hopper_the_tile_of_the_shortest_time() -> None:
    """Whole waves of tiles on 132 SMs, each product timed on an H200: the fastest of the three."""
    large, middle, small = HOPPER_TILES
    for form, rows, cols, depth, fastest in (
        ("forward", 4096, 4096, 4096, large),
        ("forward", 512, 1024, 4096, small),  # 32, 64 or 128 tiles: one wave of each
        ("forward", 512, 5120, 8192, small),  # 160, 320 or 640: 2 waves, 3, and 2 of pairs with a half
        ("forward", 1, 4096, 4096, small),
        ("dgrad", 512, 4096, 1024, large),  # 128: one wave
        ("dgrad", 512, 5120, 8192, small),
        ("wgrad", 1024, 5120, 512, middle),  # 320, 640 or 1280: 3 waves, 5, and 5 of pairs
        ("wgrad", 1024, 5120, 4096, middle),
        ("wgrad", 5120, 8192, 2048, large),
    ):
        assert choose_on_hopper(form, rows, cols, depth, "float32", 132) == (fastest, True), (form, rows, cols)
    assert choose_on_hopper("forward", 4096, 4096, 4098, "float32", 132) == (small, False)
    assert choose_on_hopper("forward", 4096, 4096, 4100, "bfloat16", 132) == (large, True)  # 4 elements of 2 bytes
    assert choose_on_hopper("dgrad", 4096, 4097, 4096, "float32", 132) == (large, True)  # B is not read in chunks
    assert choose_on_hopper("wgrad", 4098, 4096, 7, "float32", 132) == (small, False)
    assert choose_on_hopper("wgrad", 4096, 4097, 7, "float32", 132) == (large, True)


def test_hoppers_times_say_what_shares_an_sm() -> None:
    """A half as large tile takes more than half of the time; two CTAs of an SM take less than twice one's."""
    for large, middle, pair, alone in HOPPER_TIMES.values():
        assert middle > large / 2 and alone < pair < 2 * alone and pair > large / 2


def test_designs_of_one_capability_only() -> None:
    """wgmma is sm_90's; the tests of bits run mma's designs there, too."""
    specs = operands("forward", 64, 64, 64)
    for capability, design in ((80, HOPPER_DESIGNS[0]), (100, HOPPER_DESIGNS[0])):
        with pytest.raises(AssertionError):
            product(Recorder(capability), "forward", *(fixed(256, s.shape, s.dtype) for s in specs), choice=design)
    assert linear_tf32.designs(90) == HOPPER_DESIGNS and linear_tf32.designs(100) == DESIGNS


def test_arguments_in_the_kernels_order() -> None:
    for capability, symbol, grid, threads in (
        (80, "linear_tf32_float32", 4 * 3, 128),
        (90, "linear_tf32_sm90_float32", 4 * 3, 256),
    ):
        check_arguments(Recorder(capability), symbol, grid, threads)


def check_arguments(rec: Recorder, symbol: str, grid: int, threads: int) -> None:
    a, b, c = (fixed(256, spec.shape, spec.dtype) for spec in operands("wgrad", 200, 136, 77))
    product(rec, "wgrad", a, b, c, accumulate=True)
    (launch,) = rec.launches
    x, y, bias, z, *numbers = launch.args
    assert (x, y, z) == (a, b, c) and bias is None and numbers == [200, 136, 77, 1, linear_tf32.GROUP]
    assert (launch.kernel.symbol, launch.grid, launch.block[0]) == (symbol, (grid, 1, 1), threads)


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


@pytest.fixture(scope="module")
def hopper(gpu: Backend) -> Backend:
    if gpu.capability != 90:
        pytest.skip(f"wgmma is sm_90's, this is sm_{gpu.capability}")
    return gpu


def drawn(form: str, rows: int, cols: int, depth: int, dtype: str, kind: str = "normal") -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(rows + cols + depth)

    def values(spec: Spec) -> np.ndarray:
        if kind == "positive":
            return rng.random(spec.shape).astype(NUMPY_DTYPE[spec.dtype])
        x = rng.standard_normal(spec.shape)
        if kind == "wide":
            x *= 2.0 ** rng.integers(-8, 9, spec.shape)
        return x.astype(NUMPY_DTYPE[spec.dtype])

    return tuple(map(values, operands(form, rows, cols, depth, dtype)[:2]))


def run(
    backend: Backend,
    form: str,
    a: np.ndarray,
    b: np.ndarray,
    *,
    choice: Design | None = None,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
    group: int = linear_tf32.GROUP,
) -> np.ndarray:
    """One product between guard bytes. `start`: what C is added to."""
    a_mn, b_mn, _ = FORMS[form]
    rows, cols = a.shape[1 if a_mn else 0], b.shape[1 if b_mn else 0]
    guarded = opcheck.GuardedBackend(backend)
    with Session(guarded) as session:  # type: ignore[arg-type]
        x, y = session.put(a), session.put(b)
        c = session.empty(Spec((rows, cols), "float32")) if start is None else session.put(start)
        z = None if bias is None else session.put(bias)
        rec = Recorder.of(backend)
        product(rec, form, x, y, c, z, accumulate=start is not None, choice=choice, group=group)
        session.execute(rec)
        got = session.get(c)
    assert not guarded.broken, guarded.broken
    return got


def runnable(backend: Backend) -> tuple[Design, ...]:
    """Every design: on Hopper mma's, which it can run, and its own."""
    return tuple(dict.fromkeys((*DESIGNS, *linear_tf32.designs(backend.capability))))


def by_plain(backend: Backend, form: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same product by linear.cu."""
    forced, none = {"linear": "plain"}, np.zeros
    if form == "forward":
        return run_op(backend, OP, [a], [b], forced=forced).outputs[0]
    if form == "dgrad":
        done = run_op(backend, OP, [none((len(a), b.shape[1]), np.float32)], [b], {}, [a], forced=forced)
        assert done.d_inputs[0] is not None
        return done.d_inputs[0]
    return run_op(backend, OP, [b], [none((a.shape[1], b.shape[1]), np.float32)], {}, [a], forced=forced).d_params[0]


def exact(form: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(A B^T, |A| |B|^T) in fp64."""
    a_mn, b_mn, _ = FORMS[form]
    a64, b64 = (m.astype(np.float64).T if mn else m.astype(np.float64) for m, mn in ((a, a_mn), (b, b_mn)))
    return a64 @ b64.T, np.abs(a64) @ np.abs(b64).T


def judge(
    form: str,
    got: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
    what: str = "",
) -> None:
    """Against fp64, element by element, in units of 2^-23 of sum |a||b|. Left out: lo lo, at most 1/2, and a bit of
    each lo, at most 1 each; cut by tensor cores: 1/2 on average; rounded: 1/2 an addition at most, but of partial sums
    that are smaller and of either sign. 4 in all, which one lo less (2^12 at most, 2^9 on average) overshoots far."""
    want, size = exact(form, a, b)
    for added in (bias, start):
        if added is not None:
            want, size = want + added.astype(np.float64), size + np.abs(added.astype(np.float64))
    error = np.abs(got.astype(np.float64) - want)
    assert np.isfinite(got.astype(np.float64)).all(), f"{what}: not every element was written"
    worst = float((error / (size + 1e-30)).max() * 2.0**23)
    print(f"{form} {what}: {worst:.2f} 2^-23")
    assert worst <= 4, what


def around(form: str, dtype: str, design: Design) -> Iterator[tuple[int, int, int]]:
    """(rows, cols, depth) on both sides of a tile's edges and of the stages' end, as the copies need them."""
    tile, vector = design
    a_mn, b_mn, _ = FORMS[form]
    a_unit, b_unit = (4, 16 // ITEMSIZE[dtype]) if vector else (1, 1)
    if vector and isinstance(tile, HopperTile):
        b_unit = 1 if b_mn else 4
    for rows, cols, depth in (
        (1, 1, 1),
        (tile.rows, tile.cols, STEP * tile.stages),
        (tile.rows + 1, tile.cols + 1, STEP * (tile.stages + 2) + 1),
        (tile.rows - 1, tile.cols - 1, STEP - 1),
        (37, 2 * tile.cols + 3, 3 * STEP + 17),
        (tile.rows + 5, 3, 5),
        (9, tile.cols - 9, 256 + STEP + 8),
    ):
        unit = max(1 if a_mn else a_unit, 1 if b_mn else b_unit)
        yield (
            -(-rows // a_unit) * a_unit if a_mn else rows,
            -(-cols // b_unit) * b_unit if b_mn else cols,
            -(-depth // unit) * unit,
        )


@pytest.mark.parametrize(("form", "dtype", "design"), EVERY, ids=label)
def test_values(device: Backend, form: str, dtype: str, design: Design) -> None:
    check_values(device, form, dtype, design)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "dtype", "design"), HOPPERS, ids=label)
def test_values_on_hopper(hopper: Backend, form: str, dtype: str, design: Design) -> None:
    check_values(hopper, form, dtype, design)


def check_values(device: Backend, form: str, dtype: str, design: Design) -> None:
    """Tile edges, all copies; every other product with a bias or (wgrad) added to what is there; several groups."""
    rng = np.random.default_rng(1)
    for index, (rows, cols, depth) in enumerate(around(form, dtype, design)):
        a, b = drawn(form, rows, cols, depth, dtype)
        bias = start = None
        if index % 2 and form == "forward":
            bias = rng.standard_normal(cols).astype(NUMPY_DTYPE[dtype])
        if index % 2 and form == "wgrad":
            start = rng.standard_normal((rows, cols)).astype(np.float32)
        got = run(device, form, a, b, choice=design, bias=bias, start=start, group=1 + index % 3)
        judge(form, got, a, b, bias, start, f"{label(design)} {rows}x{cols}x{depth}")


def test_a_product_of_22_and_12_bits_is_exact(device: Backend) -> None:
    """Each of the three products is needed. 12 bits are hi and a lo of one bit."""
    rng = np.random.default_rng(0)
    long, short = (rng.integers(2 ** (n - 1), 2**n, (80, 8)).astype(np.float32) for n in (22, 12))
    assert (long.view(np.int32) & 0x1FFF).any() and (short.view(np.int32) & 0x1FFF).any()
    for a, b in ((long, short), (short, long)):
        one = np.zeros_like(a)
        one[:, 3] = a[:, 3]
        want = one[:, 3:4].astype(np.float64) * b[:, 3].astype(np.float64)
        got = run(device, "forward", one, b)
        # hi lo + lo hi + hi hi of 34 bits, rounded or cut to 24 when the last is added; lo lo is at most 2^10.
        assert (np.abs(got - want) <= 2.0**-23 * want + 2.0**10).all()
    power = np.exp2(rng.integers(-3, 4, (72, 8))).astype(np.float32)
    one = np.zeros_like(long)
    one[:, 5] = long[:, 5]
    opcheck.assert_same_bits(run(device, "forward", one, power), one[:, 5:6] * power[:, 5])


@pytest.mark.parametrize("kind", ["normal", "positive", "wide"])
@pytest.mark.parametrize(("form", "dtype"), KINDS, ids=label)
def test_errors_are_no_larger_than_plains(device: Backend, form: str, dtype: str, kind: str) -> None:
    """From the smallest depth on at which it is taken unasked. (The simulator rounds what tensor cores cut.) Not so
    where few terms make up a sum: of magnitudes over 2^-20 to 2^20 it is plain's that is smaller at these depths."""
    for depth in (linear_tf32.MIN_DEPTH, 1024):
        a, b = drawn(form, 128, 128, depth, dtype, kind)
        want, _ = exact(form, a, b)
        ours, plains = (opcheck.relative_error(f(device, form, a, b), want) for f in (run, by_plain))
        print(f"{depth}: {ours:.2e}, plain {plains:.2e}")
        assert ours <= plains


@pytest.mark.parametrize(("form", "dtype"), KINDS, ids=label)
def test_every_design_has_the_same_bits(device: Backend, form: str, dtype: str) -> None:
    """What lets the number of rows choose the tile. Two partial sums, the second one not whole."""
    a, b = drawn(form, 72, 136, 328, dtype)
    first = run(device, form, a, b, choice=DESIGNS[0])
    judge(form, first, a, b)
    for design in runnable(device)[1:]:
        opcheck.assert_same_bits(run(device, form, a, b, choice=design), first, label(design))


@pytest.mark.parametrize(("form", "dtype"), [kind for kind in KINDS if kind[0] != "wgrad"], ids=label)
def test_rows_have_the_same_bits_alone_and_in_company(device: Backend, form: str, dtype: str) -> None:
    a, b = drawn(form, 140, 72, 264, dtype)
    whole = run(device, form, a, b, choice=linear_tf32.designs(device.capability)[0])
    for start, stop in ((0, 1), (77, 78), (139, 140), (3, 66)):
        part = run(device, form, np.ascontiguousarray(a[start:stop]), b)
        opcheck.assert_same_bits(part, whole[start:stop], f"rows {start} to {stop}")


def test_accumulates(device: Backend) -> None:
    """C += the product: exactly the float32 sum of what stood there and what = writes."""
    sizes = ((8, 8, 1, True), (72, 136, 77, True), (33, 5, 66, False))
    for (rows, cols, depth, vector), design in itertools.product(sizes, runnable(device)):
        if design[1] != vector:
            continue
        a, b = drawn("wgrad", rows, cols, depth, "float32")
        start = np.random.default_rng(2).standard_normal((rows, cols)).astype(np.float32)
        got = run(device, "wgrad", a, b, start=start, choice=design)
        opcheck.assert_same_bits(got, start + run(device, "wgrad", a, b, choice=design))


def test_an_empty_sum_is_written(device: Backend) -> None:
    a, b = drawn("wgrad", 70, 9, 0, "float32")
    for design in (None, runnable(device)[-1]):
        assert (run(device, "wgrad", a, b, choice=design) == 0).all()
        assert (run(device, "wgrad", a, b, choice=design, start=np.ones((70, 9), np.float32)) == 1).all()


# ---- range ----


@pytest.mark.parametrize(("form", "dtype"), KINDS, ids=label)
def test_not_finite_sums_are_plains(device: Backend, form: str, dtype: str) -> None:
    """Bit for bit; sums without such an operand do not change. Infinities keep their sign, 3.4e38 stays finite."""
    a, b = drawn(form, 72, 136, 136, dtype)
    a_mn, b_mn, _ = FORMS[form]
    b[...] = np.where(np.abs(b) < 0.1, 0, b)  # infinity times 0
    before = run(device, form, a, b)
    rows, cols = a.T if a_mn else a, b.T if b_mn else b
    rows[71, 135], rows[3, 8], rows[5, 0] = np.inf, -np.inf, np.nan
    rows[6, 1] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # a NaN that rounds up to -0
    rows[8], rows[9, 7] = 0, np.finfo(np.float32).max  # rounds up to infinity
    cols[8, 9] = 2.0**-3
    cols[[0, 135], 9] = np.inf, np.nan
    touched = np.zeros((72, 136), bool)
    touched[[71, 3, 5, 6, 8, 9]] = True
    touched[:, [0, 8, 135]] = True
    with np.errstate(invalid="ignore", over="ignore"):
        want = by_plain(device, form, a, b)
    for design in runnable(device):
        got = run(device, form, a, b, choice=design)
        opcheck.assert_same_bits(got[~touched], before[~touched])
        recomputed = ~np.isfinite(want)
        recomputed[9, 1:8] = True
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), label(design))
        opcheck.assert_same_bits(got[recomputed & ~np.isnan(want)], want[recomputed & ~np.isnan(want)], label(design))
    assert np.isposinf(want[71]).any() and np.isneginf(want[71]).any() and np.isnan(want[71]).any()
    assert np.isfinite(want[9, 1:8]).any()


@pytest.mark.parametrize("exponent", [-50, 50])
def test_scales_exactly_by_powers_of_two(device: Backend, exponent: int) -> None:
    for form, dtype in KINDS:
        a, b = drawn(form, 20, 40, 72, dtype)
        once, scaled = run(device, form, a, b), run(device, form, np.ldexp(a, exponent), b)
        opcheck.assert_same_bits(np.ldexp(once, exponent), scaled)


def test_tiny_operands(device: Backend) -> None:
    """All digits from 2^-113 on; below, each is off by at most 2^-136."""
    a, b = drawn("forward", 40, 72, 136, "float32", "positive")
    a += 1
    for exponent in (-100, -113):
        tiny = np.ldexp(a, exponent)
        want, size = exact("forward", tiny, b)
        worst = float((np.abs(run(device, "forward", tiny, b) - want) / size).max()) * 2**23
        print(f"2^{exponent}: {worst:.2f} 2^-23")
        assert worst <= 4
    for exponent in (-114, -120, -126, -130):
        tiny = np.ldexp(a, exponent)
        want, size = exact("forward", tiny, b)
        limit = 4 * 2.0**-23 * size + 2.0**-136 * b.sum(axis=1, dtype=np.float64)
        assert (np.abs(run(device, "forward", tiny, b) - want) <= limit).all(), exponent


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "dtype"), KINDS, ids=label)
def test_large_products(gpu: Backend, form: str, dtype: str) -> None:
    """Every design, the same bits, 10 times over; rows alone and in company at real depths."""
    a, b = drawn(form, 1160, 1416, 2056, dtype)
    first = run(gpu, form, a, b, choice=DESIGNS[0])
    judge(form, first, a, b)
    for design in runnable(gpu):
        for _ in range(10):
            opcheck.assert_same_bits(run(gpu, form, a, b, choice=design), first, label(design))
    if form != "wgrad":
        for start, stop in ((0, 1), (77, 78), (1159, 1160), (3, 66), (5, 517)):
            part = run(gpu, form, np.ascontiguousarray(a[start:stop]), b)
            opcheck.assert_same_bits(part, first[start:stop], f"rows {start} to {stop}")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "positive", "wide"])
@pytest.mark.parametrize("depth", [4096, 25600])
def test_errors_of_long_sums_are_no_larger_than_plains(gpu: Backend, depth: int, kind: str) -> None:
    for form, dtype in KINDS:
        a, b = drawn(form, 128, 256, depth, dtype, kind)
        want, _ = exact(form, a, b)
        ours, plains = (opcheck.relative_error(f(gpu, form, a, b), want) for f in (run, by_plain))
        print(f"{form} {dtype}: {ours:.2e}, plain {plains:.2e}")
        assert ours <= plains, (form, dtype)
