// Products of few rows with quantised weights: y = x weight^T for 1 to 8 NT rows of bf16: every code is read once.
//
// Shapes: N rows (x [N,K], y [N,M] row-major), weight [M,K] in the device layout of cupyllm/quant/layout.py. K a
// multiple of 8 (int8), 128 (int4), 64 (nf4); any M.
// Swapped operands: y^T = weight x^T by mma m16n8k16, so that 16 rows of the weight fill the tensor core's long side
// and a tile of codes is its A operand, 16 bytes a lane. Each lane copies its own codes by cp.async into a ring of its
// warp, and later decodes them to registers. x is few: a CTA keeps its slice of it in shared memory, in the order in
// which a lane wants it: 32 bytes a lane and 64 k.
//
// Work: blocks of 16 rows of the weight, at most WN MI in a pass of a CTA, MI by each of WK warps. Warp wk of WK takes
// the steps (128 k) wk, wk + WK, .. of the CTA's slice of K, in each of them its MI blocks, which share the fragments
// of x. AHEAD steps are in flight, across passes too. Grid: S slices times G groups; CTA b has slice b % S and blocks
// [g B / G, (g + 1) B / G), g = b / S, B = ceil(M / 16), in as few passes as that takes, as long as each other but for
// a block.
//
// Numerics: codes are exact in bf16 (nf4's levels but for the rounding in quantized.cuh), so products are exact; the
// sum of a group (int8: of 128 k) is made by the tensor core in fp32 and multiplied by the group's scale in fp32
// (fused) where it is added to the total. int4's codes are multiplied as 16 + n, one instruction less a pair; 16 + zero
// times the sum of the group's x, in fp32, is taken off its sum. NF4_UNIT and int8's scale, one a row, come after the
// total of WK warps, which is added in order; S slices are added in order. One rounding to y. Bits depend on K, WK and
// S alone, neither on N nor on the GPU. Deterministic; no atomics.
//
// Slices: with CLUSTER = 1, parts [S,N,M] float are written if S > 1, and linear_sum.cu adds them; else y is written.
// With CLUSTER > 1 (9.0 and later) it is S: the CTAs of a group are a cluster, each adds up and writes 1 / S of a pass.
//
// Macros: Y_T of y (bf16 or float), FORMAT (quantized.cuh), NT groups of 8 rows of x, WN, WK, MI, AHEAD, CLUSTER.
// Block: 32 WN WK. Dynamic shared bytes: ops/quantized_rows.py. R: blocks of a warp whose sums are exchanged at a time.
// May be launched programmatically: only codes are read before the wait. nf4 of 8-bit absmax: M K / 64 < 2^32.
// Aliasing: y and parts overlap nothing. Capability: 8.0.
// Measured: share of 4545 GB/s at which codes and scales were read, gate+up / down of Qwen3-32B (H200, graphs of
// launches with weights of their own, 2026-11-30):
//   1 row    int8 0.92 / 0.83, int4 0.75 / 0.66, nf4 0.70 / 0.63, nf4 of 8-bit absmax 0.60 / 0.53
//   8 rows   int8 0.85 / 0.70, int4 0.64 / 0.46, nf4 0.62 / 0.47, nf4 of 8-bit absmax 0.53 / 0.40
//   16 rows  int8 0.70 / 0.61, int4 0.48 / 0.39, nf4 0.42 / 0.35, nf4 of 8-bit absmax 0.37 / 0.31
// cuBLAS takes 2.1, 3.2, 2.8 and 2.6 times as long for 1 row of gate+up in bf16. Instructions limit nf4, not memory:
// of 8-bit absmax (1 row, gate+up, 1x20x5*1) a scheduler issues in 69 % of cycles and memory is busy in 43 %; warps
// wait, an issue, 1.55 for another warp's, 1.55 for a fixed latency, 0.84 for shared memory, 0.82 for a pipe, 0.66 for
// global memory.
// Rejected: codes loaded to registers without a ring; bulk copies and mbarriers in place of cp.async (int8 the same
// from 4 rows on and up to 17 % slower at 1, int4 6 to 13 %, nf4 2 to 11 %); clusters of 4 (0.54 where 2 have 0.83 and
// a second launch 0.79); nf4's levels by prmt (11 integer operations for 4 weights).
#include "quantized.cuh"

