"""quantized_linear's wgmma variant. Without a GPU: what is made where, choices, refusals. With one: values and bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend import nvrtc
from cupyllm.backend.base import Backend, Spec, TensorMap, fixed
from cupyllm.backend.compile import flatten
from cupyllm.backend.record import Recorder
from cupyllm.ops import linear_sm90, quantized_sm90
from cupyllm.ops.quantized_sm90 import (
    CONSUMERS,
    DESIGNS,
    LARGE,
    MAKERS,
    SHARED_BYTES,
    SMALL,
    Design,
    choose,
    makes,
    product,
)
from cupyllm.quant import layout
from cupyllm.quant.int8 import Int8
from tests.ops import opcheck
from tests.ops.quantized import FORMATS, FORMS, Weight, activations, draw, judge, run, run_dequantised, to_bfloat16

EVERY = list(itertools.product(FORMS, FORMATS))
OP = ops.get("quantized_linear")


def label(value: object) -> str:
    return str(value)


def slack(form: str, format: str) -> float:
    """What a weight may be off before its rounding: quantized_pairs.cuh's split scales."""
    return 2.0**-16 if format == "int4" else 2.0**-15 if format == "int8" and form == "dgrad" else 0.0


# ---- what is made where: the kernel's arithmetic in Python ----


