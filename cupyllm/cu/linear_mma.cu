// Linear on the tensor cores of every GPU from sm_80: C[r,c] = (or +=) sum_k A[r,k] B[c,k] + bias[c]; bf16 in, bf16 or
// float out.
//
// The three products of a linear layer are this one kernel. It is compiled for each form, which says of either operand
// whether k is its contiguous axis (MN 0) or the other one is (MN 1); all matrices are row-major:
//   forward  C = y        A = x    A_MN 0  B = weight  B_MN 0  C_T bf16   k runs over K (head: C_T float)
//   dgrad    C = d_x      A = d_y  A_MN 0  B = weight  B_MN 1  C_T bf16   k runs over M
//   wgrad    C = d_weight A = d_y  A_MN 1  B = x       B_MN 1  C_T float  k runs over N
// Macros: A_MN B_MN C_T, the tile BM BN, the warp tile WM WN, BK (k of a step) and STAGES, COPY (bytes of a copy, see
//   Needs), SLICED and EIGHT (0 or 1), MIN_CTAS (CTAs that the registers of an SM have to last for).
// Method: cp.async fills STAGES shared tiles of BM x 64 and BN x 64; (BM / WM) (BN / WN) warps multiply them by
//   ldmatrix and mma.sync m16n8k16, WM x WN of C each, while the fragments of the next 16 k are on their way. One
//   barrier a step of 64 k: behind it all have their part of the coming tile and have read the one that is replaced.
//   CTAs take the tiles of C in groups of rows of tiles, so that those at work share operands in the L2. Sums of up to
//   64 products, which take less time than storing them, are one step of 16, 32 or 64 k: STAGES 1, several CTAs an SM,
//   and C leaves through shared memory, whole rows of the tile at a time, past what the L2 keeps (st.cs).
// Eight (EIGHT): where C has at most 8 rows (or columns), 8 of the 16 elements of A's (or B's) tile are held and are
//   both halves of a fragment; the second half's sums lie beyond C and are not stored.
// Slices (SLICED): with few tiles, the CTAs of a grid of tiles x S each sum a range of whole steps, and C is parts
//   [S,rows,cols] float, which linear_sum.cu adds up. With S = 1 it is C itself. Rejected: the last CTA of a tile adds
//   up, which takes a counter between CTAs.
// Layout of shared tiles: rows of 1, 2, 4 or 8 chunks of 16 bytes: with k contiguous a row of the tile, else the
//   elements of one k in a box of up to 64 columns. A chunk's place is XORed with its row, so that the eight rows that
//   ldmatrix reads, and eight neighbouring copies, lie in different banks. Rejected: padding, which takes room; tiles
//   of 128 x 160, 128 x 256 and 256 x 128 and steps of 32 k, which add 2 % to the mean together, and some of which
//   spill on sm_100.
// Launch: block 32 (BM / WM) (BN / WN); grid ceil(rows / BM) ceil(cols / BN) x S, S up to 64 and 1 if not SLICED;
//   dynamic shared bytes SHARED_BYTES, at most 99 KB, which is what a CTA has on sm_86, 89, 120 and 121. group:
//   rows of tiles that are taken together, at least 1; any gives the same bits. S > 1: no bias, no accumulate. May be
//   launched programmatically (9.0 and later): it waits before it reads anything.
// Needs: COPY 16: both contiguous axes are multiples of 8, A and B aligned to 16 bytes; COPY 4: multiples of 2; COPY 2:
//   any, loaded through registers (tiles of 64 x 64: larger ones spill). Rows and columns from 1, depth from 0 (STAGES
//   1: up to BK), all below 2^30.
// Numerics: products of bf16 are exact; mma.sync adds them to fp32 sums (its adders truncate), 16 k at a time in order
//   of k. bias and, with `accumulate`, the old C are added in fp32, then C is rounded once. Every tile shape and COPY
//   sums each element in the same order: a row's bits depend on S, and neither on the number of rows nor on its place
//   among them. Deterministic; no atomics; no CTA waits for another.
// Aliasing: C must not overlap A, B or bias. Capability: 8.0.
// Measured: 0.56 of cuBLAS's speed over the projections of Qwen3-32B and 8B at 512 to 8192 rows with the two tiles of
//   ops/linear_mma.py (geometric mean of 108 products), at least 0.40 (H200, 2026-11-30, whose full speed takes wgmma).
//   Products of LoRA, 512 to 8192 rows and 5120 or 25600 columns, against cuBLAS (the same), as ops/linear_skinny.py
//   takes them: 1.14 to 1.93 where C is the large matrix (mean 1.37; 1.13 times as fast, the median of 0.98 to 1.30, as
//   when C did not leave through shared memory); h and d_h, dA and dB of rank 8 0.95 to 1.37 (mean 1.14) and 1.01 to
//   1.17 (1.10), of rank 16 0.95 to 1.23 (1.09) and 1.00 to 1.11 (1.06), of rank 32 0.91 to 0.99 (0.96) and 0.87 to
//   1.00 (0.95). Least are sums of 25600 at 512 rows, and dA and dB of 2048 and 4096 rows: 80 tiles for 132 SMs.
//   EIGHT: 1.00 to 1.26 times as fast as 16 that are half zeros (18 products, mean 1.12).
#include "common.cuh"

