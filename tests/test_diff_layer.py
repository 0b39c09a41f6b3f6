"""scripts/diff_layer.py: clean where nothing is wrong, and right about where something is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupyllm import ops
from scripts import diff_layer
from tests.simulated import share_kernels

GOLDEN = Path(__file__).parent / "fixtures" / "goldens" / "h1"


@pytest.mark.parametrize("backend", ["emulator", "sim"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_diverges(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, backend: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    share_kernels(tmp_path / "cupyllm")
    assert diff_layer.main(["--backend", backend, "--tokens", "5", "--dtype", dtype]) == 0
    assert "no node diverges: 50 tensors" in capsys.readouterr().out


def test_a_checkpoints_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert diff_layer.main(["--backend", "emulator", "--tokens", "5", "--model", str(GOLDEN), "--layer", "1"]) == 0
    assert "no node diverges" in capsys.readouterr().out


def test_a_wrong_forward_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """silu of the wrong half: everything after swiglu would differ, only swiglu is named."""
    op: Any = ops.get("swiglu")
    forward = type(op).forward

    def swapped(self: Any, rec: Any, inputs: Any, *rest: Any) -> Any:
        return forward(self, rec, [inputs[1], inputs[0]], *rest)

    monkeypatch.setattr(type(op), "forward", swapped)
    assert diff_layer.main(["--backend", "emulator", "--tokens", "5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("first diverging node: swiglu (op swiglu), activated")
    assert {line.split()[1] for line in lines if line.startswith("FAIL")} == {"swiglu"}


def test_a_gradient_that_is_not_written_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op: Any = ops.get("linear")
    backward = type(op).backward

    def forgetful(
        self: Any, rec: Any, saved: Any, d_out: Any, d_in: Any, d_params: Any, *rest: Any, **options: Any
    ) -> None:
        backward(self, rec, saved, d_out, d_in, [None] * len(d_params), *rest, **options)

    monkeypatch.setattr(type(op), "backward", forgetful)
    assert diff_layer.main(["--backend", "emulator", "--tokens", "5"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("first diverging node: down_proj (op linear), d_mlp.down_proj.weight")


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert diff_layer.main(["--backend", "emulator", "--tokens", "0"]) == 2
    assert diff_layer.main(["--backend", "emulator", "--model", str(GOLDEN), "--layer", "99"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