#define WARPS (WN * WK)
#define THREADS (WARPS * 32)
#define PASS (WN * MI)                    // blocks
#define K_STEP 128                        // k of a warp's step
#define TILES (K_STEP / DEPTH)            // tiles of a step
#define RED_COLS 20                       // floats between two columns of a warp's sums: banks 8 t + g, each once
#define SUMS_OF_X (FORMAT == INT4)
#define TILE_SCALES (FORMAT == INT8 ? 0 : FORMAT == INT4 ? 32 : FORMAT == NF4 ? 64 : 16)  // bytes of scales for a tile
#define STEP_CODES (TILES * TILE_BYTES)
#define STEP_SCALES (TILES * TILE_SCALES)
#define SLOT (STEP_CODES + STEP_SCALES)
#define SLOTS (AHEAD * MI)                // of a warp's ring
#define KEEP_X (MI > 1 && NT * THREADS <= 640)  // registers hold a step's x, read once for MI blocks

struct alignas(16) Quad { u32 v[4]; };
struct Pair { float v[2]; };

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE Quad load_quad(const bf16* p) {  // of x, which the kernel before this one may have written: not .nc
  Quad q;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p));
  return q;
}
DEVICE Quad load_shared(u32 p) {
  Quad q;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "r"(p) : "memory");
  return q;
}
DEVICE Pair load_pair(u32 p) {
  Pair q;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(q.v[0]), "=f"(q.v[1]) : "r"(p) : "memory");
  return q;
}
DEVICE u32 load_word(u32 p) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
  return v;
}
DEVICE u32 load_byte(u32 p) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
  return v;
}
DEVICE void store_shared(u32 p, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }

// 16 bytes from global to shared memory behind the thread's back; zeros, and nothing read, if not `inside`.
DEVICE void copy_async(u32 to, const unsigned char* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void dependents_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#if CLUSTER > 1
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void store_remote(u32 address, int rank, float v) {  // to the same place of another CTA of the cluster
  asm volatile("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}"
               ::"r"(address), "r"(rank), "f"(v) : "memory");
}
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

#undef KERNEL
#define KERNEL(name) extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1) CONCAT(name, SUFFIX)
KERNEL(quantized_rows)(const bf16* x, const unsigned char* codes, const void* scales, const float* nested, Y_T* y,
                       float* parts, i64 N_, i64 M_, i64 K_, i64 S_, i64 G_, i64 R_) {
  const int N = (int)N_, M = (int)M_, K = (int)K_, S = CLUSTER > 1 ? CLUSTER : (int)S_, R = (int)R_;
  extern __shared__ __align__(128) unsigned char shared[];
  int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  int wk = warp % WK, wn = warp / WK;
  int slice = (int)(blockIdx.x % (u32)S), group = (int)(blockIdx.x / (u32)S), blocks = (M + ROWS - 1) / ROWS;
  int lo = (int)((i64)group * blocks / G_), count = (int)((i64)(group + 1) * blocks / G_) - lo;
  int passes = (count + PASS - 1) / PASS, each = count / passes, longer = count % passes;
  auto first_block = [&](int pass) { return lo + pass * each + min(pass, longer); };
  int all_chunks = (K + K_STEP * WK - 1) / (K_STEP * WK);
  int first_chunk = slice * all_chunks / S, chunks = (slice + 1) * all_chunks / S - first_chunk;
  int tiles = (int)tiles_of(K);

  // Shared memory: nf4's table, warps' sums, the cluster's sums, nf4's map, sums of x, rings, x.
  float* red = (float*)(shared + (IS_NF4 ? NF4_TABLE_BYTES : 0));
  float* slice_sums = red + WARPS * R * N * RED_COLS;
  const int units = CLUSTER > 1 ? (PASS * N + CLUSTER - 1) / CLUSTER : 0;  // 16 sums each: this CTA's share of a pass
  float* map = slice_sums + 2 * CLUSTER * units * ROWS;
  float* x_sums = map + (FORMAT == NF4_DOUBLE ? MAP : 0);
  u32 rings = shared_address(x_sums + (SUMS_OF_X ? chunks * WK * 8 * NT : 0)), ring = rings + warp * (SLOTS * SLOT);
  u32 x_at = rings + WARPS * (SLOTS * SLOT);
  u32 x_pitch = (u32)(chunks * WK * K_STEP * 2 + 16);  // 16 mod 128: rows g and g + 1 fill each other's banks

  // Steps of a warp in a pass that have one tile at least, and those that have all.
  const int first = (first_chunk * WK + wk) * TILES, stride = WK * TILES;
  const int some = min(chunks, max(0, (tiles - first + stride - 1) / stride));
  const int whole = min(chunks, max(0, (tiles - first - TILES + stride) / stride));

  // The step that is asked for next: place of its first block's tile in the weight, blocks from there on in the pass.
  struct Walk {
    i64 tile;
    int chunk, pass, left;
  };
  auto enter = [&](Walk& w) {
    int block = first_block(w.pass) + wn;
    w.left = w.pass < passes ? first_block(w.pass + 1) - block : 0;
    w.tile = (i64)block * tiles + first;
  };
  auto advance = [&](Walk& w) {
    w.tile += stride;
    if (++w.chunk < chunks) return;
    w.chunk = 0, w.pass++;
    enter(w);
  };
  auto copy_codes = [&](const Walk& w, int mi, u32 to) {
    if (mi * WN >= w.left || w.chunk >= some) return;
    const unsigned char* from = codes + (w.tile + (i64)mi * WN * tiles) * TILE_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < TILES; i++)
      copy_async(to + lane * 16 + i * TILE_BYTES, from + i * TILE_BYTES, i < TILES / 2 || w.chunk < whole);
  };
  auto copy_scales = [&](const Walk& w, int mi, u32 to) {
    if (STEP_SCALES == 0 || lane >= STEP_SCALES / 16 || mi * WN >= w.left || w.chunk >= some) return;
    const unsigned char* from = (const unsigned char*)scales + (w.tile + (i64)mi * WN * tiles) * TILE_SCALES;
    copy_async(to + STEP_CODES + lane * 16, from + lane * 16, lane < TILE_SCALES / 16 || w.chunk < whole);
  };

  dependents_may_start();
#if CLUSTER > 1
  cluster_arrive();
#endif
  Walk walk{};
  enter(walk);
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    copy_codes(walk, i % MI, ring + i * SLOT);
    if (i % MI == MI - 1) advance(walk);
  }