#define WARPS_N (BN / WN)
#define THREADS (32 * (BM / WM) * WARPS_N)
#define MI (WM / 16)             // fragments of A a warp multiplies each 16 k
#define NI (WN / 16)             // of B, two of 8 columns together
#define A_ROWS (EIGHT && BM == 16 ? 8 : BM)  // that are held
#define B_ROWS (EIGHT && BN == 16 ? 8 : BN)
#define A_BYTES (A_ROWS * BK * 2)
#define B_BYTES (B_ROWS * BK * 2)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define C_PITCH (BN * 2 + 16)    // bytes from a row of C to the next while it leaves
#define SHARED_BYTES (STAGES == 1 && BM * C_PITCH > STAGE_BYTES ? BM * C_PITCH : STAGES * STAGE_BYTES)
#define KSTEPS (BK / 16)
#define AHEAD (STAGES - 1)       // tiles that are being filled while one is multiplied

static_assert(BM % WM == 0 && BN % WN == 0 && WM % 16 == 0 && WN % 16 == 0, "whole fragments");
static_assert(!EIGHT || (BM == 16 ? A_MN : BN == 16 && B_MN), "what is held of a row is one chunk");
static_assert(STAGES > 1 || sizeof(C_T) == 2 && BM * (BN / 8) % THREADS == 0, "16 bytes of C a thread at a time");
static_assert(COPY == 16 || COPY == 4 || COPY == 2, "see Needs");
static_assert(BK == 64 || STAGES == 1 && (BK == 16 || BK == 32), "one tile holds all k, or tiles of 64 k take turns");

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

DEVICE void copy_now(u32 shared, const bf16* global, bool inside) {
  unsigned short bits = inside ? global->bits : (unsigned short)0;
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(bits) : "memory");
}

