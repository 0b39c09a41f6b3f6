// Programmatic dependent launches, seen from inside. Grid 1, block 1.

#include "common.cuh"

DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Lets the next kernel start, works for `duration` ns, then writes x and when it ended.
extern "C" __global__ void first(i64* x, i64* ended, i64 value, i64 duration) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  u64 start = nanoseconds();
  while (nanoseconds() - start < (u64)duration) {
  }
  *x = value;
  *ended = (i64)nanoseconds();
}

// Notes when it began, waits, then y = x + w.
extern "C" __global__ void second(const i64* x, const i64* w, i64* y, i64* began) {
  i64 weight = *w;
  *began = (i64)nanoseconds();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  *y = *(volatile const i64*)x + weight;
}
