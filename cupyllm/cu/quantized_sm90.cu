// Linear of quantised weights on Hopper's tensor cores: C[r,c] = sum_k A[r,k] B[c,k] (NT) or
// sum_k A[r,k] B[k,c] (NN), B dequantised from INT8, INT4 or NF4 codes on the way; A bf16, C bf16 or float.
//
//   forward  C = y    A = x    B_MN 0  B = weight [N,K]  k runs over K, rows of the weight are columns of C
//   dgrad    C = d_x  A = d_y  B_MN 1  B = weight [K,N]  k runs over the weight's rows
// Macros: FORMAT as in quantized.cuh, B_MN C_T, the tile BM BN, the cluster CN (CTAs side by side,
//   which share A), A_STAGES, B_STAGES, EPILOGUE_BOXES.
// Method: linear_sm90.cu's persistent CTA with two rings. The first consumer thread fills A_STAGES tiles of BM x 64 by
//   TMA, two steps ahead. Two making warpgroups fill B_STAGES tiles of BN x 64, in turn, since one alone took 1.5 times
//   as long for a step as wgmma: they read codes into registers a step of theirs ahead, make bf16 of them and store by
//   stmatrix. Codes lie in memory as mma's A fragments (quant/layout.py), which are four of its 8 x 8 matrices. Two
//   warpgroups multiply by wgmma and write C with TMA. The weight never exists as bf16 in device memory.
// Measured: of linear_sm90's speed with a bf16 weight (760 TFLOP/s), M = 4096, weights 51200 x 5120 / 5120 x 25600, in
//   256 x 128 without a cluster: forward int8 0.90 / 0.91, int4 0.93 / 0.92, nf4 0.74 / 0.74; dgrad int4 0.92 / 0.93,
//   nf4 0.71 / 0.72. dgrad int8: 0.88 / 0.88 split with CN 2, 0.86 / 0.85 unsplit with CN 1; split with CN 1, as it is
//   launched, is unmeasured. With CN 2, forward int8 0.89 / 0.90, int4 0.90 / 0.89, nf4 0.73 / 0.73. H200, 2026-11-30.
// Limit of nf4: a lookup a weight. Schedulers issue in 34 % of cycles, the shared memory's pipe is 69 % busy; between
//   two instructions a warp stalls 5.3 cycles on the long scoreboard (consumers that wait for makers), 1.9 on fixed
//   latencies, 1.1 on dispatch.
// Rejected: dequantising in the consumers' registers (wgmma's A): they cannot multiply and convert at once, and C
//   leaves transposed. A warpgroup for TMA alone, or a third that makes: it would take registers from the others. Each
//   making warpgroup a half of every stage: slower than in turn. 128 x 256: no registers for n256's sums, and twice the
//   weights to make. int4 by one fp32 rounding: 0.85 where split has 0.90 (CN 2). nf4 by a table of pairs: six-way bank
//   conflicts, or 32 KB of copies, which cost stages; by byte permutes: 14 instructions a pair; with levels looked up a
//   word ahead alone: 0.71, no faster than without (CN 2; with 256 bytes a level alone 0.72, with both 0.73).
// Tile: 256 x 128 wants 8192 weights dequantised per 1024 cycles of wgmma; 128 x 256 twice as many.
// Numerics: a weight is what the format's reference makes of it, rounded once to bf16, int4's and dgrad's int8 with a
//   relative error d before it, 2^-16 and 2^-15 at most (SPLIT in quantized_pairs.cuh). int8's forward: q is exact in
//   bf16, and the row's scale multiplies the sum in fp32. Products, sums and C as in linear_sm90.cu, in the same order:
//   nf4 has the bits of its product with the dequantised weight, and so has int4 where d is 0. Deterministic; a row has
//   the same bits in every batch.
// Launch: block 512; grid a multiple of CN, at best one CTA an SM; dynamic shared bytes
//   A_STAGES * A_BYTES + B_STAGES * B_BYTES + 2 * EPILOGUE_BOXES * BOX_BYTES + TABLE_BYTES.
// Needs: addresses and row pitches of A and C that are multiples of 16 bytes; any extents beside that, from 1.
// Aliasing: C must not overlap A or B. Capability: 9.0 only (sm_90a).
#define SCALED (FORMAT != INT8 || B_MN)  // weights are scaled before the product
#define SPLIT (FORMAT == INT8 || FORMAT == INT4)
#define LEVEL_PITCH 256
#define IN_ORDER 1
#include "quantized_pairs.cuh"

