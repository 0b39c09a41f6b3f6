"""Linear's `wgmma` variant: which tile a product gets, and its launch. Kernel, maths and numerics: cu/linear_sm90.cu.

Letters: C [M,N] = A B^T, a sum over K; these are the product's, not the layer's (the table says which is which).

    form     A, stored       B, stored         C               layer
    forward  x [M,K]         weight [N,K]      y [M,N]         M rows, N out, K in (head: y is float32)
    dgrad    d_y [M,K]       weight [K,N]      d_x [M,N]       M rows, N in, K out
    wgrad    d_y [K,M]       x [K,N]           d_weight [M,N]  M out, N in, K rows

A design is a tile BM x BN, the CTAs that share operands ("128x256c21": 2 x 1) and those that share a sum ("128x64k2":
each sums half of K). Each form has few of them, since each is a kernel to compile. linear_tiles.json, which
scripts/tune_linear.py writes, has the products of Qwen3's projections that the cost model gets wrong; all others, and
other GPUs, take what the model finds fastest. The order of each sum is the same in every design that does not split K,
so the number of rows may choose among these. Where it must not choose the order (Recorder.batch_invariant), they are
all there is; wgrad, whose rows are no tokens, takes any. Tuning on the user's GPU at the first call was rejected: the
same program would not run the same kernels twice.

Few rows (forward and head up to 64) take tiles of 64 rows, which load and store only what rows there are, in eights:
one kernel serves all of them, and the table lists their products at 16, 32 and 64 rows. Rejected: kernels of 16 and of
32 rows, which are three times as many (at 16 rows 32 lost 1.6% to 16).

Skinny products (linear_mma.py) have a rule of their own, `skinny`, since the model is of larger ones. Rejected: the
first CTA of a cluster of up to eight adds up and writes all columns: 2% over all of them, though 1.5 times the mma
variant's speed at 512 rows, 5120 k and 16 columns.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cupyllm.backend.base import ITEMSIZE, KernelSpec, Spec, Tensor, TensorMap, kernel
from cupyllm.backend.record import Recorder

SOURCE = "linear_sm90.cu"
TABLE = Path(__file__).with_name("linear_tiles.json")
FORMS = {  # form -> whether another axis than k is contiguous in A and in B, dtype of C
    "forward": (False, False, "bfloat16"),
    "head": (False, False, "float32"),
    "dgrad": (False, True, "bfloat16"),
    "wgrad": (True, True, "float32"),
}
STEP = 64  # k of a stage, BK in the kernel; also the elements of a 128-byte row
SHARED_BYTES = (227 << 10) - 1024  # of a CTA, without its barriers, which alignment rounds up to 1024
MAX_STAGES, MAX_BOXES = 32, 4
FEW_ROWS = 64  # up to which forward and head are bound by memory, with constants of the cost model of their own
DEFAULT_ORDER = (8, 0)  # tiles of a band, whether bands go by columns
SKINNY = {  # what `skinny` takes
    "forward": ("64x64k4", "64x64k2", "64x64", "128x64k2", "128x128"),
    "head": (),
    "dgrad": ("64x64k4", "64x64k2", "64x64", "128x64k2", "128x128"),
    "wgrad": ("64x64", "64x128c12", "128x64c21"),
}
MAX_SKINNY = 64
LONG = 12288  # k from which a sum of few tiles is left to the mma variant, which splits it more often
SHORT = 1024  # k up to which wgrad takes small tiles
TALL, WIDE = 1024, 8192  # rows above which, and columns up to which, 128x128 stores 32 products' sums faster


@dataclass(frozen=True)
class Design:
    """A tile, its cluster, and what follows from them in a form."""

    bm: int
    bn: int
    cm: int  # CTAs of a cluster along M, which share B
    cn: int  # and along N, which share A
    ck: int = 1  # of such groups in a cluster, each of which sums a range of K

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, 64 or 128 rows each."""
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.bm]

    @property
    def group(self) -> int:
        """CTAs that share operands."""
        return self.cm * self.cn

    @property
    def cluster(self) -> int:
        return self.group * self.ck

    @property
    def out_cols(self) -> int:
        """Columns of C that a CTA writes."""
        return self.bn // self.ck

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def clusters(self, num_sms: int) -> int:
        """How many the GPU holds at once. A cluster lies within one GPC, whose SMs are no multiple of four: an H200's
        132 hold 66 of two, but from 28 to 31 of four, as cuOccupancyMaxActiveClusters says."""
        return max(num_sms * 7 // 33 if self.cluster == 4 else num_sms // self.cluster, 1)

    def can(self, depth: int) -> bool:
        """Whether there is a block of K for everyone."""
        return -(-depth // STEP) >= self.ck

    def height(self, form: str, rows: int) -> int:
        """Rows of A that a tile loads: of a product with fewer than 64 only what there is, since TMA takes long over
        those outside."""
        varies = self.bm == 64 and self.cn == 1 and not FORMS[form][0]
        return min(-(-rows // 8) * 8, self.bm) if varies else self.bm

    def tiles(self, rows: int, cols: int) -> int:
        """Tiles of clusters that cover C."""
        return -(-rows // (self.bm * self.cm)) * -(-cols // (self.bn * self.cn))

    def stage_bytes(self, form: str) -> int:
        """Shared bytes of 64 k of both operands; with k not contiguous B comes in boxes of 64 columns."""
        b_rows = -(-self.bn // 64) * 64 if FORMS[form][1] else self.bn
        return 2 * STEP * (self.bm + b_rows)

    def box_cols(self, form: str) -> int:
        """Columns of a box of C; what is no multiple of 32 leaves in one box."""
        if self.out_cols % 32:
            return self.out_cols
        return 32 if FORMS[form][2] == "float32" or self.out_cols % 64 else 64

    def box_bytes(self, form: str) -> int:
        """Shared bytes of one box of 64 rows for each consumer."""
        return self.consumers * 64 * self.box_cols(form) * ITEMSIZE[FORMS[form][2]]

    @property
    def exchange_bytes(self) -> int:
        """Shared bytes of the sums that other CTAs hand to this one: a float for 64 rows a consumer."""
        return self.consumers * 64 * self.out_cols * 4 * (self.ck - 1)

    def depth(self, form: str) -> tuple[int, int]:
        """(stages, boxes of C in flight a consumer): stages first, beside two boxes, or the one that is all of them;
        boxes in what is left."""
        stage, box = self.stage_bytes(form), self.box_bytes(form)
        left = SHARED_BYTES - self.exchange_bytes
        least, most = (1, 1) if self.out_cols % 32 else (2, MAX_BOXES)
        stages = min(MAX_STAGES, (left - least * box) // stage)
        return stages, min(most, (left - stages * stage) // box)

    def shared_bytes(self, form: str) -> int:
        """Dynamic shared memory of a CTA."""
        stages, boxes = self.depth(form)
        return stages * self.stage_bytes(form) + boxes * self.box_bytes(form) + self.exchange_bytes

    def kernel(self, form: str) -> KernelSpec:
        a_mn, b_mn, dtype = FORMS[form]
        stages, boxes = self.depth(form)
        return kernel(
            SOURCE,
            "linear_sm90",
            dtypes={"C_T": dtype},
            A_MN=int(a_mn),
            B_MN=int(b_mn),
            BM=self.bm,
            BN=self.bn,
            CONSUMERS=self.consumers,
            CM=self.cm,
            CN=self.cn,
            CK=self.ck,
            STAGES=stages,
            EPILOGUE_BOXES=boxes,
        )

    def __str__(self) -> str:
        shared = f"c{self.cm}{self.cn}" if self.group > 1 else ""
        return f"{self.bm}x{self.bn}{shared}" + (f"k{self.ck}" if self.ck > 1 else "")


def design(label: str) -> Design:
    """ "128x256c21", "128x64k2" and the like."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:c(\d)(\d))?(?:k(\d))?", label)
    assert found, label
    return Design(*(int(part or 1) for part in found.groups()))


@dataclass(frozen=True)
class Choice:
    """How one product is made."""

    design: Design
    group: int  # tiles of a band: the order of the tiles, which decides what the L2 keeps
    by_columns: int


def makes(form: str, a: Spec, b: Spec, c: Spec) -> bool:
    """Whether this variant can make the product: bfloat16 operands, row pitches of 16 bytes, a sum of something."""
    _, _, dtype = FORMS[form]
    pitches = (a.shape[1], b.shape[1], c.shape[1])
    return a.dtype == b.dtype == "bfloat16" and c.dtype == dtype and all(n % 8 == 0 for n in pitches) and a.size > 0


def prefers(rec: Recorder, form: str, rows: int, cols: int, depth: int) -> bool:
    """Whether a product that fits is taken here unasked."""
    return True


def product(
    rec: Recorder,
    form: str,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    accumulate: bool = False,
    choice: Choice | None = None,
) -> None:
    """Record C = A B^T + bias, or (wgrad) C += A B^T. Shapes as in the table above; bias [N] in forward and head only.

    `choice`: for tuning and tests.
    """
    a_mn, b_mn, c_dtype = FORMS[form]
    (rows, cols), depth = c.shape, a.shape[0 if a_mn else 1]
    assert a.shape == ((depth, rows) if a_mn else (rows, depth)) and a.dtype == "bfloat16", (form, a)
    assert b.shape == ((depth, cols) if b_mn else (cols, depth)) and b.dtype == "bfloat16", (form, b)
    assert c.dtype == c_dtype and depth > 0 and (bias is None or not b_mn), (form, c, bias)
    choice = choice or choose(form, rows, cols, depth, rec.num_sms, form == "wgrad" or not rec.batch_invariant)
    made = choice.design
    assert made.can(depth), (made, depth)
    height = made.height(form, rows)
    maps = (
        TensorMap(a, _operand_box(a_mn, height, made.cn)),
        TensorMap(b, _operand_box(b_mn, made.bn, made.cm)),
        TensorMap(c, (min(height, 64), made.box_cols(form))),
    )
    grid = min(made.clusters(rec.num_sms), made.tiles(rows, cols)) * made.cluster
    args = (*maps, bias, rows, cols, depth, int(accumulate), choice.group, choice.by_columns, height)
    # Of wgrad nothing is read early, so any tensor will do; large ones are 1.1 times as fast when they start alone.
    weight = b if form != "wgrad" else c if skinny(form, rows, cols, depth, rec.num_sms) else None
    rec.launch(made.kernel(form), grid, made.threads, *args, shared_bytes=made.shared_bytes(form), weights=weight)


def _operand_box(mn: bool, extent: int, share: int) -> tuple[int, int]:
    """The box (rows, columns) in which one of `share` CTAs loads its part of `extent` rows (or columns, with mn)."""
    if not mn:
        return extent // share, STEP
    whole = -(-extent // 64) % share == 0
    return (STEP if whole else STEP // share), 64


# ---- choice ----


@lru_cache(maxsize=None)
def table() -> dict[str, Any]:
    """linear_tiles.json: the GPU it is of, the cost model's constants, each form's designs and products."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=None)
def designs(form: str) -> tuple[Design, ...]:
    """What is compiled for a form."""
    return tuple(design(label) for label in dict.fromkeys((*table()[form]["designs"], *SKINNY[form])))


@lru_cache(maxsize=None)
def choose(form: str, rows: int, cols: int, depth: int, num_sms: int, split: bool = True) -> Choice:
    """The table's tile for this product, on GPUs as wide as the one it was made on; else the rule's for skinny ones and
    the cost model's. `split`: K may be split."""
    entry = table()[form]
    if num_sms == table()["num_sms"]:
        key = f"{_listed_rows(form, rows)} {cols} {depth}"
        found = (entry["split"].get(key) if split else None) or entry["products"].get(key)
        if found is not None:
            label, group, by_columns = found
            return Choice(design(label), group, by_columns)
    narrow = skinny(form, rows, cols, depth, num_sms)
    if narrow is not None and (split or narrow.ck == 1):
        return Choice(narrow, *DEFAULT_ORDER)
    able = [made for made in map(design, entry["designs"]) if made.can(depth) and (split or made.ck == 1)]
    if is_few(form, rows):  # one row of tiles, as low as it is
        able = [made for made in able if made.bm == FEW_ROWS and made.group == 1]
    return Choice(
        min(able, key=lambda d: predict(d, form, rows, cols, depth, num_sms, model(form, rows))), *DEFAULT_ORDER
    )


def skinny(form: str, rows: int, cols: int, depth: int, num_sms: int) -> Design | None:
    """The design of a product with an extent of up to 64, where it is faster than the mma variant's: mostly from 33 on
    (H200, six products of ranks 8 to 64). 64x64, where it fills the GPU once, 1.02 times as fast as 128x64k2."""
    label = None
    if form == "wgrad":
        extent = min(rows, cols)
        if MAX_SKINNY // 2 < extent <= MAX_SKINNY < max(rows, cols):
            small = depth <= SHORT or design("64x64").tiles(rows, cols) > num_sms
            label = "64x64" if small else "64x128c12" if rows < cols else "128x64c21"
    elif form != "head" and rows > MAX_SKINNY:
        if depth <= MAX_SKINNY < cols:
            half = MAX_SKINNY // 2
            label = "128x128" if depth > half or (depth == half and rows > TALL and cols <= WIDE) else None
        elif cols <= MAX_SKINNY:
            waves = (k for k in ("64x64k4", "64x64k2", "64x64") if _is_one_wave(design(k), rows, cols, num_sms))
            label = next(waves, "128x64k2")
            most_split = label == "64x64k4"
            least = (8 if form == "dgrad" else 0) if most_split else MAX_SKINNY // 2  # columns to have more than
            if cols <= least or (most_split and depth > LONG):
                label = None
    made = None if label is None else design(label)
    return made if made is not None and made.can(depth) else None


def _is_one_wave(made: Design, rows: int, cols: int, num_sms: int) -> bool:
    return made.tiles(rows, cols) <= made.clusters(num_sms)


def _listed_rows(form: str, rows: int) -> int:
    """The rows by which the table lists a product: few rows cost what 16, 32 or 64 do."""
    few = is_few(form, rows)
    return next(n for n in (16, 32, FEW_ROWS) if rows <= n) if few else rows


def is_few(form: str, rows: int) -> bool:
    """Whether memory is what bounds a product."""
    return form in ("forward", "head") and rows <= FEW_ROWS


def model(form: str, rows: int) -> dict[str, float]:
    """The cost model's constants."""
    found: dict[str, float] = table()["few" if is_few(form, rows) else "model"]
    return found


def predict(made: Design, form: str, rows: int, cols: int, depth: int, num_sms: int, model: dict[str, float]) -> float:
    """Microseconds. Waves of tiles; 64 k take what the slowest of tensor cores, shared memory and L2 takes; the whole
    takes no less than memory and power allow.

    `model`: us of a launch, of a wave's ends and of exchanging 64 rows of sums; GB/s of memory; per us, bytes that an
    SM's shared memory takes in (ingest), that the L2 gives an SM, that an SM stores; FLOP of an SM, and of the GPU
    within its power limit.
    """
    size = ITEMSIZE[FORMS[form][2]]
    b_rows = made.stage_bytes(form) // (2 * STEP) - made.bm
    waves = -(-made.tiles(rows, cols) // made.clusters(num_sms))
    block = max(
        2 * made.bm * made.bn * STEP / model["flops"],
        2 * STEP * (made.height(form, rows) + b_rows) / model["ingest"],
        2 * STEP * (min(made.bm, rows) / made.cn + b_rows / made.cm) / model["l2"],
    )
    tile = -(-depth // (STEP * made.ck)) * block + model["wave"] + made.bm * made.out_cols * size / model["store"]
    if made.ck > 1:
        tile += model["exchange"] * made.bm / made.consumers / 64
    memory = ((rows + cols) * depth * 2 + rows * cols * size) / (model["memory"] * 1e3)
    power = 2 * rows * cols * depth / model["power"]
    return model["launch"] + float(sum(t**8 for t in (waves * tile, memory, power)) ** 0.125)  # a smooth maximum
