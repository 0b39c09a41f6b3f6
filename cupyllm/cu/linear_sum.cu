// Linear's split sums: C[i] = (or +=) sum_s parts[s,i] + bias[i mod cols], s in order.
//
// linear_mma.cu writes parts [slices,size] float, one for each range of k; C is bf16 or float, rounded once.
// Macros: C_T, WIDTH: elements of a thread, 4 (size and cols multiples of 4) or 1.
// Launch: block 128; grid ceil(size / (128 WIDTH)). May be launched programmatically: it waits before it reads.
// Numerics: fp32, in order of s, then bias, then with `accumulate` the old C. Deterministic; no atomics.
// Aliasing: C must not overlap parts or bias. Capability: 8.0.
#include "common.cuh"

#define THREADS 128

struct alignas(4 * WIDTH) Floats { float v[WIDTH]; };
struct alignas(sizeof(C_T) * WIDTH) Results { C_T v[WIDTH]; };

KERNEL(linear_sum)(const float* parts, const bf16* bias, C_T* c, i64 size, i64 cols, i64 slices, i64 accumulate) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // the next kernel, which waits for this one's end
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  i64 first = ((i64)blockIdx.x * THREADS + threadIdx.x) * WIDTH;
  if (first >= size) return;
  Floats sum = *(const Floats*)(parts + first);
#pragma unroll 8
  for (i64 s = 1; s < slices; s++) {
    Floats part = *(const Floats*)(parts + s * size + first);
#pragma unroll
    for (int e = 0; e < WIDTH; e++) sum.v[e] += part.v[e];
  }
  if (bias) {
    i64 col = first % cols;
#pragma unroll
    for (int e = 0; e < WIDTH; e++) sum.v[e] += to_float(bias[col + e]);
  }
  Results* target = (Results*)(c + first);
  if (accumulate) {
    Results old = *target;
#pragma unroll
    for (int e = 0; e < WIDTH; e++) sum.v[e] += to_float(old.v[e]);
  }
  Results made;
#pragma unroll
  for (int e = 0; e < WIDTH; e++) made.v[e] = from_float<C_T>(sum.v[e]);
  *target = made;
}