#define BK 64
#define A_MN 0
#define CM 1
#define CONSUMERS 2
#define MAKERS 2                  // warpgroups that dequantise, in turn
#define THREADS ((CONSUMERS + MAKERS) * 128)
#define MI (BM / CONSUMERS / 64)  // blocks of 64 rows of a warpgroup
#define REGS (BN / 2)             // sums that a thread holds of 64 rows
#define A_BYTES (BM * BK * 2)
#define B_BYTES (BN * BK * 2)
#define BOX_COLS (sizeof(C_T) == 4 ? 32 : 64)
#define BOX_PITCH (BOX_COLS * (int)sizeof(C_T))
#define BOX_BYTES (64 * BOX_PITCH)
#define TABLE_BYTES (IS_NF4 ? 2 * LEVELS_BYTES : 0)  // of nf4: levels at a multiple of 4096, the map of absmax
#define BLOCKS (BN / 16 / 4)          // of 16 rows by 64 k of codes, that a warp makes of a stage
#define LOADS (FORMAT == INT8 ? 2 : 1)          // of 16 bytes a lane and block
#define SCALE_BYTES (FORMAT == NF4_DOUBLE ? 1 : 4)

// setmaxnreg: multiples of 8, of 512 in all for the four warpgroups.
#define CONSUMER_REGISTERS 168
#define MAKER_REGISTERS 88

#include "sm90.cuh"

// One consumer warpgroup's way out: 64 rows of a tile leave as boxes, through EPILOGUE_BOXES places in turn.
struct Writer {
  const TensorMap* map;
  u32 boxes;  // this warpgroup's places
  int place, wg, tid;
  bool accumulate;

  DEVICE void write(const float* sums, int row, int col) {
#pragma unroll
    for (int x = 0; x < BN; x += BOX_COLS) write_box(sums + x / 2, row, col + x);
  }

  // The box whose first element is (row, col); `v`: its part of the sums.
  DEVICE void write_box(const float* v, int row, int col) {
    int warp = tid / 32, lane = tid % 32;
    u32 base = boxes + place * BOX_BYTES;
    if (sizeof(C_T) == 4) {
      int r = warp * 16 + lane / 4;  // r and r + 8 are swizzled alike
#pragma unroll
      for (int i = 0; i < BOX_COLS / 2; i += 4) {
        u32 at = base + r * 128 + (((i / 2 + lane % 4 / 2) ^ (r & 7)) << 4) + (lane & 1) * 8;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[i]), "f"(v[i + 1]) : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 1024), "f"(v[i + 2]), "f"(v[i + 3]) : "memory");
      }
    } else {
      int r = warp * 16 + lane % 16, swizzle = BOX_COLS == 64 ? r & 7 : r >> 1 & 3;
#pragma unroll
      for (int i = 0; i < BOX_COLS / 2; i += 8) {
        u32 at = base + r * BOX_PITCH + (((i / 4 + lane / 16) ^ swizzle) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(pack(v[i], v[i + 1])), "r"(pack(v[i + 2], v[i + 3])), "r"(pack(v[i + 4], v[i + 5])),
                     "r"(pack(v[i + 6], v[i + 7])) : "memory");
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (tid == 0) tma_store_wait<EPILOGUE_BOXES - 2>();  // then the next place is free, too
    group_sync(wg);
    if (tid == 0) tma_store(map, base, col, row, accumulate);
    place = place + 1 == EPILOGUE_BOXES ? 0 : place + 1;
  }
};

