// What the persistent wgmma kernels share: barriers, TMA, wgmma, the order of tiles.
//
// Macros of the including file: A_MN B_MN BM BN BK CM CN, as linear_sm90.cu explains them.
// Capability: 9.0 only (sm_90a).
#pragma once

#include "common.cuh"

struct alignas(64) TensorMap { u64 opaque[16]; };

// What the L2 does with a line, as createpolicy makes it.
#define EVICT_NORMAL 0x1000000000000000ull
#define EVICT_FIRST 0x12f0000000000000ull

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The same place in the shared memory of another CTA of the cluster.
DEVICE u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

DEVICE void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
// Lanes 0 to COUNT - 1 tell the CTAs first, first + 1, .. of the cluster that this warp has read a stage.
template <int COUNT> DEVICE void barrier_release(u32 bar, int lane, int first = 0) {
  if (COUNT == 1) {
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
  } else if (lane < COUNT) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(bar, first + lane)) : "memory");
  }
}
// Relaxed, since the fence after the barriers' making releases them; .release would cost every thread a MEMBAR.GPU.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void group_sync(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }

DEVICE void tma_load(u32 target, const TensorMap* map, u32 bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          target), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_load(u32 target, const TensorMap* map, u32 bar, int x, int y, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(target), "l"(map), "r"(bar), "l"(policy), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_load_multicast(u32 target, const TensorMap* map, u32 bar, int x, int y, unsigned short mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(target), "l"(map), "r"(bar), "h"(mask), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_store(const TensorMap* map, u32 source, int x, int y, bool accumulate) {
  if (accumulate)
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                     map), "r"(source), "r"(x), "r"(y) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most LEFT of this thread's stores still read shared memory.
template <int LEFT> DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// One operand's stage, rows of 128 bytes, from a map whose box is
//   k contiguous: 64 k, EXTENT / SHARE rows; the stage is EXTENT rows of 64 k.
//   else: 64 elements, 64 k; the stage is a sequence of such boxes. Where SHARE does not divide their number, a box has
//   64 / SHARE k instead.
// SHARE CTAs need this stage; each loads the `part`-th of it for all of them. Beyond the matrix TMA writes zeros.
// `policy`, if any, is for what nobody shares.
template <int MN, int EXTENT, int SHARE, class... Policy>
DEVICE void load_tile(u32 target, const TensorMap* map, u32 bar, int first, int k, int part, unsigned short mask,
                      Policy... policy) {
  const int boxes = MN ? (EXTENT + 63) / 64 : 1, whole = boxes % SHARE == 0;
  const int rows = !MN ? EXTENT / SHARE : whole ? 64 : 64 / SHARE, loads = MN && whole ? boxes / SHARE : boxes;
#pragma unroll
  for (int i = 0; i < loads; i++) {
    int box = MN && whole ? part * loads + i : i, offset = MN && whole ? 0 : part * rows;
    int x = MN ? first + box * 64 : k, y = MN ? k + offset : first + offset;
    u32 at = target + box * 8192 + offset * 128;
    if (SHARE > 1) tma_load_multicast(at, map, bar, x, y, mask);
    else tma_load(at, map, bar, x, y, policy...);
  }
}

// A wgmma operand with the 128-byte swizzle. k contiguous: an atom is 8 rows of 128 bytes, the next 8 rows follow 1024
// bytes on, 16 k are 32 bytes. Else an atom is 8 k of 64 elements, the next 8 k follow 1024 bytes on, the next 64
// elements 8192, 16 k are 2048 bytes.
DEVICE u64 descriptor(u32 address, int mn) {
  u64 leading = mn ? 8192 >> 4 : 1, stride = 1024 >> 4;
  return (u64)1 << 62 | stride << 32 | leading << 16 | (u64)((address & 0x3ffff) >> 4);
}
#define K_STEP(mn) ((mn) ? 2048 >> 4 : 32 >> 4)

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define STRING_(x) #x
#define STRING(x) STRING_(x)
#define P16_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define P16_1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define P16_2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define P16_3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define P16_4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define P16_5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define P16_6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define P16_7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#if BN == 40
#define PLACES P16_0 "," "%16,%17,%18,%19"
#define SUMS(d) F16(d, 0), F4(d, 16)
#define INPUTS "%20, %21, p, 1, 1, "
#define ADD "%22"
#elif BN == 48
#define PLACES P16_0 "," "%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS(d) F16(d, 0), F4(d, 16), F4(d, 20)
#define INPUTS "%24, %25, p, 1, 1, "
#define ADD "%26"
#elif BN == 64
#define PLACES P16_0 "," P16_1
#define SUMS(d) F16(d, 0), F16(d, 16)
#define INPUTS "%32, %33, p, 1, 1, "
#define ADD "%34"
#elif BN == 80
#define PLACES P16_0 "," P16_1 "," "%32,%33,%34,%35,%36,%37,%38,%39"
#define SUMS(d) F16(d, 0), F16(d, 16), F4(d, 32), F4(d, 36)
#define INPUTS "%40, %41, p, 1, 1, "
#define ADD "%42"
#elif BN == 96
#define PLACES P16_0 "," P16_1 "," P16_2
#define SUMS(d) F16(d, 0), F16(d, 16), F16(d, 32)
#define INPUTS "%48, %49, p, 1, 1, "
#define ADD "%50"
#elif BN == 128
#define PLACES P16_0 "," P16_1 "," P16_2 "," P16_3
#define SUMS(d) F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
#define INPUTS "%64, %65, p, 1, 1, "
#define ADD "%66"
#elif BN == 160
#define PLACES P16_0 "," P16_1 "," P16_2 "," P16_3 "," P16_4
#define SUMS(d) F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48), F16(d, 64)
#define INPUTS "%80, %81, p, 1, 1, "
#define ADD "%82"
#elif BN == 192
#define PLACES P16_0 "," P16_1 "," P16_2 "," P16_3 "," P16_4 "," P16_5
#define SUMS(d) F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48), F16(d, 64), F16(d, 80)
#define INPUTS "%96, %97, p, 1, 1, "
#define ADD "%98"
#elif BN == 256
#define PLACES P16_0 "," P16_1 "," P16_2 "," P16_3 "," P16_4 "," P16_5 "," P16_6 "," P16_7
#define SUMS(d) F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48), F16(d, 64), F16(d, 80), F16(d, 96), F16(d, 112)
#define INPUTS "%128, %129, p, 1, 1, "
#define ADD "%130"
#endif
// sums[64 x BN] = a b + (add ? sums : 0). A thread holds rows lane / 4 and lane / 4 + 8 of its warp's 16, and columns
// 2 (lane % 4) and the next of every 8: four sums are two columns of the upper row, then of the lower.
DEVICE void wgmma(float* sums, u64 a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" STRING(BN) "k16.f32.bf16.bf16 {" PLACES "}, " INPUTS STRING(A_MN)
               ", " STRING(B_MN) ";\n}" : SUMS(sums) : "l"(a), "l"(b), "r"(add));
}

// The order of the tiles, which decides what the L2 keeps: bands of `group` tiles, within a band one column after
// another (or, by columns, one row after another). Tiles are those of a cluster: BM * CM rows, BN * CN columns.
struct Order {
  int across, along, group, by_columns;
  DEVICE Order(i64 M, i64 N, i64 group_, i64 by_columns_) : group((int)group_), by_columns((int)by_columns_) {
    int tiles_m = (int)((M + BM * CM - 1) / (BM * CM)), tiles_n = (int)((N + BN * CN - 1) / (BN * CN));
    across = by_columns ? tiles_n : tiles_m;
    along = by_columns ? tiles_m : tiles_n;
  }
  DEVICE int tiles() const { return across * along; }
  DEVICE void place(int tile, int& m, int& n) const {
    int band = group * along, first = tile / band * group, rest = tile % band, width = min(group, across - first);
    int a = first + rest % width, b = rest / width;
    m = by_columns ? b : a;
    n = by_columns ? a : b;
  }
};

// {low, high} rounded to bf16
DEVICE u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
