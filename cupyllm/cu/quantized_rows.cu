// Products of few rows with quantised weights: y = x weight^T for 1 to 8 NT rows of bf16: every code is read once.
//
// Shapes: N rows (x [N,K], y [N,M] row-major bf16), weight [M,K] in the device layout of cupyllm/quant/layout.py. K a
// multiple of 8 (int8), 128 (int4), 64 (nf4); any M.
// Swapped operands: y^T = weight x^T by mma m16n8k16, so that 16 rows of the weight fill the tensor core's long side and
// a tile of codes is its A operand, 16 bytes a lane, straight from memory to registers. x is few: a CTA keeps its slice
// of it in shared memory, in the order in which a lane wants it: 32 bytes a lane and 64 k.
//
// Work: blocks of 16 rows of the weight, WN in a pass of a CTA, by WK warps each. Warp wk of WK takes the steps (128 k)
// wk, wk + WK, .. of the CTA's slice of K. D steps ahead are in flight, across passes too. Grid: S slices times G groups;
// CTA b has slice b % S and blocks [g B / G, (g + 1) B / G), g = b / S, B = ceil(M / 16).
//
// Numerics: codes are exact in bf16 (nf4's levels but for the rounding in quantized.cuh), so products are exact; the sum
// of a group (int8: of 128 k) is made by the tensor core in fp32 and multiplied by the group's scale in fp32 (fused) where it
// is added to the total. WK totals are added in order; int8's scale, one a row, comes then; S slices are added in order by
// linear_sum.cu. One rounding to y. Bits depend on K, WK and S alone, neither on N nor on the GPU. Deterministic; no atomics.
//
// Macros: Y_T of y (bf16 or float), FORMAT (quantized.cuh), NT groups of 8 rows of x, WN, WK, D. Block: 32 WN WK. Dynamic shared bytes:
// ops/quantized_rows.py. parts: [S,N,M] floats if S > 1, else y is written. May be launched programmatically: only codes are read before the
// wait. Aliasing: y and parts overlap nothing. Capability: 8.0.
#include "quantized.cuh"

#define WARPS (WN * WK)
#define THREADS (WARPS * 32)
#define K_STEP 128                        // k of a warp's step
#define TILES (K_STEP / DEPTH)            // tiles of a step
#define K_TILE 64                         // k of a lane's 32 bytes of x
#define SCALES (FORMAT == INT8 ? 1 : FORMAT == INT4 ? 2 : FORMAT == NF4 ? 1 : 2)  // registers of a step's scales
#define RED_COLS 20                       // floats between two columns of a warp's sums: banks 8 t + g, each once
#define RED (8 * RED_COLS)                // floats of a warp's sums of 16 rows by 8

#ifndef MI
#define MI 1
#endif
#ifndef XR
#define XR 0
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 1
#endif

