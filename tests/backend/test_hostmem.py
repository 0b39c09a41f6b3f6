"""Host memory figures: anonymous apart from mapped, peaks that are gone again, cgroup limits."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np

from cupyllm import hostmem
from cupyllm.hostmem import PeakSampler, available_bytes, resident_bytes

MIB = 1 << 20
SLACK_BYTES = 8 * MIB  # what the interpreter itself may take or give back meanwhile


def test_a_peak_that_is_gone_is_remembered() -> None:
    before = resident_bytes().anon
    with PeakSampler() as memory:
        block = np.ones(64 * MIB, np.uint8)
        time.sleep(10 * hostmem.SAMPLE_SECONDS)
        del block
        assert resident_bytes().anon < before + 32 * MIB
    grown = memory.peak().anon - before
    assert 64 * MIB - SLACK_BYTES <= grown <= 64 * MIB + SLACK_BYTES
    assert memory.peak() == memory.peak()


def test_mapped_files_are_not_anonymous(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(32 * MIB))
    before = resident_bytes()
    with PeakSampler() as memory, path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        total = int(np.frombuffer(mapped, np.uint8).sum())
        peak = memory.peak()
    assert total == 0
    assert peak.file - before.file >= 32 * MIB - SLACK_BYTES
    assert peak.anon - before.anon <= SLACK_BYTES


def test_available_memory_is_what_the_machine_has_at_most() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < available_bytes() <= int(total.split()[1]) * 1024


def test_the_tightest_group_limits(tmp_path: Path) -> None:
    inner = tmp_path / "job" / "task"
    inner.mkdir(parents=True)
    for group, limit, usage, files in (
        (inner, "max", 10, 0),
        (inner.parent, "1000", 700, 200),
        (tmp_path, "5000", 900, 0),
    ):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{usage}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert sorted(hostmem._rooms(tmp_path, "/job/task", *names)) == [500, 4100]
    assert hostmem._rooms(tmp_path, "/elsewhere", *names) == [4100]  # a container sees its own group at the root
