// Quantised weights as bf16, each what the format's reference makes of it in fp32, rounded once.
//
// SCALED 0 (int8, whose scale of a row may be multiplied into the sum): q itself, exact.
// int4: (n - zero) scale = fmaf(128 + n, scale, -(128 + zero) scale), which is exact: scale has 16 bits.
// nf4: level times absmax. Levels come from shared memory, 16 values for each of 32 lanes, so that no lookups conflict.
#pragma once
#include "quantized.cuh"

#ifndef SPLIT_SCALES
#define SPLIT_SCALES 0
#endif
#ifndef NF4_PAIRS
#define NF4_PAIRS 0
#endif
#define LEVELS_BYTES (NF4_PAIRS ? NF4_TABLE_BYTES : 2048)
#define NIBBLE_WORDS (FORMAT != INT8)

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
  asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// nf4's levels and, double-quantised, the map of absmax behind them.
DEVICE void fill_tables(u32 table, const float* nested, int threads) {
  for (int i = threadIdx.x; IS_NF4 && i < LEVELS_BYTES / 4; i += threads) {
    int code = NF4_PAIRS == 2 && i % 2 ? i / 512 & 15 : i / 32 & 15;
    u32 entry = NF4_PAIRS == 1 ? (u32)NF4_BF16[code] | (u32)NF4_BF16[i / 512 & 15] << 16 : __float_as_uint(NF4_LEVELS[code]);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(table + i * 4), "r"(entry) : "memory");
  }
  for (int i = threadIdx.x; FORMAT == NF4_DOUBLE && i < MAP; i += threads)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(table + LEVELS_BYTES + i * 4), "f"(nested[i]) : "memory");
}

// (x & mask) | bits as one instruction, whatever becomes of it.
DEVICE u32 mask_or(u32 x, u32 mask, u32 bits) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// Of a lane's rows g and g + 8 of a block, for one group of k.
struct Scales {
  float factor[2], shift[2];
  u32 high[2], low[2], minus[2];  // SPLIT: pairs of the factor's upper and lower part, and of -(128 + zero)

  DEVICE void split(int h, float scale) {
    high[h] = bf16_pair(scale, scale);
    float rest = scale - low_float(high[h]);
    low[h] = bf16_pair(rest, rest);
  }
  DEVICE u32 times(int h, u32 pair) const {
    return fma_bf16x2(pair, high[h], fma_bf16x2(pair, low[h], 0x80008000u));
  }

  // bits: as stored (NF4_DOUBLE: absmax's code, which `absmax2` belongs to). `table`: fill_tables'.
  DEVICE void set(int h, u32 bits, float absmax2, u32 table, float offset) {
    if (FORMAT == INT4 && SPLIT_SCALES) {
      minus[h] = int4_minus(bits & 0xffu);
      split(h, __uint_as_float(bits & 0xffffff00u));
      return;
    }
    if (FORMAT == INT4) {
      factor[h] = __uint_as_float(bits & 0xffffff00u);
      shift[h] = -(float)(128 + (bits & 0xffu)) * factor[h];
    } else if (FORMAT == NF4_DOUBLE)
      factor[h] = nested_absmax(constant_float(table + LEVELS_BYTES + bits * 4), absmax2, offset);
    else factor[h] = __uint_as_float(bits);
    if (FORMAT == INT8 ? SPLIT_SCALES : NF4_PAIRS == 1) split(h, IS_NF4 ? factor[h] * NF4_UNIT : factor[h]);
  }
};

// 16 k of a block, one word a lane (int8: two) -> mma's A fragment. `levels`: this lane's of nf4, table + 4 lane, where
// the table lies at a multiple of 2048.
DEVICE void dequantise(u32 first, u32 second, const Scales& scales, u32 levels, u32 (&pair)[4]) {
  if (FORMAT == INT8) decode_int8(first, second, pair);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float factor = scales.factor[i % 2];
    if (FORMAT == INT8) {
      if (SCALED && SPLIT_SCALES) pair[i] = scales.times(i % 2, pair[i]);
      else if (SCALED) pair[i] = bf16_pair(low_float(pair[i]) * factor, high_float(pair[i]) * factor);
    } else if (FORMAT == INT4) {
      u32 both = mask_or(first >> 4 * i, 0x000f000fu, 0x43004300u);  // 128 + n
      float shift = scales.shift[i % 2];
      if (SPLIT_SCALES) pair[i] = scales.times(i % 2, fma_bf16x2(both, ONE_PAIR, scales.minus[i % 2]));
      else pair[i] = bf16_pair(fmaf(low_float(both), factor, shift), fmaf(high_float(both), factor, shift));
    } else if (NF4_PAIRS) {
      u32 lane = threadIdx.x % 32 * 4, base = levels - lane;
      u32 row = i == 0 ? first << 7 : first >> (8 * i - 7);
      if (NF4_PAIRS == 1) {
        u32 both;
        asm("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(base + mask_or(row, 0x7f80u, lane)));
        pair[i] = scales.times(i % 2, both);
      } else {
        float low, high;
        asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(low), "=f"(high) : "r"(base + mask_or(row, 0x7f80u, lane * 2 & 0x78u)));
        pair[i] = bf16_pair(low * factor, high * factor);
      }
    }
    else {  // level n lies 128 n bytes on
      u32 low = i == 0 ? first << 7 : first >> (8 * i - 7), high = i == 0 ? first << 3 : first >> (8 * i - 3);
      pair[i] = bf16_pair(constant_float((low & 0x780u) | levels) * factor,
                          constant_float((high & 0x780u) | levels) * factor);
    }
  }
}
