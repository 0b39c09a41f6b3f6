"""`cupyllm sim-check`: planted faults are found and shown with their source line, clean kernels are clean."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import ops
from cupyllm.backend.record import Recorder
from cupyllm.simcheck import ops as op_checks
from cupyllm.simcheck import source
from cupyllm.simcheck.standard import HEADERS
from tests.cli.conftest import Cli, Ran
from tests.simulated import share_kernels

README = Path(__file__).parents[2] / "README.md"

Check = Callable[..., Ran]


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder and one cache for all tests: a kernel's compiled form names the folder that it was in."""
    return tmp_path_factory.mktemp("sim-check")


@pytest.fixture
def sim_check(cli: Cli, work: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """sim_check(text of a .cu, options): the file is k.cu in the current folder, and has one kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "cache"))
    monkeypatch.chdir(work)

    def run(text: str, options: str, kernel: str = "") -> Ran:
        Path("k.cu").write_text(text)
        return cli("sim-check", "--kernel", f"k.cu:{kernel}" if kernel else "k.cu", *shlex.split(options))

    return run


def found(ran: Ran, *parts: str) -> str:
    """The output of a run that found something: status 1, and every part in one line."""
    assert ran.status == 1, (ran.stdout, ran.stderr)
    assert any(all(part in line for part in parts) for line in ran.stdout.splitlines()), ran.stdout
    return ran.stdout


def clean(ran: Ran) -> str:
    assert ran.status == 0, (ran.stdout, ran.stderr)
    assert "clean: " in ran.stdout.splitlines()[-1], ran.stdout
    return ran.stdout


def line_of(text: str, part: str) -> str:
    """ "k.cu:3": where `part` is."""
    (number,) = [i for i, line in enumerate(text.splitlines(), 1) if part in line]
    return f"k.cu:{number}"


# ---- planted faults

REVERSE = """extern "C" __global__ void reverse(const float* x, float* y) {
    __shared__ float tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    BARRIER
    y[threadIdx.x] = tile[127 - threadIdx.x];
}
"""


def test_a_missing_barrier_read_after_write(sim_check: Check) -> None:
    options = "--block 128 --args 'f32[128] f32[128]:empty'"
    assert "kernel: reverse in k.cu, grid (1,1,1), block (128,1,1)" in clean(
        sim_check(REVERSE.replace("BARRIER", "__syncthreads();"), options)
    )
    text = REVERSE.replace("BARRIER", "")
    out = found(
        sim_check(text, options), "race in shared memory: reverse, CTA (0,0,0)", "tile[", "k.cu:5", "k.cu:3", "barrier"
    )
    assert "    k.cu:5 | y[threadIdx.x] = tile[127 - threadIdx.x];" in out.splitlines()
    assert "    k.cu:3 | tile[threadIdx.x] = x[threadIdx.x];" in out.splitlines()
    assert re.search(r"\n1 finding, in \d+\.\d\d s\n$", out)


SHIFT = """__global__ void shift(float* y, int rounds) {
    __shared__ float tile[64];
    int t = threadIdx.x;
    tile[t] = t;
    __syncthreads();
    for (int i = 0; i < rounds; i++) {
        float next = tile[(t + 1) % 64];
        BARRIER
        tile[t] = next;
        __syncthreads();
    }
    y[t] = tile[t];
}
"""


def test_a_missing_barrier_write_after_read(sim_check: Check) -> None:
    options = "--block 64 --args 'f32[64]:empty 3' --show y"
    out = clean(sim_check(SHIFT.replace("BARRIER", "__syncthreads();"), options))
    assert "y =\n[ 3.  4.  5." in out and "args: y f32[64] empty, rounds 3" in out
    found(sim_check(SHIFT.replace("BARRIER", ""), options), "race in shared memory: ", "tile[", "k.cu:9", "k.cu:7")


def test_out_of_bounds_by_one(sim_check: Check) -> None:
    text = """__global__ void twice(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = 2 * x[i];
}
"""
    options = "--grid 2 --block 64 --args 'x=f32[100] y=f32[100]:empty 100'"
    out = found(
        sim_check(text, options), "out of bounds", "CTA (1,0,0), thread (36,0,0)", "reads", "end of x", "k.cu:3"
    )
    assert "    k.cu:3 | if (i <= n) y[i] = 2 * x[i];" in out.splitlines()
    found(sim_check(text, options), "out of bounds", "thread (36,0,0)", "writes", "end of y")
    clean(sim_check(text.replace("<=", "<"), options))


def test_an_element_of_a_matrix_has_its_indices(sim_check: Check) -> None:
    text = "__global__ void k(int* table, int* y) { if (threadIdx.x == 29) y[0] = table[threadIdx.x]; }"
    out = found(sim_check(text, "--block 32 --args 'i32[4,8]:empty i32[1]:empty'"), "uninitialised read", "table[3,5]")
    assert out.splitlines()[1] == "args: table i32[4,8] empty, y i32[1] empty"


def test_an_uninitialised_shared_read(sim_check: Check) -> None:
    text = """__global__ void k(float* y) {
    __shared__ float tile[64];
    if (threadIdx.x != 5) tile[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x];
}
"""
    found(
        sim_check(text, "--block 64 --args 'f32[64]:empty'"),
        "uninitialised read",
        "thread (5,0,0)",
        "tile[5]",
        "k.cu:5",
    )


def test_a_divergent_barrier(sim_check: Check) -> None:
    text = """__global__ void k(int* y) {
    if (threadIdx.x < 32) {
        __syncthreads();
        y[threadIdx.x] = 1;
    } else {
        asm volatile("bar.sync 0;");
        y[threadIdx.x] = 2;
    }
}
"""
    found(sim_check(text, "--block 64 --args 'i32[64]:empty'"), "divergent barrier", "k.cu:3", "k.cu:6")


def test_a_divergent_shuffle(sim_check: Check) -> None:
    text = """__global__ void k(int* y) {
    int v = threadIdx.x;
    if (v < 16) v = __shfl_xor_sync(0xffffffff, v, 1);
    y[threadIdx.x] = __shfl_xor_sync(0xffffffff, v, 2);
}
"""
    found(sim_check(text, "--block 32 --args 'i32[32]:empty'"), "divergent shuffle", "k.cu:3", "k.cu:4")


def test_cp_async_without_its_wait(sim_check: Check) -> None:
    text = """__global__ void k(const float4* x, float4* y) {
    __shared__ float4 tile[32];
    unsigned at = __cvta_generic_to_shared(&tile[threadIdx.x]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(x + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    WAIT
    y[threadIdx.x] = tile[threadIdx.x];
}
"""
    options = "--block 32 --args 'x=f32[32,4] f32[32,4]:empty'"
    clean(sim_check(text.replace("WAIT", 'asm volatile("cp.async.wait_group 0;" ::: "memory");'), options))
    out = found(sim_check(text.replace("WAIT", ""), options), "cp.async misuse", "k.cu:7")
    assert "k.cu:4 | asm volatile" in out


def test_misaligned(sim_check: Check) -> None:
    text = "__global__ void k(float* x) { *(float4*)(x + 1 + 4 * threadIdx.x) = make_float4(0, 0, 0, 0); }"
    found(sim_check(text, "--block 4 --args 'f32[64]'"), "misaligned", "x[1]", "k.cu:1")


def test_a_race_between_ctas(sim_check: Check) -> None:
    text = "__global__ void k(int* x) { if (threadIdx.x == 0) x[0] = blockIdx.x; }"
    found(sim_check(text, "--grid 3 --block 32 --args 'i32[1]'"), "race between CTAs", "x[0]", "k.cu:1")
    clean(sim_check(text, "--grid 1 --block 32 --args 'i32[1]'"))


def test_an_endless_loop_spends_its_budget(sim_check: Check) -> None:
    text = """__global__ void k(volatile int* flag, int* y) {
    while (*flag == 0) {}
    y[0] = 1;
}
"""
    options = "--grid 2 --block 32 --args 'i32[1] i32[1]:empty'"
    found(sim_check(text, f"{options} --budget 1000000"), "budget exceeded: k", "k.cu:2", "1000000")
    assert "note: 1 of 1 elements of y were never written" in sim_check(text, f"{options} --budget 1000000").stdout


# ---- clean kernels


def test_atomics_partial_warps_and_device_variables_are_clean(sim_check: Check) -> None:
    text = """
__device__ unsigned seen;
__constant__ float weights[4] = {1, 2, 3, 4};
template <class T> __device__ T weigh(T value) { return value * weights[threadIdx.x % 4]; }

extern "C" __global__ void histogram(const int* ids, unsigned* counts, float* sum, long long n) {
    extern __shared__ unsigned local[];
    for (int i = threadIdx.x; i < 10; i += blockDim.x) local[i] = 0;
    __syncthreads();
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&local[ids[i]], 1u);
    atomicAdd(&seen, 1u);
    atomicAdd(sum, weigh(1.0f));
    __syncthreads();
    if (threadIdx.x < 10) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}
"""
    options = "--grid 3 --block 45 --shared-bytes 40 --args 'i32[130]:random:10 counts=u32[10]:zeros f32[1]:0 130'"
    out = clean(sim_check(text, f"{options} --save counts=out.npy --show sum"))
    assert np.load("out.npy").sum() == 130 and np.load("out.npy").dtype == np.uint32
    assert "sum =\n[333.]" in out, "three times 11 of each weight, and one more of the first"
    assert "45,1,1), 40 bytes of dynamic shared memory" in out and "clean: 3 CTAs x 45 threads, in " in out
    short = options.replace("--shared-bytes 40", "--shared-bytes 36")
    found(sim_check(text, short), "out of bounds", "thread (9,0,0) writes", "end of local")


def test_bfloat16_in_place_and_null(sim_check: Check) -> None:
    text = """
struct Bf16 { unsigned short bits; };
__global__ void halve(Bf16* x, const Bf16* same, const float* scale, double factor, bool on) {
    float value = __uint_as_float(same[threadIdx.x].bits << 16) * (scale ? *scale : 1.0f) * (on ? factor : 0.0);
    x[threadIdx.x].bits = __float_as_uint(value) >> 16;
}
"""
    options = "--block 8 --args 'x=bf16[8]:arange @x null 0.5 true' --save x=out.npy --json"
    ran = sim_check(text, options)
    assert ran.status == 0, ran.stderr
    assert np.array_equal(np.load("out.npy"), np.arange(8, dtype=np.float32) / 2)
    values = ran.json()
    assert values["clean"] is True and values["arguments"]["same"] == "@x" and values["unwritten"] == {"x": 0}


def test_names_in_namespaces_and_templates(sim_check: Check) -> None:
    text = """
namespace ns { template <class T> __global__ void fill(T* y, T value) { y[threadIdx.x] = value; } }
template __global__ void ns::fill<float>(float*, float);
template __global__ void ns::fill<int>(int*, int);
extern "C" __global__ void other() {}
"""
    options = "--block 4 --args 'f32[4]:empty 2.5' --show y"
    assert "y =\n[2.5 2.5 2.5 2.5]" in clean(sim_check(text, options, "_ZN2ns4fillIfEEvPT_S1_"))
    line = sim_check(text, options, "fill").refused()
    assert "fits 2 kernels: ns::fill (_ZN2ns4fillI" in line
    line = sim_check(text, options, "fil").refused()
    assert "has no kernel 'fil', expected one of " in line and "other" in line
    assert "has 3 kernels" in sim_check(text, options).refused()
    clean(sim_check(text, "--block 32", "other"))


def test_macros_and_headers_of_ones_own(sim_check: Check) -> None:
    Path("inner").mkdir()
    Path("beside.cuh").write_text('#pragma once\n#include "inner/deep.cuh"\n')
    Path("inner/deep.cuh").write_text("#define VALUE 3\n")
    Path("far").mkdir()
    Path("far/far.cuh").write_text("__device__ int far() { return 4; }\n")
    text = """#include "beside.cuh"
#include <far.cuh>
__global__ void k(int* y) { y[threadIdx.x] = VALUE + far() + EXTRA; }
"""
    options = "--block 2 --args i32[2]:empty --show y --define EXTRA=100 --include far"
    assert "[107 107]" in clean(sim_check(text, options))
    Path("inner/deep.cuh").write_text("#define VALUE 5\n")
    assert "[109 109]" in clean(sim_check(text, options)), "a changed header is compiled anew"
    line = sim_check(text, options.replace("--include far", "")).refused()
    assert "k.cu(2): catastrophic error: c" in line and '"far.cuh"' in line and "name its folder with --include" in line
    assert "there is no such folder" in sim_check(text, options + " --include nowhere").refused()
    assert "expected NAME or NAME=VALUE" in sim_check(text, options + " --define 3=4").refused()


def test_a_warm_run_compiles_nothing(sim_check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "__global__ void k(int* y) { y[threadIdx.x] = 77; }"
    clean(sim_check(text, "--block 2 --args i32[2]:empty"))
    compiled: list[Any] = []
    monkeypatch.setattr(source, "_compile", lambda *request: compiled.append(request))
    clean(sim_check(text, "--block 2 --args i32[2]:empty"))
    assert not compiled


def test_a_damaged_cache_entry_is_built_again(sim_check: Check, tmp_path: Path) -> None:
    Path("k.cu").write_text("__global__ void k(int* y) { y[threadIdx.x] = 78; }")
    first = source.compile_source("k.cu", cache=tmp_path)
    (entry,) = tmp_path.glob("k-*.ptx")
    entry.write_text(entry.read_text().replace("78", "79"))
    assert source.compile_source("k.cu", cache=tmp_path).ptx == first.ptx


def test_cache_entries_are_bytes(tmp_path: Path) -> None:
    """Whatever the locale, and with the line ends that the text has."""
    code = (
        "import sys, pathlib; from cupyllm.simcheck import source; entry = pathlib.Path(sys.argv[1])\n"
        "text = '// gr\\u00f6\\u00dfe.cu\\r\\n.version 8.8\\n'; source._store(entry, text)\n"
        "assert source._cached(entry) == text"
    )
    settings = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code, tmp_path / "k.ptx"], env=settings, check=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["k.ptx"]
    (tmp_path / "k.ptx").write_bytes(b"\xff\n\xfe")
    assert source._cached(tmp_path / "k.ptx") is None


def test_cuda_headers_come_from_a_folder_or_are_asked_for(sim_check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "#include <cuda_fp99.h>\n__global__ void k(int* y) { y[threadIdx.x] = FP99; }"
    monkeypatch.setattr(source, "cuda_headers", lambda: ())
    line = sim_check(text, "--block 2 --args i32[2]:empty").refused()
    assert "k.cu(1): " in line and "or, if it is one of CUDA's, install nvidia-cuda-runtime" in line
    Path("toolkit").mkdir()
    Path("toolkit/cuda_fp99.h").write_text("#define FP99 99\n")
    monkeypatch.setattr(source, "cuda_headers", lambda: (Path("toolkit").absolute(),))
    clean(sim_check(text, "--block 2 --args i32[2]:empty"))


def test_headers_of_c_that_nvrtc_does_not_have(sim_check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "cuda_headers", lambda: ())
    assert "uint32_t" in HEADERS["stdint.h"]
    text = "".join(f"#include <{name}>\n" for name in HEADERS)
    text += """__global__ void k(std::uint32_t* y, int64_t n) {
    float least = fminf(FLT_MAX, INFINITY);
    y[threadIdx.x] = INT_MAX + uint32_t(least < INFINITY) + (n > INT64_MIN) + isnan(NAN) + (size_t)offsetof(float4, y);
}
"""
    assert "[2147483654 2147483654]" in clean(sim_check(text, "--block 2 --args 'u32[2]:empty 1' --show y"))


# ---- bad input

COPY = """__global__ void copy(const float* x, float* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
"""


@pytest.mark.parametrize(
    "options, said",
    [
        ("", "--block is missing"),
        ("--block 0", "--block is 0,1,1, expected 1,1,1 to 1024,1024,64"),
        ("--block 32,64", "--block has 2048 threads, expected at most 1024"),
        ("--block a", "--block is 'a', expected up to three sizes"),
        ("--block 32 --grid 1,70000", "--grid is 1,70000,1, expected 1,1,1 to 2147483647,65535,65535"),
        ("--block 32", "got 0 arguments, the kernel takes 3: const float* x, float* y, int n"),
        (
            "--block 32 --args 'f32[4] f32[4] f32[4]'",
            "got the array f32[4], expected an integer: the parameter is int n",
        ),
        ("--block 32 --args 'f32[4] 4 4'", "got the number 4, expected an array or null: the parameter is float* y"),
        ("--block 32 --args 'f32[4] f32[4] 4' --show z", "--show z: there is no such array, expected one of x, y"),
        ("--block 32 --args 'f32[4] f32[4] 4' --save y", "--save y: expected NAME=FILE.npy"),
        ("--block 32 --args 'f32[4] f32[4] 4' --save y=no/y.npy", "no/y.npy"),
        ("--block 32 --args 'f32[4] f32[4] 4' --save y=k.cu", "k.cu is k.cu, which this command reads"),
        ("--block 32 --args 'f32[4] f32[4] 4' --op add", "expected --kernel FILE.cu:NAME or --op NAME, one of the two"),
        ("--block 32 --args 'f32[4] f32[4] 4' --variant plain", "--kernel and --variant were given"),
        ("--block 32 --args 'f32[4] f32[4] 4' --grid 2000000000,65535", "more than the budget of"),
        ("--block 32 --args 'f32[4] f32[4] 4' --shared-bytes 200000", "200000 bytes of shared memory a block"),
        ("--block 32 --args 'f32[4] f32[4] 4' --budget 0", "'--budget'"),
        ("--block 32 --args 'f32[99999,99999] f32[99999,99999] 4'", "bytes of host memory"),
        ("--block 32 --args 'f32[300,300] f32[4] 4' --show x --json", "too large for JSON"),
    ],
)
def test_bad_options_are_refused(sim_check: Check, options: str, said: str) -> None:
    assert said in sim_check(COPY, options).refused()


@pytest.mark.parametrize(
    "text, said",
    [
        (COPY.replace("y[", "z["), 'k.cu does not compile: k.cu(2): error: identifier "z" is undefined'),
        ("__global__ void k(float* x) {\n    x[0] = 1\n}\nint = 3;", 'k.cu(3): error: expected a ";" (and 2 more)'),
        ("__device__ int f() { return 0; }", "k.cu defines no kernel"),
        ("int main() { return 0; }", "k.cu(1): error: A function without execution space"),
        ("int main() { return 0; }", "; NVRTC compiles device code only: keep host code in a file of its own"),
        ('__global__ void k(float* x) { asm volatile("nanosleep.u32 %0;" :: "r"(1)); unknown(); }', "k.cu(1): error"),
        ("struct S { int a[6]; };\n__global__ void k(S s, int* y) { *y = s.a[1]; }", "S s, passed by value"),
        ("\xe9", "does not compile"),
    ],
)
def test_bad_source_is_refused_with_its_line(sim_check: Check, text: str, said: str) -> None:
    assert said in sim_check(text, "--block 32 --args '4 i32[1]'").refused()


def test_files_that_cannot_be_read(cli: Cli, tmp_path: Path) -> None:
    assert "nowhere.cu does not exist" in cli("sim-check", "--kernel", "nowhere.cu:k", "--block", 1).refused()
    assert "Is a directory" in cli("sim-check", "--kernel", f"{tmp_path}:k", "--block", 1).refused()
    (tmp_path / "latin.cu").write_bytes(b"// \xe9")
    assert "not UTF-8 at byte 3" in cli("sim-check", "--kernel", tmp_path / "latin.cu", "--block", 1).refused()


def test_an_instruction_that_is_not_simulated_is_named(sim_check: Check) -> None:
    text = '__global__ void k(int* y) { printf("%d", y[0]); }'
    line = sim_check(text, "--block 32 --args 'i32[1]'").refused()
    assert "the simulator does not execute " in line and "call" in line and "k.cu:1" in line


# ---- JSON


def test_json_has_reports_and_arrays(sim_check: Check) -> None:
    text = REVERSE.replace("BARRIER", "")
    ran = sim_check(text, "--block 128 --args 'f32[128]:ones f32[128]:empty' --show y --json")
    assert ran.status == 1 and ran.stderr.splitlines() == [
        "kernel: reverse in k.cu, grid (1,1,1), block (128,1,1)",
        "args: x f32[128] ones, y f32[128] empty",
    ]
    values = ran.json()
    assert (values["kernel"], values["clean"], values["findings"]) == ("reverse", False, 1)
    (report,) = values["reports"]
    assert report["kind"] == "race" and report["message"].startswith("race in shared memory: reverse, CTA (0,0,0)")
    assert report["cta"] == [0, 0, 0] and re.fullmatch(r"tile\[\d+\]", report["element"]) and report["count"] >= 1
    lines = {site["where"][0]["line"]: site["where"][0]["text"] for site in (report["at"], report["other"])}
    assert lines == {3: "tile[threadIdx.x] = x[threadIdx.x];", 5: "y[threadIdx.x] = tile[127 - threadIdx.x];"}
    assert len(values["show"]["y"]) == 128


# ---- our ops


def test_an_op_is_clean(cli: Cli, shared_cache: Path) -> None:
    share_kernels(shared_cache / "cupyllm")
    lines = cli("sim-check", "--op", "swiglu", "--dtype", "float32").stdout.splitlines()
    cases = [case.name for case in ops.get("swiglu").cases() if case.size == "small"]
    assert [line.split(":")[0] for line in lines[:-1]] == [f"swiglu plain {name} float32" for name in cases]
    assert all(re.fullmatch(r".*: clean, \d+\.\d\d s", line) for line in lines[:-1])
    assert re.fullmatch(rf"clean: {len(cases)} cases of swiglu, in \d+\.\d s", lines[-1])


def test_launchers_outside_the_graph_are_clean(cli: Cli, shared_cache: Path) -> None:
    share_kernels(shared_cache / "cupyllm")
    ran = cli("sim-check", "--op", "adamw", "--op", "grad_norm", "--json")
    assert ran.status == 0 and ran.json()["clean"] is True
    dtypes = {(case["op"], case["dtype"]) for case in ran.json()["cases"]}
    assert dtypes == {("adamw", "float32"), ("adamw", "bfloat16"), ("grad_norm", "float32")}


def test_a_fault_in_an_op_is_found_and_shown(cli: Cli, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher claims one row more than there is."""
    share_kernels(shared_cache / "cupyllm")
    launch = Recorder.launch

    def wrong(self: Recorder, kernel: Any, grid: Any, block: Any, *args: Any, **options: Any) -> None:
        longer = tuple(arg + 1 if isinstance(arg, int) else arg for arg in args)
        launch(self, kernel, grid, block, *longer, **options)

    monkeypatch.setattr(Recorder, "launch", wrong)
    ran = cli("sim-check", "--op", "add", "--dtype", "float32")
    out = found(ran, "  out of bounds: add_forward_float32, CTA (0,0,0), thread (1,0,0) reads", "end of input0")
    assert re.search(r"\n      add\.cu:\d+ +\| \S", out)
    assert re.search(r"\n\d+ findings: \d+ cases of add, in ", out)
    (first, *_) = cli("sim-check", "--op", "add", "--dtype", "float32", "--json").json()["cases"]
    assert first["findings"] > 0 and first["reports"][0]["at"]["where"][0]["text"]


@pytest.mark.parametrize(
    "options, said",
    [
        ("--op sub", "--op sub: there is no such op, expected all or one of embedding, rmsnorm,"),
        ("--op add --variant fast", "--variant fast: add has no such variant, expected one of plain"),
        ("--op all --variant plain", "--variant plain with 13 ops, expected one --op"),
        ("--op linear --variant rows --dtype float32", "it takes no case of linear in float32"),
        ("--op linear --variant tf32x3 --dtype bfloat16", "it takes no case of linear in bfloat16"),
        ("--op add --block 4", "--op and --block were given, which do not go together"),
        ("", "expected --kernel FILE.cu:NAME or --op NAME"),
    ],
)
def test_bad_ops_are_refused(cli: Cli, options: str, said: str) -> None:
    assert said in cli("sim-check", *options.split()).refused()


def test_a_variant_of_a_newer_gpu_is_not_simulated(cli: Cli) -> None:
    assert "needs sm_90 and is not simulated" in cli("sim-check", "--op", "linear", "--variant", "wgmma").refused()
    assert op_checks.variants("linear", None) == ["rows", "mma", "tf32x3", "plain"]


# ---- README


def test_the_race_in_readme(sim_check: Check, cli: Cli) -> None:
    """The kernel, the command and what it prints are those of README; only the time differs."""
    section = README.read_text().split("<!-- sim-check:begin -->")[1].split("<!-- sim-check:end -->")[0]
    kernel, session = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    command, printed = session.split("\n", 1)
    Path("race.cu").write_text(kernel)
    ran = cli(*shlex.split(command.removeprefix("$ .venv/bin/cupyllm ")))
    assert ran.status == 1

    def timeless(text: str) -> str:
        return re.sub(r"\d+\.\d+ s", "? s", text)

    assert timeless(ran.stdout) == timeless(printed)
    Path("race.cu").write_text(re.sub(r"// (__syncthreads\(\);).*", r"\1", kernel))
    clean(cli(*shlex.split(command.removeprefix("$ .venv/bin/cupyllm "))))
