"""linear's skinny variant: what Hopper takes of it before wgmma. Values and bits: test_linear_mma.py."""

from __future__ import annotations

import pytest

from cupyllm.backend.base import Spec
from cupyllm.backend.record import Recorder
from cupyllm.config import published
from cupyllm.ops import linear_skinny
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
    for size in ("0.6b", "8b", "32b"):
        hidden = published(size).hidden_size
        for tokens in (512, 2048, 8192):
            assert taken(tokens, rank, hidden) == [SKINNY] * 3, "h = x A^T, d_x, dA"
            assert taken(tokens, hidden, rank) == [SKINNY] * 3, "y = h B^T, d_h, dB"


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
