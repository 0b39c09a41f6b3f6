// RMSNorm (Zhang and Sennrich 2019), Hugging Face's order: r = (mean(x^2) + eps)^(-1/2) in fp32, n = x r rounded to the
// activation type, y = n weight rounded again. A row of H*D elements is H chunks of D: H = 1 over the hidden size,
// H heads for q_norm and k_norm. Backward, with g = d_y weight and the unrounded n = x r:
//   d_x = r (g - n mean(g n))        d_weight = sum over chunks of d_y n
//
// Shapes: R = N*H chunks, D their size; x, y, d_y, d_x [R,D], weight [D], rstd float [R], d_weight float [D]. Any R, D.
// Macros: X_T activations (float or bf16), W_T the weight (float, bf16 or f16).
// Two forms of the same maths: _warp gives each chunk a warp (small D: head sizes), _block a block of 256 (large D).
// Sums in fp32: a thread adds every 32nd (256th) element, then butterflies. A chunk's bits depend on nothing but the
// chunk. d_weight: slabs of chunks are summed apart into a scratch, then in order of slab: deterministic, no atomics.
#include "common.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define PROMOTE 128  // terms of a partial sum before it is added to a total

// How a chunk's threads are found: `group` threads, this one is `lane`; sum() adds over the group, same in every thread.
struct Warp {
  static const int group = 32;
  DEVICE static i64 chunk() { return (i64)blockIdx.x * WARPS + threadIdx.x / 32; }
  DEVICE static int lane() { return threadIdx.x % 32; }
  DEVICE static float sum(float x) { return warp_sum(x); }
};
struct Block {
  static const int group = THREADS;
  DEVICE static i64 chunk() { return blockIdx.x; }
  DEVICE static int lane() { return threadIdx.x; }
  DEVICE static float sum(float x) {
    __shared__ float shared[WARPS];
    return block_sum<THREADS>(x, shared);
  }
};

// A whole warp or block leaves together when its chunk is past the end, so the sums' barriers stay uniform.
template <typename G> DEVICE void forward(const X_T* x, const W_T* weight, X_T* y, float* rstd, i64 R, i64 D, float eps) {
  i64 chunk = G::chunk();
  if (chunk >= R) return;
  x += chunk * D;
  y += chunk * D;
  float squares = 0.0f;
  for (i64 d = G::lane(); d < D; d += G::group) {
    float value = to_float(x[d]);
    squares = fmaf(value, value, squares);
  }
  float r = 1.0f / sqrtf(G::sum(squares) / (float)D + eps);
  for (i64 d = G::lane(); d < D; d += G::group)
    y[d] = from_float<X_T>(round_to<X_T>(to_float(x[d]) * r) * to_float(weight[d]));
  if (G::lane() == 0) rstd[chunk] = r;
}

template <typename G>
DEVICE void backward(const X_T* d_y, const X_T* x, const W_T* weight, const float* rstd, X_T* d_x, i64 R, i64 D) {
  i64 chunk = G::chunk();
  if (chunk >= R) return;
  d_y += chunk * D;
  x += chunk * D;
  d_x += chunk * D;
  float r = rstd[chunk], dot = 0.0f;
  for (i64 d = G::lane(); d < D; d += G::group)
    dot = fmaf(to_float(d_y[d]) * to_float(weight[d]), to_float(x[d]) * r, dot);
  float mean = G::sum(dot) / (float)D;
  for (i64 d = G::lane(); d < D; d += G::group) {
    float g = to_float(d_y[d]) * to_float(weight[d]), n = to_float(x[d]) * r;
    d_x[d] = from_float<X_T>(r * fmaf(-n, mean, g));
  }
}

// y =, rstd =. y must not alias x. Grid: ceil(R / 8), block 256.
KERNEL(rmsnorm_forward_warp)(const X_T* x, const W_T* weight, X_T* y, float* rstd, i64 R, i64 D, float eps) {
  forward<Warp>(x, weight, y, rstd, R, D, eps);
}

// The same for large D. Grid: R, block 256.
KERNEL(rmsnorm_forward_block)(const X_T* x, const W_T* weight, X_T* y, float* rstd, i64 R, i64 D, float eps) {
  forward<Block>(x, weight, y, rstd, R, D, eps);
}

// d_x =; must not alias d_y or x (d_weight reads both afterwards). Grid: ceil(R / 8), block 256.
KERNEL(rmsnorm_backward_warp)
(const X_T* d_y, const X_T* x, const W_T* weight, const float* rstd, X_T* d_x, i64 R, i64 D) {
  backward<Warp>(d_y, x, weight, rstd, d_x, R, D);
}

// The same for large D. Grid: R, block 256.
KERNEL(rmsnorm_backward_block)
(const X_T* d_y, const X_T* x, const W_T* weight, const float* rstd, X_T* d_x, i64 R, i64 D) {
  backward<Block>(d_y, x, weight, rstd, d_x, R, D);
}

// slabs[s,d] = sum of d_y n over the chunks [s * slab_chunks, (s + 1) * slab_chunks). slabs [S,D] =.
// Grid: ceil(D / 32) * S, slab slowest; block 256: lane = column, warp w adds the slab's chunks w, w + 8, ..
KERNEL(rmsnorm_backward_weight)
(const X_T* d_y, const X_T* x, const float* rstd, float* slabs, i64 R, i64 D, i64 slab_chunks) {
  __shared__ float totals[WARPS][32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 column_tiles = (D + 31) / 32;
  i64 slab = blockIdx.x / column_tiles, d = blockIdx.x % column_tiles * 32 + lane;
  i64 begin = slab * slab_chunks, end = begin + slab_chunks < R ? begin + slab_chunks : R;
  float total = 0.0f;
  if (d < D)
    for (i64 first = begin + warp; first < end; first += WARPS * PROMOTE) {
      i64 last = first + WARPS * PROMOTE < end ? first + WARPS * PROMOTE : end;
      float partial = 0.0f;
      for (i64 chunk = first; chunk < last; chunk += WARPS)
        partial = fmaf(to_float(d_y[chunk * D + d]), to_float(x[chunk * D + d]) * rstd[chunk], partial);
      total += partial;
    }
  totals[warp][lane] = total;
  __syncthreads();
  if (warp == 0 && d < D) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += totals[w][lane];
    slabs[slab * D + d] = sum;
  }
}

// d_weight[d] = (or +=) sum of slabs[s,d] over the S slabs, in order, PROMOTE at a time. Grid: ceil(D / 256), block 256.
KERNEL(rmsnorm_backward_weight_sum)(const float* slabs, float* d_weight, i64 S, i64 D, i64 accumulate) {
  i64 d = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (d >= D) return;
  float total = 0.0f;
  for (i64 first = 0; first < S; first += PROMOTE) {
    i64 last = first + PROMOTE < S ? first + PROMOTE : S;
    float partial = 0.0f;
    for (i64 s = first; s < last; s++) partial += slabs[s * D + d];
    total += partial;
  }
  d_weight[d] = accumulate ? d_weight[d] + total : total;
}
