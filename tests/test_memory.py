"""Case F1: mapped pages are not a leak. Anonymous memory while a checkpoint of 1 GiB streams, sampled from outside."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cupyllm.config import ModelConfig, RopeConfig
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.synth import synthesize

MIB = 1 << 20
LAYERS = 16

CHILD = """
import sys
import numpy as np
from cupyllm.model.checkpoint import Checkpoint
from cupyllm.reference.engine import ReferenceEngine
with Checkpoint.open(sys.argv[1]) as checkpoint:
    engine = ReferenceEngine(checkpoint)
    a = np.ones((512, 512), np.float32)
    a @ a  # BLAS makes its own buffers on first use
    ids = np.arange(8)[None]
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(3):
        engine.forward(ids, on_layer=lambda done, count: print("layer", number, done, flush=True))
    maps = [line.split() for line in open("/proc/self/maps") if "model.safetensors" in line]
    print("modes", *{fields[1] for fields in maps}, flush=True)
"""


def sixteen_layers() -> ModelConfig:
    """Layers of 64 MiB in bfloat16, within a percent."""
    return ModelConfig(
        family="qwen3",
        hidden_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        intermediate_size=10144,
        vocab_size=320,
        rope=RopeConfig(theta=1e6),
    )


def status(pid: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/status has no {field}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_F1_anonymous_memory_stays_flat_while_layers_stream(tmp_path: Path) -> None:
    path = tmp_path / "model"
    synthesize(sixteen_layers(), path, 0)
    with Checkpoint.open(path) as checkpoint:
        layer = checkpoint.layer_bytes(3)
        file_bytes = checkpoint.stored_bytes(checkpoint.names())
    assert abs(layer - 64 * MIB) < MIB
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            try:
                samples.append(status(child.pid, "RssAnon"))
            except (OSError, AssertionError):
                return  # the child has ended
            time.sleep(0.001)

    assert child.stdout.readline().strip() == "ready"
    before = status(child.pid, "RssAnon")
    sampler = threading.Thread(target=sample)
    sampler.start()
    child.stdin.write("go\n")
    child.stdin.flush()
    per_layer: list[int] = []
    mapped = 0
    modes: set[str] = set()
    for line in child.stdout:
        if line.startswith("modes"):
            modes = set(line.split()[1:])
            break
        per_layer.append(status(child.pid, "RssAnon"))
        mapped = max(mapped, status(child.pid, "RssFile"))
    stop.set()
    sampler.join()
    assert child.wait(60) == 0
    growth = max(samples) - before
    print(f"RssAnon grew by {growth / MIB:.1f} MiB over {len(samples)} samples; RssFile reached {mapped / MIB:.0f} MiB")
    # One layer as stored (2 bytes a parameter) and one in float32 (4 bytes): 3 layers' worth of stored bytes.
    assert growth <= 3 * layer
    second, third = per_layer[LAYERS : 2 * LAYERS], per_layer[2 * LAYERS :]
    assert abs(third[-1] - second[0]) < 8 * MIB  # flat from the second pass on
    assert all(mode.startswith("r--") for mode in modes), modes
    assert mapped < file_bytes + 256 * MIB
