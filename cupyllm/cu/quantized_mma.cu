// Linear of quantised weights on the tensor cores of every GPU from sm_80: C[r,c] = sum_k A[r,k] B[c,k] (NT) or
// sum_k A[r,k] B[k,c] (NN), B dequantised from INT8, INT4 or NF4 codes in registers; A bf16, C bf16 or float.
//
//   forward  C = y    A = x    B_MN 0  B = weight [N,K]  k runs over K (head: C float)
//   dgrad    C = d_x  A = d_y  B_MN 1  B = weight [K,N]  k runs over the weight's rows
// Macros: FORMAT as in quantized.cuh, B_MN C_T, the tile BM BN, the warp tile WM WN, STAGES.
// Method: cp.async fills STAGES shared stages with BM x 64 of A (linear_mma.cu's layout), the codes of BN x 64 weights
//   as they are, and their scales. Codes lie as mma's A fragments (quant/layout.py): 16 weights' rows by 16 k, four 8 x
//   8 matrices a0 a1 (below) a2 (to the right) a3. With rows as columns of C they are two B fragments, (a0,a2) and
//   (a1,a3); with rows as k, transposed by movmatrix, (a0,a1) and (a2,a3). So a warp dequantises what it multiplies, 64
//   columns of 16 k at a time, and no bf16 weight is ever stored. Warps over one another repeat that work.
// Launch: block 32 (BM / WM) (BN / WN); grid ceil(M / BM) ceil(N / BN); dynamic shared bytes STAGES * STAGE_BYTES +
//   TABLE_BYTES, at most 99 KB. group: rows of tiles that are taken together, at least 1; any gives the same bits.
// Needs: K a multiple of 8 (K of A: dgrad's rows of the weight) and A aligned to 16 bytes. All extents below 2^30.
// Numerics: a weight is rounded once to bf16 (quantized_pairs.cuh). int8's forward: q is exact in bf16, and the row's
//   scale multiplies the sum in fp32. Products and sums are linear_mma.cu's, in the same order, so, but for int8's
//   forward, the bits are those of its product with the dequantised weight, and depend neither on the number of rows
//   nor on the tile. Deterministic; no atomics.
// Aliasing: C must not overlap A or B. Capability: 8.0.
#define SCALED (FORMAT != INT8 || B_MN)  // weights are scaled before the product
#define SPLIT 0
#define LEVEL_PITCH 128
#define IN_ORDER 0
#include "quantized_pairs.cuh"

#define BK 64
#define WARPS_N (BN / WN)
#define THREADS (32 * (BM / WM) * WARPS_N)
#define MI (WM / 16)
#define NI (WN / 16)
#define CHUNKS 8                            // of 16 bytes in a row of A
#define AHEAD (STAGES - 1)
#define BLOCKS (BN / 16)                    // of 16 rows by 64 k of codes
#define BLOCK_BYTES (FORMAT == INT8 ? 1024 : 512)
#define SCALE_BYTES (SCALED ? BLOCKS * (FORMAT == NF4_DOUBLE ? 80 : 64) : 0)  // NF4_DOUBLE: absmax2 lies first
#define A_BYTES (BM * BK * 2)
#define STAGE_BYTES (A_BYTES + BLOCKS * BLOCK_BYTES + SCALE_BYTES)
#define ONCE (IS_NF4 && !B_MN)              // a stage's scales are looked up once; int4's would take too many registers
#define UNROLLED (FORMAT == INT4 ? 1 : 4)
#define TABLE_BYTES (IS_NF4 ? 5120 : 0)     // at a multiple of 2048: levels, the map of absmax

static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && WN % 16 == 0, "whole fragments");
static_assert(BN % 64 == 0 && (64 % WN == 0 || WN % 64 == 0) && WN <= 64, "a warp's columns are of one block");
static_assert(AHEAD >= 1 && THREADS >= BN, "one stage is multiplied while others are filled; a thread a scale");

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// BYTES (16 or 4) from global to shared memory behind the thread's back; zeros, and nothing read, if not `inside`.
template <int BYTES> DEVICE void copy_async(u32 shared, const void* global, bool inside) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(inside ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(inside ? 4 : 0)
                 : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&m)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}
DEVICE u32 transpose(u32 matrix) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(matrix));
  return other;
}
DEVICE u32 load_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// c[16,8] += a[16,16] b[16,8]
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbours of a row of C; `both`: the second exists; `paired`: N is even, so that they may move as one.
struct alignas(8) Float2 { float v[2]; };
DEVICE void store_pair(float* c, float first, float second, bool both, bool paired) {
  if (paired) *(Float2*)c = Float2{{first, second}};
  else {
    c[0] = first;
    if (both) c[1] = second;
  }
}
DEVICE void store_pair(bf16* c, float first, float second, bool both, bool paired) {
  u32 bits = bf16_pair(first, second);
  if (paired) *(u32*)c = bits;
  else {
    c[0].bits = (unsigned short)bits;
    if (both) c[1].bits = (unsigned short)(bits >> 16);
  }
}

