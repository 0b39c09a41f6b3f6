// Linear in fp32 on the tensor cores of every GPU from sm_80: C[r,c] = (or +=) sum_k A[r,k] B[c,k] + bias[c] of fp32 A
// and C, as exactly as linear.cu. Hopper's launcher takes linear_tf32_sm90.cu, of the same bits.
//
// The forms are those of linear_mma.cu; all matrices are row-major, MN 1: k is not the operand's contiguous axis:
//   forward  C = y        A = x    A_MN 0  B = weight  B_MN 0  B_T float, bf16 or f16   k runs over K
//   dgrad    C = d_x      A = d_y  A_MN 0  B = weight  B_MN 1  B_T float, bf16 or f16   k runs over M
//   wgrad    C = d_weight A = d_y  A_MN 1  B = x       B_MN 1  B_T float                k runs over N
// Macros: A_MN B_MN B_T, the tile BM BN, the warp tile WM WN, STAGES, CTAS (that share an SM), VECTOR (see Needs).
// Method: 3xTF32. a = hi + lo, hi the nearest of 11 bits, lo the exact rest, of which the tensor cores read 11 bits;
//   then a b = lo hi + hi lo + hi hi, the small ones first. Values of bf16 and f16 are their own hi: two products then.
//   cp.async fills STAGES shared tiles of BM x 32 and BN x 32; (BM / WM) (BN / WN) warps multiply them by mma.sync
//   m16n8k8, each WM x WN of C, and split what they read: a split tile would take twice the room and bandwidth.
// Rejected: hi cut instead of rounded, an instruction less: lo lo, left out, is then always of the product's sign and
//   takes 1.2e-7 off every sum; chains of more k (see Numerics); lo times 2^13 against underflow (see Range), which is
//   two more instructions for each element that is split and each sum.
// Layout: an mma adds all its 8 k at once and keeps rows and columns apart, so any order of them will do, if it is that
//   of both operands. Lane 4 g + t takes k = 2 t and 2 t + 1, and of every 32 rows of the tile (columns of C for B)
//   4 g to 4 g + 3, as Quad: for A the two halves of two fragments, for B four fragments. So it reads 16 bytes where k
//   is not contiguous, and writes 32 neighbouring bytes of C. Chunks of 16 shared bytes are XORed so that what a warp
//   reads at once lies in different banks (places in Operand).
// Launch: block 32 (BM / WM) (BN / WN); grid ceil(rows / BM) ceil(cols / BN); dynamic shared bytes
//   STAGES * STAGE_BYTES, at most 99 KB, which is what a CTA has on sm_86, 89, 120 and 121. group: rows of tiles that
//   are taken together, at least 1; any gives the same bits.
// Needs: VECTOR 1: both contiguous axes are of whole 16 bytes, A, B and C aligned to 16 bytes; VECTOR 0: any, C aligned
//   to 16 bytes. Rows and columns from 1, depth from 0, all below 2^30.
// Numerics: sums have three levels. mma.sync's adder cuts, always towards zero, so that its error does not average
//   out: a chain is the three products of 8 k, from 0. Chains are added in fp32, rounded, to a partial sum, and that
//   to the total every PROMOTE k. A sum of one sign loses 0.4 2^-23 of itself to the cut, and with chains of 64 k five
//   times 2^-23. Relative L2 error of normal, of positive operands at K = 4096, beside linear.cu's: 1.6e-7 (2.3e-7),
//   7.5e-8 (8.3e-8); at K = 25600 2.3e-7 (3.3e-7), 1.5e-7 (2.1e-7). Only where few terms make up a sum, as with
//   magnitudes over 2^-20 to 2^20, is it larger, 1.5e-7 (1.4e-7) at K = 4096: the split alone costs 7e-8 (H200,
//   2026-11-30). bias and, with `accumulate`, the old C are added last. Every tile and VECTOR sums each element in the
//   same order: a row's bits depend neither on the number of rows nor on its place among them. Deterministic; no
//   atomics; no CTA waits for another.
// Measured: H200, 2026-11-30, TFLOP/s of 4096^3, forward, dgrad, wgrad: 128x128 64, 62, 64; 64x64 58, 56, 61; linear.cu
//   28; torch in fp32 50, 50, 51. Warp tiles of 32x64, of 32x32, and the loop over a step unrolled: 56 to 65.
// Range: operands from 2^-113 on (or 0) have all their digits; smaller ones are off by up to 2^-136, lo being below
//   what tf32 can say. Infinities, NaN and |a| from 2^128 - 2^116 on, which round up to infinity, make lo NaN or
//   infinite and so every sum that they are in not finite: such an element is summed again by fp32 FMA, in linear.cu's
//   order.
// Aliasing: C must not overlap A, B or bias. Capability: 8.0.
#include "common.cuh"