// Programmatic launches: waits for the launch before this one, then lets the next one start to wait for this one.
DEVICE void take_turn() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&m)[4], u32 row) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// c[16,8] += a[16,16] b[16,8]
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One operand's tile of R rows (columns of C for B) x BK: this thread's part of the copies, and what its lane hands to
// ldmatrix. MN: k is not the contiguous axis.
template <bool IS_A, bool MN, int R> struct Operand {
  enum : int {
    WIDTH = MN ? (R < 64 ? R : 64) : BK,  // elements of a shared row
    CHUNKS = WIDTH / 8,                   // of 16 bytes in it
    TURN = 8 / CHUNKS,                    // shared rows in the width of all banks
    LINES = MN ? BK : R,                  // shared rows of a box
    BOXES = MN ? R / WIDTH : 1,
    PASS = THREADS / CHUNKS               // shared rows that the block copies at once
  };
  static_assert((!MN || R % WIDTH == 0) && 8 % CHUNKS == 0 && PASS % 8 == 0, "whole boxes and turns");
  static_assert(LINES % PASS == 0 || PASS % LINES == 0, "equal shares, or one for some of the threads");

  const bf16* next;  // this thread's first chunk of the coming tile
  i64 pitch;         // elements from a row of the matrix to the next
  int rows_left;     // rows of the tile inside the matrix, from this thread's first one on
  int k;             // its first k in the tile
  u32 target;        // bytes from the tile's start to its first chunk
  u32 lane_row;      // row and (swizzled, k contiguous) chunk that this lane gives to ldmatrix, in bytes
  int lane_chunk;    // MN: the chunk before swizzling, counted from the tile's first column

  static DEVICE int swizzled(int chunk, int row) { return chunk ^ row / TURN % CHUNKS; }

  DEVICE Operand(const bf16* matrix, int first, int first_k, i64 rows, i64 depth, int warp_first) {
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;  // PASS is a multiple of 8: later rows swizzle alike
    pitch = MN ? rows : depth;
    next = matrix + (MN ? (first_k + row) * pitch + first + chunk * 8 : (first + row) * pitch + first_k + chunk * 8);
    i64 left = rows - first;
    rows_left = (int)(left < R ? left : R) - (MN ? chunk * 8 : row);
    k = MN ? row : chunk * 8;
    target = row * CHUNKS * 16 + swizzled(chunk, row) * 16;
    // ldmatrix: of A the matrices are rows 0-7 and 8-15 of the first 8 k, then of the others; of B the other way round.
    int lane = threadIdx.x % 32;
    int r = IS_A != MN ? lane % 16 : lane / 16 * 8 + lane % 8, c = IS_A != MN ? lane / 16 : lane / 8 % 2;
    lane_row = (MN ? r : warp_first + r) * CHUNKS * 16 + (MN ? 0 : swizzled(c, r)) * 16;
    lane_chunk = warp_first / 8 + c;
  }

  // Starts copying the tile; `left` of its k are inside the matrix. Elements outside become zeros and add nothing.
  DEVICE void load(u32 tile, int left) {
    if (PASS > LINES && threadIdx.x >= LINES * CHUNKS) return;
    const bf16* source = next;
#pragma unroll
    for (int down = 0; down < LINES; down += PASS) {  // rows of the matrix
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        u32 to = tile + target + (box * LINES + down) * CHUNKS * 16;
        const bf16* from = source + box * CHUNKS * 8;
#pragma unroll
        for (int e = 0; e < 8; e += COPY / 2) {
          bool inside = MN ? k + down < left && box * CHUNKS * 8 + e < rows_left : k + e < left && down < rows_left;
          if constexpr (COPY == 2) copy_now(to + e * 2, from + e, inside);
          else copy_async<COPY>(to + e * 2, from + e, inside);
        }
      }
      source += PASS * pitch;  // added up: products with `down` would take registers
    }
    next = MN ? (PASS > LINES ? next + BK * pitch : source) : next + BK;
  }

  // Where this lane's row of fragment i, k from 16 step on, starts in the tile.
  DEVICE u32 place(int i, int step) const {
    if (!MN) return (lane_row ^ (step * 32)) + i * 16 * CHUNKS * 16;
    int chunk = R == 8 ? 0 : lane_chunk + i * 2;
    int placed = swizzled(chunk % CHUNKS, lane_row / (CHUNKS * 16));
    return (chunk / CHUNKS * BK + step * 16) * CHUNKS * 16 + lane_row + placed * 16;
  }
};

struct alignas(8) Float2 { float v[2]; };
struct alignas(16) Words { u32 v[4]; };

// Both rounded to nearest even, the first one low. By cvt: from_float's branches are long.
DEVICE u32 round_pair(float first, float second) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// Two neighbours of a row of C; `both`: the second exists; `paired`: N is even, so that they may move as one.
DEVICE void store_pair(float* c, float first, float second, bool both, bool paired) {
  if (paired) *(Float2*)c = Float2{{first, second}};
  else {
    c[0] = first;
    if (both) c[1] = second;
  }
}
DEVICE void store_pair(bf16* c, float first, float second, bool both, bool paired) {
  u32 bits = round_pair(first, second);
  if (paired) *(u32*)c = bits;
  else {
    c[0].bits = (unsigned short)bits;
    if (both) c[1].bits = (unsigned short)(bits >> 16);
  }
}

// Lane t of four holds columns 2 t and 2 t + 1 of tiles 0..3; gives it tile t, columns 0 to 7.
DEVICE Words transpose_quad(u32 w0, u32 w1, u32 w2, u32 w3) {
  bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  u32 a = __shfl_xor_sync(FULL_MASK, odd ? w0 : w1, 1), b = __shfl_xor_sync(FULL_MASK, odd ? w2 : w3, 1);
  u32 x0 = odd ? a : w0, x1 = odd ? w1 : a, x2 = odd ? b : w2, x3 = odd ? w3 : b;
  u32 p = __shfl_xor_sync(FULL_MASK, high ? x0 : x2, 2), q = __shfl_xor_sync(FULL_MASK, high ? x1 : x3, 2);
  return high ? Words{{p, q, x2, x3}} : Words{{x0, x1, p, q}};
}

