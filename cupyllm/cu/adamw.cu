// AdamW (Loshchilov and Hutter 2019) in the order of torch.optim.AdamW, on float32 state.
//
//   g = grad_scale * gradient
//   p *= 1 - lr weight_decay;   m += (1 - beta1) (g - m);   v = beta2 v + (1 - beta2) g^2
//   p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// Scalars come from device memory, since they change every step while the launch stays bound; ops/adamw.py packs them.
//
// Layout: p, g, m, v float [n]; p16 P16_T [n] or null; scalars float [8].
// Grid: ceil(n / 256), 256 threads, one element a thread, no shared memory. Elementwise, so deterministic.
// Accumulation: p, m and v are updated in place, g is read only, p16 is written (=) with p rounded to nearest even.
// Aliasing: the arrays must not overlap. Capability: any.
#include "common.cuh"

#ifndef P16_T
#define P16_T bf16
#endif

KERNEL(adamw)(float* p, const float* g, float* m, float* v, P16_T* p16, const float* scalars, i64 n) {
  i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= n) return;
  float decay = scalars[0], one_minus_beta1 = scalars[1], beta2 = scalars[2], one_minus_beta2 = scalars[3];
  float step_size = scalars[4], root_correction = scalars[5], eps = scalars[6], grad_scale = scalars[7];
  float grad = g[index] * grad_scale, param = p[index] * decay;
  float first = m[index], second = v[index];
  first += one_minus_beta1 * (grad - first);
  second = second * beta2 + one_minus_beta2 * grad * grad;
  param -= step_size * first / (sqrtf(second) / root_correction + eps);
  p[index] = param;
  m[index] = first;
  v[index] = second;
  if (p16) p16[index] = from_float<P16_T>(param);
}