struct alignas(16) Quad { u32 v[4]; };

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE Quad load_stream(const unsigned char* p) {
  Quad q;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p));
  return q;
}
DEVICE Quad load_quad(const bf16* p) {  // of x, which the kernel before this one may have written: not .nc
  Quad q;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p));
  return q;
}
DEVICE Quad load_shared(u32 p) {
  Quad q;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "r"(p) : "memory");
  return q;
}
DEVICE void store_shared(u32 p, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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

// A step's codes and scales on their way.
struct Step {
  Quad codes[MI][TILES];
  u32 scales[MI][SCALES];
};

#undef KERNEL
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) CONCAT(name, SUFFIX)
KERNEL(quantized_rows)(const bf16* x, const unsigned char* codes, const void* scales, const float* nested, Y_T* y, float* parts, i64 N_, i64 M_, i64 K_, i64 S_, i64 G_) {
  const int N = (int)N_, M = (int)M_, K = (int)K_, S = (int)S_;
  extern __shared__ __align__(128) unsigned char shared[];
  int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  int wk = warp % WK, wn = warp / WK;
  int slice = (int)(blockIdx.x % (u32)S), group = (int)(blockIdx.x / (u32)S), blocks = (M + ROWS - 1) / ROWS;
  int lo = (int)((i64)group * blocks / G_), hi = (int)((i64)(group + 1) * blocks / G_);
  int all_chunks = (K + K_STEP * WK - 1) / (K_STEP * WK);
  int first_chunk = slice * all_chunks / S, chunks = XR ? XR : (slice + 1) * all_chunks / S - first_chunk;
  int passes = (hi - lo + WN * MI - 1) / (WN * MI), total = passes * chunks;
  int tiles = (int)tiles_of(K);

  float* red = (float*)shared;
  u32* table = (u32*)(red + WARPS * MI * NT * RED);
  float* map = (float*)((unsigned char*)table + (IS_NF4 ? NF4_TABLE_BYTES : 0));
  u32 x_at = shared_address(map + (FORMAT == NF4_DOUBLE ? MAP : 0));
  u32 x_pitch = (u32)(chunks * WK * K_STEP * 2 + 16);  // 16 mod 128: rows g and g + 1 fill each other's banks

  // A warp's walk over (pass, step). first: tile of its first block's row of tiles; tile: of the step in it; at: the
  // same from the weight's first tile, which both codes and scales are counted by.
  const int first = (first_chunk * WK + wk) * TILES, stride = WK * TILES;
  struct Walk {
    i64 at;
    int block, tile, step;
  } walk{(i64)(lo + wn * MI) * tiles + first, lo + wn * MI, first, 0};
  auto advance = [&](Walk& w) {
    w.tile += stride, w.at += stride;
    if (++w.step == chunks) {
      w.at += (i64)(WN * MI) * tiles - (w.tile - first);
      w.block += WN * MI, w.tile = first, w.step = 0;
    }
  };
  // Zeros where there is nothing: past K, past the CTA's blocks.
  auto load_codes = [&](Step& to, const Walk& w) {
    const unsigned char* from = codes + w.at * TILE_BYTES + lane * 16;
#pragma unroll
    for (int mi = 0; mi < MI; mi++)
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        to.codes[mi][i] = Quad{};
        if (w.block + mi < hi && w.tile + i < tiles) to.codes[mi][i] = load_stream(from + ((i64)mi * tiles + i) * TILE_BYTES);
      }
  };
  auto load_scales = [&](Step& to, const Walk& w) {
#pragma unroll
    for (int mi = 0; mi < MI; mi++) {
#pragma unroll
      for (int i = 0; i < SCALES; i++) to.scales[mi][i] = 0;
      if (FORMAT == INT8 || w.block + mi >= hi) continue;
      i64 at = w.at + (i64)mi * tiles;
      if (FORMAT == INT4 && w.tile < tiles) {
        const u32* from = (const u32*)scales + at / TILES * ROWS + g;
        to.scales[mi][0] = from[0], to.scales[mi][1] = from[8];
      }
      if (IS_NF4 && w.tile + lane / ROWS < tiles) {  // a step is two blocks of 16 absmax, one a lane
        i64 mine = at * ROWS + lane;
        if (FORMAT == NF4) to.scales[mi][0] = ((const u32*)scales)[mine];
        else {
          // absmax are counted by rows in `nested`: row 16 block + lane % 16, place tile + lane / 16
          i64 outer = ((at - w.tile) * ROWS + (i64)(lane % ROWS) * tiles + w.tile + lane / ROWS) / OUTER, last = ((i64)M * tiles - 1) / OUTER;
          to.scales[mi][0] = ((const unsigned char*)scales)[mine];
          to.scales[mi][1] = __float_as_uint(nested[ABSMAX2 + (outer < last ? outer : last)]);
        }
      }
    }
  };

  Step ahead[D];
  const Walk start = walk;
  dependents_may_start();
#pragma unroll
  for (int d = 0; d < D; d++) {
    load_codes(ahead[d], walk);
    advance(walk);
  }
#if IS_NF4
  fill_nf4_table(table, thread, THREADS);
  u32 column = shared_address(table) + lane * 4;
#endif
  wait_for_predecessor();
  walk = start;
#pragma unroll
  for (int d = 0; d < D; d++) {
    load_scales(ahead[d], walk);
    advance(walk);
  }

#if FORMAT == NF4_DOUBLE
  float offset = nested[OFFSET];
  for (int i = thread; i < MAP; i += THREADS) map[i] = nested[i];
#endif
#if XR
  Quad x_kept[XR][2][2][NT];
#pragma unroll
  for (int c = 0; c < XR; c++)
#pragma unroll
    for (int i = 0; i < 16 * NT; i++) {
      int nt = i / 16, half = i / 8 % 2, pair = i / 4 % 2, word = i % 4;
      int k = ((first_chunk + c) * WK + wk) * K_STEP + half * 64 + pair * 32 + word * 8 + t * 2, n = nt * 8 + g < N ? nt * 8 + g : N - 1;
      x_kept[c][half][pair][nt].v[word] = k < K ? *(const volatile u32*)(x + (i64)n * K + k) : 0;
    }
#else
  {
    // x: 8 k of memory are 4 words, one for each t; neighbours begin at different t, so that their banks differ.
    int k0 = first_chunk * WK * K_STEP, units = chunks * WK * K_STEP / 8;
    for (int i = thread; i < N * units; i += THREADS) {
      int n = i / units, unit = i % units, k = k0 + unit * 8;
      Quad q{};
      if (k < K) q = load_quad(x + (i64)n * K + k);
      u32 to = x_at + n * x_pitch + unit / 8 * 128 + unit % 8 * 4;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int s = (j + unit / 8) % 4;
        store_shared(to + s * 32, s == 0 ? q.v[0] : s == 1 ? q.v[1] : s == 2 ? q.v[2] : q.v[3]);
      }
    }
  }
  u32 x_row[NT];  // rows past N repeat the last: their columns are not stored
