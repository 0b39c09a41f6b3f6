"""quantized_linear's mma variant: who makes what, values and bits on the checking simulator and on GPUs, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from cupyllm.backend import nvrtc
from cupyllm.backend.base import Backend, Spec
from cupyllm.backend.compile import flatten
from cupyllm.backend.record import Recorder
from cupyllm.ops import linear_mma, quantized_mma
from cupyllm.ops.quantized_mma import DESIGNS, LARGE, SMALL, Tile, choose, makes
from cupyllm.quant import layout
from tests.ops import opcheck
from tests.ops.quantized import FORMATS, FORMS, activations, draw, judge, run, run_dequantised
from tests.simulated import KERNELS

EVERY = list(itertools.product(FORMS, FORMATS))


def label(value: object) -> str:
    return str(value)


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


# ---- who makes what: the kernel's arithmetic in Python ----


@pytest.mark.parametrize("band", [1, 2, 8, 16])
@pytest.mark.parametrize("tile", DESIGNS, ids=label)
def test_every_tile_is_made_once(tile: Tile, band: int) -> None:
    sizes = (1, tile.size, tile.size + 1, 7 * tile.size, 17 * tile.size + 3)
    for rows, cols in itertools.product(sizes, sizes):
        row_tiles, col_tiles = -(-rows // tile.size), -(-cols // tile.size)
        times = np.zeros((row_tiles, col_tiles), np.int32)
        for cta in range(tile.count(rows, cols)):
            base_row, place = cta // (band * col_tiles) * band, cta % (band * col_tiles)
            in_band = min(row_tiles - base_row, band)
            times[base_row + place % in_band, place // in_band] += 1
        assert (times == 1).all(), (rows, cols)


@pytest.mark.parametrize(("form", "format"), EVERY)
@pytest.mark.parametrize("tile", DESIGNS, ids=label)
def test_launcher_and_kernel_agree_on_sizes(tile: Tile, form: str, format: str) -> None:
    """The kernel's own macros, asserted while it compiles (to PTX: ptxas adds nothing to this)."""
    number = FORMATS.index(format)
    spec = tile.kernel(form, number)
    claims = {
        "STAGES * STAGE_BYTES + TABLE_BYTES": tile.shared_bytes(form, number),
        "THREADS": tile.threads,
        "BK": layout.STEP,
        "STAGE_BYTES % 16": 0,
    }
    text = flatten(spec.source) + "".join(f'static_assert({k} == {v}, "{k}");\n' for k, v in claims.items())
    options = ["-arch=compute_80", "-std=c++17", *(f"-D{macro}={value}" for macro, value in spec.defines)]
    ptx, _ = nvrtc.compile_text(text, spec.source, options, "ptx")
    assert spec.symbol.encode() in ptx
    assert tile.shared_bytes(form, number) <= 99 << 10, "what a CTA may have on sm_86, 89, 120 and 121"


# ---- values and bits ----


