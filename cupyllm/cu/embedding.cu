// Embedding: y[n] = weight[ids[n]], converted to the activation type. Backward: d_weight[v] = sum of d_y[n] over the n
// with ids[n] = v.
//
// Shapes: N positions, V vocabulary, C hidden; ids int [N] in [0,V) (checked on the host: nothing is clamped here),
// weight [V,C], y and d_y [N,C], d_weight float [V,C]. Macros: X_T (float or bf16), W_T (float, bf16 or f16).
//
// Deterministic backward without atomics: equal ids are chained from position to position, and whoever comes first
// sums the rows of its chain, in order of position, in fp32 (two levels: a padding or newline id may come 10^5 times).
// A block for each vocabulary row was rejected: V*N id reads. Sorting was: three more kernels for no less memory traffic.
#include "common.cuh"

#define THREADS 256
#define PROMOTE 128

// y =. Grid: N, block 256.
KERNEL(embedding_forward)(const int* ids, const W_T* weight, X_T* y, i64 C) {
  i64 n = blockIdx.x;
  const W_T* row = weight + (i64)ids[n] * C;
  for (i64 c = threadIdx.x; c < C; c += THREADS) y[n * C + c] = from_float<X_T>(to_float(row[c]));
}

// next[n] = the smallest later position with the same id, or -1; first[n] = whether no earlier position has it.
// Grid: ceil(N / 256), block 256. N^2 id reads in the worst case, neighbouring threads reading neighbouring ids.
KERNEL(embedding_chain)(const int* ids, int* next, int* first, i64 N) {
  i64 n = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (n >= N) return;
  int id = ids[n];
  i64 later = n + 1, earlier = n - 1;
  while (later < N && ids[later] != id) later++;
  while (earlier >= 0 && ids[earlier] != id) earlier--;
  next[n] = later < N ? (int)later : -1;
  first[n] = earlier < 0;
}

// d_weight[ids[n]] += the chain that starts at n; rows that no id names, and row padding_idx (-1: none), stay.
// Grid: (N, ceil(C / 256)), block 256.
KERNEL(embedding_backward)
(const X_T* d_y, const int* ids, const int* next, const int* first, float* d_weight, i64 C, i64 padding_idx) {
  i64 n = blockIdx.x, c = (i64)blockIdx.y * THREADS + threadIdx.x;
  i64 id = ids[n];
  if (!first[n] || id == padding_idx || c >= C) return;
  float total = 0.0f;
  while (n >= 0) {
    float partial = 0.0f;
    for (int terms = 0; terms < PROMOTE && n >= 0; terms++, n = next[n]) partial += to_float(d_y[n * C + c]);
    total += partial;
  }
  d_weight[id * C + c] += total;
}

// d_weight[i] = 0 for n elements, where gradients are written and not added. Grid: ceil(n / 256), block 256.
KERNEL(embedding_zero)(float* d_weight, i64 n) {
  i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i < n) d_weight[i] = 0.0f;
}
