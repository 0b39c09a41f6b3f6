// Linear of quantised weights on Hopper's tensor cores: C[r,c] = sum_k A[r,k] B[c,k] (NT) or
// sum_k A[r,k] B[k,c] (NN), B dequantised from INT8, INT4 or NF4 codes on the way; A bf16, C bf16 or float.
//
//   forward  C = y    A = x    B_MN 0  B = weight [N,K]  k runs over K, rows of the weight are columns of C
//   dgrad    C = d_x  A = d_y  B_MN 1  B = weight [K,N]  k runs over the weight's rows
// Macros: FORMAT as in quantized.cuh, B_MN C_T, the tile BM BN, the cluster CN (CTAs side by side,
//   which share A), A_STAGES, B_STAGES, EPILOGUE_BOXES.
// Method: linear_sm90.cu's persistent CTA with two rings. The producing warpgroup fills A_STAGES tiles of BM x 64 by
//   TMA, reads codes into registers a step ahead, makes bf16 of them and fills B_STAGES tiles of BN x 64 by stmatrix:
//   the codes lie in memory as mma's A fragments (quant/layout.py), which are four of its 8 x 8 matrices. Two
//   warpgroups multiply by wgmma and write C with TMA. The weight never exists as bf16 in device memory.
// Rejected: dequantising in the consumers' registers (wgmma's A): they cannot multiply and convert at once, and C
//   leaves transposed. A warpgroup for TMA alone: 512 threads have 128 registers each, too few for the sums. nf4 by a
//   table of 256 pairs: six-way bank conflicts; by byte permutes: 14 instructions a pair.
// Tile: 256 x 128 wants 8192 weights dequantised per 1024 cycles of wgmma; 128 x 256 twice as many.
// Numerics: a weight is what the format's reference makes of it, rounded once to bf16 (quantized_pairs.cuh). int8's
//   forward: q is exact in bf16, and the row's scale multiplies the sum in fp32. Products, sums and C as in
//   linear_sm90.cu, in the same order, so, but for int8's forward, the bits are those of its product with the
//   dequantised weight. Deterministic; a row has the same bits in every batch.
// Launch: block 384; grid a multiple of CN, at best one CTA an SM; dynamic shared bytes
//   A_STAGES * A_BYTES + B_STAGES * B_BYTES + 2 * EPILOGUE_BOXES * BOX_BYTES + TABLE_BYTES.
// Needs: addresses and row pitches of A and C that are multiples of 16 bytes; any extents beside that, from 1.
// Aliasing: C must not overlap A or B. Capability: 9.0 only (sm_90a).
#define SCALED (FORMAT != INT8 || B_MN)  // weights are scaled before the product
#include "quantized_pairs.cuh"

#define BK 64
#define A_MN 0
#define CM 1
#define CONSUMERS 2
#define MAKERS 2                  // warpgroups that dequantise
#ifndef TURNS
#define TURNS 1                   // whether they make stages in turn, or all of them a part of each
#endif
#define THREADS ((CONSUMERS + MAKERS) * 128)
#define STRIDE (TURNS ? MAKERS : 1)              // steps from one of a maker's to its next
#define STAGE_WARPS (TURNS ? 4 : MAKERS * 4)     // that make a stage
#define MI (BM / CONSUMERS / 64)  // blocks of 64 rows of a warpgroup
#define REGS (BN / 2)             // sums that a thread holds of 64 rows
#define A_BYTES (BM * BK * 2)
#define B_BYTES (BN * BK * 2)
#define BOX_COLS (sizeof(C_T) == 4 ? 32 : 64)
#define BOX_PITCH (BOX_COLS * (int)sizeof(C_T))
#define BOX_BYTES (64 * BOX_PITCH)
#define TABLE_BYTES (IS_NF4 ? LEVELS_BYTES + 2048 : 0)  // of nf4: levels at a multiple of 2048, the map of absmax
#define BLOCKS (BN / 16 / STAGE_WARPS)          // of 16 rows by 64 k of codes, that a warp makes of a stage
#define LOADS (FORMAT == INT8 ? 2 : 1)          // of 16 bytes a lane and block

// setmaxnreg: multiples of 8, of 512 in all for the four warpgroups.
#ifndef CONSUMER_REGISTERS
#define CONSUMER_REGISTERS 168
#endif
#define PRODUCER_REGISTERS (256 - CONSUMER_REGISTERS)
#define LEAD (A_STAGES - B_STAGES)  // steps that A's loads are ahead of B's making

#include "sm90.cuh"