#define BK 32                    // k of a step
#define PROMOTE 256              // k of a partial sum
#define RUN 128                  // the same of linear.cu's order
#define WARPS_N (BN / WN)
#define THREADS (32 * (BM / WM) * WARPS_N)
#define AQ (WM / 32)             // quads of A a warp multiplies each 8 k: two fragments of 16 rows each
#define BQ (WN / 32)             // of B: four fragments of 8 columns each
#define A_BYTES (BM * BK * 4)
#define B_BYTES (BN * BK * (int)sizeof(B_T))
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define KSTEPS (BK / 8)
#define AHEAD (STAGES - 1)       // tiles that are being filled while one is multiplied

static_assert(BM % WM == 0 && BN % WN == 0 && WM % 32 == 0 && WN % 32 == 0, "whole quads");
static_assert(AHEAD >= 1, "one tile is multiplied while another is filled");

struct alignas(16) Float4 { float v[4]; };
struct alignas(8) Float2 { float v[2]; };
template <typename T> struct alignas(8) Halves4 { T v[4]; };
template <typename T> struct alignas(4) Halves2 { T v[2]; };

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

DEVICE void copy_element(u32 shared, const float* global, bool inside) { copy_async<4>(shared, global, inside); }
template <typename T> DEVICE void copy_element(u32 shared, const T* global, bool inside) {  // of 16 bits
  unsigned short bits = inside ? global->bits : (unsigned short)0;
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(bits) : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// c[16,8] += a[16,8] b[8,8] of tf32: the low 13 bits are not looked at
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The nearest value of 11 bits, and the rest. Infinite where that leaves fp32; some NaN become 0, but not their rest.
DEVICE u32 high(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
DEVICE u32 low(float x, u32 hi) { return __float_as_uint(x - __uint_as_float(hi)); }

// Rows 4 g + i of a block of 32, k = 2 t + e.
struct Quad { float v[4][2]; };

// One operand's tile of R rows (columns of C for B) x BK: this thread's part of the copies, and the lane's quads.
// MN: k is not the contiguous axis. Shared places of 16-byte chunks, by row r (MN: of k) and chunk c in it:
//   k contiguous, 4 bytes   128 r + 16 (c ^ 2 (r / 4 % 4))
//   k contiguous, 2 bytes   128 (r / 2) + 16 ((r % 2 * 4 + c) ^ r / 4 % 8)     two rows share 128 bytes
//   MN                      the row's bytes r + 16 (c ^ 2 (r / 2 % 4))
template <typename T, bool MN, int R> struct Operand {
  enum : int {
    SIZE = (int)sizeof(T),
    EACH = 16 / SIZE,                             // elements of a chunk
    WIDTH = (MN ? R : BK) / EACH,                 // chunks of a row
    PASS = THREADS / WIDTH,                       // rows that the block copies at once
    COPIES = R * BK / EACH / THREADS
  };
  static_assert(THREADS % WIDTH == 0 && R * BK / EACH % THREADS == 0, "equal shares");
  static_assert(MN ? PASS % 4 == 0 && WIDTH % 8 == 0 : PASS % (SIZE == 4 ? 16 : 32) == 0, "later rows swizzle alike");

  const T* next;   // this thread's first chunk of the coming tile
  i64 pitch;       // elements from a row of the matrix to the next
  int rows_left;   // rows of the tile inside the matrix, from this thread's first one on
  int k;           // its first k in the tile
  u32 target;      // bytes from the tile's start to its first chunk
  u32 lane_place;  // and to the lane's quad of the first block and step

  DEVICE Operand(const T* matrix, int first, i64 rows, i64 depth, int warp_first) {
    int row = threadIdx.x / WIDTH, chunk = threadIdx.x % WIDTH;
    pitch = MN ? rows : depth;
    next = matrix + (MN ? row * pitch + first + chunk * EACH : (first + row) * pitch + chunk * EACH);
    i64 left = rows - first;
    rows_left = (int)(left < R ? left : R) - (MN ? chunk * EACH : row);
    k = MN ? row : chunk * EACH;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (MN) {
      target = (row * WIDTH + (chunk ^ row / 2 % 4 * 2)) * 16;
      int column = warp_first + 4 * g;
      lane_place = (2 * t * WIDTH + (column / EACH ^ 2 * t)) * 16 + column % EACH * SIZE;
    } else if (SIZE == 4) {
      target = row * 128 + (chunk ^ row / 4 % 4 * 2) * 16;
      lane_place = (warp_first + 4 * g) * 128 + (t / 2 ^ g % 4 * 2) * 16 + t % 2 * 8;
    } else {
      target = row / 2 * 128 + ((row % 2 * 4 + chunk) ^ row / 4 % 8) * 16;
      lane_place = (warp_first / 2 + 2 * g) * 128 + g * 16 + t * 4;
    }
  }

  // Starts copying the tile; `left` of its k are inside the matrix. Elements outside become zeros and add nothing.
  DEVICE void load(u32 tile, int left) {
    const T* source = next;
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
      u32 to = tile + (target ^ (MN ? i * PASS / 2 % 4 * 32 : 0)) + i * THREADS * 16;
#pragma unroll
      for (int e = 0; e < EACH; e += VECTOR ? EACH : 1) {
        bool inside = MN ? k + i * PASS < left && e < rows_left : k + e < left && i * PASS < rows_left;
        if constexpr (VECTOR) copy_async<16>(to, source, inside);
        else copy_element(to + e * SIZE, source + e, inside);
      }
      source += PASS * pitch;  // added up: products with i would take registers
    }
    next = MN ? source : next + BK;
  }

  // The lane's quad of a block of 32 of the warp's rows, k from 8 step on.
  DEVICE Quad quad(const unsigned char* tile, int block, int step) const {
    Quad q;
    if constexpr (MN) {
      u32 place = (SIZE == 4 ? lane_place + block * 128 : (lane_place ^ block % 2 * 64) + block / 2 * 128);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const unsigned char* p = tile + place + (step * 8 + e) * WIDTH * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if constexpr (SIZE == 4) q.v[i][e] = ((const Float4*)p)->v[i];
          else q.v[i][e] = to_float(((const Halves4<T>*)p)->v[i]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if constexpr (SIZE == 4) {
            q.v[i][e] = ((const Float2*)(tile + (lane_place ^ step * 32) + (block * 32 + i) * 128))->v[e];
          } else {
            u32 place = (lane_place ^ (i % 2 * 64 + step * 16)) + (block * 16 + i / 2) * 128;
            q.v[i][e] = to_float(((const Halves2<T>*)(tile + place))->v[e]);
          }
        }
    }
    return q;
  }
};

// C[row,col] as linear.cu sums it.
DEVICE float sum_by_fma(const float* a, const B_T* b, i64 row, i64 col, i64 M, i64 N, i64 K) {
  float total = 0.0f, partial = 0.0f;
#pragma unroll 1
  for (i64 k = 0; k < K; k++) {
    partial = fmaf(a[A_MN ? k * M + row : row * K + k], to_float(b[B_MN ? k * N + col : col * K + k]), partial);
    if (k % RUN == RUN - 1) {
      total += partial;
      partial = 0.0f;
    }
  }
  return total + partial;
}

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

#undef KERNEL
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, CTAS) CONCAT(name, SUFFIX)
// Letters: C [M,N], a sum over K.
KERNEL(linear_tf32)(const float* a, const B_T* b, const B_T* bias, float* c, i64 M, i64 N, i64 K, i64 accumulate,
                    i64 group) {
  extern __shared__ __align__(128) unsigned char shared[];
  // This CTA's tile: groups of `group` rows of tiles, in them column by column.
  u32 row_tiles = (u32)((M + BM - 1) / BM), col_tiles = (u32)((N + BN - 1) / BN), per_group = (u32)group * col_tiles;
  u32 base_row = blockIdx.x / per_group * (u32)group, in_group = blockIdx.x % per_group;
  u32 rows = row_tiles - base_row < (u32)group ? row_tiles - base_row : (u32)group;
  int first_row = (int)(base_row + in_group % rows) * BM, first_col = (int)(in_group / rows) * BN;

  int warp = threadIdx.x / 32, warp_row = warp / WARPS_N * WM, warp_col = warp % WARPS_N * WN;
  Operand<float, A_MN, BM> a_tile(a, first_row, M, K, warp_row);
  Operand<B_T, B_MN, BN> b_tile(b, first_col, N, K, warp_col);
  int k_left = (int)K;  // from the tile that is loaded next on
  // [quad of A][fragment in it][fragment of B][C's register]
  float total[AQ][2][4 * BQ][4] = {}, partial[AQ][2][4 * BQ][4] = {};
  Quad x[AQ], w[BQ];

  auto load_tiles = [&](u32 stage) {
    u32 to = shared_address(shared) + stage;
    a_tile.load(to, k_left);
    b_tile.load(to + A_BYTES, k_left);
    k_left -= BK;
  };
  auto promote = [&]() {
#pragma unroll
    for (int q = 0; q < AQ; q++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4 * BQ; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            total[q][i][j][e] += partial[q][i][j][e];
            partial[q][i][j][e] = 0.0f;
          }
  };

#pragma unroll
  for (int s = 0; s < AHEAD; s++) {
    load_tiles(s * STAGE_BYTES);
    copy_commit();
  }
  u32 stage = 0, coming = AHEAD * STAGE_BYTES;
  copy_wait<AHEAD - 1>();
  __syncthreads();
#pragma unroll
  for (int q = 0; q < AQ; q++) x[q] = a_tile.quad(shared, q, 0);
#pragma unroll
  for (int q = 0; q < BQ; q++) w[q] = b_tile.quad(shared + A_BYTES, q, 0);
  int promoted_in = PROMOTE / BK;  // steps
#pragma unroll 1
  while (k_left > -AHEAD * BK) {
    load_tiles(coming);  // zeros past the end, so that nothing here branches
    copy_commit();
    coming = coming + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : coming + STAGE_BYTES;
#pragma unroll 1  // unrolled, ptxas asks for 5 to 40 registers more than there are
    for (int step = 0; step < KSTEPS; step++) {
      u32 wh[4 * BQ][2], wl[4 * BQ][2];
#pragma unroll
      for (int j = 0; j < 4 * BQ; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float value = w[j / 4].v[j % 4][e];
          wh[j][e] = sizeof(B_T) == 4 ? high(value) : __float_as_uint(value);
          wl[j][e] = low(value, wh[j][e]);
        }
      if (step == KSTEPS - 1) {  // all have their part of the coming tile, and hold what is left of this one
        copy_wait<AHEAD - 1>();
        __syncthreads();
        stage = stage + STAGE_BYTES == STAGES * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
      }
#pragma unroll
      for (int q = 0; q < BQ; q++) w[q] = b_tile.quad(shared + stage + A_BYTES, q, (step + 1) % KSTEPS);
#pragma unroll
      for (int q = 0; q < AQ; q++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          u32 xh[4], xl[4];
#pragma unroll
          for (int r = 0; r < 4; r++) {  // halves of 8 rows are 2 i and 2 i + 1 of the quad
            float value = x[q].v[2 * i + r % 2][r / 2];
            xh[r] = high(value);
            xl[r] = low(value, xh[r]);
          }
          float sum[4 * BQ][4] = {};
#pragma unroll
          for (int j = 0; j < 4 * BQ; j++) multiply_add(sum[j], xl, wh[j]);
          if (sizeof(B_T) == 4) {
#pragma unroll
            for (int j = 0; j < 4 * BQ; j++) multiply_add(sum[j], xh, wl[j]);
          }
#pragma unroll
          for (int j = 0; j < 4 * BQ; j++) multiply_add(sum[j], xh, wh[j]);
#pragma unroll
          for (int j = 0; j < 4 * BQ; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) partial[q][i][j][e] += sum[j][e];
        }
        x[q] = a_tile.quad(shared + stage, q, (step + 1) % KSTEPS);
      }
    }
    if (--promoted_in == 0) {
      promote();
      promoted_in = PROMOTE / BK;
    }
  }
  copy_wait<0>();
  promote();

  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int row = first_row + warp_row + 4 * g, col = first_col + warp_col + 8 * t;
  float(&sums)[AQ * 8 * BQ * 4] = *(float(*)[AQ * 8 * BQ * 4]) & total;
  bool finite = true;
