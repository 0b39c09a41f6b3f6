"""Linear's `wgmma` variant: which tile a product gets, and its launch. Kernel, maths and numerics: cu/linear_sm90.cu.

Letters: C [M,N] = A B^T, a sum over K; these are the product's, not the layer's (the table says which is which).

    form     A, stored       B, stored         C               layer
    forward  x [M,K]         weight [N,K]      y [M,N]         M rows, N out, K in (head: y is float32)
    dgrad    d_y [M,K]       weight [K,N]      d_x [M,N]       M rows, N in, K out
    wgrad    d_y [K,M]       x [K,N]           d_weight [M,N]  M out, N in, K rows

A design is a tile BM x BN and the cluster of CTAs that share operands: "128x256c21" is a cluster of 2 x 1. Each form
has few of them, since each is a kernel to compile. linear_tiles.json, which scripts/tune_linear.py writes, has the
products of Qwen3's projections that the cost model gets wrong; all others, and other GPUs, take what the model finds
fastest. Neither changes a result: the order of each sum is the same in every design, so the number of rows may choose
the tile (linear_sm90.cu). Tuning on the user's GPU at the first call was rejected: the same program would not run the
same kernels twice.
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
MAX_STAGES, MAX_BOXES = 12, 4
DEFAULT_ORDER = (8, 0)  # tiles of a band, whether bands go by columns


@dataclass(frozen=True)
class Design:
    """A tile, its cluster, and what follows from them in a form."""

    bm: int
    bn: int
    cm: int  # CTAs of a cluster along M, which share B
    cn: int  # and along N, which share A

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, 64 or 128 rows each."""
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.bm]

    @property
    def cluster(self) -> int:
        return self.cm * self.cn

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def tiles(self, rows: int, cols: int) -> int:
        """Tiles of clusters that cover C."""
        return -(-rows // (self.bm * self.cm)) * -(-cols // (self.bn * self.cn))

    def stage_bytes(self, form: str) -> int:
        """Shared bytes of 64 k of both operands; with k not contiguous B comes in boxes of 64 columns."""
        b_rows = -(-self.bn // 64) * 64 if FORMS[form][1] else self.bn
        return 2 * STEP * (self.bm + b_rows)

    def box_cols(self, form: str) -> int:
        """Columns of a box of C."""
        return 32 if FORMS[form][2] == "float32" or self.bn % 64 else 64

    def box_bytes(self, form: str) -> int:
        """Shared bytes of one box of 64 rows for each consumer."""
        return self.consumers * 64 * self.box_cols(form) * ITEMSIZE[FORMS[form][2]]

    def depth(self, form: str) -> tuple[int, int]:
        """(stages, boxes of C in flight a consumer): stages first, beside two boxes; boxes in what is left."""
        stage, box = self.stage_bytes(form), self.box_bytes(form)
        stages = min(MAX_STAGES, (SHARED_BYTES - 2 * box) // stage)
        return stages, min(MAX_BOXES, (SHARED_BYTES - stages * stage) // box)

    def shared_bytes(self, form: str) -> int:
        """Dynamic shared memory of a CTA."""
        stages, boxes = self.depth(form)
        return stages * self.stage_bytes(form) + boxes * self.box_bytes(form)

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
            STAGES=stages,
            EPILOGUE_BOXES=boxes,
        )

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}" + (f"c{self.cm}{self.cn}" if self.cluster > 1 else "")


def design(label: str) -> Design:
    """ "128x256c21" and the like."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:c(\d)(\d))?", label)
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
    choice = choice or choose(form, rows, cols, depth, rec.num_sms)
    made = choice.design
    maps = (
        TensorMap(a, _operand_box(a_mn, made.bm, made.cn)),
        TensorMap(b, _operand_box(b_mn, made.bn, made.cm)),
        TensorMap(c, (64, made.box_cols(form))),
    )
    grid = min(rec.num_sms // made.cluster, made.tiles(rows, cols)) * made.cluster
    args = (*maps, bias, rows, cols, depth, int(accumulate), choice.group, choice.by_columns)
    rec.launch(made.kernel(form), grid, made.threads, *args, shared_bytes=made.shared_bytes(form))


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
    return tuple(design(label) for label in table()[form]["designs"])


@lru_cache(maxsize=None)
def choose(form: str, rows: int, cols: int, depth: int, num_sms: int) -> Choice:
    """The table's tile for this product, on GPUs as wide as the one it was made on; else the cost model's."""
    found = table()[form]["products"].get(f"{rows} {cols} {depth}") if num_sms == table()["num_sms"] else None
    if found is not None:
        label, group, by_columns = found
        return Choice(design(label), group, by_columns)
    best = min(designs(form), key=lambda d: predict(d, form, rows, cols, depth, num_sms, table()["model"]))
    return Choice(best, *DEFAULT_ORDER)


def predict(made: Design, form: str, rows: int, cols: int, depth: int, num_sms: int, model: dict[str, float]) -> float:
    """Microseconds. Waves of tiles; 64 k take what the slowest of tensor cores, shared memory and L2 takes; the whole
    takes no less than memory and power allow.

    `model`: us of a launch and of a wave's ends; GB/s of memory; per us, bytes that an SM's shared memory takes in
    (ingest), that the L2 gives an SM, that an SM stores; FLOP of an SM, and of the GPU within its power limit.
    """
    size = ITEMSIZE[FORMS[form][2]]
    b_rows = made.stage_bytes(form) // (2 * STEP) - made.bm
    waves = -(-made.tiles(rows, cols) // max(num_sms // made.cluster, 1))
    block = max(
        2 * made.bm * made.bn * STEP / model["flops"],
        2 * STEP * (made.bm + b_rows) / model["ingest"],
        2 * STEP * (made.bm / made.cn + b_rows / made.cm) / model["l2"],
    )
    tile = -(-depth // STEP) * block + model["wave"] + made.bm * made.bn * size / model["store"]
    memory = ((rows + cols) * depth * 2 + rows * cols * size) / (model["memory"] * 1e3)
    power = 2 * rows * cols * depth / model["power"]
    return model["launch"] + float(sum(t**8 for t in (waves * tile, memory, power)) ** 0.125)  # a smooth maximum