static_assert(BM % (CONSUMERS * 64) == 0 && LEAD >= 0, "a warpgroup makes 64 or 128 rows");
static_assert(BLOCKS <= 2 || BLOCKS == 4, "a warp's blocks are neighbours in both forms");
static_assert(BN % (16 * STAGE_WARPS) == 0 && A_STAGES >= STRIDE && B_STAGES >= STRIDE, "whole blocks of codes, as many for each warp");
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
DEVICE void move(u32& to, u32 from) { asm volatile("mov.b32 %0, %1;" : "=r"(to) : "r"(from)); }

// What the dequantising warps read. The weight has MB blocks of 16 rows and KB of 64 k.
struct Codes {
  const unsigned char* codes;
  const void* scales;
  const float* nested;  // NF4_DOUBLE, with `count` absmax2
  int rows, MB, KB, count;
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

  // The block of (mb, kb), the `block`-th = mb KB + kb; zeros if it is not `inside`.
  DEVICE void load(const Codes& from, int mb, int kb, int block, bool inside) {
    int lane = threadIdx.x % 32;
    const Words* at = (const Words*)(from.codes + (i64)block * (LOADS * 512)) + lane;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      words[i] = Words{{0, 0, 0, 0}};
      if (inside)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[i].v[0]), "=r"(words[i].v[1]), "=r"(words[i].v[2]), "=r"(words[i].v[3])
                     : "l"(at + i * 32));
    }
