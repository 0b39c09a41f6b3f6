// Quantised weights as bf16: what the format's reference makes of them in fp32, rounded once.
//
// SCALED 0 (int8, whose scale of a row may be multiplied into the sum): q itself, exact.
// int4: (n - zero) scale = fmaf(128 + n, scale, -(128 + zero) scale), which is exact: scale has 16 bits.
// nf4: level times absmax. Levels come from shared memory, 16 values for each of 32 lanes, so that no lookups conflict.
// SPLIT 1, of int8 and int4, saves instructions (253 -> 200 of int4's 32 pairs) and is not quite one rounding: with
//   scale = high + low in bf16, w = round(v high + round(v low)), v = q or n - zero, is round(v scale (1 + d)).
//   |low| <= 2^-8 |scale| and a rounding errs by 2^-8 at most: |d| <= 2^-16 for int4, whose low is exact, and 2^-15 for
//   int8, which rounds low, too. d = 0 for int4's scales of float16 and bfloat16 checkpoints: v low then has 6 bits.
//   (Scales from 2^-110 on: bf16 does not go on below.)
// Macros: FORMAT as in quantized.cuh, SCALED, SPLIT, LEVEL_PITCH (bytes from a level to the next: 128; 256 saves
//   instructions for twice the table), IN_ORDER (1: lookups stay where they are written).
#pragma once
#include "quantized.cuh"

#define LEVELS_BYTES (16 * LEVEL_PITCH)

// {first, second} rounded to bf16, the first one low.
DEVICE u32 bf16_pair(float first, float second) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
DEVICE float low_float(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float constant_float(u32 address) {  // shared memory that does not change any more
  float value;
  if (IN_ORDER) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  else asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// nf4's levels and, double-quantised, the map of absmax behind them.
DEVICE void fill_tables(u32 table, const float* nested, int threads) {
  for (int i = threadIdx.x; IS_NF4 && i < LEVELS_BYTES / 4; i += threads) {
    float level = NF4_LEVELS[i / (LEVEL_PITCH / 4)];
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(table + i * 4), "f"(level) : "memory");
  }
  for (int i = threadIdx.x; FORMAT == NF4_DOUBLE && i < MAP; i += threads)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(table + LEVELS_BYTES + i * 4), "f"(nested[i]) : "memory");
}

// Of a lane's rows g and g + 8 of a block, for one group of k.
struct Scales {
  float factor[2], shift[2];
  u32 high[2], low[2], minus[2];  // SPLIT: pairs of the scale's parts, and of -(128 + zero)

  DEVICE void split(int h, float scale) {
    high[h] = bf16_pair(scale, scale);
    float rest = scale - low_float(high[h]);
    low[h] = bf16_pair(rest, rest);
  }
  DEVICE u32 times(int h, u32 pair) const {  // SPLIT: pair scale
    return fma_bf16x2(pair, high[h], fma_bf16x2(pair, low[h], 0x80008000u));
  }

  // bits: as stored (NF4_DOUBLE: absmax's code, which `absmax2` belongs to). `table`: fill_tables'.
  DEVICE void set(int h, u32 bits, float absmax2, u32 table, float offset) {
    float scale = __uint_as_float(FORMAT == INT4 ? bits & 0xffffff00u : bits);
    if (FORMAT == NF4_DOUBLE) scale = nested_absmax(constant_float(table + LEVELS_BYTES + bits * 4), absmax2, offset);
    if (SPLIT) {
      if (FORMAT == INT4) minus[h] = int4_minus(bits & 0xffu);
      split(h, scale);
    } else {
      if (FORMAT == INT4) shift[h] = -(float)(128 + (bits & 0xffu)) * scale;
      factor[h] = scale;
    }
  }
};

// nf4's levels of a word: of its four pairs. `levels`: this lane's, table + 4 lane, of a table at a multiple of
// LEVELS_BYTES.
DEVICE void lookup(u32 word, u32 levels, float (&found)[8]) {
  if (LEVEL_PITCH == 256) {  // a byte of the address is a code
    u32 upper = __byte_perm(levels, 0, 0x1111) & 0xf0f0f0f0u;
    u32 low = and_or(word, 0x0f0f0f0fu, upper), high = and_or(word >> 4, 0x0f0f0f0fu, upper);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      found[2 * i] = constant_float(__byte_perm(levels, low, 0x3200 | (4 + i) << 4));
      found[2 * i + 1] = constant_float(__byte_perm(levels, high, 0x3200 | (4 + i) << 4));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {  // level n lies 128 n bytes on
    u32 low = i == 0 ? word << 7 : word >> (8 * i - 7), high = i == 0 ? word << 3 : word >> (8 * i - 3);
    found[2 * i] = constant_float((low & 0x780u) | levels);
    found[2 * i + 1] = constant_float((high & 0x780u) | levels);
  }
}
DEVICE void scale_levels(const float (&found)[8], const Scales& scales, u32 (&pair)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    pair[i] = bf16_pair(found[2 * i] * scales.factor[i % 2], found[2 * i + 1] * scales.factor[i % 2]);
}

// 16 k of a block, one word a lane (int8: two) -> mma's A fragment. `levels`: lookup's.
DEVICE void dequantise(u32 first, u32 second, const Scales& scales, u32 levels, u32 (&pair)[4]) {
  if (IS_NF4) {
    float found[8];
    lookup(first, levels, found);
    scale_levels(found, scales, pair);
    return;
  }
  if (FORMAT == INT8) decode_int8(first, second, pair);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float factor = scales.factor[i % 2], shift = scales.shift[i % 2];
    if (FORMAT == INT4) {
      u32 both = and_or(first >> 4 * i, 0x000f000fu, 0x43004300u);  // 128 + n
      if (SPLIT) pair[i] = scales.times(i % 2, fma_bf16x2(both, ONE_PAIR, scales.minus[i % 2]));
      else pair[i] = bf16_pair(fmaf(low_float(both), factor, shift), fmaf(high_float(both), factor, shift));
    } else if (SCALED) {
      if (SPLIT) pair[i] = scales.times(i % 2, pair[i]);
      else pair[i] = bf16_pair(low_float(pair[i]) * factor, high_float(pair[i]) * factor);
    }
  }
}
