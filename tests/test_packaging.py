"""What gets installed: everything that runs, and it runs outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

import pytest

from cupyllm import __version__

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    shutil.copytree(ROOT / "cupyllm", source / "cupyllm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", str(work), str(source))
    return next(work.glob("cupyllm-*.whl"))


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    patterns = ("*.py", "*.cu", "*.cuh", "py.typed")
    wanted = {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "cupyllm").rglob(pattern)}
    assert wanted - names == set()
    assert not any(name.startswith(("tests", "scripts", "benchmarks")) for name in names)
    assert any(name.endswith("LICENSE") for name in names)
    assert metadata["Version"] == __version__
    assert {"cuda12", "cuda13", "test"} <= set(metadata.get_all("Provides-Extra", []))
    assert "cupyllm = cupyllm.cli:main" in scripts


def test_the_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = "import cupyllm, cupyllm.backend.compile as c; print(cupyllm.__file__, (c.CU / 'common.cuh').is_file())"
    environment = {**os.environ, "PYTHONPATH": str(target), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    where = run(
        sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-c", code, cwd=tmp_path, env=environment
    )
    assert where.stdout.split() == [str(target / "cupyllm" / "__init__.py"), "True"]
    ran = run(sys.executable, "-m", "cupyllm", "forward", "--layers", "2", cwd=tmp_path, env=environment)
    assert "loss:" in ran.stdout


def test_the_two_cupy_wheels_are_never_asked_for_together() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for name, value in setup["options.extras_require"].items():
        assert not ("cupy-cuda12x" in value and "cupy-cuda13x" in value), name
    assert "cupy" not in setup["options"]["install_requires"]


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_readmes_commands_are_what_ci_runs() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    first_screen = "\n".join(readme.splitlines()[:24])
    assert "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/cupyllm forward --layers 64" in first_screen
    test_command = ".venv-test/bin/python -m pytest -n auto"
    assert test_command in first_screen
    assert ci.splitlines()[-1] == test_command