#pragma unroll
    for (int h = 0; h < (SCALED ? 2 : 0); h++) {
      int row = lane / 4 + h * 8;
      scale[h] = 0;
      outer[h] = 0.0f;
      if (!inside) continue;
      if (FORMAT == INT8) {
        int m = mb * 16 + row;
        if (m < from.rows) scale[h] = __ldg((const u32*)from.scales + m);
      } else if (FORMAT == INT4) {
        scale[h] = __ldg((const u32*)from.scales + (i64)(mb * (from.KB >> 1) + (kb >> 1)) * 16 + row);
      } else if (FORMAT == NF4) {
        scale[h] = __ldg((const u32*)from.scales + (i64)block * 16 + row);
      } else {
        scale[h] = __ldg((const unsigned char*)from.scales + (i64)block * 16 + row);
        int i = ((mb * 16 + row) * from.KB + kb) >> 8;
        outer[h] = __ldg(from.nested + ABSMAX2 + (i < from.count ? i : from.count - 1));
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
  const u32 table = (out + CONSUMERS * EPILOGUE_BOXES * BOX_BYTES + 2047) & ~2047u;
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
      barrier_init(b_full + s * 8, STAGE_WARPS);
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

  if (warp >= CONSUMERS * 4) {  // the producers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    const Codes from = {codes, scales, nested, (int)rows, (int)MB, (int)KB, (int)count};
    const int maker = warp - CONSUMERS * 4, turn = TURNS ? maker / 4 : 0;
    const int first_block = maker % STAGE_WARPS * BLOCKS;  // of the stage: 2048 bytes each
    const u32 row = b_tiles + first_block * 2048 + lane % 16 * 128;  // stmatrix: this lane's row of a block, its chunk
    const int chunk = lane / 16, swizzle = lane & 7;
    const bool loads_a = maker % STAGE_WARPS == 0 && lane == 0;
    const float offset = FORMAT == NF4_DOUBLE ? nested[OFFSET] : 0.0f;

    const int steps = first_tile < tiles ? (tiles - first_tile + clusters - 1) / clusters * k_blocks : 0;

    // A's next tile. Its stage was read together with the one of B that `make` waits for, LEAD steps behind.
    int a_step = (turn + LEAD) % STRIDE, a_stage = a_step, a_k = a_step, a_tile = first_tile, a_row = -1;
    u32 a_phase = 0;
    auto wait_a = [&]() { barrier_wait(a_empty + a_stage * 8, a_phase ^ 1); };
    auto next_a = [&]() {
      a_step += STRIDE;
      a_k += STRIDE;
      a_stage += STRIDE;
      if (a_stage >= A_STAGES) {
        a_stage -= A_STAGES;
        a_phase ^= 1;
      }
    };
    auto load_a = [&]() {
      if (a_step >= steps) return;
      while (a_k >= k_blocks) {
        a_k -= k_blocks;
        a_tile += clusters;
        a_row = -1;
      }
      if (a_row < 0) {
        int m, n;
        order.place(a_tile, m, n);
        a_row = m * BM;
      }
      wait_a();
      u32 bar = a_full + a_stage * 8;
      barrier_expect(bar, A_BYTES);
      load_tile<0, BM, CN>(a_tiles + a_stage * A_BYTES, &a_map, bar, a_row, a_k * BK, rank, (1 << CN) - 1);
      next_a();
    };

    // The step whose codes are loaded next, one ahead of the one that is made. Two ahead gain nothing: ptxas gives all
    // of these loads one scoreboard, so that a step would wait for those of the next one, too.
    int tile = first_tile, k = turn, step = turn;
    int mb = 0, kb = -1, block = 0;  // of the first block of this warp; the next ones lie below it
    auto load_b = [&](Block (&blocks)[BLOCKS]) {
      if (step >= steps) return;
      while (k >= k_blocks) {
        k -= k_blocks;
        tile += clusters;
        kb = -1;
      }
      if (kb < 0) {
        int m, n;
        order.place(tile, m, n);
        int col = (n * CN + rank) * BN;
        mb = B_MN ? k * 4 + first_block % 4 : col / 16 + first_block;
        kb = B_MN ? col / 64 + first_block / 4 : k;
        block = mb * from.KB + kb;
      }
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
        blocks[i].load(from, mb + i, kb, block + i * from.KB, mb + i < from.MB && (!B_MN || kb < from.KB));
      if (B_MN) mb += 4 * STRIDE;
      else kb += STRIDE;
      block += B_MN ? 4 * STRIDE * from.KB : STRIDE;
      k += STRIDE;
      step += STRIDE;
    };
    int stage = turn;
    u32 phase = 0;
    auto make = [&](const Block (&blocks)[BLOCKS]) {
      if (loads_a) load_a();
      __syncwarp();
      u32 to = row + stage * B_BYTES;
#pragma unroll
#ifdef LAB_NONE
      for (int i = 0; i < 0; i++) {
#else
      for (int i = 0; i < BLOCKS; i++) {
#endif
        const Block& block = blocks[i];
        Scales scale;
        if (SCALED)
#pragma unroll
          for (int h = 0; h < 2; h++) scale.set(h, block.scale[h], block.outer[h], table, offset);
#pragma unroll
        for (int first = 0; first < 4; first += 2) {
          u32 pair[2][4];  // both before the first store: no load of the table passes a store
#pragma unroll
          for (int j = 0; j < 2; j++) {
            int s = first + j;
#ifdef LAB_RAW
            for (int e = 0; e < 4; e++) pair[j][e] = block.words[s % LOADS].v[e] & 0x3fff3fffu;
            continue;
#endif
            if (FORMAT == INT8)
              dequantise(block.words[s / 2 % LOADS].v[s % 2 * 2], block.words[s / 2 % LOADS].v[s % 2 * 2 + 1], scale,
                         table + lane * 4, pair[j]);
            else dequantise(block.words[0].v[s], 0, scale, table + lane * 4, pair[j]);
          }
#pragma unroll
          for (int s = 0; s < 2; s++)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + i * 2048 + (((first + s) * 2 + chunk ^ swizzle) << 4)),
                         "r"(pair[s][0]), "r"(pair[s][1]), "r"(pair[s][2]), "r"(pair[s][3]) : "memory");
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      barrier_release<1>(b_full + stage * 8, lane);
      stage += STRIDE;
      if (stage >= B_STAGES) {
        stage -= B_STAGES;
        phase ^= 1;
      }
    };

    Block now[BLOCKS], next[BLOCKS];
    if (loads_a)
      for (int i = 0; i < (turn + LEAD) / STRIDE; i++) load_a();
    __syncwarp();
    load_b(next);
#pragma unroll 1
    for (int i = turn; i < steps; i += STRIDE) {
      barrier_wait(b_empty + stage * 8, phase ^ 1);
#pragma unroll
      for (int i = 0; i < BLOCKS; i++) now[i].take(next[i]);
      load_b(next);
      make(now);
    }
    // A CTA leaves once its peers have released its stages: nobody reaches into its shared memory any more.
    if (CN > 1 && loads_a)
      for (; a_step < steps + A_STAGES; next_a()) wait_a();
    __syncwarp();
  } else {  // the consumers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    int wg = warp / 4, tid = threadIdx.x % 128, a_stage = 0, b_stage = 0;
    u32 a_phase = 0, b_phase = 0;
    const u64 a_first = descriptor(a_tiles + wg * MI * 8192, 0), b_first = descriptor(b_tiles, B_MN);
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
    if (tid == 0) tma_store_wait<0>();
  }
}
