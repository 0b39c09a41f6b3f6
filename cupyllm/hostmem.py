"""Host memory of this process: what is anonymous, what is mapped from files, what is left.

Peak host memory is stated as the peak of RssAnon. VmHWM was rejected: it counts the mapped pages of a checkpoint, which
the kernel may drop at any time and which are no cost of ours. Mapped pages (RssFile) are stated beside it.
Linux keeps no high-water mark of RssAnon, so a thread samples it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 0.01
_STATUS = Path("/proc/self/status")


class Resident(NamedTuple):
    """Resident bytes of this process."""

    anon: int
    file: int


def resident_bytes() -> Resident:
    """What is resident now; zeros where /proc does not say."""
    anon = file = 0
    try:
        text = _STATUS.read_text()
    except OSError:
        return Resident(0, 0)
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            anon = int(line.split()[1]) * 1024
        elif line.startswith("RssFile:"):
            file = int(line.split()[1]) * 1024
    return Resident(anon, file)


def available_bytes() -> int:
    """Bytes that can still be allocated: the system's available memory, or less where a cgroup limits us."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the free pages above
    return min([available, *_cgroup_rooms()])


class PeakSampler:
    """Context manager that samples resident memory while it is open; `peak()` may be asked meanwhile and after."""

    def __init__(self, interval_seconds: float = SAMPLE_SECONDS) -> None:
        self._interval = interval_seconds
        self._peak = Resident(0, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="cupyllm-hostmem", daemon=True)

    def __enter__(self) -> PeakSampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def peak(self) -> Resident:
        """The largest of each so far, not necessarily at one moment."""
        if not self._stop.is_set():
            self._sample()
        return self._peak

    def _loop(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        now = resident_bytes()
        self._peak = Resident(max(self._peak.anon, now.anon), max(self._peak.file, now.file))


def _cgroup_rooms() -> list[int]:
    """What every memory limit above this process leaves, reclaimable file pages counted as free."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += _rooms(Path("/sys/fs/cgroup/memory"), path, *names)
    return rooms


def _rooms(mount: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> list[int]:
    rooms = []
    folder = mount / path.strip("/")
    if not folder.is_dir():  # inside a container the path is the host's, and the mount shows our group at its root
        folder = mount
    for group in (folder, *folder.parents):
        if group != mount and mount not in group.parents:
            break
        try:
            limit = (group / limit_name).read_text().strip()
            usage = int((group / usage_name).read_text())
            statistics = (group / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        if limit == "max":
            continue
        files = sum(int(line.split()[1]) for line in statistics if line.split()[0] == reclaimable)
        rooms.append(max(0, int(limit) - usage + files))
    return rooms