def made_stage(codes: np.ndarray, bn: int, b_mn: bool, k: int, col: int) -> np.ndarray:
    """The stage of step k as the producing warps store it: 64-bit values in place of bf16, -1000 where nothing is.

    `codes`: int8 in the device layout. One block after another, lane by lane, by stmatrix.
    """
    num_mb, num_tiles, _ = codes.shape
    blocks = codes.reshape(num_mb, num_tiles // 2, 2, 32, 16).view(np.int8)
    stage = np.full(bn * 64, -1000)
    for q in range(bn // 16):
        mb, kb = (k * 4 + q % 4, col // 64 + q // 4) if b_mn else (col // 16 + q, k)
        inside = mb < num_mb and kb < blocks.shape[1]
        for s in range(4):
            registers = np.zeros((4, 32, 2), int)  # matrix, lane, pair
            for lane, matrix, second in itertools.product(range(32), range(4), range(2)):
                byte = s % 2 * 8 + matrix // 2 * 4 + second * 2 + matrix % 2
                registers[matrix, lane, second] = blocks[mb, kb, s // 2, lane, byte] if inside else 0
            for lane in range(32):  # gives the address of row lane % 8 of matrix lane / 8
                row, chunk, swizzle = lane % 16, lane // 16, lane & 7
                at = (q * 2048 + row * 128 + ((s * 2 + chunk ^ swizzle) << 4)) // 2
                values = registers[lane // 8, lane % 8 * 4 : lane % 8 * 4 + 4].ravel()
                assert (stage[at : at + 8] == -1000).all(), "stored twice"
                stage[at : at + 8] = values
    return stage


@pytest.mark.parametrize("b_mn", [False, True], ids=["forward", "dgrad"])
@pytest.mark.parametrize("bn", sorted({made.bn for made in DESIGNS}))
def test_every_stage_is_what_wgmma_reads(bn: int, b_mn: bool) -> None:
    """128-byte swizzle: k contiguous, rows of 64 k; else boxes of 64 columns, a row a k (sm90.cuh's descriptors)."""
    rng = np.random.default_rng(0)
    num_out, num_in = 200, 328
    q = rng.integers(-127, 128, (num_out, num_in)).astype(np.int8)
    codes = layout.pack(Int8(q, np.ones(num_out, np.float32)))[0]
    padded = np.zeros((1024, 1024), int)
    padded[:num_out, :num_in] = q
    for k, col in itertools.product((0, 1, 3), (0, bn, 2 * bn)):
        stage = made_stage(codes, bn, b_mn, k, col)
        for n, kk in itertools.product(range(bn), range(64)):
            if b_mn:
                at = n // 64 * 4096 + kk * 64 + (n % 64 // 8 ^ kk % 8) * 8 + n % 8
                want = padded[k * 64 + kk, col + n]
            else:
                at = n * 64 + (kk // 8 ^ n % 8) * 8 + kk % 8
                want = padded[col + n, k * 64 + kk]
            assert stage[at] == want, (k, col, n, kk)


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived; waits are for the end of a phase of that parity."""

    def __init__(self, count: int) -> None:
        self.count, self.left, self.phase = count, count, 0

    def arrive(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.left, self.phase = self.count, self.phase + 1

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Ring:
    """A place in a ring of stages that moves on by `stride`, with the parity that waits take."""

    def __init__(self, stages: int, first: int) -> None:
        self.stages, self.stage, self.phase = stages, first, 0

    def step(self, stride: int) -> None:
        self.stage += stride
        if self.stage >= self.stages:
            self.stage -= self.stages
            self.phase ^= 1


class Cta:
    """The kernel's roles as generators, which yield a wait until it is over. A stage holds its step's number."""

    def __init__(self, of_a: int, of_b: int, steps: int, cluster: list[Cta], num_ctas: int) -> None:
        self.of_a, self.of_b, self.steps, self.cluster = of_a, of_b, steps, cluster
        self.a_full = [Barrier(num_ctas) for _ in range(of_a)]  # every CTA's part
        self.a_empty = [Barrier(num_ctas * CONSUMERS) for _ in range(of_a)]
        self.b_full = [Barrier(1) for _ in range(of_b)]
        self.b_empty = [Barrier(CONSUMERS) for _ in range(of_b)]
        self.a, self.b, self.read = [-1] * of_a, [-1] * of_b, 0

    def maker(self, turn: int) -> Iterator[tuple[Barrier, int]]:
        ring = Ring(self.of_b, turn)
        for made in range(turn, self.steps, MAKERS):
            yield self.b_empty[ring.stage], ring.phase ^ 1
            assert self.b[ring.stage] == (made - self.of_b if made >= self.of_b else -1)
            self.b[ring.stage] = made
            self.b_full[ring.stage].arrive()
            ring.step(MAKERS)

    def consumer(self, wg: int) -> Iterator[tuple[Barrier, int]]:
        ring, ring_b, before = Ring(self.of_a, 0), Ring(self.of_b, 0), (-1, -1)
        load, coming = 0, Ring(self.of_a, 0)

        def load_a() -> Iterator[tuple[Barrier, int]]:
            nonlocal load
            if wg == 0 and load < self.steps:
                yield self.a_empty[coming.stage], coming.phase ^ 1
                for peer in self.cluster:
                    held = peer.a[coming.stage]
                    assert held in (load - self.of_a, load, -1), "a stage that was read, or its other part"
                    peer.a[coming.stage] = load
                    peer.a_full[coming.stage].arrive()
                coming.step(1)
                load += 1

        for _ in range(self.of_a - 2):
            yield from load_a()
        for step in range(self.steps + 1):
            if step < self.steps:
                yield self.a_full[ring.stage], ring.phase
                yield self.b_full[ring_b.stage], ring_b.phase
                assert self.a[ring.stage] == step == self.b[ring_b.stage]
            if step > 0:  # the products before have ended
                assert self.a[before[0]] == step - 1 == self.b[before[1]]
                for peer in self.cluster:
                    peer.a_empty[before[0]].arrive()
                self.b_empty[before[1]].arrive()
                self.read += 1
            if step < self.steps:
                yield from load_a()
            before = ring.stage, ring_b.stage
            ring.step(1)
            ring_b.step(1)
        for _ in range(self.of_a if wg == 0 else 0):
            yield self.a_empty[coming.stage], coming.phase ^ 1
            coming.step(1)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize(
    ("num_ctas", "of_a", "of_b"), sorted({(made.cn, *made.stages(n)) for made in DESIGNS for n in range(4)})
)
def test_rings_never_stick_nor_overwrite(num_ctas: int, of_a: int, of_b: int, steps: int) -> None:
    """A cluster, in 50 random orders of what may go on."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        cluster: list[Cta] = []
        cluster += [Cta(of_a, of_b, steps, cluster, num_ctas) for _ in range(num_ctas)]
        roles = [role for cta in cluster for role in (cta.maker(0), cta.maker(1), cta.consumer(0), cta.consumer(1))]
        waits = {i: next(role, None) for i, role in enumerate(roles)}
        while any(waits.values()):
            able = [i for i, wait in waits.items() if wait and wait[0].passed(wait[1])]
            assert able, "nothing goes on"
            chosen = int(rng.choice(able))
            waits[chosen] = next(roles[chosen], None)
        assert [cta.read for cta in cluster] == [CONSUMERS * steps] * num_ctas


@pytest.mark.parametrize(("form", "format"), EVERY)
@pytest.mark.parametrize("made", DESIGNS, ids=label)
def test_launcher_and_kernel_agree_on_sizes(made: Design, form: str, format: str) -> None:
    """The kernel's own macros, asserted while it compiles (to PTX: ptxas adds nothing to this)."""
    number = FORMATS.index(format)
    spec = made.kernel(form, number)
    claims = {
        "A_STAGES * A_BYTES + B_STAGES * B_BYTES + CONSUMERS * EPILOGUE_BOXES * BOX_BYTES + TABLE_BYTES": (
            made.shared_bytes(number)
        ),
        "BOX_COLS": made.box_cols(form),
        "THREADS": quantized_sm90.THREADS,
        "BK": layout.STEP,
    }
    text = flatten(spec.source) + "".join(f'static_assert({k} == {v}, "{k}");\n' for k, v in claims.items())
    options = ["-arch=compute_90a", "-std=c++17", *(f"-D{macro}={value}" for macro, value in spec.defines)]
    ptx, _ = nvrtc.compile_text(text, spec.source, options, "ptx")
    assert spec.symbol.encode() in ptx
    assert made.shared_bytes(number) <= SHARED_BYTES and made.stages(number)[0] >= 4


# ---- weights with split scales: the kernel's arithmetic in Python ----


def split_weights(v: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[scales, v] as Scales.split and Scales.times make them, each rounding as bf16's HFMA2 does: once."""
    high = to_bfloat16(scales)
    low = to_bfloat16(scales - high)
    return to_bfloat16(v * high[:, None] + to_bfloat16(v * low[:, None]))


def scales_of(bits: np.ndarray) -> np.ndarray:
    """float64 of float32's upper mantissa bits, from 1 to 2; a scale's power of two changes nothing."""
    return (np.uint32(0x3F800000) + bits.astype(np.uint32)).view(np.float32).astype(np.float64)


INT4_SCALES = scales_of(np.arange(1 << 15) << 8)  # all mantissas
INT8_SCALES = scales_of(np.random.default_rng(0).integers(0, 1 << 23, 4096))
SPLIT = {
    "int4": (np.arange(-16.0, 16.0), INT4_SCALES, "head"),
    "int8": (np.arange(-128.0, 128.0), INT8_SCALES, "dgrad"),
}


@pytest.mark.parametrize("format", SPLIT)
def test_split_scales_err_as_little_as_one_rounding(format: str) -> None:
    """One rounding of v scale is how bitsandbytes dequantises to bf16."""
    v, scales, form = SPLIT[format]
    exact, got = v * scales[:, None], split_weights(v, scales)
    once, bound = to_bfloat16(exact), slack(form, format)
    ends = np.stack([to_bfloat16(exact * (1 - bound)), to_bfloat16(exact * (1 + bound))])
    assert (got >= ends.min(axis=0)).all() and (got <= ends.max(axis=0)).all()
    assert (np.abs(got - exact) <= (2.0**-8 + bound) * np.abs(exact)).all()
    rms = [float(np.sqrt(np.mean(np.square((w - exact)[exact != 0] / exact[exact != 0])))) for w in (got, once)]
    others = float(np.mean(got != once))
    print(f"{format}: {others:.2%} differ; relative RMS error {rms[0]:.6f}, of one rounding {rms[1]:.6f}")
    assert 0 < others < 1e-3 and rms[0] <= 1.0001 * rms[1]


@pytest.mark.parametrize("dropped", [13, 16], ids=["float16", "bfloat16"])
def test_split_scales_of_half_precision_are_one_rounding(dropped: int) -> None:
    """int4: checkpoints' scales."""
    v, scales, _ = SPLIT["int4"]
    scales = scales_of(np.arange(1 << 23 - dropped) << dropped)
    np.testing.assert_array_equal(split_weights(v, scales), to_bfloat16(v * scales[:, None]))


@pytest.mark.parametrize("format", SPLIT)
def test_the_judge_allows_split_scales_and_no_more(format: str) -> None:
    """Products in float32 of single weights that are a unit off."""
    v, scales, form = SPLIT[format]
    exact, got = v * scales[:, None], split_weights(v, scales)
    off = got != to_bfloat16(exact)
    value, got = exact[off][:64, None].astype(np.float32), got[off][:64, None]  # [out, in 1]
    weight, a = Weight(format, (), value), np.eye(64 if form == "dgrad" else 1, dtype=np.float32)
    made = (got if form == "dgrad" else got.T).astype(np.float32)
    judge(form, made, a, weight, format, slack(form, format))
    with pytest.raises(AssertionError):
        judge(form, made, a, weight, format)
    with pytest.raises(AssertionError):
        judge(form, made * np.float32(1 + 2.0**-6), a, weight, format, slack(form, format))


# ---- choices and refusals ----


def recorded(form: str, rows: int, num_out: int, num_in: int, choice: Design | None = None) -> Any:
    rec = Recorder(90, num_sms=132)
    a_cols, cols = (num_out, num_in) if form == "dgrad" else (num_in, num_out)
    a = fixed(256, (rows, a_cols), "bfloat16")
    c = fixed(512, (rows, cols), "float32" if form == "head" else "bfloat16")
    scales = fixed(1024, (-(-num_out // 16), num_in // 64, 16), "uint8")
    nested = fixed(2048, (257 + -(-num_out * num_in // 64 // 256),), "float32")
    params = (fixed(768, layout.codes_shape("nf4", num_out, num_in), "uint8"), scales, nested)
    product(rec, form, "nf4", a, params, c, choice=choice)
    (launch,) = rec.launches
    return launch


def test_arguments_in_the_kernels_order() -> None:
    launch = recorded("dgrad", 300, 200, 640, LARGE)
    a, c, codes, scales, nested, *numbers = launch.args
    assert isinstance(a, TensorMap) and a.tensor.shape == (300, 200) and a.box == (256, 64)
    assert isinstance(c, TensorMap) and c.tensor.shape == (300, 640) and c.box == (64, 64)
    assert [t.address for t in (codes, scales, nested)] == [768, 1024, 2048]
    assert numbers == [300, 640, 200, 200, 13, 10, 8, *quantized_sm90.ORDER]
    assert launch.grid == (2 * 5, 1, 1) and launch.block == (512, 1, 1)
    shared = recorded("dgrad", 300, 200, 640, SMALL)
    assert shared.args[0].box == (64, 64) and shared.grid == (2 * 3 * 3, 1, 1), "each CTA of two loads half of A"
    assert recorded("head", 300, 200, 640).args[1].box == (64, 32)
    assert recorded("forward", 4096, 51200, 5120).grid == (132, 1, 1)


def made_of(form: str, format: str, rows: int, num_out: int, num_in: int, dtype: str = "bfloat16") -> bool:
    a_cols, cols = (num_out, num_in) if form == "dgrad" else (num_in, num_out)
    c = Spec((rows, cols), "float32" if form == "head" else "bfloat16")
    return makes(form, format, Spec((rows, a_cols), dtype), (), c)


def test_refused_shapes_and_dtypes() -> None:
    for form in FORMS:
        assert made_of(form, "int8", 3, 8, 8) and made_of(form, "int4", 1, 24, 128) and made_of(form, "nf4", 1, 24, 64)
        assert not made_of(form, "int8", 3, 8, 8, "float32")
        assert not made_of(form, "int8", 3, 12, 8) and not made_of(form, "int8", 3, 8, 12), "pitches"
        assert not made_of(form, "int4", 3, 8, 64) and not made_of(form, "nf4", 3, 8, 32), "groups inside rows"
        assert not made_of(form, "int8", 0, 8, 8)
    assert not makes("wgrad", "int8", Spec((8, 8), "bfloat16"), (), Spec((8, 8), "float32")), "weights are frozen"


def test_small_tiles_where_large_ones_leave_sms_idle() -> None:
    assert choose(4096, 51200, 132) == LARGE and choose(4096, 5120, 132) == LARGE
    assert choose(128, 5120, 132) == SMALL and choose(384, 5120, 132) == SMALL


def test_few_rows_are_left_to_others_unless_bits_must_not_tell() -> None:
    for rows in (1, quantized_sm90.MIN_ROWS, quantized_sm90.MIN_ROWS + 1):
        assert quantized_sm90.prefers(Recorder(90), "forward", rows, 8, 8) == (rows > quantized_sm90.MIN_ROWS)
        assert quantized_sm90.prefers(Recorder(90, batch_invariant=True), "forward", rows, 8, 8)


def test_hopper_only() -> None:
    (variant,) = (variant for variant in OP.variants if variant.name == "wgmma")
    assert [c for c in (80, 86, 89, 90, 100, 120, 121) if variant.runs_on(c)] == [90] and not variant.simulated


# ---- on a GPU ----


@pytest.fixture(scope="module")
def gpu() -> Iterator[Backend]:
    from cupyllm.backend.cuda import CudaBackend

    made = CudaBackend()
    yield made
    made.close()


def shapes(format: str, made: Design) -> Iterator[tuple[int, int, int]]:
    """(rows, out, in) on both sides of a tile's edges, fewer and more steps than stages, more tiles than CTAs."""
    group = {"int8": 8, "int4": 128}.get(format, 64)
    for rows, num_out, num_in in (
        (1, 8, 8),
        (made.bm, made.bn * made.cn, 64),
        (made.bm + 1, made.bn * made.cn + 8, 5 * 64),
        (made.bm - 1, 3 * made.bn - 8, 776),
        (3 * made.bm + 7, 40, 200),
        (1100, 2312, 2304),
    ):
        yield rows, num_out, -(-num_in // group) * group


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "format"), EVERY)
@pytest.mark.parametrize("made", DESIGNS, ids=label)
def test_values(gpu: Backend, made: Design, form: str, format: str) -> None:
    """nf4 has the bits of linear_sm90's product with the dequantised weight, too, which sums in the same order."""
    for index, (rows, num_out, num_in) in enumerate(shapes(format, made)):
        weight = draw(format, num_out, num_in, index)
        a = activations(form, weight, rows, index)
        order = (1 + index % 3, index % 2)
        got = run(gpu, quantized_sm90, form, a, weight, choice=made, order=order)
        judge(form, got, a, weight, f"{format} {made} {rows}x{num_out}x{num_in}", slack(form, format))
        if format.startswith("nf4"):
            opcheck.assert_same_bits(got, run_dequantised(gpu, linear_sm90, form, a, weight), f"{rows} rows")


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "format"), EVERY)
def test_rows_have_the_same_bits_alone_and_in_company(gpu: Backend, form: str, format: str) -> None:
    """In every design, 10 times over."""
    weight = draw(format, 1160, 1408)
    a = activations(form, weight, 1300)
    whole = run(gpu, quantized_sm90, form, a, weight, choice=LARGE)
    for made, _ in itertools.product(DESIGNS, range(10)):
        opcheck.assert_same_bits(run(gpu, quantized_sm90, form, a, weight, choice=made), whole, str(made))
    for start, stop in ((0, 1), (77, 78), (1299, 1300), (3, 66), (5, 517)):
        part = run(gpu, quantized_sm90, form, np.ascontiguousarray(a[start:stop]), weight)
        opcheck.assert_same_bits(part, whole[start:stop], f"rows {start} to {stop}")


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "format"), EVERY)
def test_nan_and_inf_stay_in_their_row(gpu: Backend, form: str, format: str) -> None:
    weight = draw(format, 72, 128)
    a = activations(form, weight, 9)
    a[8, -1], a[2, 0] = np.inf, np.nan
    bad = ~np.isfinite(run(gpu, quantized_sm90, form, a, weight).astype(np.float64))
    assert not np.delete(bad, (2, 8), axis=0).any() and bad[2].all() and bad[8].any()