#if IS_NF4
  fill_nf4_table((u32*)shared, thread, THREADS);
#endif
  wait_for_predecessor();
  walk = Walk{};
  enter(walk);
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    copy_scales(walk, i % MI, ring + i * SLOT);
    copy_commit();  // the first has all codes, too
    if (i % MI == MI - 1) advance(walk);
  }
#if FORMAT == NF4_DOUBLE
  float offset = nested[OFFSET];
  for (int i = thread; i < MAP; i += THREADS) map[i] = nested[i];
#endif
  {
    // x: 8 k of memory are 4 words, one for each t; neighbours begin at different t, so that their banks differ.
    int k0 = first_chunk * WK * K_STEP, octets = chunks * WK * K_STEP / 8, all = N * octets;
    for (int i = thread; i - lane < all; i += THREADS) {
      int n = i / octets, octet = i % octets, k = k0 + octet * 8;
      Quad q{};
      if (i < all && k < K) q = load_quad(x + (i64)n * K + k);
      if (SUMS_OF_X) {  // 16 lanes have a step's k
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) sum += __uint_as_float(q.v[j] << 16) + __uint_as_float(q.v[j] & 0xffff0000u);
#pragma unroll
        for (int j = 8; j > 0; j /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, j);
        if (i < all && octet % 16 == 0) x_sums[octet / 16 * (8 * NT) + n] = sum;
      }
      if (i >= all) continue;
      u32 to = x_at + n * x_pitch + octet / 8 * 128 + octet % 8 * 4;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int s = (j + octet / 8) % 4;
        store_shared(to + s * 32, s == 0 ? q.v[0] : s == 1 ? q.v[1] : s == 2 ? q.v[2] : q.v[3]);
      }
    }
    if (SUMS_OF_X)
      for (int i = thread; i < chunks * WK * 8 * NT; i += THREADS)
        if (i % (8 * NT) >= N) x_sums[i] = 0.0f;
  }
  u32 x_row[NT];  // rows past N repeat the last: their columns are not stored
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
    x_row[nt] = x_at + (nt * 8 + g < N ? nt * 8 + g : N - 1) * x_pitch + wk * (K_STEP * 2) + t * 32;
  u32 x_sum = shared_address(x_sums) + wk * (8 * NT * 4) + t * 8;
  u32 column = lane * 4;  // of nf4's table