#pragma unroll
  for (int nt = 0; nt < NT; nt++) x_row[nt] = x_at + (nt * 8 + g < N ? nt * 8 + g : N - 1) * x_pitch + wk * (K_STEP * 2) + t * 32;
#endif
  __syncthreads();

  float acc[MI][NT][4] = {};
  auto multiply = [&](const Step& step, int chunk) {
#if IS_NF4
    float mine[MI];
#pragma unroll
    for (int mi = 0; mi < MI; mi++) {
      mine[mi] = __uint_as_float(step.scales[mi][0]);
#if FORMAT == NF4_DOUBLE
      mine[mi] = nested_absmax(map[step.scales[mi][0]], __uint_as_float(step.scales[mi][1]), offset);
#endif
      mine[mi] *= NF4_UNIT;
    }
#endif
    float c[MI][NT][4];
#pragma unroll
    for (int half = 0; half < K_STEP / K_TILE; half++) {
      if (half == 0 || IS_NF4) {
#pragma unroll
        for (int i = 0; i < MI * NT * 4; i++) c[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
      }
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {  // two mma steps, 32 k
        Quad b[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#if XR
          b[nt] = x_kept[chunk][half][pair][nt];
#else
          b[nt] = load_shared(x_row[nt] + chunk * (WK * K_STEP * 2) + half * 128 + pair * 16);
#endif
        }
#pragma unroll
        for (int mi = 0; mi < MI; mi++)
#pragma unroll
          for (int s = 0; s < 2; s++) {
            u32 a[4];
#if FORMAT == INT8
            const Quad& q = step.codes[mi][half * 2 + pair];
            decode_int8(q.v[s * 2], q.v[s * 2 + 1], a);
#elif FORMAT == INT4
            decode_int4(step.codes[mi][half].v[pair * 2 + s], int4_minus(step.scales[mi][0] & 255u), int4_minus(step.scales[mi][1] & 255u), a);
#else
            decode_nf4(step.codes[mi][half].v[pair * 2 + s], column, a);
#endif
#pragma unroll
            for (int nt = 0; nt < NT; nt++) mma(c[mi][nt], a, b[nt].v[s * 2], b[nt].v[s * 2 + 1]);
          }
      }
      if (half + 1 < K_STEP / K_TILE && !IS_NF4) continue;
#pragma unroll
      for (int mi = 0; mi < MI; mi++) {
#if IS_NF4
        float scale[2] = {__shfl_sync(FULL_MASK, mine[mi], half * ROWS + g), __shfl_sync(FULL_MASK, mine[mi], half * ROWS + 8 + g)};
#elif FORMAT == INT4
        float scale[2] = {__uint_as_float(step.scales[mi][0] & 0xffffff00u), __uint_as_float(step.scales[mi][1] & 0xffffff00u)};
#endif
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
#if FORMAT == INT8
            acc[mi][nt][i] += c[mi][nt][i];
#else
            acc[mi][nt][i] = fmaf(scale[i / 2], c[mi][nt][i], acc[mi][nt][i]);
#endif
          }
      }
    }
  };

  // Adds the WK sums in order and stores them; the accumulators are zero afterwards.
  auto finish = [&](int pass) {
    __syncthreads();  // the sums of the last pass have been read
#pragma unroll
    for (int i = 0; i < MI * NT; i++) {
      float* to = red + (warp * MI * NT + i) * RED + 2 * t * RED_COLS + g;
      float(&c)[4] = acc[i / NT][i % NT];
      to[0] = c[0], to[RED_COLS] = c[1], to[8] = c[2], to[RED_COLS + 8] = c[3];
      c[0] = c[1] = c[2] = c[3] = 0.0f;
    }
    __syncthreads();
    for (int i = thread; i < WN * MI * NT * 8 * ROWS; i += THREADS) {
      int r = i % ROWS, n = i / ROWS % (NT * 8), w = i / (ROWS * NT * 8);
      int block = lo + pass * WN * MI + w, m = block * ROWS + r;
      if (n >= N || block >= hi || m >= M) continue;
      const float* from = red + ((w / MI * WK * MI + w % MI) * NT + n / 8) * RED + n % 8 * RED_COLS + r;
      float sum = from[0];
#pragma unroll
      for (int j = 1; j < WK; j++) sum += from[j * MI * NT * RED];
      if (FORMAT == INT8) sum *= ((const float*)scales)[m];
      if (S > 1) parts[((i64)slice * N + n) * M + m] = sum;
      else y[(i64)n * M + m] = from_float<Y_T>(sum);
    }
  };

  int pass = 0, step = 0;
  for (int i = 0; i < total; i += D) {
#pragma unroll
    for (int d = 0; d < D; d++) {
      if (i + d < total) {
        multiply(ahead[d], XR ? d % (XR ? XR : 1) : step);
        load_codes(ahead[d], walk);
        load_scales(ahead[d], walk);
        advance(walk);
        if (++step == chunks) step = 0, finish(pass++);
      }
    }
  }
}
