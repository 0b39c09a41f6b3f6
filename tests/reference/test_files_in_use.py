"""A checkpoint that changes under the reference: cut short is an error and no SIGBUS, overwritten is noticed.

Modification times have the kernel's tick for a resolution, so files are backdated before they are opened.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.errors import CheckpointError
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.synth import synthesize
from tests.reference.sources import tiny_config

ROOT = Path(__file__).parents[2]
IDS = np.arange(12).reshape(2, 6)
LAYERS = 3
Call = Callable[[ReferenceEngine, Callable[[int, int], None]], Any]
CALLS: dict[str, tuple[Call, int]] = {  # and how often on_layer is called
    "forward stream": (lambda engine, on_layer: engine.forward(IDS, on_layer=on_layer), LAYERS),
    "forward resident": (lambda engine, on_layer: engine.forward(IDS, mode="resident", on_layer=on_layer), LAYERS),
    "gradients": (
        lambda engine, on_layer: engine.loss_and_grads(IDS, IDS, lambda name, grad: None, on_layer=on_layer),
        2 * LAYERS,
    ),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = synthesize(tiny_config(head_dim=16, num_hidden_layers=LAYERS, dtype="bfloat16"), tmp_path / "model", 0)
    os.utime(path / "model.safetensors", (1e9, 1e9))
    return path


def overwrite(path: Path) -> None:
    """100 bytes, in place: size and inode stay."""
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))


@pytest.mark.parametrize("at", range(1, 2 * LAYERS + 1))
@pytest.mark.parametrize("call", CALLS)
def test_a_change_in_the_middle_of_a_pass_is_an_error(call: str, at: int, model: Path) -> None:
    run, count = CALLS[call]
    if at > count:
        at = count  # the last moment once more
    with Checkpoint.open(model) as checkpoint:
        engine = ReferenceEngine(checkpoint)
        run(engine, lambda done, of: None)  # so that "resident" reads nothing any more

        def on_layer(done: int, of: int) -> None:
            if done == at:
                overwrite(model)

        with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while in use: mtime_ns"):
            run(engine, on_layer)


SCENARIOS = """
import os, sys
from pathlib import Path
import numpy as np
from cupyllm.errors import CheckpointError
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.reference.engine import ReferenceEngine
from cupyllm.reference.runner import ReferenceRunner
from cupyllm.serve.runner import StepBatch
from cupyllm.train.state import HostState
from cupyllm.verify import tensor_statistics

path, weights = Path(sys.argv[1]), Path(sys.argv[1]) / "model.safetensors"
whole, ids = weights.read_bytes(), np.arange(12)[None]

def attempt(name, use):
    weights.write_bytes(whole)
    with Checkpoint.open(path) as checkpoint:
        # As if the file were cut between the check and the read: only pread notices.
        checkpoint.check_unchanged = lambda: None
        try:
            use(checkpoint, lambda *layer: os.truncate(weights, 4096))
            print(name, "| no error")
        except CheckpointError as error:
            print(name, "|", error)

def step(checkpoint, cut):
    runner = ReferenceRunner(checkpoint, num_pages=2, page_tokens=16, max_pages=2)
    cut()
    runner.engine.embedding_rows(np.array([30, 36]))

def statistics(checkpoint, cut):
    cut()
    for name in checkpoint.names():
        tensor_statistics(checkpoint, name)

def masters(checkpoint, cut):
    cut()
    HostState(checkpoint, "float32")

def early(checkpoint, cut):
    cut()
    ReferenceEngine(checkpoint).forward(ids + 24)

attempt("early", early)
attempt("stream", lambda c, cut: ReferenceEngine(c).forward(ids, on_layer=cut))
attempt("resident", lambda c, cut: ReferenceEngine(c).forward(ids, mode="resident", on_layer=cut))
attempt("gradients", lambda c, cut: ReferenceEngine(c).loss_and_grads(ids, ids, lambda n, g: None, on_layer=cut))
attempt("step", step)
attempt("statistics", statistics)
attempt("masters", masters)
"""


def test_a_file_cut_short_is_an_error_wherever_it_is_read(model: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCENARIOS, str(model)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, (run.returncode, run.stdout, run.stderr)  # -7 is SIGBUS
    lines = dict(line.split(" | ") for line in run.stdout.splitlines())
    assert list(lines) == ["early", "stream", "resident", "gradients", "step", "statistics", "masters"]
    for name, line in lines.items():
        assert "model.safetensors ended at byte" in line and "truncated while in use" in line, (name, line)