def shapes(format: str, tile: Tile) -> Iterator[tuple[int, int, int]]:
    """(rows, out, in) on both sides of a tile's edges, fewer and more steps than stages."""
    group = {"int8": 8, "int4": 128}.get(format, 64)
    s = tile.size
    for rows, num_out, num_in in (
        (1, 8, 8),
        (s, s, s),
        (s + 1, s + 8, 5 * 64),
        (7, 2 * s + 24, 72),
        (2 * s - 1, 40, 200),
    ):
        yield rows, num_out, -(-num_in // group) * group


@pytest.mark.parametrize(("form", "format"), EVERY)
@pytest.mark.parametrize("tile", DESIGNS, ids=label)
def test_values(device: Backend, tile: Tile, form: str, format: str) -> None:
    """And the bits of linear_mma's product with the dequantised weight, which sums in the same order."""
    for index, (rows, num_out, num_in) in enumerate(shapes(format, tile)):
        weight = draw(format, num_out, num_in, index)
        a = activations(form, weight, rows, index)
        got = run(device, quantized_mma, form, a, weight, choice=tile, band=1 + index % 3)
        judge(form, got, a, weight, f"{format} {tile} {rows}x{num_out}x{num_in}")
        if format != "int8" or form == "dgrad":
            opcheck.assert_same_bits(got, run_dequantised(device, linear_mma, form, a, weight), f"{rows} rows")


@pytest.mark.parametrize("form", ["forward", "dgrad"])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_have_the_same_bits_alone_and_in_company(device: Backend, form: str, format: str) -> None:
    weight = draw(format, 136, 128)
    a = activations(form, weight, 140)
    whole = run(device, quantized_mma, form, a, weight, choice=LARGE)
    for start, stop in ((0, 1), (77, 78), (3, 66), (64, 140)):
        part = run(device, quantized_mma, form, np.ascontiguousarray(a[start:stop]), weight, choice=SMALL)
        opcheck.assert_same_bits(part, whole[start:stop], f"rows {start} to {stop}")


@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_columns_of_c(device: Backend, form: str) -> None:
    """Odd widths are stored one by one; only A's rows are whole chunks."""
    weight = draw("int8", 8 if form == "dgrad" else 33, 33 if form == "dgrad" else 8)
    a = activations(form, weight, 5)
    judge(form, run(device, quantized_mma, form, a, weight), a, weight)


@pytest.mark.parametrize(("form", "format"), EVERY)
def test_nan_and_inf_stay_in_their_row(device: Backend, form: str, format: str) -> None:
    """What stands for codes outside of the weight must not meet an infinity that ends up in C."""
    weight = draw(format, 72, 128)
    a = activations(form, weight, 9)
    a[8, -1], a[2, 0] = np.inf, np.nan
    bad = ~np.isfinite(run(device, quantized_mma, form, a, weight).astype(np.float64))
    assert not np.delete(bad, (2, 8), axis=0).any() and bad[2].all() and bad[8].any()


# ---- choices and refusals ----


def made(form: str, format: str, rows: int, num_out: int, num_in: int, dtype: str = "bfloat16") -> bool:
    a_cols, cols = (num_out, num_in) if form == "dgrad" else (num_in, num_out)
    c = Spec((rows, cols), "float32" if form == "head" else "bfloat16")
    return makes(form, format, Spec((rows, a_cols), dtype), (), c)


def test_refused_shapes_and_dtypes() -> None:
    for form in FORMS:
        assert made(form, "int8", 3, 8, 8) and made(form, "int4", 1, 24, 128) and made(form, "nf4", 1, 24, 64)
        assert not made(form, "int8", 3, 8, 8, "float32")
        assert not made(form, "int8", 3, 12 if form == "dgrad" else 8, 8 if form == "dgrad" else 12), "pitch of A"
        assert not made(form, "int4", 3, 8, 64) and not made(form, "nf4", 3, 8, 32), "groups inside rows"
        assert not made(form, "int8", 0, 8, 8) and not made(form, "int8", 1 << 30, 8, 8)
    assert made("forward", "int8", 3, 5, 8) and made("dgrad", "int8", 3, 8, 5), "any width of C"
    assert not makes("wgrad", "int8", Spec((8, 8), "bfloat16"), (), Spec((8, 8), "float32")), "weights are frozen"


def test_large_tiles_where_they_fill_half_of_the_sms() -> None:
    assert choose(512, 1024, 132) == SMALL and choose(1152, 1024, 132) == LARGE
    assert choose(1, 51200, 132) == LARGE and choose(16, 5120, 132) == SMALL


def test_any_recorder_prefers_it() -> None:
    for rec in (Recorder(80), Recorder(80, batch_invariant=True)):
        assert quantized_mma.prefers(rec, "forward", 1, 8, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "format"), EVERY)
def test_large_products(form: str, format: str) -> None:
    """Both tiles, the same bits, 10 times over."""
    from cupyllm.backend.cuda import CudaBackend

    gpu = CudaBackend()
    try:
        weight = draw(format, 1416, 1152)
        a = activations(form, weight, 1160)
        first = run(gpu, quantized_mma, form, a, weight, choice=LARGE)
        judge(form, first, a, weight)
        for tile, _ in itertools.product(DESIGNS, range(10)):
            opcheck.assert_same_bits(run(gpu, quantized_mma, form, a, weight, choice=tile), first, str(tile))
    finally:
        gpu.close()
