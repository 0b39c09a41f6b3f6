"""What the analysis says of small kernels: blocks, meetings, what is live, where addresses come from; and the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyllm.backend import nvrtc
from cupyllm.sim import flow, module, ptx
from cupyllm.sim.ptx import Address
from cupyllm.sim.translate import translate
from tests.sim.running import OPTIONS, Device

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"
KERNEL = (
    HEADER
    + """
.visible .entry k(.param .u64 x, .param .u64 y, .param .u64 n) {
  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<10>; .reg .f32 %f<9>;
  .shared .align 4 .b8 tile[128];
  ld.param.u64 %rd1, [x];
  ld.param.u64 %rd2, [y];
  ld.param.u64 %rd3, [n];
  mov.u32 %r1, %tid.x;
  cvt.u64.u32 %rd4, %r1;
  shl.b64 %rd5, %rd4, 2;
  add.s64 %rd6, %rd1, %rd5;
  ld.global.u64 %rd7, [%rd6];
  add.s64 %rd8, %rd7, 8;
  setp.lt.u64 %p1, %rd4, %rd3;
  @%p1 bra FAR;
  ld.global.f32 %f1, [%rd8];
  mov.u32 %r2, tile;
  add.s32 %r3, %r2, %r1;
  st.shared.f32 [%r3], %f1;
  bar.sync 0;
  ld.shared.f32 %f2, [%r3];
  selp.b64 %rd9, %rd6, %rd2, %p1;
  st.global.f32 [%rd9], %f2;
FAR:
  ret;
}
"""
)


@pytest.fixture(scope="module")
def kernel() -> ptx.Kernel:
    return ptx.parse(KERNEL).kernels["k"]


@pytest.fixture(scope="module")
def analysed(kernel: ptx.Kernel) -> flow.Flow:
    return flow.analyse(kernel, [])


def address(kernel: ptx.Kernel, text: str) -> Address:
    found = next(i for i in kernel.body if i.text.startswith(text))
    return next(operand for operand in found.operands if isinstance(operand, Address))


def test_blocks_and_segments(analysed: flow.Flow) -> None:
    assert [(b.taken, b.following, b.conditional) for b in analysed.blocks] == [
        (2, 1, True),
        (flow.EXIT, 2, False),
        (flow.EXIT, flow.EXIT, False),
    ]
    assert [len(b.segments) for b in analysed.blocks] == [1, 2, 1]
    meetings = [s.meeting.opcode for s in analysed.segments if s.meeting]
    assert meetings == ["bar.sync"]


def test_only_what_is_read_later_is_live(analysed: flow.Flow) -> None:
    before_the_branch, before_the_barrier, after = analysed.segments[:3]
    assert before_the_branch.live_after == {"%rd2", "%rd6", "%rd8", "%r1", "%p1"}
    assert before_the_barrier.live_after == {"%rd2", "%rd6", "%r3", "%p1"}
    assert after.live_after == frozenset()


@pytest.mark.parametrize(
    ("instruction", "origin"),
    [
        ("ld.global.u64 %rd7", ({0}, set())),
        ("ld.global.f32 %f1", (None, None)),  # a pointer that was loaded
        ("st.shared.f32", (set(), {"tile"})),
        ("ld.shared.f32", (set(), {"tile"})),
        ("st.global.f32", ({0, 1}, set())),  # one of two
    ],
)
def test_origins(kernel: ptx.Kernel, analysed: flow.Flow, instruction: str, origin: object) -> None:
    assert analysed.origin(address(kernel, instruction)) == origin


def test_a_jump_to_nowhere_is_refused() -> None:
    with pytest.raises(ptx.PtxError, match="GONE"):
        ptx.parse(KERNEL.replace("@%p1 bra FAR", "@%p1 bra GONE"))


PRODUCT = """
extern "C" __global__ void product(const float* a, const float* b, float* c) {
  float x[4], y[4], sum[4][4];
  for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) sum[i][j] = c[(i * 4 + j) * 32 + threadIdx.x];
#pragma unroll
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int i = 0; i < 4; i++) { x[i] = a[(k * 4 + i) * 32 + threadIdx.x]; y[i] = b[(k * 4 + i) * 32 + threadIdx.x]; }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) c[(i * 4 + j) * 32 + threadIdx.x] = sum[i][j];
}
"""


def test_unrolled_fmas_are_grouped_and_keep_their_order() -> None:
    text, _ = nvrtc.compile_text(PRODUCT, "test.cu", OPTIONS, "ptx")
    parsed = ptx.parse(text if isinstance(text, str) else text.decode()).kernels["product"]
    source, _ = translate(parsed, flow.analyse(parsed, []))
    assert source.count("num.fma_f32_many") == 8 and "num.fma_f32(" not in source
    rng, device = np.random.default_rng(0), Device()
    a, b = (rng.standard_normal((8, 4, 32)).astype(np.float32) for _ in range(2))
    c = rng.standard_normal((4, 4, 32)).astype(np.float32)
    device.put("a", a), device.put("b", b), device.put("c", c)
    device.run(PRODUCT, "product", 1, 32, "a", "b", "c")
    want = c
    for k in range(8):  # exact in float64, then one rounding: what a fused multiply-add gives but for double rounding
        want = (a[k][:, None].astype(np.float64) * b[k][None] + want).astype(np.float32)
    np.testing.assert_array_equal(device.get("c"), want)


def test_the_cache_is_used_and_a_damaged_entry_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = module.load_module(KERNEL, tmp_path).kernels["k"]
    (entry,) = tmp_path.iterdir()
    content = entry.read_bytes()

    def fail(*_: object) -> None:
        raise AssertionError("parsed again")

    with monkeypatch.context() as patch:
        patch.setattr(ptx, "parse", fail)
        again = module.load_module(KERNEL, tmp_path).kernels["k"]
    assert again.source == built.source and [s.text for s in again.sites] == [s.text for s in built.sites]
    for damaged in (content[:-1], content[:40] + b"x" + content[41:], b""):
        entry.write_bytes(damaged)
        assert module.load_module(KERNEL, tmp_path).kernels["k"].source == built.source
        assert entry.read_bytes()[32:] and list(tmp_path.iterdir()) == [entry]
    assert module.load_module(KERNEL + "// changed\n", tmp_path).digest != module.load_module(KERNEL).digest