#if FORMAT == NF4_DOUBLE
  // absmax are counted by rows in `nested`: this lane's is of row lane % 16 and tile lane / 16 of a step.
  u32 last = (u32)(((i64)M * tiles - 1) / OUTER);
  auto row_at = [&](int pass) {
    return (u32)((i64)((first_block(pass) + wn) * ROWS + lane % ROWS) * tiles + first + lane / ROWS);
  };
  auto outer_at = [&](u32 at) { return nested[ABSMAX2 + min(at / OUTER, last)]; };
  u32 row = row_at(0);
  float outer = outer_at(row);
#endif
  __syncthreads();

  float acc[MI][NT][4] = {};
  // Adds the sums of WK warps in order, R blocks of a warp at a time, and stores them; the accumulators are zero then.
  auto finish = [&](int pass) {
    int begin = first_block(pass), end = first_block(pass + 1);
#pragma unroll 1
    for (int m0 = 0; m0 < MI; m0 += R) {
      __syncthreads();  // the last sums have been read
#pragma unroll
      for (int mi = 0; mi < MI; mi++) {
        if (mi < m0 || mi >= m0 + R) continue;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          int n = nt * 8 + 2 * t;
          float* to = red + ((warp * R + mi - m0) * N + n) * RED_COLS + g;
          float(&c)[4] = acc[mi][nt];
          if (n < N) to[0] = c[0], to[8] = c[2];
          if (n + 1 < N) to[RED_COLS] = c[1], to[RED_COLS + 8] = c[3];
          c[0] = c[1] = c[2] = c[3] = 0.0f;
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int i = thread; i < WN * R * N * ROWS; i += THREADS) {
        int r = i % ROWS, n = i / ROWS % N, w = i / (ROWS * N), place = w + m0 * WN;  // block in the pass
        int block = begin + place, m = block * ROWS + r;
        if (block >= end || m >= M) continue;
        const float* from = red + ((w % WN * WK * R + w / WN) * N + n) * RED_COLS + r;
        float sum = from[0];
#pragma unroll
        for (int j = 1; j < WK; j++) sum += from[j * (R * N * RED_COLS)];
        if (FORMAT == INT8) sum *= ((const float*)scales)[m];
        if (IS_NF4) sum *= NF4_UNIT;
#if CLUSTER > 1
        int unit = place * N + n;
        float* to = slice_sums + ((pass % 2 * CLUSTER + slice) * units + unit / CLUSTER) * ROWS + r;
        store_remote(shared_address(to), unit % CLUSTER, sum);
#else
        if (S > 1) parts[((i64)slice * N + n) * M + m] = sum;
        else y[(i64)n * M + m] = from_float<Y_T>(sum);
#endif
      }
    }
  };
#if CLUSTER > 1
  // Adds and stores this CTA's part of a pass, whose sums all CTAs have sent.
  auto finish_slices = [&](int pass) {
    int begin = first_block(pass), end = first_block(pass + 1);
#pragma unroll 1
    for (int i = thread; i < units * ROWS; i += THREADS) {
      int r = i % ROWS, unit = i / ROWS * CLUSTER + slice, n = unit % N, block = begin + unit / N, m = block * ROWS + r;
      if (block >= end || m >= M) continue;
      const float* from = slice_sums + pass % 2 * CLUSTER * units * ROWS + i;
      float sum = from[0];
#pragma unroll
      for (int s = 1; s < CLUSTER; s++) sum += from[s * units * ROWS];
      y[(i64)n * M + m] = from_float<Y_T>(sum);
    }
  };
#endif

  u32 set = ring;  // the slots of a step
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    const int left = first_block(pass + 1) - first_block(pass) - wn;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
      u32 x_step = chunk * (WK * K_STEP * 2);
      auto load_x = [&](int nt, int quarter) {  // 32 k of a step
        return load_shared(x_row[nt] + x_step + quarter / 2 * 128 + quarter % 2 * 16);
      };
      Quad x_kept[KEEP_X ? 4 : 1][NT];
      if (KEEP_X) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int nt = 0; nt < NT; nt++) x_kept[KEEP_X ? i : 0][nt] = load_x(nt, i);
      }
