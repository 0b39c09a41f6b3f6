// Quantised weights in registers: from the device layout (cupyllm/quant/layout.py) to bf16 pairs, and their scales.
//
// FORMAT: INT8 (0), INT4 (1), NF4 (2: absmax float), NF4_DOUBLE (3: absmax 8-bit; its map, offset and absmax2 in
// `nested`).
// A tile is 16 rows by DEPTH k in 512 bytes, 16 a lane: the A fragments of mma m16n8k16 (a warp's part of wgmma's A).
// Values are exact in bf16 but for nf4's levels: those are NF4_UNIT times a bf16 number (below).
#pragma once
#include "common.cuh"

#define INT8 0
#define INT4 1
#define NF4 2
#define NF4_DOUBLE 3
#define ROWS 16
#define TILE_BYTES 512
#define DEPTH (FORMAT == INT8 ? 32 : 64)
#define GROUP (FORMAT == INT4 ? 128 : 64)   // k a scale; int8 has one a row
#define IS_NF4 (FORMAT >= NF4)
#define MAP 256                             // `nested`: the dynamic map, the offset, absmax2 of blocks of 256
#define OFFSET 256
#define ABSMAX2 257
#define OUTER 256

// The 16 levels in float32, for products that are not of bf16.
__device__ const float NF4_LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// The same as NF4_UNIT times a bf16 number. Levels times 1.43632, rounded, lie nearer to the levels than levels rounded
// as they are: of Gaussian weights the error is 0.78e-3 (relative L2) and not 1.36e-3. bitsandbytes, which rounds level
// times absmax, has 1.66e-3. The unit, the best factor back, is multiplied into absmax.
#define NF4_UNIT 0.69603287f
__device__ const unsigned short NF4_BF16[16] = {0xbfb8, 0xbf80, 0xbf41, 0xbf11, 0xbed1, 0xbe88, 0xbe06, 0x0000,
                                                0x3dea, 0x3e6d, 0x3eb5, 0x3ef9, 0x3f22, 0x3f4f, 0x3f85, 0x3fb8};

// Tiles along K.
DEVICE i64 tiles_of(i64 K) { return FORMAT == INT8 ? (K + 63) / 64 * 2 : K / 64; }

// ---- one weight at a time, in float32 (exact codes, scales not applied)

DEVICE i64 tile_at(i64 m, i64 k, i64 tiles) {  // byte of this lane's part of the tile of (m, k)
  return ((m / ROWS) * tiles + k / DEPTH) * TILE_BYTES + (m % 8 * 4 + k % 8 / 2) * 16;
}

DEVICE int code_at(const unsigned char* codes, i64 m, i64 k, i64 tiles) {
  const unsigned char* lane = codes + tile_at(m, k, tiles);
  int step = (int)(k % DEPTH) / 16, high_k = (int)(k / 8) % 2, second = (int)(k % 2), high_row = (int)(m / 8) % 2;
  if (FORMAT == INT8) return (signed char)lane[step * 8 + high_k * 4 + second * 2 + high_row];
  if (FORMAT == INT4) return lane[step * 4 + second * 2 + high_k] >> high_row * 4 & 15;
  return lane[step * 4 + high_k * 2 + high_row] >> second * 4 & 15;
}

// Place of a group's scale: [blocks of 16 rows, groups, 16].
DEVICE i64 scale_at(i64 m, i64 group, i64 groups) { return (m / ROWS * groups + group) * ROWS + m % ROWS; }

// absmax of bitsandbytes' double quantisation, bit for bit: multiplied, rounded, added, rounded.
DEVICE float nested_absmax(float mapped, float absmax2, float offset) { return mapped * absmax2 + offset; }

// weight[m,k] in float32. K a multiple of GROUP but in int8.
DEVICE float weight_at(const unsigned char* codes, const void* scales, const float* nested, i64 m, i64 k, i64 M,
                       i64 K) {
  int code = code_at(codes, m, k, tiles_of(K));
  if (FORMAT == INT8) return (float)code * ((const float*)scales)[m];
  i64 groups = K / GROUP, at = scale_at(m, k / GROUP, groups);
  if (FORMAT == INT4) {
    u32 bits = ((const u32*)scales)[at];
    return (float)(code - (int)(bits & 255)) * __uint_as_float(bits & 0xffffff00u);
  }
  float absmax;
  if (FORMAT == NF4) absmax = ((const float*)scales)[at];
  else {
    float mapped = nested[((const unsigned char*)scales)[at]];
    absmax = nested_absmax(mapped, nested[ABSMAX2 + (m * groups + k / GROUP) / OUTER], nested[OFFSET]);
  }
  return NF4_LEVELS[code] * absmax;
}

// ---- a lane's part of a tile, in bf16 pairs
#ifndef CUPYLLM_HOST

DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
#define ONE_PAIR 0x3f803f80u

DEVICE u32 and_or(u32 a, u32 mask, u32 bits) {  // a & mask | bits in one instruction, which is not what compilers make
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

// Two words (a step of 16 k) -> the step's A fragment.
DEVICE void decode_int8(u32 first, u32 second, u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 h = (i < 2 ? first : second) >> i % 2 * 8;
    a[i] = fma_bf16x2(and_or(h, 0x007f007fu, 0x43004300u), ONE_PAIR, and_or(h, 0x00800080u, 0xc300c300u));
  }
}

// What int4's zero point subtracts: the pair -(128 + zero).
DEVICE u32 int4_minus(u32 zero) { return 0xc300c300u + zero * 0x10001u; }

// One word -> the A fragment of 16 + n. Less 16 + zero, which a product of few rows takes off its sum.
DEVICE void decode_int4(u32 word, u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = and_or(i == 0 ? word << 3 : word >> (i * 4 - 3), 0x00780078u, 0x41804180u);
}
DEVICE float int4_minus_sixteen(u32 zero) { return __uint_as_float(0xc1800000u + zero * 0x80000u); }  // -(16 + zero)

// nf4's pairs by byte, [256][32] words of shared memory: every lane has its own column, so no lookups conflict. A table
// of 16 levels by prmt was rejected: 10 integer operations for 4 weights, and Hopper has 64 lanes of them a clock.
#define NF4_TABLE_BYTES (256 * 32 * 4)
DEVICE void fill_nf4_table(u32* table, int thread, int threads) {
  for (int i = thread; i < 256 * 32; i += threads)
    table[i] = (u32)NF4_BF16[i / 32 & 15] | (u32)NF4_BF16[i / 512] << 16;
}

// One word -> the A fragment. `column`: 4 lane, this lane's in the table.
DEVICE void decode_nf4(u32 word, const unsigned char* table, u32 column, u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    a[i] = *(const u32*)(table + and_or(i == 0 ? word << 7 : word >> (i * 8 - 7), 0x7f80u, column));
}
#endif