// The warp's sums to C, from (row, col) on: WM x WN of them. `scales` [N] of int8's forward.
DEVICE void store_sums(float (&sum)[MI][2 * NI][4], const float* scales, C_T* c, int row, int col, int M, int N) {
  int lane = threadIdx.x % 32;
  bool paired = N % 2 == 0;
  row += lane / 4;
  col += lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2 * NI; j++) {
    int n = col + j * 8;
    if (n >= N) continue;
    float scale[2] = {1.0f, 1.0f};
    if (!SCALED) {
      scale[0] = scales[n];
      scale[1] = n + 1 < N ? scales[n + 1] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int m = row + i * 16 + h * 8;
        float first = sum[i][j][h * 2], second = sum[i][j][h * 2 + 1];
        if (m < M)
          store_pair(c + (i64)m * N + n, SCALED ? first : first * scale[0], SCALED ? second : second * scale[1],
                     n + 1 < N, paired);
      }
  }
}

// Copies of a stage, and where a lane finds what it multiplies. The weight has `rows` rows, MB blocks of 16 of them and
// KB of 64 columns.
struct Weight {
  const unsigned char* codes;
  const void* scales;
  const float* nested;
  int rows, MB, KB, count, first_col;

  // Block q of BLOCKS of the step: columns of C are its rows, or, in boxes of 64, its columns.
  DEVICE void block(int q, int step, int& mb, int& kb) const {
    mb = B_MN ? step * 4 + q % 4 : first_col / 16 + q;
    kb = B_MN ? first_col / 64 + q / 4 : step;
  }

  // Starts copying a step; behind the last one, and outside of the weight, there are zeros.
  DEVICE void load(u32 stage, int step) const {
#pragma unroll
    for (int i = threadIdx.x; i < BLOCKS * BLOCK_BYTES / 16; i += THREADS) {
      int mb, kb;
      block(i / (BLOCK_BYTES / 16), step, mb, kb);
      bool inside = mb < MB && kb < KB;
      i64 at = ((i64)mb * KB + kb) * BLOCK_BYTES + i % (BLOCK_BYTES / 16) * 16;
      copy_async<16>(stage + i * 16, codes + at, inside);
    }
    u32 to = stage + BLOCKS * BLOCK_BYTES;
    if (!SCALED || threadIdx.x >= BN) return;
    int q = threadIdx.x / 16, row = threadIdx.x % 16, mb, kb;
    block(q, step, mb, kb);
    bool inside = mb < MB && kb < KB;
    i64 at;
    if (FORMAT == INT8) {
      inside = mb * 16 + row < rows;
      at = mb * 16 + row;
    } else if (FORMAT == INT4) at = ((i64)mb * (KB / 2) + kb / 2) * 16 + row;
    else at = ((i64)mb * KB + kb) * 16 + row;
    if (FORMAT == NF4_DOUBLE) {
      i64 outer = ((i64)(mb * 16 + row) * KB + kb) / OUTER;
      copy_async<4>(to + threadIdx.x * 4, nested + ABSMAX2 + (outer < count ? outer : count - 1), inside);
      to += BN * 4;
      if (row == 0) copy_async<16>(to + q * 16, (const unsigned char*)scales + at, inside);
    } else copy_async<4>(to + threadIdx.x * 4, (const u32*)scales + at, inside);
  }

  // Scales of a lane's rows of block q.
  DEVICE void find(Scales& found, u32 stage, int q, u32 table, float offset) const {
    u32 from = stage + BLOCKS * BLOCK_BYTES;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = q * 16 + threadIdx.x % 32 / 4 + h * 8;
      u32 bits = load_word(from + (FORMAT == NF4_DOUBLE ? BN * 4 + row / 4 * 4 : row * 4));
      if (FORMAT == NF4_DOUBLE)
        found.set(h, bits >> row % 4 * 8 & 0xff, __uint_as_float(load_word(from + row * 4)), table, offset);
      else found.set(h, bits, 0.0f, table, offset);
    }
  }

  // 16 columns (step s of 4) of block q: its A fragment, dequantised.
  DEVICE void fragment(u32 (&pair)[4], u32 stage, int q, int s, const Scales& scale, u32 levels) const {
    u32 from = stage + q * BLOCK_BYTES + threadIdx.x % 32 * 16;
    if (FORMAT == INT8) {
      from += s / 2 * 512 + s % 2 * 8;
      dequantise(load_word(from), load_word(from + 4), scale, levels, pair);
    } else dequantise(load_word(from + s * 4), 0, scale, levels, pair);
  }
};

