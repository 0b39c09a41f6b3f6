"""README says what benchmarks/*.json say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_performance_section_is_made_from_the_files() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "readme_tables.py"), "--check"], cwd=ROOT)
    assert done.returncode == 0, "run: python scripts/readme_tables.py"
