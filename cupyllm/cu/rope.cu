// Rotary position embedding (Su et al. 2021), half-split pairing: element i of a head turns with element i + D/2.
//
//   y_i = x_i cos_i - x_{i+D/2} sin_i      y_{i+D/2} = x_{i+D/2} cos_i + x_i sin_i
// Backward is the transpose: the same with -sin (direction -1).
//
// rope_table: the angle is the fp32 product position * inv_freq, as models were trained with; its cosine and sine are
//   taken in double and rounded once, so angles of 40959 radians and more keep all their digits. CUDA's sinf was
//   rejected: its large-argument path keeps an array in local memory.
// Layout: q [N,HQ*D], k [N,HK*D] X_T; cos, sin float [N,D/2], the YaRN factor included. Any D that is even.
// Grid: rope: one CTA of 256 threads a row; rope_table: ceil(N * D/2 / 256). No shared memory.
// Aliasing: q_out may be q and k_out may be k (a pair is read whole before it is written). Outputs are written (=).
// Capability: any.
#include "common.cuh"

#ifndef X_T
#define X_T float
#endif

// Cosine and sine of any float, each within 1e-15 before the one rounding to float. x = quarter * pi/2 + r with pi/2 in
// two parts (106 bits): |quarter| < 2^31 loses nothing that a float can show. Polynomials: fdlibm's kernels (Sun 1993).
DEVICE void cos_sin(float angle, float* cosine, float* sine) {
  i64 nearest = (i64)(angle * 0.63661977236758134308 + (angle < 0.0f ? -0.5 : 0.5));
  double quarter = (double)nearest;
  double r = fma(-quarter, 1.57079632679489655800e+00, (double)angle);
  r = fma(-quarter, 6.12323399573676603587e-17, r);
  double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = fma(s, z, -2.50507602534068634195e-08);
  s = fma(s, z, 2.75573137070700676789e-06);
  s = fma(s, z, -1.98412698298579493134e-04);
  s = fma(s, z, 8.33333333332248946124e-03);
  s = fma(s, z, -1.66666666666666324348e-01);
  s = fma(s * z, r, r);
  double c = -1.13596475577881948265e-11;
  c = fma(c, z, 2.08757232129817482790e-09);
  c = fma(c, z, -2.75573143513906633035e-07);
  c = fma(c, z, 2.48015872894767294178e-05);
  c = fma(c, z, -1.38888888888741095749e-03);
  c = fma(c, z, 4.16666666666666019037e-02);
  c = fma(c * z, z, fma(z, -0.5, 1.0));
  i64 quadrant = nearest & 3;
  double first = quadrant & 1 ? s : c, second = quadrant & 1 ? c : s;
  *cosine = (float)(quadrant == 1 || quadrant == 2 ? -first : first);
  *sine = (float)(quadrant >= 2 ? -second : second);
}

// positions int [N], inv_freq float [half] -> cos, sin float [N,half] (=), times factor.
KERNEL(rope_table)(const int* positions, const float* inv_freq, float* cos, float* sin, i64 num_rows, i64 half,
                   float factor) {
  i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= num_rows * half) return;
  float cosine, sine;
  cos_sin((float)positions[index / half] * inv_freq[index % half], &cosine, &sine);
  cos[index] = cosine * factor;
  sin[index] = sine * factor;
}

// Turns the q and k heads of one row. A tensor that is not wanted has 0 heads.
KERNEL(rope)(const X_T* q, const X_T* k, const float* cos, const float* sin, X_T* q_out, X_T* k_out, i64 num_q_heads,
             i64 num_k_heads, i64 half, float direction) {
  i64 row = blockIdx.x;
  int pairs = (int)((num_q_heads + num_k_heads) * half), width = (int)half;
  for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
    int head = pair / width, i = pair % width;
    bool is_q = head < num_q_heads;
    i64 start = is_q ? (row * num_q_heads + head) * 2 * half : (row * num_k_heads + head - num_q_heads) * 2 * half;
    const X_T* x = (is_q ? q : k) + start;
    X_T* y = (is_q ? q_out : k_out) + start;
    float a = to_float(x[i]), b = to_float(x[i + half]);
    float c = cos[row * half + i], s = sin[row * half + i] * direction;
    y[i] = from_float<X_T>(a * c - b * s);
    y[i + half] = from_float<X_T>(b * c + a * s);
  }
}