#pragma unroll
      for (int mi = 0; mi < MI; mi++) {
        const u32 slot = set + mi * SLOT, own = slot + lane * 16;
        copy_wait<SLOTS - 1>();
        __syncwarp();
        // What the slot holds, before it is filled anew.
        const bool here = mi * WN < left && chunk < some;
        Quad q[TILES] = {};
        u32 scale_bits[4] = {};
        if (here) {
#pragma unroll
          for (int i = 0; i < TILES; i++) q[i] = load_shared(own + i * TILE_BYTES);
          if (FORMAT == INT4 || FORMAT == NF4) {
#pragma unroll
            for (int i = 0; i < STEP_SCALES / 32; i++) scale_bits[i] = load_word(slot + STEP_CODES + i * 32 + g * 4);
          }
          if (FORMAT == NF4_DOUBLE) scale_bits[0] = load_byte(slot + STEP_CODES + lane);
        }
        __syncwarp();
        copy_codes(walk, mi, slot);
        copy_scales(walk, mi, slot);
        copy_commit();
#if FORMAT == NF4_DOUBLE
        float mine = nested_absmax(map[scale_bits[0]], outer, offset);
        u32 coming = row + (mi + 1) * (WN * ROWS) * (u32)tiles + chunk * stride;
        if (mi + 1 == MI) coming = chunk + 1 < chunks ? row + (chunk + 1) * stride : row_at(pass + 1);
        outer = outer_at(coming);
#endif
        if (!here) continue;
        float c[NT][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (half == 0 || IS_NF4) {
#pragma unroll
            for (int i = 0; i < NT * 4; i++) c[i / 4][i % 4] = 0.0f;
          }
#pragma unroll
          for (int pair = 0; pair < 2; pair++) {  // two mma steps, 32 k
            Quad b[NT];
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
              b[nt] = KEEP_X ? x_kept[KEEP_X ? half * 2 + pair : 0][nt] : load_x(nt, half * 2 + pair);
#pragma unroll
            for (int s = 0; s < 2; s++) {
              u32 a[4];
#if FORMAT == INT8
              decode_int8(q[half * 2 + pair].v[s * 2], q[half * 2 + pair].v[s * 2 + 1], a);
#elif FORMAT == INT4
              decode_int4(q[half].v[pair * 2 + s], a);
#else
              decode_nf4(q[half].v[pair * 2 + s], shared, column, a);
#endif
#pragma unroll
              for (int nt = 0; nt < NT; nt++) mma(c[nt], a, b[nt].v[s * 2], b[nt].v[s * 2 + 1]);
            }
          }
          if (half == 0 && !IS_NF4) continue;
          float scale[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            if (FORMAT == INT4) scale[i] = __uint_as_float(scale_bits[i] & 0xffffff00u);
            if (FORMAT == NF4) scale[i] = __uint_as_float(scale_bits[half * 2 + i]);
#if FORMAT == NF4_DOUBLE
            scale[i] = __shfl_sync(FULL_MASK, mine, half * ROWS + i * 8 + g);
#endif
          }
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            Pair sums{};
            if (SUMS_OF_X) sums = load_pair(x_sum + chunk * (WK * 8 * NT * 4) + nt * 32);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float sum = c[nt][i];
              if (FORMAT == INT4) sum = fmaf(int4_minus_sixteen(scale_bits[i / 2] & 255u), sums.v[i % 2], sum);
              acc[mi][nt][i] = FORMAT == INT8 ? acc[mi][nt][i] + sum : fmaf(scale[i / 2], sum, acc[mi][nt][i]);
            }
          }
        }
      }
      advance(walk);
      set = AHEAD == 1 || set == ring + (AHEAD - 1) * MI * SLOT ? ring : set + MI * SLOT;
    }
#if CLUSTER > 1
    cluster_wait();  // at first: all CTAs run; then: all have sent the last pass
    if (pass > 0) finish_slices(pass - 1);
    finish(pass);
    cluster_arrive();
#else
    finish(pass);
#endif
#if FORMAT == NF4_DOUBLE
    row = row_at(pass + 1);
#endif
  }
#if CLUSTER > 1
  cluster_wait();
  finish_slices(passes - 1);
#endif
  copy_wait<0>();
}
