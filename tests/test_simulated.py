"""What is left out on the simulator is a list that cannot go stale, and what must run there is not on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simulated import LEFT_OUT, left_out

SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py"))


@pytest.mark.parametrize("function", LEFT_OUT)
def test_a_test_that_is_left_out_exists(function: str) -> None:
    assert re.search(rf"^def {function}\(", SOURCES, re.MULTILINE)
    assert LEFT_OUT[function] and all(reason for _, reason in LEFT_OUT[function])


def test_parameters_are_matched_whole() -> None:
    name = "test_logits_loss_hidden_states_and_every_gradient"
    assert left_out(name, "sim-h3") and not left_out(name, "sim-h1") and not left_out("another_test", "sim-h3")
    assert not left_out(name, "sim-h33"), "a part of a word is another parameter"


@pytest.mark.parametrize("golden", ["h1", "h2", "h4", "h5", "h6"])
def test_goldens_run_there(golden: str) -> None:
    assert not left_out("test_logits_loss_hidden_states_and_every_gradient", f"sim-{golden}")
    assert not left_out("test_training_golden", "sim")