#pragma unroll
  for (int n = 0; n < AQ * 8 * BQ * 4; n++) finite &= is_finite(sums[n]);
  if (!finite) {
#pragma unroll 1
    for (int n = 0; n < AQ * 8 * BQ * 4; n++) {
      // n counts [q][i][j][h][e]: row 32 q + 2 i + h, column 32 (j / 4) + 4 e + j % 4
      int e = n % 2, h = n / 2 % 2, j = n / 4 % (4 * BQ), i = n / (16 * BQ);
      int r = row + i / 2 * 32 + i % 2 * 2 + h, s = col + j / 4 * 32 + e * 4 + j % 4;
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < AQ * 8 * BQ * 4; other++) sum = other == n ? sums[other] : sum;
      if (is_finite(sum) || r >= M || s >= N) continue;
      sum = sum_by_fma(a, b, r, s, M, N, K);
#pragma unroll
      for (int other = 0; other < AQ * 8 * BQ * 4; other++) sums[other] = other == n ? sum : sums[other];
    }
  }

#pragma unroll
  for (int block = 0; block < 2 * BQ; block++) {  // of 4 columns
    int n = col + block / 2 * 32 + block % 2 * 4;
    float add[4];
#pragma unroll
    for (int j = 0; j < 4; j++) add[j] = bias && n + j < N ? to_float(bias[n + j]) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * AQ; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int m = row + i / 2 * 32 + i % 2 * 2 + h;
        float* line = c + (i64)m * N + n;
        Float4 out;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          out.v[j] = total[i / 2][i % 2][block / 2 * 4 + j][2 * h + block % 2];
          if (bias) out.v[j] += add[j];
        }
        if (m >= M || n >= N) continue;
        if (N % 4 == 0) {
          if (accumulate) {
            Float4 old = *(const Float4*)line;
#pragma unroll
            for (int j = 0; j < 4; j++) out.v[j] += old.v[j];
          }
          *(Float4*)line = out;
        } else {
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (n + j < N) line[j] = accumulate ? out.v[j] + line[j] : out.v[j];
        }
      }
  }
}
