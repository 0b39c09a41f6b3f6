"""linear's skinny variant: what Hopper takes of it before wgmma. Values and bits: test_linear_mma.py."""

from __future__ import annotations

import pytest

from cupyllm.backend.base import Spec
from cupyllm.backend.record import Recorder
from cupyllm.config import published
from cupyllm.ops import linear_skinny, linear_sm90
from cupyllm.ops.linear_mma import FORMS
from cupyllm.ops.op import Case
from tests.ops import opcheck

RANKS = (8, 16, 24, 32, 64)
SKINNY, WGMMA, ROWS = "linear_mma.cu", "linear_sm90.cu", "linear_rows.cu"


def taken(n: int, m: int, k: int, capability: int = 90) -> list[str]:
    """Files of the kernels of forward, dgrad and wgrad, without the sums of slices."""
    rec = opcheck.record("linear", Case("x", ((n, k),), ((m, k),)), "bfloat16", "bfloat16", capability=capability)
    return [launch.kernel.source for launch in rec.launches if launch.kernel.source != "linear_sum.cu"]


@pytest.mark.parametrize("rank", RANKS)
def test_both_products_of_a_lora_pair_and_their_gradients(rank: int) -> None:
    """h = x A^T, d_x and dA, then y = h B^T, d_h and dB, as they were the faster ones on an H200."""
    other, small = (WGMMA if rank > 32 else SKINNY), (SKINNY if rank == 8 else WGMMA)
    for hidden in (2048, 4096, 5120):
        for tokens, h, d_h in ((512, WGMMA, small), (2048, other, None), (8192, other, None)):
            y = WGMMA if rank == 32 and tokens > 512 else other
            assert taken(tokens, rank, hidden) == [h, y, other]
            assert taken(tokens, hidden, rank) == [y, d_h or h, other]
    assert taken(512, rank, 25600) == [SKINNY, other, other], "more slices than a cluster has CTAs"


def test_what_wgmma_takes() -> None:
    for form, rows, cols, depth, want in (
        ("forward", 512, 64, 5120, "64x64k4"),
        ("forward", 2048, 64, 5120, "64x64k2"),
        ("dgrad", 8192, 64, 5120, "64x64"),
        ("forward", 16384, 64, 5120, "128x64k2"),
        ("forward", 2048, 32, 5120, None),
        ("forward", 2048, 5120, 64, "128x128"),
        ("forward", 2048, 5120, 32, "128x128"),
        ("dgrad", 1024, 5120, 32, None),
        ("dgrad", 2048, 25600, 32, None),
        ("dgrad", 2048, 5120, 24, None),
        ("wgrad", 64, 5120, 512, "64x64"),
        ("wgrad", 64, 5120, 2048, "64x128c12"),
        ("wgrad", 5120, 64, 2048, "128x64c21"),
        ("wgrad", 5120, 25600, 2048, None),
        ("wgrad", 64, 64, 2048, None),
        ("forward", 40, 64, 5120, None),
        ("head", 512, 64, 5120, None),
        ("forward", 512, 64, 192, None),
    ):
        made = linear_sm90.skinny(form, rows, cols, depth, 132)
        assert (made and str(made)) == want, (form, rows, cols, depth)
        if made is not None:
            assert made in linear_sm90.designs(form)
            assert linear_sm90.choose(form, rows, cols, depth, 132).design == made
            assert linear_sm90.choose(form, rows, cols, depth, 132, split=False).design.ck == 1


def test_projections_stay_with_wgmma() -> None:
    for size in ("0.6b", "8b", "32b"):
        c = published(size)
        for tokens in (65, 512, 8192):
            assert taken(tokens, c.intermediate_size, c.hidden_size) == [WGMMA] * 3
            assert taken(tokens, c.num_key_value_heads * c.head_dim, c.hidden_size) == [WGMMA] * 3


def test_small_products_and_few_rows_are_made_by_others() -> None:
    assert taken(128, 16, 1024) == [WGMMA] * 3
    assert SKINNY not in taken(4, 16, 5120)


def test_rows_that_must_not_matter() -> None:
    rec = Recorder(90, batch_invariant=True)
    for form in FORMS:
        assert linear_skinny.prefers(rec, form, 4096, 16, 5120) == (form == "wgrad")


def test_makes_what_mma_makes() -> None:
    a, b = Spec((512, 5120), "bfloat16"), Spec((16, 5120), "bfloat16")
    assert linear_skinny.makes("forward", a, b, Spec((512, 16), "bfloat16"))
    assert not linear_skinny.makes("forward", a, b, Spec((512, 16), "float32"))
    assert linear_skinny.SOURCE == SKINNY
