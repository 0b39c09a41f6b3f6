"""The kernel build: targets, options, errors with a kernel's name, and a cache that can be trusted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cupyllm.backend import compile as kernels
from cupyllm.backend import nvrtc
from cupyllm.backend.base import KernelSpec, kernel
from cupyllm.backend.compile import ARCHITECTURES, CU, compile_cubin, compile_many, compile_ptx_many
from cupyllm.backend.resources import parse_resources
from cupyllm.errors import BackendError, StorageError

ADD = kernel("add.cu", "add_forward", dtypes={"X_T": "float32"})
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernels").mkdir()
    return tmp_path / "kernels"


# ---- targets and options ----


def test_nvrtc_knows_every_target() -> None:
    known = {int(arch) for arch in nvrtc.library().getSupportedArchs()}
    assert {int(re.sub(r"\D", "", arch)) for arch in ARCHITECTURES} <= known


def test_options_keep_the_arithmetic_of_the_source() -> None:
    """No fast-math and no flush to zero; fp32 sums rely on both."""
    assert not [option for option in kernels.OPTIONS if "fast" in option or "ftz" in option or "prec" in option]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [(80, "sm_80"), (86, "sm_86"), (87, "sm_87"), (89, "sm_89"), (90, "sm_90a"), (121, "sm_121")],
)
def test_architecture_of_a_device(capability: int, arch: str) -> None:
    assert kernels.architecture(capability) == arch


def test_newer_minor_revision_takes_the_nearest_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc.library(), "getSupportedArchs", lambda: [80, 86, 90, 100])
    assert kernels.architecture(89) == "sm_86"
    assert kernels.architecture(103) == "sm_100"
    with pytest.raises(BackendError, match=r"cannot compile for sm_120 .*up to sm_100.*pip install"):
        kernels.architecture(120)
    with pytest.raises(BackendError, match=r"the GPU is sm_75, expected sm_80"):
        kernels.architecture(75)


# ---- the cache ----


def test_second_request_comes_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_cubin(ADD, "sm_80", folder)
    assert first.path.read_bytes()[:4] == b"\x7fELF"
    assert parse_resources(first.log)[ADD.symbol].registers > 0
    monkeypatch.setattr(kernels, "_build", lambda jobs, folder: pytest.fail("compiled again"))
    assert compile_cubin(ADD, "sm_80", folder) == first


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "emptied", "missing", "entry cut", "entry not JSON", "entry a list"]
)
def test_damaged_entries_are_built_again(folder: Path, damage: str) -> None:
    cubin = compile_cubin(ADD, "sm_80", folder).path
    (entry,) = folder.glob("*.json")
    content = cubin.read_bytes()
    if damage == "truncated":
        cubin.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        cubin.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "emptied":
        cubin.write_bytes(b"")
    elif damage == "missing":
        cubin.unlink()
    elif damage == "entry cut":
        entry.write_text(entry.read_text()[:40])
    elif damage == "entry not JSON":
        entry.write_bytes(b"\xff\x00")
    else:
        entry.write_text("[]")
    again = compile_cubin(ADD, "sm_80", folder)
    assert again.path.read_bytes() == content
    assert json.loads(entry.read_text())["cubin"] == again.path.name


def test_ptx_for_the_simulator_comes_from_the_same_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compile_cubin(ADD, "sm_80", folder)
    other = kernel("add.cu", "add_backward", dtypes={"X_T": "float32"})  # of the same unit
    first = compile_ptx_many([ADD, other], folder)
    assert first[ADD] == first[other] and first[ADD].path != cubin.path
    text = first[ADD].path.read_text()
    assert ".target sm_80" in text and f".entry {ADD.symbol}(" in text and "\t.loc\t" in text, "lines are for reports"
    monkeypatch.setattr(kernels, "_build", lambda jobs, folder: pytest.fail("compiled again"))
    assert compile_ptx_many([other, ADD], folder) == first
    assert compile_cubin(ADD, "sm_80", folder) == cubin


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "missing"])
def test_damaged_ptx_is_made_again(folder: Path, damage: str) -> None:
    path = compile_ptx_many([ADD], folder)[ADD].path
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        wrong = {"truncated": content[:-100], "flipped": content[:-9] + b"x" + content[-8:], "emptied": b""}
        path.write_bytes(wrong[damage])
    assert compile_ptx_many([ADD], folder)[ADD].path.read_bytes() == content


def test_ptx_that_does_not_compile_names_kernel_and_line(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('#include "common.cuh"\n\nKERNEL(broken)(float* y) { y[0] = nonsense; }\n')
    with pytest.raises(BackendError, match=r"broken\.cu for compute_80 .*broken\.cu\(3\): error: .*nonsense"):
        compile_ptx_many([KernelSpec(str(source), "broken")], folder)
    assert not list(folder.iterdir())


def test_header_source_macro_and_target_each_make_a_new_entry(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "cu"
    shutil.copytree(CU, sources)
    monkeypatch.setattr(kernels, "CU", sources)
    paths = [compile_cubin(ADD, "sm_80", folder).path, compile_cubin(ADD, "sm_90a", folder).path]
    paths.append(compile_cubin(kernel("add.cu", "add_forward", dtypes={"X_T": "bfloat16"}), "sm_80", folder).path)
    for changed in ("common.cuh", "add.cu"):
        text = (sources / changed).read_text()
        (sources / changed).write_text(text + "// changed\n")
        paths.append(compile_cubin(ADD, "sm_80", folder).path)
    assert len({path.name.rsplit("-", 1)[0] for path in paths}) == len(paths)
    assert kernels._job("add.cu", ADD.defines, "sm_80", (12, 8)) != kernels._job(
        "add.cu", ADD.defines, "sm_80", (12, 9)
    )


def test_headers_are_flattened_once_and_lines_kept() -> None:
    text = kernels.flatten("add.cu")
    assert "#include" not in text and text.count("typedef long long i64;") == 1
    resumed = re.search(r'#line (\d+) "add\.cu"\n(.*)', text.split("common.cuh", 1)[1])
    assert resumed is not None
    assert (CU / "add.cu").read_text().splitlines()[int(resumed[1]) - 1] == resumed[2]


def test_processes_that_start_at_once_all_get_the_cubin(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from cupyllm.backend.base import kernel; from cupyllm.backend.compile import compile_cubin\n"
        "spec = kernel('add.cu', 'add_forward', dtypes={'X_T': 'float32'})\n"
        "print(compile_cubin(spec, 'sm_80', Path(sys.argv[1])).path.read_bytes()[:4] == b'\\x7fELF')"
    )
    command = [sys.executable, "-c", code, str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in processes] == ["True"] * 3
    names = sorted(path.suffix for path in folder.iterdir())
    assert names.count(".json") == 1 and not list(folder.glob(".building-*"))


def test_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError) as caught:
        compile_cubin(ADD, "sm_80")
    assert "\n" not in str(caught.value) and "XDG_CACHE_HOME" in str(caught.value)


def test_vanished_cache_folder_is_a_storage_error(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(StorageError, match="cannot write"):
        compile_cubin(ADD, "sm_80", folder)


# ---- failures ----


def test_compile_error_names_kernel_and_line(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text('#include "common.cuh"\n\nKERNEL(broken)(float* y) { y[0] = nonsense; }\n')
    with pytest.raises(BackendError) as caught:
        compile_cubin(KernelSpec(str(source), "broken"), "sm_80", folder)
    assert re.fullmatch(
        r"broken\.cu for sm_80 with no macros does not compile: broken\.cu\(3\): error: .*nonsense.*", str(caught.value)
    )
    assert not list(folder.iterdir())


def test_good_kernels_beside_a_broken_one_do_not_hide_it(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("nonsense\n")
    specs = [kernel("add.cu", "add_forward", dtypes={"X_T": dtype}) for dtype in ("float32", "bfloat16")]
    with pytest.raises(BackendError, match=r"broken\.cu"):
        compile_many([*specs, KernelSpec(str(source), "broken")], "sm_80", folder)


def test_crash_of_the_compiler_names_the_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = [sys.executable, "-c", "import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 11)"]
    monkeypatch.setattr(nvrtc, "child_command", lambda: crash)
    with pytest.raises(BackendError, match=r"crashed \(exit status -11\) on add\.cu for sm_80 with -DX_T=float"):
        compile_cubin(ADD, "sm_80", folder)
    assert not list(folder.iterdir())


def test_missing_cupy_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(BackendError, match=r"needs CuPy.*pip install 'cupyllm\[cuda12\]'"):
        compile_cubin(ADD, "sm_80", folder)


def test_missing_nvrtc_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(ModuleType):
        def getVersion(self) -> tuple[int, int]:
            raise RuntimeError("CuPy failed to load libnvrtc.so.12:\n OSError: no such file")

    monkeypatch.setattr(nvrtc, "library", lambda: Missing("nvrtc"))
    with pytest.raises(BackendError) as caught:
        compile_cubin(ADD, "sm_80", folder)
    assert "NVRTC" in str(caught.value) and "pip install" in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_to_compile_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: pytest.fail("asked for the compiler"))
    assert compile_many([], "sm_80") == {}
