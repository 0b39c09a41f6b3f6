"""linear's wgmma variant. Without a GPU: who makes what, what is loaded, what is chosen. With one: values and bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import graph, ops
from cupyllm.backend import nvrtc
from cupyllm.backend.base import NUMPY_DTYPE, Spec, Tensor, TensorMap, fixed
from cupyllm.backend.compile import flatten
from cupyllm.backend.eager import Session, run_op
from cupyllm.backend.program import Program
from cupyllm.backend.record import Recorder, arena_layout
from cupyllm.backend.record import place as arena_place
from cupyllm.bench.device import Ready
from cupyllm.bench.measure import Batch
from cupyllm.config import published
from cupyllm.errors import InputError
from cupyllm.model.decoder import layer_nodes
from cupyllm.model.names import layer_params
from cupyllm.ops import linear_sm90
from cupyllm.ops.linear_sm90 import FORMS, Choice, Design, choose, design, designs, product
from cupyllm.ops.op import Case
from scripts import tune_linear
from tests.bench.fake import FakeGpu
from tests.ops import opcheck

OP = ops.get("linear")
EVERY = [(form, made) for form in FORMS for made in designs(form)]
LAYER_FORMS = ("forward", "dgrad", "wgrad")


def label(value: object) -> str:
    return str(value)


# ---- who makes what: the kernel's arithmetic in Python ----


def place(tile: int, across: int, along: int, group: int) -> tuple[int, int]:
    """Order::place: (position across bands' width, position along them)."""
    band = group * along
    first, rest = tile // band * group, tile % band
    width = min(group, across - first)
    return first + rest % width, rest // width


def outputs_of_a_grid(made: Design, rows: int, cols: int, num_clusters: int, choice: Choice) -> np.ndarray:
    """How often each element of C is written."""
    times = np.zeros((rows, cols), np.int32)
    out = made.bn // made.ck
    tiles_m, tiles_n = -(-rows // (made.bm * made.cm)), -(-cols // (made.bn * made.cn))
    across, along = (tiles_n, tiles_m) if choice.by_columns else (tiles_m, tiles_n)
    assert across * along == made.tiles(rows, cols)
    for cta in range(num_clusters * made.cluster):
        rank = cta % made.cluster
        rank_k, rank_m, rank_n = rank // made.group, rank % made.cm, rank % made.group // made.cm
        for tile in range(cta // made.cluster, across * along, num_clusters):
            a, b = place(tile, across, along, choice.group)
            m, n = (b, a) if choice.by_columns else (a, b)
            row, col = (m * made.cm + rank_m) * made.bm, (n * made.cn + rank_n) * made.bn + rank_k * out
            times[row : row + made.height("forward", rows), col : col + out] += 1
    return times


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_block_of_k_is_summed_once_and_in_order(parts: int) -> None:
    """k_first and k_count of the CTAs that split K; each has at least one block, which is what Design.can asks for."""
    made = Design(64, 64, 1, 1, parts)
    for depth in (1, 64, 65, 129, 136, 256, 264, 4096, 5120, 25600, 25608):
        blocks = -(-depth // 64)
        assert made.can(depth) == (blocks >= parts)
        if made.can(depth):
            ranges = [range(blocks * rank // parts, blocks * (rank + 1) // parts) for rank in range(parts)]
            assert [k for part in ranges for k in part] == list(range(blocks)) and all(ranges)
            assert max(map(len, ranges)) == -(-blocks // parts), "what the cost model counts"


def exchanged(made: Design, height: int = 64) -> list[list[list[tuple[int, int]]]]:
    """Exchange: per CTA of a tile, what it adds up for each vector of eight columns: (CTA, vector of that one's sums).
    Of 16 rows, a warp has 512 bytes of a vector; only warps with rows of C send theirs.

    A CTA that is `mine` puts its vectors of `other` into the slot that it has there, and `other` reads the slots in
    order of the CTAs.
    """
    vectors = made.out_cols // 8
    buffers: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in range(made.ck)]
    for mine, other, i in itertools.product(range(made.ck), range(made.ck), range(vectors)):
        if other != mine:
            place = (mine if mine < other else mine - 1, i)
            assert place not in buffers[other], "written twice"
            buffers[other][place] = (mine, other * vectors + i)
    warps = (height + 15) // 16
    bytes_of = (made.ck - 1) * vectors * warps * 512  # what the kernel's barrier waits for, of one consumer
    sent = sum(512 for buffer in buffers for _ in buffer for warp in range(4) if warp < warps)
    assert sent == made.ck * bytes_of and warps * 16 >= height
    assert made.exchange_bytes == made.consumers * (made.ck - 1) * vectors * 2048 >= made.consumers * bytes_of
    return [
        [
            [
                (k, mine * vectors + i) if k == mine else buffers[mine][k if k < mine else k - 1, i]
                for k in range(made.ck)
            ]
            for i in range(vectors)
        ]
        for mine in range(made.ck)
    ]


@pytest.mark.parametrize("made", sorted({made for _, made in EVERY if made.ck > 1}, key=str), ids=label)
def test_every_sum_meets_the_others_of_its_columns_in_order_of_k(made: Design) -> None:
    for height in {made.height("forward", rows) for rows in (1, 16, 17, 40, 64, 200)}:
        added = [vector for cta in exchanged(made, min(height, 64)) for vector in cta]
        assert added == [[(k, column) for k in range(made.ck)] for column in range(made.bn // 8)]


@pytest.mark.parametrize("order", [linear_sm90.DEFAULT_ORDER, *tune_linear.ORDERS, (1, 0), (3, 1)], ids=label)
@pytest.mark.parametrize("made", sorted({made for _, made in EVERY}, key=str), ids=label)
def test_every_output_is_made_once(made: Design, order: tuple[int, int]) -> None:
    tile_m, tile_n = made.bm * made.cm, made.bn * made.cn
    for rows, cols in itertools.product(
        (1, 17, tile_m - 8, tile_m, tile_m + 1, 5 * tile_m + 3), (8, tile_n, tile_n + 8, 7 * tile_n - 8)
    ):
        for num_clusters in (1, 3, 66):
            times = outputs_of_a_grid(made, rows, cols, num_clusters, Choice(made, *order))
            assert (times == 1).all(), (rows, cols, num_clusters)


def load(
    stage: np.ndarray,
    ids: np.ndarray,
    box: tuple[int, int],
    mn: bool,
    extent: int,
    first: int,
    part: int,
    share: int,
    k: int,
) -> None:
    """load_tile by one CTA: copies boxes of `ids`, an operand's element numbers, into the stage (as into its sharers').

    A stage is a list of 128-byte rows (64 elements), before the swizzle; TMA writes -1 outside the matrix.
    """
    boxes = -(-extent // 64) if mn else 1
    whole = boxes % share == 0
    rows = extent // share if not mn else 64 if whole else 64 // share
    assert box == (rows, 64), "the map's box is what the kernel's coordinates step by"
    loads = boxes // share if mn and whole else boxes
    for i in range(loads):
        at, offset = (part * loads + i if mn and whole else i), (0 if mn and whole else part * rows)
        x, y = (first + at * 64, k + offset) if mn else (k, first + offset)
        got = np.full((rows, 64), -1)
        inside = ids[y : y + rows, x : x + 64]
        got[: inside.shape[0], : inside.shape[1]] = inside
        start = at * 64 + offset
        assert (stage[start : start + rows] == -2).all(), "loaded twice"
        stage[start : start + rows] = got


@pytest.mark.parametrize("few", [False, True], ids=["many rows", "20 rows"])
@pytest.mark.parametrize(("form", "made"), EVERY, ids=label)
def test_every_stage_is_filled_once_with_its_operands(form: str, made: Design, few: bool) -> None:
    """By the boxes that the launcher puts into the maps, each part of a shared stage by one CTA of the cluster."""
    a_mn, b_mn, _ = FORMS[form]
    rows, cols, depth = made.bm * made.cm * 2 - 24, made.bn * made.cn * 2 - 24, 280
    if few:
        rows = 24 if a_mn else 20
    height = made.height(form, rows)
    maps = [arg for arg in recorded(form, rows, cols, depth, Choice(made, 8, 0)).args if isinstance(arg, TensorMap)]
    for operand, mn, extent, share, length in (
        (maps[0], a_mn, height, made.cn, rows),
        (maps[1], b_mn, made.bn, made.cm, cols),
    ):
        shape = operand.tensor.shape
        assert shape == ((depth, length) if mn else (length, depth))
        ids = np.arange(math.prod(shape)).reshape(shape)
        stage_rows = -(-extent // 64) * 64 if mn else extent
        for first, k in itertools.product((0, length // extent * extent), (0, 64, 256)):
            stage = np.full((stage_rows, 64), -2)
            for part in range(share):
                load(stage, ids, operand.box, mn, extent, first, part, share, k)
            assert not (stage == -2).any(), "not filled"
            for r, kk in itertools.product((0, 1, 7, 8, extent // 2, extent - 1), (0, 1, 15, 16, 63)):
                got = stage[r // 64 * 64 + kk, r % 64] if mn else stage[r, kk]
                inside = first + r < length and k + kk < depth
                want = (ids[k + kk, first + r] if mn else ids[first + r, k + kk]) if inside else -1
                assert got == want, (r, kk)


@pytest.mark.parametrize(("form", "made"), EVERY, ids=label)
def test_launcher_and_kernel_agree_on_sizes(form: str, made: Design, tmp_path: Path) -> None:
    """The kernel's own macros, asserted while it compiles (to PTX: ptxas adds nothing to this)."""
    spec = made.kernel(form)
    claims = {
        "STAGES * (A_BYTES + B_BYTES) + CONSUMERS * EPILOGUE_BOXES * BOX_BYTES + EXCHANGE_BYTES": made.shared_bytes(
            form
        ),
        "EXCHANGE_BYTES": made.exchange_bytes,
        "OUT_COLS": made.out_cols,
        "A_BYTES + B_BYTES": made.stage_bytes(form),
        "BOX_COLS": made.box_cols(form),
        "THREADS": made.threads,
        "GROUP": made.group,
        "CLUSTER": made.cluster,
        "WEIGHT_IS_B": int(form != "wgrad"),
        "HEIGHT_VARIES": int(made.height(form, 1) < made.bm),
        "BK": linear_sm90.STEP,
    }
    text = flatten(spec.source) + "".join(f'static_assert({k} == {v}, "{k}");\n' for k, v in claims.items())
    options = ["-arch=compute_90a", "-std=c++17", *(f"-D{macro}={value}" for macro, value in spec.defines)]
    ptx, _ = nvrtc.compile_text(text, spec.source, options, "ptx")
    assert spec.symbol.encode() in ptx
    stages, boxes = made.depth(form)
    assert stages >= 3 and (1 if made.out_cols % 32 else 2) <= boxes <= 4
    assert made.shared_bytes(form) + 16 * stages + 16 * made.consumers <= 227 << 10
    assert made.cluster in (1, 2, 4), "of others it is not known how many fit"


def test_a_grid_is_what_the_gpu_holds_at_once() -> None:
    """28 clusters of four at least on 132 SMs; more would wait for others to end."""
    for name, cols, grid in (
        ("64x80", 51200, 132),
        ("64x80k2", 51200, 132),
        ("64x192k4", 51200, 112),
        ("64x192k4", 384, 8),
    ):
        launch = recorded("forward", 40, cols, 5120, Choice(design(name), 8, 0))
        assert launch.grid == (grid, 1, 1), name
    assert [design("64x192k4").clusters(n) for n in (132, 114, 78, 2)] == [28, 24, 16, 1]


def test_boxes_as_they_were_measured() -> None:
    """Boxes (rows, columns) of A, B, C, CTAs, threads and dynamic shared bytes on 132 SMs, by design and form."""
    for form, name, boxes, grid, threads, shared in (
        ("forward", "128x256", ((128, 64), (256, 64), (64, 64)), 132, 384, 229376),
        ("forward", "128x256c21", ((128, 64), (128, 64), (64, 64)), 132, 384, 229376),
        ("forward", "128x160c21", ((128, 64), (80, 64), (64, 32)), 132, 384, 217088),
        ("forward", "128x96c21", ((128, 64), (48, 64), (64, 32)), 132, 384, 225280),
        ("forward", "64x64c21", ((64, 64), (32, 64), (64, 64)), 132, 256, 229376),
        ("dgrad", "128x160c21", ((128, 64), (32, 64), (64, 32)), 132, 384, 229376),
        ("dgrad", "128x96c21", ((128, 64), (64, 64), (64, 32)), 132, 384, 229376),
        ("wgrad", "192x128c12", ((32, 64), (64, 64), (64, 32)), 132, 512, 212992),
        ("wgrad", "256x160c12", ((64, 64), (64, 64), (64, 32)), 132, 384, 221184),
        ("wgrad", "64x128c12", ((32, 64), (64, 64), (64, 32)), 132, 256, 229376),
        ("forward", "64x80", ((64, 64), (80, 64), (64, 80)), 132, 256, 231424),
        ("forward", "64x80k2", ((64, 64), (80, 64), (64, 40)), 132, 256, 218112),
        ("head", "64x192", ((64, 64), (192, 64), (64, 32)), 132, 256, 229376),
    ):
        launch = recorded(form, 4096, 8192, 5120, Choice(design(name), 8, 0))
        assert tuple(arg.box for arg in launch.args if isinstance(arg, TensorMap)) == boxes, name
        assert (launch.grid[0], launch.block[0], launch.shared_bytes) == (grid, threads, shared), name


def test_few_rows_are_loaded_without_those_that_are_not() -> None:
    """In whole eights, the rows of a swizzle's atom; C leaves in as many. A tile shared by CTAs, and A with another
    contiguous axis, stay whole."""
    for form, name, rows, height in (
        ("forward", "64x80", 1, 8),
        ("forward", "64x80k2", 16, 16),
        ("head", "64x192", 17, 24),
        ("dgrad", "64x64", 40, 40),
        ("forward", "64x80", 57, 64),
        ("forward", "64x80", 72, 64),
        ("forward", "64x64c12", 8, 64),
        ("forward", "128x64k2", 8, 128),
        ("wgrad", "64x128c21", 8, 64),
    ):
        launch = recorded(form, rows, 768, 512, Choice(design(name), 8, 0))
        a, _, c = (arg.box[0] for arg in launch.args if isinstance(arg, TensorMap))
        assert (a, c, launch.args[-1]) == (
            64 if form == "wgrad" else height // design(name).cn,
            min(height, 64),
            height,
        )


def operands(form: str, rows: int, cols: int, depth: int) -> tuple[Spec, Spec, Spec]:
    a_mn, b_mn, dtype = FORMS[form]
    a, b = (depth, rows) if a_mn else (rows, depth), (depth, cols) if b_mn else (cols, depth)
    return Spec(a, "bfloat16"), Spec(b, "bfloat16"), Spec((rows, cols), dtype)


def recorded(
    form: str,
    rows: int,
    cols: int,
    depth: int,
    choice: Choice | None = None,
    num_sms: int = 132,
    batch_invariant: bool = False,
) -> Any:
    rec = Recorder(90, num_sms=num_sms, batch_invariant=batch_invariant)
    a, b, c = (fixed(256, spec.shape, spec.dtype) for spec in operands(form, rows, cols, depth))
    product(rec, form, a, b, c, choice=choice)
    (launch,) = rec.launches
    return launch


def test_arguments_in_the_kernels_order() -> None:
    launch = recorded("wgrad", 200, 136, 77, Choice(design("128x128c21"), 4, 1))
    a, b, c, bias, *numbers = launch.args
    assert [m.tensor.shape for m in (a, b, c)] == [(77, 200), (77, 136), (200, 136)]
    assert [m.tensor.dtype for m in (a, b, c)] == ["bfloat16", "bfloat16", "float32"]
    assert bias is None and numbers == [200, 136, 77, 0, 4, 1, 128]
    assert dict(launch.kernel.defines)["A_MN"] == "1" and launch.kernel.symbol == "linear_sm90_float32"
    assert launch.grid == (4, 1, 1), "no more clusters than tiles"


# ---- which variant, which design ----


def taken(n: int, m: int, k: int, dtype: str, weight_dtype: str, capability: int = 90, **options: Any) -> list[str]:
    """Files of the kernels of forward and backward."""
    case = Case("x", ((n, k),), ((m, k), (m,)), options)
    rec = opcheck.record("linear", case, dtype, weight_dtype, capability=capability)
    sources = [launch.kernel.source for launch in rec.launches]
    assert rec.chosen == {"linear": {FAST: "wgmma", MMA: "mma", PLAIN: "plain"}[sources[0]]}
    return sources


FAST, MMA, PLAIN = "linear_sm90.cu", "linear_mma.cu", "linear.cu"


def test_bfloat16_products_on_hopper() -> None:
    """The bias's gradient has one kernel only. Few rows have variants of their own."""
    for n in (65, 127, 128, 700):
        assert taken(n, 24, 40, "bfloat16", "bfloat16") == [FAST, FAST, FAST, PLAIN]


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120, 121])
def test_other_gpus_have_mma(capability: int) -> None:
    assert taken(200, 24, 40, "bfloat16", "bfloat16", capability) == [MMA, MMA, MMA, PLAIN]


@pytest.mark.parametrize("weight_dtype", ["float32", "float16"])
def test_products_without_the_weight_are_made_whatever_its_dtype(weight_dtype: str) -> None:
    assert taken(200, 24, 40, "bfloat16", weight_dtype) == [PLAIN, PLAIN, FAST, PLAIN]


@pytest.mark.parametrize(("m", "k"), [(24, 41), (20, 40)])
def test_pitches_that_do_not_fit_are_mma(m: int, k: int) -> None:
    assert taken(200, m, k, "bfloat16", "bfloat16") == [MMA, MMA, MMA, PLAIN]


def test_products_of_one_layer_are_chosen_apart() -> None:
    """float32 logits have float32 gradients; no rows make an empty sum, which is written all the same."""
    assert taken(200, 24, 40, "bfloat16", "bfloat16", out_dtype="float32") == [FAST, PLAIN, PLAIN, PLAIN]
    rec = opcheck.record("linear", Case("x", ((0, 40),), ((24, 40),)), "bfloat16", capability=90)
    assert [launch.kernel.source for launch in rec.launches] == [MMA]  # d_weight; there are no elements of y and d_x


def test_forced_and_impossible_is_an_error() -> None:
    case = Case("x", ((8, 41),), ((24, 41),))
    with pytest.raises(InputError, match=r"no variant fits \(forced: wgmma, device sm_90\).*--variant linear=NAME"):
        opcheck.record("linear", case, "bfloat16", forced={"linear": "wgmma"}, capability=90)
    with pytest.raises(InputError, match=r"no variant fits \(forced: wgmma, device sm_100\)"):
        fitting = Case("x", ((8, 40),), ((24, 40),))
        opcheck.record("linear", fitting, "bfloat16", forced={"linear": "wgmma"}, capability=100)


def layer_products() -> Iterator[tuple[str, int, int, int]]:
    """Every projection of the three models, and the LM heads, at few and at many rows."""
    for size in tune_linear.SIZES:
        c = published(size)
        h, f = c.hidden_size, c.intermediate_size
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        for n in (1, 2, 16, 64, 65, 200, 700, 2048, 16384):
            for out, depth in ((q, h), (kv, h), (h, q), (f, h), (h, f)):
                yield from (("forward", n, out, depth), ("dgrad", n, depth, out), ("wgrad", out, depth, n))
            yield "head", n, c.vocab_size, h


def test_every_projection_gets_a_design() -> None:
    for num_sms, invariant, (form, rows, cols, depth) in itertools.product((132, 114), (False, True), layer_products()):
        choice = choose(form, rows, cols, depth, num_sms, form == "wgrad" or not invariant)
        assert choice.design in designs(form) and choice.design.can(depth), (form, rows, cols, depth)
        launch = recorded(form, rows, cols, depth, num_sms=num_sms, batch_invariant=invariant)
        assert launch.kernel == choice.design.kernel(form)
        assert 0 < launch.grid[0] <= num_sms and launch.grid[0] % choice.design.cluster == 0
        assert launch.shared_bytes <= linear_sm90.SHARED_BYTES


def test_few_rows_take_small_tiles_and_large_products_large_ones() -> None:
    """One row of tiles, which nobody shares."""
    for num_sms, split, (form, rows, cols, depth) in itertools.product((132, 114), (True, False), layer_products()):
        if linear_sm90.is_few(form, rows):
            made = choose(form, rows, cols, depth, num_sms, split).design
            assert (made.bm, made.group) == (64, 1) and made.height(form, rows) < rows + 8
    assert choose("forward", 8192, 25600, 5120, 132).design.bn >= 128


def test_k_is_split_where_the_rows_may_choose_only() -> None:
    """And it is split somewhere, or these designs are compiled in vain."""
    for form, rows, cols, depth in layer_products():
        assert choose(form, rows, cols, depth, 132, split=False).design.ck == 1
    parts = {form: {choose(*p, 132).design.ck for p in layer_products() if p[0] == form} for form in FORMS}
    assert parts["forward"] > {1} and all(1 in found for found in parts.values())
    split = next(p for p in layer_products() if p[0] == "forward" and choose(*p, 132).design.ck > 1)
    assert recorded(*split).kernel == choose(*split, 132).design.kernel("forward")
    assert dict(recorded(*split, batch_invariant=True).kernel.defines)["CK"] == "1"


def test_a_weight_is_read_early() -> None:
    """Forward and dgrad are programmatic on what came before, unless it may have written the weight; wgrad, which reads
    nothing early, unless it names C."""
    for form in LAYER_FORMS:
        rec = Recorder(90)
        a, b, c = (fixed(i << 30, spec.shape, spec.dtype) for i, spec in enumerate(operands(form, 64, 128, 256), 1))
        d = fixed(1 << 40, c.shape, c.dtype)
        product(rec, form, a, b, c)
        product(rec, form, a, fixed(1 << 41, b.shape, b.dtype), d)
        product(rec, form, a, fixed(1 << 41, b.shape, b.dtype), c)
        assert [launch.programmatic for launch in rec.launches] == [False, True, False]


def test_the_table_has_designs_that_are_compiled() -> None:
    table = linear_sm90.table()
    measured = {(form, *shape) for form, *shape in tune_linear.products()}
    for form in FORMS:
        for kind, key in ((title, key) for title in ("products", "split") for key in table[form][title]):
            name, group, by_columns = table[form][kind][key]
            shape = tuple(int(part) for part in key.split())
            assert (form, *shape) in measured, "a product that the script does not measure"
            assert design(name) in designs(form) and group >= 1 and by_columns in (0, 1)
            assert kind == "split" or design(name).ck == 1
            listed = table[form]["split"].get(key, table[form]["products"].get(key))
            for split, entry in ((True, listed), (False, table[form]["products"].get(key))):
                if entry is not None:
                    found = choose(form, *shape, table["num_sms"], split)
                    assert found == Choice(design(entry[0]), *entry[1:])
    assert linear_sm90.TABLE.read_text(encoding="utf-8") == tune_linear.render(table)


def test_few_rows_are_listed_by_16_32_and_64() -> None:
    for form, few in (("forward", True), ("head", True), ("dgrad", False), ("wgrad", False)):
        listed = {rows: linear_sm90._listed_rows(form, rows) for rows in (1, 16, 17, 32, 33, 64, 65, 512)}
        expected = {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 65, 512: 512}
        assert listed == (expected if few else {rows: rows for rows in listed})


def test_the_table_is_of_one_width_of_gpu() -> None:
    """Its orders of tiles are its own; the model knows one."""
    entries = linear_sm90.table()["forward"]["products"].items()
    key, entry = next((key, entry) for key, entry in entries if tuple(entry[1:]) != linear_sm90.DEFAULT_ORDER)
    m, n, k = (int(part) for part in key.split())
    assert choose("forward", m, n, k, 132, split=False).group == entry[1]
    assert choose("forward", m, n, k, 114, split=False).group == linear_sm90.DEFAULT_ORDER[0]


def test_a_layer_of_a_real_model_forward_and_backward() -> None:
    """Every projection's three products are wgmma's, and every map lies inside its own tensor once the arena is laid
    out and the program is bound."""
    config, n = published("0.6b"), 200
    c, half = config.hidden_size, config.head_dim // 2
    addresses = itertools.count(1 << 40, 1 << 32)

    def tensor(shape: tuple[int, ...], dtype: str = "bfloat16") -> Tensor:
        return fixed(next(addresses), shape, dtype)

    shapes = layer_params(config)
    weights = {name: tensor(shape) for name, shape in shapes.items()}
    values = {"x": tensor((n, c)), "cos": tensor((n, half), "float32"), "sin": tensor((n, half), "float32")}
    rec, nodes = Recorder(90), layer_nodes(config, 0, 1, n, False)
    known, saved = graph.forward(rec, nodes, values, weights, {"y": tensor((n, c))})
    d_params = {name: tensor(shape, "float32") for name, shape in shapes.items()}
    graph.backward(rec, nodes, known, saved, {"y": tensor((n, c))}, d_params, ["x"], {"x": tensor((n, c))})
    assert [rec.chosen[node.name] for node in nodes if node.op == "linear"] == ["wgmma"] * 7
    fast = [launch for launch in rec.launches if launch.kernel.source == FAST]
    assert len(fast) == 3 * 7 and PLAIN not in {launch.kernel.source for launch in rec.launches}

    base = 1 << 50
    offsets, total = arena_layout(rec.launches)
    maps: list[TensorMap] = []
    Program(
        arena_place(rec.launches, offsets, base),
        {launch.kernel: 0 for launch in rec.launches},
        lambda wanted: (maps.append(wanted), bytes(128))[1],  # type: ignore[func-returns-value]
    )
    assert len(maps) == 3 * len(fast)
    in_arena = [m for m in maps if m.tensor.address >= base]
    assert in_arena and all(m.tensor.address + m.tensor.nbytes <= base + total for m in in_arena)
    for m in maps:
        assert m.tensor.address % 16 == 0 and m.tensor.offset + m.tensor.nbytes <= m.tensor.storage.nbytes


def test_the_timer_takes_the_same_turns_for_everyone() -> None:
    """On a device where a launch takes a microsecond: a peer that is slow is timed as well as ours, over the same sets
    of operands, in graphs as long."""
    gpu, turns = FakeGpu({linear_sm90.SOURCE: 1.0}), []
    choices = [Choice(made, 8, 0) for made in designs("dgrad")[:2]]

    class Peer:
        name = "peer"

        def prepare(self, bench: Any, case: Any, sets: Any) -> Ready:
            assert [t.shape for t in (*sets[0].inputs, *sets[0].outputs)] == [(512, 3072), (3072, 1024), (512, 1024)]
            spans = sorted((t.address, t.address + t.nbytes) for one in sets for t in (*one.inputs, *one.outputs))
            assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans)), "operands overlap"
            assert sum(t.nbytes for one in sets for t in one.inputs) >= 200_000_000, "operands that the L2 holds"

            def batches(order: Any) -> list[Batch]:
                turns.extend(order)
                return [Batch(partial(self.work, len(turn)), len(turn)) for turn in order]

            return Ready("peer", "", lambda: None, batches, lambda: None)

        def work(self, calls: int) -> None:
            gpu.now += 2 * calls

        def kernels(self, backend: Any, case: Any) -> list[Any]:
            return []

    shape = ("dgrad", 512, 1024, 3072)
    row = tune_linear.Timer(gpu, [shape]).time(shape, choices, [Peer()])
    assert row["form"] == "dgrad" and row["cols"] == 1024
    assert row["us"] == pytest.approx({**{f"{choice.design} 8 0": 1.0 for choice in choices}, "peer": 2.0})
    assert len(gpu.graphs) == 2 * len(turns) and all(len(turn) >= 20 for turn in turns)
    assert all(len(graph.programs[0].launches) == len(turns[0]) and graph.freed for graph in gpu.graphs)


def test_graphs_hold_twenty_launches_or_two_milliseconds() -> None:
    for shape in tune_linear.products():
        case = tune_linear.case_of(*shape)
        least_us = tune_linear.num_calls(case) * max(case.cost.bytes / 4.6e6, case.cost.flops / 9e8)
        assert tune_linear.num_calls(case) >= 20 or least_us >= 1500, shape
        a, b = case.inputs
        assert a.size * b.size == shape[1] * shape[2] * shape[3] ** 2 and case.outputs[0].shape == shape[1:3]


def modelled(rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Times as the model predicts."""
    found = []
    for form, m, n, k in tune_linear.products(rows):
        near, model = tune_linear.candidates(form, m, n, k, 132), linear_sm90.model(form, m)
        us = {tune_linear.label(c): linear_sm90.predict(c.design, form, m, n, k, 132, model) for c in near}
        found.append({"form": form, "rows": m, "cols": n, "depth": k, "us": us})
    return found


def test_tuning_keeps_few_designs_and_lists_what_the_model_gets_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """All as the model says, but for a product where a design that it thinks slow is fastest, and one where that is a
    design that splits K."""
    old, rows = linear_sm90.table(), modelled((512, 8192))
    odd, split = (
        next(row for row in rows if row["form"] == "dgrad" and f"{name} 8 0" in row["us"])
        for name in ("128x256", "128x128k2")
    )
    odd["us"]["128x256 8 0"] = min(odd["us"].values()) / 2
    split["us"]["128x128k2 8 0"] = min(split["us"].values()) / 3
    made = tune_linear.make_table([{"gpu": "x", "num_sms": 132, "rows": rows}], old)
    assert made["dgrad"]["products"][tune_linear.key_of(odd)] == ["128x256", 8, 0]
    assert made["dgrad"]["split"][tune_linear.key_of(split)] == ["128x128k2", 8, 0]
    assert {"128x256", "128x128k2"} <= set(made["dgrad"]["designs"])
    assert all(design(entry[0]).ck == 1 for form in FORMS for entry in made[form]["products"].values())
    assert all(len(made[form]["designs"]) < len(tune_linear.MANY) for form in ("dgrad", "wgrad"))
    assert "loses" in capsys.readouterr().out


def test_a_table_of_some_products_keeps_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Few rows measured again: many rows' entries, and the designs that they and the model take, stay."""
    old = linear_sm90.table()
    made = tune_linear.make_table([{"gpu": "x", "num_sms": 132, "rows": modelled((16, 32, 64))}], old)
    for form in LAYER_FORMS:
        many = {key: x for key, x in old[form]["products"].items() if form != "forward" or int(key.split()[0]) > 64}
        assert many.items() <= made[form]["products"].items()
        assert {entry[0] for entry in many.values()} <= set(made[form]["designs"])
    assert made["dgrad"] == old["dgrad"] and made["wgrad"] == old["wgrad"]
    taken = {str(choose(*p, 132).design) for p in tune_linear.products((512, 2048)) if p[0] == "forward"}
    assert taken <= set(made["forward"]["designs"])
    assert "head" in capsys.readouterr().out


# ---- values and bits, on a GPU ----


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from cupyllm.backend.cuda import CudaBackend

    backend = CudaBackend()
    if backend.capability != 90:
        pytest.skip(f"wgmma is sm_90's, this is sm_{backend.capability}")
    yield backend
    backend.close()


def drawn(form: str, rows: int, cols: int, depth: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b, _ = operands(form, rows, cols, depth)
    return tuple(rng.standard_normal(spec.shape).astype(NUMPY_DTYPE["bfloat16"]) for spec in (a, b))  # type: ignore[return-value]


def run(
    backend: Any,
    form: str,
    a: np.ndarray,
    b: np.ndarray,
    *,
    choice: Choice | None = None,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
    num_sms: int | None = None,
    batch_invariant: bool = False,
) -> np.ndarray:
    """One product between guard bytes. `start`: what C is added to; `num_sms`: fewer make a CTA do more tiles."""
    a_mn, b_mn, dtype = FORMS[form]
    rows, cols = a.shape[1 if a_mn else 0], b.shape[1 if b_mn else 0]
    guarded = opcheck.GuardedBackend(backend)
    with Session(guarded) as session:
        x, y = session.put(a), session.put(b)
        c = session.empty(Spec((rows, cols), dtype)) if start is None else session.put(start)
        z: Tensor | None = None if bias is None else session.put(bias)
        rec = Recorder(90, num_sms=num_sms or backend.num_sms, batch_invariant=batch_invariant)
        product(rec, form, x, y, c, z, accumulate=start is not None, choice=choice)
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
    """Against fp64, element by element. wgmma's adders cut: at most 2^-20 of sum |a||b| (half of it was seen); bf16
    rounds once more, by at most half a unit in the last place, 2^-8 of the value; fp32 additions by 2^-24 each."""
    a_mn, b_mn, dtype = FORMS[form]
    a64, b64 = (m.astype(np.float64).T if mn else m.astype(np.float64) for m, mn in ((a, a_mn), (b, b_mn)))
    want, size = a64 @ b64.T, np.abs(a64) @ np.abs(b64).T
    for added in (bias, start):
        if added is not None:
            want, size = want + added.astype(np.float64), size + np.abs(added.astype(np.float64))
    limit = size * 2.0**-20 + (np.abs(want) * 2.0**-8 if dtype == "bfloat16" else 0.0)
    error = np.abs(got.astype(np.float64) - want)
    assert np.isfinite(got.astype(np.float64)).all(), f"{what}: not every element was written"
    worst = float((error / limit).max())
    print(f"{form} {what}: {worst:.3f} of the limit")
    assert worst <= 1, what


def around(made: Design) -> list[tuple[int, int]]:
    """(rows, cols) on both sides of a tile's edges and of a cluster's; one row; several tiles."""
    m, n = made.bm * made.cm, made.bn * made.cn
    edges = [(m - 8, n - 8), (m, n), (m + 8, n + 8), (made.bm + 8, made.bn + 8), (3 * m + 8, 2 * n + 24)]
    return [(1, 8), (8, n), (16, n + 8), (24, n), (40, 2 * n), *edges]


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [2, None], ids=["2 CTAs", "all"])
@pytest.mark.parametrize(("form", "made"), EVERY, ids=label)
def test_values(gpu: Any, form: str, made: Design, num_sms: int | None) -> None:
    """Rows of forward and dgrad, and the depth of wgrad, need not be multiples of 8."""
    for index, (rows, cols) in enumerate(around(made)):
        for depth in (8, 64, 72, 520, 1000):
            if form == "wgrad":
                rows, depth = max(rows, 8), depth + 1 - 2 * (index % 2)
            else:
                rows += index % 3
            if not made.can(depth):
                continue
            a, b = drawn(form, rows, cols, depth)
            got = run(gpu, form, a, b, choice=Choice(made, 8, 0), num_sms=num_sms)
            judge(form, got, a, b, what=f"{made} {rows}x{cols}x{depth}")


@pytest.mark.gpu
@pytest.mark.parametrize("order", [*tune_linear.ORDERS, (3, 1)], ids=label)
@pytest.mark.parametrize("form", FORMS)
def test_orders_of_tiles(gpu: Any, form: str, order: tuple[int, int]) -> None:
    a, b = drawn(form, 1304, 1160, 264)
    want: dict[int, np.ndarray] = {}
    for made in designs(form):
        got = run(gpu, form, a, b, choice=Choice(made, *order), num_sms=10)
        judge(form, got, a, b, what=str(made))
        opcheck.assert_same_bits(got, want.setdefault(made.ck, got), str(made))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [8, 136, 328, 5120])
@pytest.mark.parametrize("form", FORMS)
def test_designs_that_split_k_alike_have_the_same_bits(gpu: Any, form: str, depth: int) -> None:
    """What lets the number of rows choose the tile, among those with one CK."""
    a, b = drawn(form, 328, 712, depth)
    able = [made for made in designs(form) if made.can(depth)]
    for parts in sorted({made.ck for made in able}):
        first, *others = ((made, run(gpu, form, a, b, choice=Choice(made, 8, 0))) for made in able if made.ck == parts)
        judge(form, first[1], a, b, what=str(first[0]))
        for made, got in others:
            opcheck.assert_same_bits(got, first[1], f"{made} against {first[0]}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
@pytest.mark.parametrize("form", ["forward", "head"])
def test_few_rows_of_real_products(gpu: Any, form: str, rows: int) -> None:
    """What the chooser takes, with and without split K, one launch behind another: the weights' first stages are asked
    for while the one before still runs."""
    for cols, depth in ((5120, 8192), (4096, 4096), (6144, 1024), (1024, 3072), (10248, 136)):
        a, b = drawn(form, rows, cols, depth)
        for split in (True, False):
            judge(
                form,
                run(gpu, form, a, b, choice=choose(form, rows, cols, depth, gpu.num_sms, split)),
                a,
                b,
                what=f"{cols}",
            )


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["forward", "dgrad", "head"])
def test_rows_have_the_same_bits_alone_and_in_company(gpu: Any, form: str) -> None:
    a, b = drawn(form, 700, 1032, 1096)
    whole = run(gpu, form, a, b, batch_invariant=True)
    for start, stop in ((0, 1), (77, 78), (699, 700), (0, 2), (3, 66), (0, 64), (64, 129), (5, 517), (0, 699)):
        part = run(gpu, form, np.ascontiguousarray(a[start:stop]), b, batch_invariant=True)
        opcheck.assert_same_bits(part, whole[start:stop], f"rows {start} to {stop}")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["forward", "head"])
def test_bias(gpu: Any, form: str) -> None:
    for rows, cols in ((1, 8), (65, 136), (300, 1160)):
        a, b = drawn(form, rows, cols, 264)
        bias = np.random.default_rng(5).standard_normal(cols).astype(NUMPY_DTYPE["bfloat16"])
        for made in designs(form):
            got = run(gpu, form, a, b, bias=bias, choice=Choice(made, 8, 0))
            judge(form, got, a, b, bias=bias, what=str(made))


@pytest.mark.gpu
@pytest.mark.parametrize("made", designs("wgrad"), ids=label)
def test_accumulates(gpu: Any, made: Design) -> None:
    """C += the product: exactly the float32 sum of what stood there and what = writes (subnormals are flushed)."""
    for rows, cols, depth in ((8, 8, 1), (136, 264, 77), (520, 392, 200), (136, 264, 333)):
        if not made.can(depth):
            continue
        a, b = drawn("wgrad", rows, cols, depth)
        start = np.random.default_rng(2).standard_normal((rows, cols)).astype(np.float32)
        got = run(gpu, "wgrad", a, b, start=start, choice=Choice(made, 8, 0))
        judge("wgrad", got, a, b, start=start, what=str(made))
        opcheck.assert_same_bits(got, start + run(gpu, "wgrad", a, b, choice=Choice(made, 8, 0)))


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "made"), EVERY, ids=label)
def test_50_runs_have_the_same_bits(gpu: Any, form: str, made: Design) -> None:
    a, b = drawn(form, 1160, 1416, 584)
    first = run(gpu, form, a, b, choice=Choice(made, 8, 0), num_sms=24)
    for _ in range(49):
        opcheck.assert_same_bits(run(gpu, form, a, b, choice=Choice(made, 8, 0), num_sms=24), first)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_nan_and_inf_stay_in_their_row_and_column(gpu: Any, form: str) -> None:
    """Zeros that TMA writes outside a matrix must not meet an infinity that ends up in C."""
    a, b = drawn(form, 72, 136, 216)
    a_mn, b_mn, _ = FORMS[form]
    (a.T if a_mn else a)[71, 215] = np.inf
    (a.T if a_mn else a)[0, 0] = np.nan
    (b.T if b_mn else b)[135, 1] = np.nan
    for made in designs(form):
        got = run(gpu, form, a, b, choice=Choice(made, 8, 0)).astype(np.float64)
        bad = ~np.isfinite(got)
        want = np.zeros((72, 136), bool)
        want[[0, 71], :] = want[:, 135] = True
        np.testing.assert_array_equal(bad, want, str(made))


@pytest.mark.gpu
def test_real_shapes_through_the_op(gpu: Any) -> None:
    """Forward and backward of Qwen3-0.6B's projections by the launcher, whatever it chooses; float32 logits too."""
    rng = np.random.default_rng(0)
    for n, m, k, out in ((1, 2048, 1024, "bfloat16"), (333, 1024, 3072, "bfloat16"), (65, 4096, 1024, "float32")):
        x, w, bias = (rng.standard_normal(s).astype(NUMPY_DTYPE["bfloat16"]) for s in ((n, k), (m, k), (m,)))
        d_y = rng.standard_normal((n, m)).astype(NUMPY_DTYPE[out])
        done = run_op(gpu, OP, [x], [w, bias], {"out_dtype": out}, [d_y], forced={"linear": "wgmma"})
        judge("forward" if out == "bfloat16" else "head", done.outputs[0], x, w, bias=bias)
        if out == "bfloat16":
            assert done.d_inputs[0] is not None
            judge("dgrad", done.d_inputs[0], d_y, w)
            judge("wgrad", done.d_params[0], d_y, x)
        else:
            assert done.d_inputs[0] is not None
            want = d_y.astype(np.float64) @ w.astype(np.float64)
            assert opcheck.relative_error(done.d_inputs[0], want) < opcheck.tolerance("bfloat16", m)


@pytest.mark.gpu
def test_several_products_share_an_arena(gpu: Any) -> None:
    """Maps of temporaries hold the addresses that the arena gave them."""
    rng = np.random.default_rng(0)
    x, w1, w2 = (rng.standard_normal(s).astype(NUMPY_DTYPE["bfloat16"]) for s in ((65, 136), (264, 136), (72, 264)))
    with Session(gpu) as session:
        rec = Recorder.of(gpu)
        hidden = rec.empty((65, 264), "bfloat16", "hidden")
        spare = rec.empty((65, 72), "bfloat16", "spare")
        y = session.empty(Spec((65, 72), "bfloat16"))
        tensors = [session.put(m) for m in (x, w1, w2)]
        product(rec, "forward", tensors[0], tensors[1], hidden)
        product(rec, "forward", hidden, tensors[2], spare)
        product(rec, "forward", hidden, tensors[2], y)
        session.execute(rec)
        got = session.get(y)
    middle = run(gpu, "forward", x, w1)
    opcheck.assert_same_bits(got, run(gpu, "forward", middle, w2))