static_assert(BM % (CONSUMERS * 64) == 0, "a warpgroup makes 64 or 128 rows");
static_assert(BLOCKS <= 2 || BLOCKS == 4, "a warp's blocks are neighbours in both forms");
static_assert(BN % 64 == 0, "whole blocks of codes, as many for each warp");
static_assert(A_STAGES > 2 && B_STAGES >= MAKERS, "a maker moves on by less than a ring");
static_assert(EPILOGUE_BOXES >= 2, "one is written while another is read");

// Two neighbours ON floats behind p, if `inside`: both are or none is, since C's rows are whole chunks. The loads
// stay where they are: gathered in front of a tile's end they would take all registers, as would an address for each.
template <int ON> DEVICE void load_pair(float& first, float& second, const float* p, bool inside) {
  first = second = 0.0f;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.v2.f32 {%0, %1}, [%2 + %4];\n}"
               : "+f"(first), "+f"(second) : "l"(p), "r"((u32)inside), "n"(ON * 4) : "memory");
}
// sums of columns x + 8 i and the next, I <= i < COUNT, times their scales.
template <int I, int COUNT> DEVICE void scale_columns(float* sums, const float* scales, int x, int N) {
  if constexpr (I < COUNT) {
    float first, second;
    load_pair<I * 8>(first, second, scales + x, x + I * 8 < N);
#pragma unroll
    for (int j = 0; j < 4; j++) sums[I * 4 + j] *= j % 2 ? second : first;
    scale_columns<I + 1, COUNT>(sums, scales, x, N);
  }
}
struct alignas(16) Words { u32 v[4]; };
DEVICE void store_matrices(u32 row, const u32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3]) : "memory");
}
DEVICE void move(u32& to, u32 from) { asm volatile("mov.b32 %0, %1;" : "=r"(to) : "r"(from)); }

// Where a lane of the making warps reads: a block of 16 rows and 64 k, of MB by KB of them; the blocks of a step follow
// one another downwards.
struct Place {
  const unsigned char *codes, *scales;
  int mb, outer;     // NF4_DOUBLE: the group's number, of its absmax2
  bool inside;       // dgrad: kb < KB
};

// One block's codes and scales of a lane, which holds rows lane / 4 and lane / 4 + 8.
struct Block {
  Words words[LOADS];
  u32 scale[2];    // INT8: float; INT4: scale and zero; NF4: absmax; NF4_DOUBLE: its code
  float outer[2];  // NF4_DOUBLE: absmax2

  // A copy that is made at once: it waits for the other's loads, before those of the step after it start.
  DEVICE void take(const Block& other) {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) move(words[i].v[e], other.words[i].v[e]);
#pragma unroll
    for (int h = 0; h < (SCALED ? 2 : 0); h++) {
      move(scale[h], other.scale[h]);
      if (FORMAT == NF4_DOUBLE) outer[h] = other.outer[h];
    }
  }

  // The i-th block of a place; zeros if it is not inside. `nested`: absmax2, `count` of them.
  DEVICE void load(const Place& at, int i, int rows, int MB, int KB, const float* nested, int count) {
    bool inside = at.inside && at.mb + i < MB;
    const unsigned char* codes = at.codes + (i64)(i * LOADS * 512) * KB;
    const unsigned char* from = at.scales + (FORMAT == INT8 ? i * 64 : FORMAT == INT4 ? (i64)(i * 64) * (KB >> 1)
                                                                                    : (i64)(i * 16 * SCALE_BYTES) * KB);
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
      words[l] = Words{{0, 0, 0, 0}};
      if (inside)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[l].v[0]), "=r"(words[l].v[1]), "=r"(words[l].v[2]), "=r"(words[l].v[3])
                     : "l"(codes + l * 512));
    }
#pragma unroll
    for (int h = 0; h < (SCALED ? 2 : 0); h++) {
      scale[h] = 0;
      outer[h] = 0.0f;
      if (!inside || (FORMAT == INT8 && (at.mb + i) * 16 + (int)threadIdx.x % 32 / 4 + h * 8 >= rows)) continue;
      if (FORMAT != NF4_DOUBLE) scale[h] = __ldg((const u32*)from + h * 8);
      else {
        scale[h] = __ldg(from + h * 8);
        outer[h] = __ldg(nested + min((at.outer + (i * 16 + h * 8) * KB) >> 8, count - 1));
      }
    }
  }
};

