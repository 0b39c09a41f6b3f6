"""`cupyllm verify` when a proof fails: the others run, the report is written, the exit status is 1."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyllm import verify
from cupyllm.cache import cache_dir
from cupyllm.errors import CheckpointError
from cupyllm.verify import Proof, tensor_statistics
from tests.cli.conftest import Cli
from tests.reference.sources import ArraySource, tiny_config

NAMES = [
    "installation",
    "kernel variants",
    "gradients of every op and a layer",
    "gradients of a whole model",
    "streamed = resident",
    "repeatable",
    "training",
]
PROOFS = ["_installation", "_variants", "_gradients", "_model_gradients", "_lossless", "_repeatable", "_training"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every proof holds at once."""
    for name in PROOFS:
        monkeypatch.setattr(verify, name, lambda *given: Proof("", True, "it holds"))


def explode(error: BaseException) -> Any:
    def proof(*given: object) -> Proof:
        raise error

    return proof


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckpointError("the file was changed while in use"), "the file was changed while in use"),
        (ValueError("several\nlines | of text"), "ValueError: several lines | of text"),
        (MemoryError(), "MemoryError: no message"),
        (AssertionError(), "AssertionError: no message"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("broken", [0, 3, 6])
def test_an_error_in_a_proof_is_a_line_of_the_report(
    broken: int, error: Exception, line: str, cli: Cli, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, PROOFS[broken], explode(error))
    ran = cli("verify", "--out", tmp_path / "report", "--json")
    assert ran.status == 1
    result = ran.json()
    assert [proof["name"] for proof in result["proofs"]] == NAMES
    assert [proof["name"] for proof in result["proofs"] if not proof["ok"]] == [NAMES[broken]]
    assert result["errors"] == [f"{NAMES[broken]}: {line}"]
    proof = result["proofs"][broken]
    if not isinstance(error, CheckpointError):
        assert proof["details"]["traceback"][0] == "Traceback (most recent call last):"
        assert any("in proof" in text for text in proof["details"]["traceback"])
    saved = json.loads((tmp_path / "report" / "verify.json").read_text())
    assert saved["proofs"] == result["proofs"]
    page = (tmp_path / "report" / "verify.md").read_text()
    assert "SOME PROOFS FAIL" in page
    row = next(text for text in page.splitlines() if text.startswith(f"| {NAMES[broken]} | NO |"))
    assert row.endswith(f"| {line.replace('|', chr(92) + '|')} |")
    assert sum(text.count("| yes |") for text in page.splitlines()) == len(NAMES) - 1


def test_an_interrupt_ends_it(cli: Cli, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_lossless", explode(KeyboardInterrupt()))
    assert cli("verify", "--out", tmp_path / "report").status == 130
    assert not (tmp_path / "report" / "verify.json").exists()


@pytest.mark.parametrize("where", ["cache", "report"])
def test_what_cannot_be_written_is_refused_before_the_first_proof(
    where: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROOFS:
        monkeypatch.setattr(verify, name, lambda *given: pytest.fail("a proof ran"))
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "out"
    if where == "cache":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        out = tmp_path / "file" / "out"
    ran = cli("verify", "--out", out, "--json")
    assert (ran.status, ran.stdout) == (2, "")
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("cupyllm: error: cannot ") and str(tmp_path / "file") in last
    assert ("XDG_CACHE_HOME moves it" in last) == (where == "cache")


def test_a_cache_that_has_the_models_need_not_be_writable(
    cli: Cli, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for layers in (verify.LAYERS, verify.SMOKE_LAYERS):
        verify.synthetic_entry(verify.default_proportions(layers), 0).mkdir(parents=True)
    monkeypatch.setattr(verify, "cache_subdir", lambda name: pytest.fail("the cache was written to"))
    assert cli("verify", "--out", tmp_path / "report").status == 0
    assert sorted(os.listdir(tmp_path / "report")) == ["verify.json", "verify.md"]
    assert len(list(cache_dir().rglob("*"))) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_statistics_of_a_tensor_in_several_pieces(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against NumPy on the whole; a piece holds 512 bytes, so that pieces end within the rows."""
    monkeypatch.setattr("cupyllm.stream.pieces.PIECE_BYTES", 512)
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    values = np.random.default_rng(0).standard_normal((41, 37)).astype(kind)
    values[3, 4], values[40, 36], values[17, 0] = np.nan, np.inf, -np.inf
    found = tensor_statistics(ArraySource(tiny_config(), {"weight": values}), "weight")
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert found.pop("mean") == pytest.approx(finite.mean(), abs=1e-12)
    assert found.pop("std") == pytest.approx(finite.std(), rel=1e-12)
    assert found == {
        "dtype": dtype,
        "shape": [41, 37],
        "elements": 41 * 37,
        "nonfinite": 3,
        "min": finite.min(),
        "max": finite.max(),
        "absmax": np.abs(finite).max(),
    }
    nothing = tensor_statistics(ArraySource(tiny_config(), {"weight": np.full((2, 2), np.nan, kind)}), "weight")
    assert nothing["nonfinite"] == 4 and np.isnan([nothing[key] for key in ("min", "max", "mean", "std")]).all()