// To the warp's sums, of WN columns from `col` on.
DEVICE void add_bias(float (&sum)[MI][2 * NI][4], const bf16* bias, int col, int N) {
#pragma unroll
  for (int j = 0; j < 2 * NI; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int n = col + j * 8 + threadIdx.x % 4 * 2 + e;
      float add = n < N ? to_float(bias[n]) : 0.0f;
#pragma unroll
      for (int i = 0; i < MI; i++) {
        sum[i][j][e] += add;
        sum[i][j][e + 2] += add;
      }
    }
}

#if STAGES == 1
// The block's sums to C, whose N is a multiple of 8: to shared memory, once all have read the operands there, then 16
// bytes a thread, row after row. What a warp stores to shared memory lies in different banks.
DEVICE void store_tile(float (&sum)[MI][2 * NI][4], u32 shared, C_T* c, int first_row, int first_col, int warp_row,
                       int warp_col, int M, int N) {
  int lane = threadIdx.x % 32;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MI; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 line = shared + (warp_row + i * 16 + h * 8 + lane / 4) * C_PITCH + (warp_col + lane % 4 * 2) * 2;
#pragma unroll
      for (int j = 0; j < 2 * NI; j++) {
        u32 bits = round_pair(sum[i][j][h * 2], sum[i][j][h * 2 + 1]);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(line + j * 16), "r"(bits) : "memory");
      }
    }
  __syncthreads();
#pragma unroll
  for (int place = threadIdx.x; place < BM * (BN / 8); place += THREADS) {
    int row = place / (BN / 8), col = place % (BN / 8) * 8;
    Words w;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3])
                 : "r"(shared + row * C_PITCH + col * 2) : "memory");
    C_T* to = c + (i64)(first_row + row) * N + first_col + col;
    if (first_row + row < M && first_col + col < N)
      asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w.v[0]), "r"(w.v[1]), "r"(w.v[2]),
                   "r"(w.v[3]) : "memory");
  }
}
#endif

// The warp's sums to C, from (row, col) on: WM x WN of them.
DEVICE void store_sums(float (&sum)[MI][2 * NI][4], C_T* c, int row, int col, int M, int N, bool accumulate) {
  int lane = threadIdx.x % 32, t = lane % 4;
  bool paired = N % 2 == 0;
  row += lane / 4;
#pragma unroll
  for (int i = 0; i < MI; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int m = row + i * 16 + h * 8;
      C_T* line = c + (i64)m * N;
      if (accumulate && m < M) {
#pragma unroll
        for (int j = 0; j < 2 * NI; j++) {
          int n = col + j * 8 + t * 2;
          if (n >= N) continue;
          sum[i][j][h * 2] += to_float(line[n]);
          if (n + 1 < N) sum[i][j][h * 2 + 1] += to_float(line[n + 1]);
        }
      }
      __syncwarp();  // other lanes write what was read here
      int done = 0;
      if (sizeof(C_T) == 2 && N % 8 == 0) {  // 16 bytes a lane, 64 a quad
        done = 2 * NI / 4 * 4;
#pragma unroll
        for (int j = 0; j < 2 * NI / 4 * 4; j += 4) {
          u32 w[4];
#pragma unroll
          for (int q = 0; q < 4; q++) w[q] = round_pair(sum[i][j + q][h * 2], sum[i][j + q][h * 2 + 1]);
          Words chunk = transpose_quad(w[0], w[1], w[2], w[3]);
          int n = col + (j + t) * 8;
          if (m < M && n < N) *(Words*)(line + n) = chunk;
        }
      }
      if (m < M) {
#pragma unroll
        for (int j = 0; j < 2 * NI; j++) {
          int n = col + j * 8 + t * 2;
          if (j >= done && n < N) store_pair(line + n, sum[i][j][h * 2], sum[i][j][h * 2 + 1], n + 1 < N, paired);
        }
      }
    }
}