// Grid: clusters * CN. `rows`, MB, KB, count: the weight's rows, blocks of 16 rows, of 64 k, and NF4's nested values.
// `group`, `by_columns`: the order of the tiles.
#undef KERNEL
#define KERNEL(name) \
  extern "C" __global__ void __cluster_dims__(CN, 1, 1) __launch_bounds__(THREADS, 1) CONCAT(name, SUFFIX)
KERNEL(quantized_sm90)(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap c_map,
                       const unsigned char* codes, const void* scales, const float* nested, i64 M, i64 N,
                       i64 K, i64 rows, i64 MB, i64 KB, i64 count, i64 group, i64 by_columns) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) u64 barriers[2 * A_STAGES + 2 * B_STAGES];
  const u32 a_tiles = shared_address(shared), b_tiles = a_tiles + A_STAGES * A_BYTES;
  const u32 out = b_tiles + B_STAGES * B_BYTES;
  const u32 table = (out + CONSUMERS * EPILOGUE_BOXES * BOX_BYTES + LEVELS_BYTES - 1) & ~(u32)(LEVELS_BYTES - 1);
  const u32 a_full = shared_address(barriers), a_empty = a_full + A_STAGES * 8;
  const u32 b_full = a_empty + A_STAGES * 8, b_empty = b_full + B_STAGES * 8;
  int warp = __shfl_sync(FULL_MASK, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int rank = blockIdx.x % CN;

  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&c_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map) : "memory");
    for (int s = 0; s < A_STAGES; s++) {
      barrier_init(a_full + s * 8, 1);
      barrier_init(a_empty + s * 8, CONSUMERS * 4 * CN);
    }
    for (int s = 0; s < B_STAGES; s++) {
      barrier_init(b_full + s * 8, 4);
      barrier_init(b_empty + s * 8, CONSUMERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  fill_tables(table, nested, THREADS);
  __syncthreads();
  if (CN > 1) {
    cluster_arrive();
    cluster_wait();
  }

  Order order(M, N, group, by_columns);
  int tiles = order.tiles(), clusters = gridDim.x / CN, k_blocks = (int)((K + BK - 1) / BK);
  int first_tile = blockIdx.x / CN;

  if (warp >= CONSUMERS * 4) {  // the makers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MAKER_REGISTERS));
    const int turn = warp / 4 - CONSUMERS, first_block = warp % 4 * BLOCKS;  // of the stage: 2048 bytes each
    const u32 row = b_tiles + first_block * 2048 + lane % 16 * 128;  // stmatrix: this lane's row of a block, its chunk
    const int chunk = lane / 16, swizzle = lane & 7;
    const float offset = FORMAT == NF4_DOUBLE ? nested[OFFSET] : 0.0f;
    const int num_rows = (int)rows, num_mb = (int)MB, num_kb = (int)KB;
    const int steps = first_tile < tiles ? (tiles - first_tile + clusters - 1) / clusters * k_blocks : 0;

    // The step whose codes are loaded next, one ahead of the one that is made. Two ahead gain nothing: ptxas gives all
    // of these loads one scoreboard, so that a step would wait for those of the next one, too.
    int tile = first_tile, k = turn, step = turn;
    bool placed = false;
    Place at = {codes, (const unsigned char*)scales, 0, 0, true};
    auto load_b = [&](Block (&blocks)[BLOCKS]) {
      if (step >= steps) return;
      while (k >= k_blocks) {
        k -= k_blocks;
        tile += clusters;
        placed = false;
      }
      if (!placed) {
        int m, n;
        order.place(tile, m, n);
        int col = (n * CN + rank) * BN;
        int mb = B_MN ? k * 4 + first_block % 4 : col / 16 + first_block;
        int kb = B_MN ? col / 64 + first_block / 4 : k, row = lane / 4;
        i64 block = (i64)mb * num_kb + kb;
        at.codes = codes + block * (LOADS * 512) + lane * 16;
        at.scales = (const unsigned char*)scales +
                    (FORMAT == INT8 ? mb * 64 : FORMAT == INT4 ? ((i64)mb * (num_kb >> 1) + (kb >> 1)) * 64
                                                               : block * (16 * SCALE_BYTES)) + row * SCALE_BYTES;
        at.mb = mb;
        at.outer = (mb * 16 + row) * num_kb + kb;
        at.inside = !B_MN || kb < num_kb;
        placed = true;
      }
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
        blocks[i].load(at, i, num_rows, num_mb, num_kb, nested + ABSMAX2, (int)count);
      const int down = 4 * MAKERS;  // blocks from one step of this warpgroup's to its next
      at.codes += B_MN ? (i64)(down * LOADS * 512) * num_kb : MAKERS * LOADS * 512;
      at.scales += FORMAT == INT8 ? down * 64
                   : FORMAT == INT4 ? (B_MN ? (i64)(down * 64) * (num_kb >> 1) : MAKERS / 2 * 64)
                                    : (B_MN ? (i64)(down * 16 * SCALE_BYTES) * num_kb : MAKERS * 16 * SCALE_BYTES);
      if (B_MN) at.mb += down;
      at.outer += B_MN ? down * 16 * num_kb : MAKERS;
      k += MAKERS;
      step += MAKERS;
    };
    int stage = turn;
    u32 phase = 0;
    auto make = [&](const Block (&blocks)[BLOCKS]) {
      u32 to = row + stage * B_BYTES;
      Scales scale[BLOCKS];
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
#pragma unroll
        for (int h = 0; h < (SCALED ? 2 : 0); h++)
          scale[i].set(h, blocks[i].scale[h], blocks[i].outer[h], table, offset);
      if (IS_NF4) {  // a word's levels are looked up before those of the word before it are stored
        float found[2][8];
        lookup(blocks[0].words[0].v[0], table + lane * 4, found[0]);
#pragma unroll
        for (int s = 0; s < 4 * BLOCKS; s++) {
          if (s + 1 < 4 * BLOCKS)
            lookup(blocks[(s + 1) / 4].words[0].v[(s + 1) % 4], table + lane * 4, found[(s + 1) % 2]);
          u32 pair[4];
          scale_levels(found[s % 2], scale[s / 4], pair);
          store_matrices(to + s / 4 * 2048 + ((s % 4 * 2 + chunk ^ swizzle) << 4), pair);
        }
      } else {
#pragma unroll
        for (int s = 0; s < 4 * BLOCKS; s++) {
          const Words* words = blocks[s / 4].words;
          u32 pair[4];
          if (FORMAT == INT8)
            dequantise(words[s / 2 % LOADS].v[s % 2 * 2], words[s / 2 % LOADS].v[s % 2 * 2 + 1], scale[s / 4], 0, pair);
          else dequantise(words[0].v[s % 4], 0, scale[s / 4], 0, pair);
          store_matrices(to + s / 4 * 2048 + ((s % 4 * 2 + chunk ^ swizzle) << 4), pair);
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      barrier_release<1>(b_full + stage * 8, lane);
      stage += MAKERS;
      if (stage >= B_STAGES) {
        stage -= B_STAGES;
        phase ^= 1;
      }
    };

    Block now[BLOCKS], next[BLOCKS];
    load_b(next);
#pragma unroll 1
    for (int i = turn; i < steps; i += MAKERS) {
      barrier_wait(b_empty + stage * 8, phase ^ 1);
#pragma unroll
      for (int i = 0; i < BLOCKS; i++) now[i].take(next[i]);
      load_b(next);
      make(now);
    }
  } else {  // the consumers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    int wg = warp / 4, tid = threadIdx.x % 128, a_stage = 0, b_stage = 0;
    u32 a_phase = 0, b_phase = 0;
    const u64 a_first = descriptor(a_tiles + wg * MI * 8192, 0), b_first = descriptor(b_tiles, B_MN);

    // A's next tile, which the first thread loads: into the stage that was read two steps before, so that nobody waits.
    int next_tile = first_tile, next_k = 0, next_row = 0, next_stage = 0;
    u32 next_phase = 0;
    auto next_a = [&]() {
      if (++next_stage == A_STAGES) {
        next_stage = 0;
        next_phase ^= 1;
      }
    };
    auto load_a = [&]() {
      if (next_tile >= tiles) return;
      if (next_k == 0) {
        int m, n;
        order.place(next_tile, m, n);
        next_row = m * BM;
      }
      barrier_wait(a_empty + next_stage * 8, next_phase ^ 1);
      u32 bar = a_full + next_stage * 8;
      barrier_expect(bar, A_BYTES);
      load_tile<0, BM, CN>(a_tiles + next_stage * A_BYTES, &a_map, bar, next_row, next_k * BK, rank, (1 << CN) - 1);
      next_a();
      if (++next_k == k_blocks) {
        next_k = 0;
        next_tile += clusters;
      }
    };
    if (threadIdx.x == 0)
      for (int s = 0; s < A_STAGES - 2; s++) load_a();
    __syncwarp();

    Writer writer = {&c_map, out + wg * EPILOGUE_BOXES * BOX_BYTES, 0, wg, tid, false};
    float sums[MI][REGS];
#pragma unroll
    for (int m = 0; m < MI; m++)
#pragma unroll
      for (int i = 0; i < REGS; i++) sums[m][i] = 0.0f;

    for (int tile = first_tile; tile < tiles; tile += clusters) {
      int m_tile, n_tile;
      order.place(tile, m_tile, n_tile);
      int first_row = m_tile * BM + wg * MI * 64, col = (n_tile * CN + rank) * BN;
      int a_done = 0, b_done = 0;  // the stages that the wgmmas in flight read
#pragma unroll 1
      for (int k = 0; k < k_blocks; k++) {
        barrier_wait(a_full + a_stage * 8, a_phase);
        barrier_wait(b_full + b_stage * 8, b_phase);
        u64 a = a_first + a_stage * (A_BYTES >> 4), b = b_first + b_stage * (B_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; i++)
#pragma unroll
          for (int m = 0; m < MI; m++)
            wgmma(sums[m], a + i * K_STEP(0) + m * (8192 >> 4), b + i * K_STEP(B_MN), i > 0 || k > 0);
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          barrier_release<CN>(a_empty + a_done * 8, lane);
          barrier_release<1>(b_empty + b_done * 8, lane);
        }
        if (threadIdx.x == 0) load_a();
        __syncwarp();
        a_done = a_stage;
        b_done = b_stage;
        if (++a_stage == A_STAGES) {
          a_stage = 0;
          a_phase ^= 1;
        }
        if (++b_stage == B_STAGES) {
          b_stage = 0;
          b_phase ^= 1;
        }
      }
      wgmma_wait<0>();
      barrier_release<CN>(a_empty + a_done * 8, lane);
      barrier_release<1>(b_empty + b_done * 8, lane);
#pragma unroll
      for (int m = 0; m < MI; m++)
#pragma unroll
        for (int i = 0; i < REGS; i++) asm volatile("" : "+f"(sums[m][i])::"memory");  // nothing reads them sooner

#pragma unroll
      for (int m = 0; m < MI; m++) {
#pragma unroll
        for (int box = 0; box < BN; box += BOX_COLS) {
          float* total = sums[m] + box / 2;
          if (!SCALED) scale_columns<0, BOX_COLS / 8>(total, (const float*)scales, col + box + lane % 4 * 2, (int)N);
          writer.write_box(total, first_row + m * 64, col + box);
        }
      }
    }
    // A CTA leaves once its peers have released its stages: nobody reaches into its shared memory any more.
    if (CN > 1 && threadIdx.x == 0)
      for (int s = 0; s < A_STAGES; s++, next_a()) barrier_wait(a_empty + next_stage * 8, next_phase ^ 1);
    if (tid == 0) tma_store_wait<0>();
  }
}
