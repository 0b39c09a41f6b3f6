"""Control flow on the simulator: diverged lanes, loops, exits, barriers, budgets; every result against NumPy."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from cupyllm.errors import BackendError
from cupyllm.sim.module import load_module
from cupyllm.sim.report import SimError, UnknownInstruction
from tests.sim.running import Device, compiled

GRID, BLOCK = 5, 96  # several CTAs a batch; a block that is no power of two
TOTAL = GRID * BLOCK

ELEMENTWISE = """
extern "C" __global__ void collatz(const int* x, int* y, long long n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int v = x[i], steps = 0;
  while (v != 1) { if (v % 2) v = 3 * v + 1; else v /= 2; steps++; }
  y[i] = steps;
}
extern "C" __global__ void choose(const int* x, int* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], r;
  switch (v % 7) {
    case 0: r = v * 3; break;
    case 1: r = v - 11; break;
    case 2: if (v > 50) r = -v; else r = v * v; break;
    case 3: { r = 0; for (int k = 0; k < v; k++) { if (k == 40) break; if (k % 3 == 0) continue; r += k; } break; }
    default: r = v ^ 0x55;
  }
  y[i] = r;
}
extern "C" __global__ void by_cta(const int* x, int* y) {
  int sum = 0;
  for (int k = 0; k <= blockIdx.x * 3; k++) sum += x[k] * (threadIdx.x + 1);
  y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def collatz(v: int) -> int:
    steps = 0
    while v != 1:
        v = 3 * v + 1 if v % 2 else v // 2
        steps += 1
    return steps


def chosen(v: int) -> int:
    match v % 7:
        case 0:
            return v * 3
        case 1:
            return v - 11
        case 2:
            return -v if v > 50 else v * v
        case 3:
            return sum(k for k in range(min(v, 40)) if k % 3)
    return v ^ 0x55


@pytest.mark.parametrize("lanes", [1, 200, 2048])  # one CTA a batch, two, all
def test_diverged_loops_and_an_early_return(lanes: int) -> None:
    device, n = Device(lanes=lanes), TOTAL - 17
    x = np.arange(1, TOTAL + 1, dtype=np.int32)
    device.put("x", x[:n]), device.put("y", np.full(TOTAL, -1, np.int32))
    device.run(ELEMENTWISE, "collatz", GRID, BLOCK, "x", "y", n)
    want = np.array([collatz(int(v)) for v in x[:n]] + [-1] * 17, np.int32)
    np.testing.assert_array_equal(device.get("y"), want)


def test_switches_breaks_and_continues() -> None:
    device = Device()
    x = np.arange(TOTAL, dtype=np.int32)
    device.put("x", x), device.empty("y", (TOTAL,), "int32")
    device.run(ELEMENTWISE, "choose", GRID, BLOCK, "x", "y")
    np.testing.assert_array_equal(device.get("y"), np.array([chosen(int(v)) for v in x], np.int32))


def test_trip_counts_that_differ_by_cta() -> None:
    device = Device()
    x = np.arange(1, 1 + 3 * (GRID - 1) + 1, dtype=np.int32)
    device.put("x", x), device.empty("y", (GRID, BLOCK), "int32")
    device.run(ELEMENTWISE, "by_cta", GRID, BLOCK, "x", "y")
    want = np.array([x[: 3 * cta + 1].sum() * np.arange(1, BLOCK + 1) for cta in range(GRID)], np.int32)
    np.testing.assert_array_equal(device.get("y"), want)


SHAPES = """
extern "C" __global__ void places(int* y) {
  int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  int threads = blockDim.x * blockDim.y * blockDim.z;
  int* at = y + 8 * (cta * threads + t);
  at[0] = blockIdx.x; at[1] = blockIdx.y; at[2] = blockIdx.z;
  at[3] = threadIdx.x; at[4] = threadIdx.y; at[5] = threadIdx.z;
  unsigned lane, warp;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm("mov.u32 %0, %%warpid;" : "=r"(warp));
  at[6] = lane; at[7] = warp;
}
"""


def test_special_registers() -> None:
    device, grid, block = Device(lanes=100), (2, 3, 2), (5, 3, 4)
    device.empty("y", (12, 60, 8), "int32")
    device.run(SHAPES, "places", grid, block, "y")
    cta, t = np.arange(12)[:, None], np.arange(60)[None, :]
    want = [cta % 2, cta // 2 % 3, cta // 6, t % 5, t // 5 % 3, t // 15, t % 32, t // 32]
    np.testing.assert_array_equal(device.get("y"), np.stack(np.broadcast_arrays(*want), axis=2))


BARRIERS = """
extern "C" __global__ void reversed(const float* x, float* y) {
  __shared__ float tile[96];
  for (int round = 0; round < 3; round++) {
    tile[threadIdx.x] = x[blockIdx.x * 96 + threadIdx.x] + round;
    __syncthreads();
    y[(blockIdx.x * 3 + round) * 96 + threadIdx.x] = tile[95 - threadIdx.x];
    __syncthreads();
  }
}
extern "C" __global__ void uneven(const float* x, float* y) {  // CTAs pass different numbers of barriers
  __shared__ float tile[96];
  float sum = 0;
  for (int round = 0; round <= blockIdx.x; round++) {
    if (threadIdx.x < 32) tile[threadIdx.x] = x[threadIdx.x] * (round + 1);
    __syncthreads();
    if (threadIdx.x % 2) sum += tile[threadIdx.x % 32];
    __syncthreads();
  }
  y[blockIdx.x * 96 + threadIdx.x] = sum;
}
extern "C" __global__ void early(const float* x, float* y, int n) {  // exited threads are not waited for
  __shared__ float tile[96];
  if (threadIdx.x >= n) return;
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[n - 1 - threadIdx.x];
}
extern "C" __global__ void one_warp_sums(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x / 32 == 1) {
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 == 0) y[0] = v;
  } else if (threadIdx.x < 16) {
    for (int d = 8; d; d /= 2) v += __shfl_xor_sync(0x0000ffffu, v, d);
    y[1 + threadIdx.x] = v;
  }
}
extern "C" __global__ void counts(const int* x, int* y) {
  y[3 * threadIdx.x] = __syncthreads_count(x[threadIdx.x] > 5);
  y[3 * threadIdx.x + 1] = __syncthreads_and(x[threadIdx.x] > 0);
  y[3 * threadIdx.x + 2] = __syncthreads_or(x[threadIdx.x] > 5);
}
"""


def test_barriers_in_a_loop() -> None:
    device = Device()
    x = np.random.default_rng(0).random((GRID, 96), np.float32)
    device.put("x", x), device.empty("y", (GRID, 3, 96))
    device.run(BARRIERS, "reversed", GRID, 96, "x", "y")
    np.testing.assert_array_equal(device.get("y"), np.stack([x[:, ::-1] + np.float32(r) for r in range(3)], axis=1))


def test_ctas_of_a_batch_pass_different_numbers_of_barriers() -> None:
    device = Device()
    x = np.arange(1, 33, dtype=np.float32)
    device.put("x", x), device.empty("y", (GRID, 96))
    device.run(BARRIERS, "uneven", GRID, 96, "x", "y")
    odd = np.arange(96) % 2
    want = [sum(range(1, cta + 2)) * np.tile(x, 3) * odd for cta in range(GRID)]
    np.testing.assert_array_equal(device.get("y"), np.array(want, np.float32))


def test_barriers_do_not_wait_for_threads_that_have_exited() -> None:
    device = Device()
    x = np.arange(70, dtype=np.float32)
    device.put("x", x), device.empty("y", (70,))
    device.run(BARRIERS, "early", 1, 96, "x", "y", np.int32(70))
    np.testing.assert_array_equal(device.get("y"), x[::-1])


def test_warps_shuffle_in_branches_of_their_own() -> None:
    device = Device()
    x = np.arange(96, dtype=np.float32)
    device.put("x", x), device.empty("y", (17,))
    device.run(BARRIERS, "one_warp_sums", 1, 96, "x", "y")
    np.testing.assert_array_equal(device.get("y"), [x[32:64].sum()] + [x[:16].sum()] * 16)


def test_barriers_that_vote() -> None:
    device = Device()
    x = np.arange(96, dtype=np.int32)
    device.put("x", x), device.empty("y", (96, 3), "int32")
    device.run(BARRIERS, "counts", 1, 96, "x", "y")
    np.testing.assert_array_equal(device.get("y"), np.tile(np.array([90, 0, 1], np.int32), (96, 1)))


STUCK = """
extern "C" __global__ void divided(float* y) {
  if (threadIdx.x < 32) { __syncthreads(); y[threadIdx.x] = 1; }
  else { y[threadIdx.x] = 2; __syncthreads(); y[threadIdx.x] = 3; }
}
extern "C" __global__ void half_a_warp(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 8);
  else v += __shfl_xor_sync(0xffffffffu, v, 4);
  y[threadIdx.x] = v;
}
extern "C" __global__ void wrong_members(float* y) {
  float v = threadIdx.x;
  y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, v, 8);
}
extern "C" __global__ void forever(volatile int* flag) {
  while (*flag == 0) { }
}
extern "C" __global__ void handed_over(volatile int* y) {  // lanes of one CTA: the second warp lets the first go on
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x < 32) { while (flag == 0) { } y[threadIdx.x] = 7; }
  else if (threadIdx.x == 32) flag = 1;
}
extern "C" __global__ void halves(float* y) { asm volatile("bar.sync 1, 32;"); y[threadIdx.x] = 0; }
"""


@pytest.mark.parametrize(
    ("symbol", "kind", "line"),
    [
        ("divided", "divergent-barrier", 3),
        ("half_a_warp", "divergent-shuffle", 8),
        ("wrong_members", "divergent-shuffle", 14),
    ],
)
def test_lanes_that_never_meet_are_reported(symbol: str, kind: str, line: int) -> None:
    device = Device()
    device.empty("y", (64,))
    with pytest.raises(SimError) as caught:
        device.run(STUCK, symbol, 1, 64, "y")
    assert caught.value.reports[0].kind == kind, str(caught.value)
    assert f"test.cu:{line}" in str(caught.value) and symbol in str(caught.value)


def test_an_endless_loop_ends_with_the_budget() -> None:
    device = Device(budget=3_000_000)
    device.put("flag", np.zeros(1, np.int32))
    start = time.perf_counter()
    with pytest.raises(SimError, match=r"budget.*forever.*3000000") as caught:
        device.run(STUCK, "forever", 1, 32, "flag")
    assert caught.value.reports[0].kind == "budget" and time.perf_counter() - start < 5


def test_a_huge_grid_is_refused_before_it_runs() -> None:
    device = Device(budget=1_000_000)
    device.put("flag", np.ones(1, np.int32))
    with pytest.raises(BackendError, match=r"2097152 threads, more than the budget of 1000000"):
        device.run(STUCK, "forever", 1 << 16, 32, "flag")


def test_a_warp_that_waits_for_another_one_goes_on() -> None:
    device = Device()
    device.empty("y", (32,), "int32")
    device.run(STUCK, "handed_over", 1, 64, "y")
    np.testing.assert_array_equal(device.get("y"), 7)


@pytest.mark.parametrize(("symbol", "what"), [("printing", "call"), ("halves", "bar.sync")])
def test_what_is_not_simulated_is_refused_by_name(symbol: str, what: str) -> None:
    device = Device()
    device.empty("y", (64,))
    text = STUCK if symbol == "halves" else 'extern "C" __global__ void printing(float*) { printf("%d", threadIdx.x); }'
    with pytest.raises(UnknownInstruction, match=what):
        device.run(text, symbol, 1, 64, "y")


MEMBERS = """
extern "C" __global__ void halves_vote(unsigned* y) {  // lanes together, masks apart
  unsigned lane = threadIdx.x % 32, m = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  unsigned* at = y + 5 * threadIdx.x;
  at[0] = __ballot_sync(m, 1);
  at[1] = __any_sync(m, lane == 20);
  at[2] = __reduce_add_sync(m, 1u);
  at[3] = __match_any_sync(m, 7);
  at[4] = __shfl_xor_sync(m, lane, 8);
}
extern "C" __global__ void across(unsigned* y) {  // reads a lane of the other half
  unsigned lane = threadIdx.x % 32, m = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  y[threadIdx.x] = __shfl_xor_sync(m, lane, 16);
}
extern "C" __global__ void halves_race(unsigned* y) {
  __shared__ unsigned tile[32];
  unsigned lane = threadIdx.x, m = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  tile[lane] = lane;
  __syncwarp(m);
  y[lane] = tile[31 - lane];
}
extern "C" __global__ void times(long long* y) { long long a = clock64(); y[0] = clock64() - a; }
extern "C" __global__ void race_then_trap(unsigned* y) {
  __shared__ unsigned tile[64];
  tile[threadIdx.x] = 0;
  __syncthreads();
  tile[threadIdx.x] = threadIdx.x;
  y[threadIdx.x] = tile[63 - threadIdx.x];
  asm volatile("trap;");
}
extern "C" __global__ void through_pointers(float** ps, float* y, int n) { y[threadIdx.x] = ps[n][n * threadIdx.x]; }
extern "C" __global__ void guarded(int* y) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p bar.warp.sync 0xffffffff;}" :: "r"(y[0]));
}
extern "C" __global__ void half_barrier(int* y) { asm volatile("barrier.sync 1;"); y[threadIdx.x] = 0; }
"""


def test_lanes_with_different_member_masks_act_apart() -> None:
    device = Device()
    device.empty("y", (64, 5), "int32")
    device.run(MEMBERS, "halves_vote", 1, 64, "y")
    lane = np.arange(64) % 32
    low = lane < 16
    half = np.where(low, 0x0000FFFF, 0xFFFF0000)
    want = np.stack([half, np.where(low, 0, 1), np.full(64, 16), half, lane ^ 8], axis=1)
    np.testing.assert_array_equal(device.get("y").view(np.uint32), want)


@pytest.mark.parametrize(
    ("symbol", "kinds"), [("across", {"divergent-shuffle"}), ("halves_race", {"race", "uninitialised-read"})]
)
def test_what_crosses_member_masks_is_reported(symbol: str, kinds: set[str]) -> None:
    device = Device()
    device.empty("y", (32,), "int32")
    with pytest.raises(SimError) as caught:
        device.run(MEMBERS, symbol, 1, 32, "y")
    found = {report.kind for report in caught.value.reports}
    assert found and found <= kinds


def test_clocks_go_forward() -> None:
    device = Device()
    device.empty("y", (1,), "int64")
    device.run(MEMBERS, "times", 1, 1, "y")
    assert device.get("y")[0] > 0


def test_a_trap_does_not_hide_a_race() -> None:
    device = Device()
    device.empty("y", (64,), "int32")
    with pytest.raises(SimError) as caught:
        device.run(MEMBERS, "race_then_trap", 1, 64, "y")
    assert {report.kind for report in caught.value.reports} == {"race", "trap"}


def test_pointers_from_memory_and_an_integer_parameter() -> None:
    device = Device()
    values = np.arange(64, dtype=np.float32)
    device.put("a", values), device.put("b", -values), device.empty("y", (32,))
    device.put("ps", np.array([device.tensors[name].address for name in "ab"], np.int64))
    device.run(MEMBERS, "through_pointers", 1, 32, "ps", "y", np.int32(1))
    np.testing.assert_array_equal(device.get("y"), -values[:32])


@pytest.mark.parametrize(
    ("symbol", "what"), [("guarded", "bar.warp.sync under a predicate"), ("half_barrier", "barrier.sync")]
)
def test_meetings_that_depend_on_more_than_the_place_are_refused(symbol: str, what: str) -> None:
    device = Device()
    device.put("y", np.zeros(64, np.int32))
    with pytest.raises(UnknownInstruction, match=what):
        device.run(MEMBERS, symbol, 1, 64, "y")


def test_fused_sums_of_uniform_factors_on_midpoints() -> None:
    text = """extern "C" __global__ void k(const float* x, float* y, float a, float b) {
  y[threadIdx.x] = fmaf(a, b, x[threadIdx.x]);
}"""
    device = Device()
    device.put("x", np.ones(32, np.float32)), device.empty("y", (32,))
    device.run(text, "k", 1, 32, "x", "y", np.float32(2.0**-24), np.float32(1))
    np.testing.assert_array_equal(device.get("y"), np.float32(1))  # a tie, to even


def test_names_longer_than_a_file_name_are_cached(tmp_path: Path) -> None:
    name = "k" * 300
    ptx = f".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry {name}() {{ ret; }}\n"
    assert load_module(ptx, tmp_path).kernels[name].kernel.name == name
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("grid", "block", "args", "message"),
    [
        (1, 2048, ("y",), "2048 threads, expected 1 to 1024"),
        (0, 32, ("y",), "grid"),
        (1, 32, ("y", 1), "2 arguments, expected 1"),
        (1, 32, (np.float32(1),), "4 bytes, expected 8"),
    ],
)
def test_launches_that_a_driver_would_refuse(grid: int, block: int, args: tuple[object, ...], message: str) -> None:
    device = Device()
    device.empty("y", (64,))
    with pytest.raises(BackendError, match=message):
        device.run(STUCK, "divided", grid, block, *args)


def test_a_module_is_translated_kernel_by_kernel() -> None:
    module = compiled(STUCK)
    assert set(module.kernels) >= {"divided", "forever"}
    with pytest.raises(KeyError):
        module.kernels["absent"]


PASSED = """
extern "C" __global__ void half_a_warp(float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 16) __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void trips(const int* n, float* y) {
  float v = 0;
  for (int k = 0; k < n[threadIdx.x]; k++) { v += k; __syncthreads(); }
  y[threadIdx.x] = v;
}
extern "C" __global__ void shuffled(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);
  y[threadIdx.x] = v;
}
"""


@pytest.mark.parametrize(
    ("symbol", "kind", "args"),
    [
        ("half_a_warp", "divergent-barrier", ("y",)),
        ("trips", "divergent-barrier", ("n", "y")),
        ("shuffled", "divergent-shuffle", ("y",)),
    ],
)
def test_threads_that_go_past_a_meeting_are_reported(symbol: str, kind: str, args: tuple[str, ...]) -> None:
    device = Device()
    device.put("n", (1 + np.arange(64) % 3).astype(np.int32)), device.empty("y", (64,))
    with pytest.raises(SimError) as caught:
        device.run(PASSED, symbol, 1, 64, *args)
    assert {report.kind for report in caught.value.reports} == {kind}
    assert "went past it" in str(caught.value)


def test_an_exchange_without_a_result_is_a_write() -> None:
    text = """extern "C" __global__ void k(const float* x, float* y) { atomicExch(&y[threadIdx.x], x[threadIdx.x]); }
extern "C" __global__ void copy(const float* y, float* z) { z[threadIdx.x] = y[threadIdx.x]; }"""
    device = Device()
    device.put("x", np.arange(32, dtype=np.float32)), device.empty("y", (32,)), device.empty("z", (32,))
    device.run(text, "k", 1, 32, "x", "y")
    device.run(text, "copy", 1, 32, "y", "z")
    np.testing.assert_array_equal(device.get("z"), np.arange(32))