#undef KERNEL
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) CONCAT(name, SUFFIX)
// Letters: C [M,N], a sum over K.
KERNEL(linear_mma)(const bf16* a, const bf16* b, const bf16* bias, C_T* c, i64 M, i64 N, i64 K, i64 accumulate,
                   i64 group) {
  extern __shared__ __align__(128) unsigned char shared[];
  // This CTA's tile: groups of `group` rows of tiles, in them column by column.
  u32 row_tiles = (u32)((M + BM - 1) / BM), col_tiles = (u32)((N + BN - 1) / BN), per_group = (u32)group * col_tiles;
  u32 base_row = blockIdx.x / per_group * (u32)group, place = blockIdx.x % per_group;
  u32 rows = row_tiles - base_row < (u32)group ? row_tiles - base_row : (u32)group;
  int first_row = (int)(base_row + place % rows) * BM, first_col = (int)(place / rows) * BN;

  int warp = threadIdx.x / 32, warp_row = warp / WARPS_N * WM, warp_col = warp % WARPS_N * WN;
  int first_k = 0, k_left = (int)K;  // from the tile that is loaded next on
#if SLICED
  u32 steps = (u32)((K + BK - 1) / BK), last_k = steps * (blockIdx.y + 1) / gridDim.y * BK;
  first_k = steps * blockIdx.y / gridDim.y * BK;
  k_left = (last_k < (u32)K ? (int)last_k : (int)K) - first_k;
  c += (i64)blockIdx.y * M * N;
#endif
  Operand<true, A_MN, A_ROWS> a_tile(a, first_row, first_k, M, K, warp_row);
  Operand<false, B_MN, B_ROWS> b_tile(b, first_col, first_k, N, K, warp_col);
  u32 first_stage = shared_address(shared), end = first_stage + STAGES * STAGE_BYTES;
  float sum[MI][2 * NI][4] = {};
  u32 x[2][MI][4], w[2][NI][4];
  take_turn();

  auto load_tiles = [&](u32 stage) {
    a_tile.load(stage, k_left);
    b_tile.load(stage + A_BYTES, k_left);
    k_left -= BK;
  };
  auto load_x = [&](int buffer, int i, u32 from, int step) {
    load_matrices<A_MN>(x[buffer][i], from + a_tile.place(i, step));
  };
  auto load_w = [&](u32 (&into)[4], int j, u32 from, int step) {
    load_matrices<B_MN>(into, from + A_BYTES + b_tile.place(j, step));
  };
  auto load_fragments = [&](int buffer, u32 from, int step) {
#pragma unroll
    for (int i = 0; i < MI; i++) load_x(buffer, i, from, step);
#pragma unroll
    for (int j = 0; j < NI; j++) load_w(w[buffer][j], j, from, step);
  };
  auto multiply = [&](int buffer, int j, const u32 (&b)[4]) {
#pragma unroll
    for (int i = 0; i < MI; i++) {
      multiply_add(sum[i][2 * j], x[buffer][i], b[0], b[1]);
      multiply_add(sum[i][2 * j + 1], x[buffer][i], b[2], b[3]);
    }
  };

#if STAGES == 1
  load_tiles(first_stage);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
#pragma unroll
  for (int step = 0; step < KSTEPS; step++) {
    load_fragments(0, first_stage, step);
#pragma unroll
    for (int j = 0; j < NI; j++) multiply(0, j, w[0][j]);
  }
#else
#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    load_tiles(first_stage + s * STAGE_BYTES);
    copy_commit();
  }
  u32 stage = first_stage, coming = first_stage + AHEAD * STAGE_BYTES;
  copy_wait<AHEAD - 1>();
  __syncthreads();
  load_fragments(0, stage, 0);
#pragma unroll 1
  while (k_left > -AHEAD * BK) {
#pragma unroll
    for (int step = 0; step < KSTEPS; step++) {
      if (step == 0) {
        load_tiles(coming);  // zeros past the end, so that nothing here branches
        copy_commit();
        coming = coming + STAGE_BYTES == end ? first_stage : coming + STAGE_BYTES;
      }
      if (step == KSTEPS - 1) {
        copy_wait<AHEAD - 1>();
        __syncthreads();
        stage = stage + STAGE_BYTES == end ? first_stage : stage + STAGE_BYTES;
      }
      load_fragments((step + 1) % 2, stage, (step + 1) % KSTEPS);
#pragma unroll
      for (int j = 0; j < NI; j++) multiply(step % 2, j, w[step % 2][j]);
    }
  }
  copy_wait<0>();
#endif
  if (bias) add_bias(sum, bias, first_col + warp_col, (int)N);
#if STAGES == 1
  if (N % 8 == 0) {
    store_tile(sum, first_stage, c, first_row, first_col, warp_row, warp_col, (int)M, (int)N);
    return;
  }
#endif
  store_sums(sum, c, first_row + warp_row, first_col + warp_col, (int)M, (int)N, accumulate != 0);
}