#undef KERNEL
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, 2) CONCAT(name, SUFFIX)
// Letters: C [M,N], a sum over K. rows, MB, KB, count: the weight's rows, blocks of 16 rows and of 64 columns, absmax2.
KERNEL(quantized_mma)(const bf16* a, const unsigned char* codes, const void* scales, const float* nested, C_T* c, i64 M,
                      i64 N, i64 K, i64 rows, i64 MB, i64 KB, i64 count, i64 group) {
  extern __shared__ __align__(128) unsigned char shared[];
  // This CTA's tile: groups of `group` rows of tiles, in them column by column.
  u32 row_tiles = (u32)((M + BM - 1) / BM), col_tiles = (u32)((N + BN - 1) / BN), per_group = (u32)group * col_tiles;
  u32 base_row = blockIdx.x / per_group * (u32)group, place = blockIdx.x % per_group;
  u32 in_group = row_tiles - base_row < (u32)group ? row_tiles - base_row : (u32)group;
  int first_row = (int)(base_row + place % in_group) * BM, first_col = (int)(place / in_group) * BN;

  u32 first_stage = shared_address(shared), end = first_stage + STAGES * STAGE_BYTES;
  const u32 table = (end + LEVELS_BYTES - 1) & ~(u32)(LEVELS_BYTES - 1);
  fill_tables(table, nested, THREADS);
  const float offset = FORMAT == NF4_DOUBLE ? nested[OFFSET] : 0.0f;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp / WARPS_N * WM, warp_col = warp % WARPS_N * WN;
  const u32 levels = table + lane * 4;
  const Weight weight = {codes, scales, nested, (int)rows, (int)MB, (int)KB, (int)count, first_col};

  // A: this thread copies a chunk of every PASS-th row, and lane i hands row i % 16, chunk i / 16 to ldmatrix.
  const int PASS = THREADS / CHUNKS;
  int copy_row = threadIdx.x / CHUNKS, copy_k = threadIdx.x % CHUNKS * 8;
  const bf16* next = a + (first_row + copy_row) * K + copy_k;
  const u32 copy_to = copy_row * 128 + (threadIdx.x % CHUNKS ^ copy_row % CHUNKS) * 16;
  const int rows_left = (int)(M - first_row < BM ? M - first_row : BM) - copy_row;
  const u32 lane_row = (warp_row + lane % 16) * 128 + (lane / 16 ^ lane % CHUNKS) * 16;

  int k_left = (int)K, step = 0;  // from the stage that is loaded next on
  auto load = [&](u32 stage) {
    const bf16* source = next;
#pragma unroll
    for (int down = 0; down < BM; down += PASS) {
      bool inside = copy_k < k_left && down < rows_left;
      copy_async<16>(stage + copy_to + down * 128, source, inside);
      source += PASS * K;
    }
    weight.load(stage + A_BYTES, step);
    next += BK;
    k_left -= BK;
    step++;
    copy_commit();
  };

  float sum[MI][2 * NI][4] = {};
#pragma unroll
  for (int s = 0; s < AHEAD; s++) load(first_stage + s * STAGE_BYTES);
  u32 stage = first_stage, coming = first_stage + AHEAD * STAGE_BYTES;
#pragma unroll 1
  while (k_left > -AHEAD * BK) {
    copy_wait<AHEAD - 1>();
    __syncthreads();  // all have their part of this stage, and have read the one that is replaced
    load(coming);
    coming = coming + STAGE_BYTES == end ? first_stage : coming + STAGE_BYTES;
    const u32 b_stage = stage + A_BYTES;
    Scales scale[ONCE ? NI : 1];
    if (ONCE)
#pragma unroll
      for (int j = 0; j < NI; j++) weight.find(scale[j], b_stage, warp_col / 16 + j, table, offset);
#pragma unroll UNROLLED
    for (int s = 0; s < BK / 16; s++) {
      u32 x[MI][4];
#pragma unroll
      for (int i = 0; i < MI; i++) load_matrices(x[i], stage + (lane_row ^ (s * 32)) + i * 16 * 128);
      if (B_MN) weight.find(scale[0], b_stage, warp_col / 64 * 4 + s, table, offset);
#pragma unroll
      for (int j = 0; j < NI; j++) {
        u32 w[4];
        if (B_MN) {
          weight.fragment(w, b_stage, warp_col / 64 * 4 + s, warp_col % 64 / 16 + j, scale[0], levels);
#pragma unroll
          for (int e = 0; e < 4; e++) w[e] = transpose(w[e]);
        } else {
          if (SCALED && !ONCE) weight.find(scale[0], b_stage, warp_col / 16 + j, table, offset);
          weight.fragment(w, b_stage, warp_col / 16 + j, s, scale[ONCE ? j : 0], levels);
        }
#pragma unroll
        for (int i = 0; i < MI; i++) {
          multiply_add(sum[i][2 * j], x[i], w[0], w[B_MN ? 1 : 2]);
          multiply_add(sum[i][2 * j + 1], x[i], w[B_MN ? 2 : 1], w[3]);
        }
      }
    }
    stage = stage + STAGE_BYTES == end ? first_stage : stage + STAGE_BYTES;
  }
  copy_wait<0>();
  store_sums(sum, (const float*)scales, c, first_row + warp_row, first_col + warp_col, (int)M, (int)N);
}
