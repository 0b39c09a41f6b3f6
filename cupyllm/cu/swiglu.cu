// SwiGLU (Shazeer 2020): y = silu(gate) up, silu(g) = g s, s = 1 / (1 + exp(-g)).
// Backward: d_gate = d_y up s (1 + g (1 - s)), d_up = d_y g s; s is recomputed, nothing but the inputs is kept.
//
// gate, up, y and gradients: n elements of X_T (float or bf16), one thread each. Grid: ceil(n / 256), block 256.
// All fp32, rounded once at the end. Deterministic.
#include "common.cuh"

#define THREADS 256

// s and 1 - s, both to full relative accuracy: the exponential is of a negative number, so it never overflows, and
// 1 - s is never a difference. 1 / (1 + exp(-g)) as written gives s = 0 below g = -88 and 1 - s = 0 above g = 17.
DEVICE void sigmoid(float g, float& s, float& one_minus_s) {
  float e = expf(-fabsf(g)), large = 1.0f / (1.0f + e), small = e * large;
  s = g >= 0.0f ? large : small;
  one_minus_s = g >= 0.0f ? small : large;
}

// y =; may alias gate or up.
KERNEL(swiglu_forward)(const X_T* gate, const X_T* up, X_T* y, i64 n) {
  i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  float g = to_float(gate[i]), s, one_minus_s;
  sigmoid(g, s, one_minus_s);
  y[i] = from_float<X_T>(g * s * to_float(up[i]));
}

// d_gate = and d_up =; either may be null (not wanted), and each may alias an input.
KERNEL(swiglu_backward)(const X_T* d_y, const X_T* gate, const X_T* up, X_T* d_gate, X_T* d_up, i64 n) {
  i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  float d = to_float(d_y[i]), g = to_float(gate[i]), u = to_float(up[i]), s, one_minus_s;
  sigmoid(g, s, one_minus_s);
  if (d_gate) d_gate[i] = from_float<X_T>(d * u * (s * (1.0f + g * one_minus_s)));
  if (d_up) d_up[i] = from_float<X_T>(d * (g * s));
}
