// The GPU's read bandwidth: every byte of a buffer, once, by 16-byte loads.
//
// Grid: a few CTAs an SM; block 512. Each thread has eight loads in flight, a grid apart. The exclusive or of all that a
// thread reads is written only where it is a value that it cannot be expected to be, which the compiler does not know.

#include "common.cuh"

#define UNROLL 8

extern "C" __global__ void __launch_bounds__(512) bench_read(const uint4* __restrict__ x, uint4* y, i64 count) {
  i64 step = (i64)gridDim.x * blockDim.x;
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += UNROLL * step) {
    uint4 read[UNROLL];
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      read[j] = make_uint4(0, 0, 0, 0);
      if (i + j * step < count)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(read[j].x), "=r"(read[j].y), "=r"(read[j].z), "=r"(read[j].w)
                     : "l"(x + i + j * step));
    }
#pragma unroll
    for (int j = 0; j < UNROLL; ++j) {
      sum.x ^= read[j].x;
      sum.y ^= read[j].y;
      sum.z ^= read[j].z;
      sum.w ^= read[j].w;
    }
  }
  if (sum.x == 0x12345678 && sum.y == 0x9abcdef0 && sum.z == 0x0fedcba9 && sum.w == 0x87654321) *y = sum;
}
