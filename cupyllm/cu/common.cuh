// Shared by every kernel: scalar types, conversions, warp and block sums.
//
// No CUDA header is included: NVRTC then needs no header wheel and a plain kernel compiles in a fraction of a second.
// bf16 and fp16 live in memory only; all arithmetic is fp32. Conversions to 16 bits round to nearest, ties to even.
// Kernel ABI (backend/base.py): integers are i64, pointers are 16-byte aligned, floats are float or double.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

#ifndef SUFFIX
#define SUFFIX
#endif
#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
// KERNEL(rmsnorm_forward)(...) defines the symbol rmsnorm_forward_<dtypes>, as backend/base.py's kernel() names it.
#define KERNEL(name) extern "C" __global__ void CONCAT(name, SUFFIX)

#define DEVICE __device__ __forceinline__
#define FULL_MASK 0xffffffffu

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float to_float(f16 x) {
#ifdef CUPYLLM_HOST  // the test emulator compiles kernels with a C++ compiler
  return (float)__builtin_bit_cast(_Float16, x.bits);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#endif
}

template <typename T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) {
  u32 u = __float_as_uint(x);
  bf16 y;
  if ((u & 0x7fffffffu) > 0x7f800000u)
    y.bits = (unsigned short)((u >> 16) | 0x40u);  // a quiet NaN stays a NaN
  else
    y.bits = (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  return y;
}
template <> DEVICE f16 from_float<f16>(float x) {
  f16 y;
#ifdef CUPYLLM_HOST
  y.bits = __builtin_bit_cast(unsigned short, (_Float16)x);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
  return y;
}

// x rounded through T and back: what a store followed by a load gives.
template <typename T> DEVICE float round_to(float x) { return to_float(from_float<T>(x)); }

// Sum over the 32 lanes of a warp, the same value in every lane; butterfly order, so the result is deterministic.
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(FULL_MASK, x, lane);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, lane));
  return x;
}

// Sum over a block of THREADS (a multiple of 32), the same value in every thread. `shared` holds THREADS / 32 floats and
// may be reused by the caller after the call (two barriers inside).
template <int THREADS> DEVICE float block_sum(float x, float* shared) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; warp++) total += shared[warp];
  __syncthreads();
  return total;
}
