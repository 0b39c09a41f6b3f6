// Softmax cross-entropy and argmax of a row of logits in one pass; its gradient.
//
//   loss = lse - x_label,  lse = m + log sum_v exp(x_v - m)        d_x_v = (exp(x_v - lse) - [v = label]) d_loss
// argmax: the lowest id among the largest of the first `valid_vocab` logits (a NaN counts as largest); ids beyond stay in
// the softmax. Label -100 is not scored: loss 0, gradient 0. Labels are checked on the host; one that is out of range
// all the same gives a NaN loss, never a read out of bounds.
//
// Layout: logits, d_logits [N,V] X_T; labels, argmax int [N]; loss, lse, d_loss float [N].
// Grid: one CTA of 256 threads a row. Shared: 4 KiB. No alignment asked of a row (V may be odd).
// Numerics: fp32, two levels: a thread adds 8 terms, then those sums; threads are combined in a fixed tree.
//   The running maximum is rescaled once per 8 terms (Milakov and Gimelshein 2018).
// An inf or NaN among the logits surfaces in the loss. Outputs are written (=).
// Aliasing: d_logits may be logits: every element is read, then written, by one thread.
// Capability: any.
#include "common.cuh"

#ifndef X_T
#define X_T float
#endif

#define THREADS 256
#define TERMS 8
#define IGNORED -100
#define NO_ID 0x7fffffff

// A set of logits: max, sum of exp(x - max), and the best id with its logit. An empty set has max -inf and sum 0.
struct State { float max, sum, best; int id; };

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// While the maximum is -inf subtract 0: exp(-inf) is 0, but exp(-inf + inf) would be NaN.
DEVICE float shift_of(float max) { return max == minus_infinity() ? 0.0f : max; }

// Whether logit x of id i beats y of id j: larger, or NaN against a number; at a tie the lower id.
DEVICE bool beats(float x, int i, float y, int j) {
  bool x_nan = x != x, y_nan = y != y;
  if (x_nan != y_nan) return x_nan;
  return x > y || ((x == y || x_nan) && i < j);
}

DEVICE State combine(State a, State b) {
  State c = beats(b.best, b.id, a.best, a.id) ? b : a;
  c.max = fmaxf(a.max, b.max);
  float shift = shift_of(c.max);
  c.sum = a.sum * expf(a.max - shift) + b.sum * expf(b.max - shift);
  return c;
}

KERNEL(cross_entropy_forward)(const X_T* logits, const int* labels, float* loss, int* argmax, float* lse, i64 vocab,
                              i64 valid_vocab) {
  __shared__ State states[THREADS];
  const X_T* row = logits + (i64)blockIdx.x * vocab;
  State state = {minus_infinity(), 0.0f, minus_infinity(), NO_ID};
  for (i64 start = threadIdx.x; start < vocab; start += THREADS * TERMS) {
    float x[TERMS], max = state.max;
#pragma unroll
    for (int t = 0; t < TERMS; t++) {
      i64 id = start + t * THREADS;
      x[t] = id < vocab ? to_float(row[id]) : minus_infinity();
      max = fmaxf(max, x[t]);
      if (id < valid_vocab && beats(x[t], (int)id, state.best, state.id)) {
        state.best = x[t];
        state.id = (int)id;
      }
    }
    float shift = shift_of(max), part = 0.0f;
#pragma unroll
    for (int t = 0; t < TERMS; t++) part += expf(x[t] - shift);
    state.sum = state.sum * expf(state.max - shift) + part;
    state.max = max;
  }
  states[threadIdx.x] = state;
  for (int half = THREADS / 2; half > 0; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) states[threadIdx.x] = combine(states[threadIdx.x], states[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) {
    State all = states[0];
    int label = labels[blockIdx.x];
    float shift = shift_of(all.max), log_sum = logf(all.sum), result = 0.0f;
    if (label != IGNORED) {
      bool in_range = label >= 0 && label < vocab;
      float target = in_range ? to_float(row[label]) : __uint_as_float(0x7fc00000u);
      result = log_sum + (shift - target);  // more exact than lse - target where the logits are large
    }
    loss[blockIdx.x] = result;
    lse[blockIdx.x] = shift + log_sum;
    argmax[blockIdx.x] = all.id;
  }
}

// No __restrict__: d_logits may be logits.
KERNEL(cross_entropy_backward)(const X_T* logits, const int* labels, const float* lse, const float* d_loss,
                               X_T* d_logits, i64 vocab) {
  i64 start = (i64)blockIdx.x * vocab;
  int label = labels[blockIdx.x];
  float row_lse = lse[blockIdx.x], factor = d_loss[blockIdx.x];
  for (i64 id = threadIdx.x; id < vocab; id += THREADS) {
    float d = 0.0f;
    if (label != IGNORED) d = (expf(to_float(logits[start + id]) - row_lse) - (id == label ? 1.0f : 0.0f)) * factor;
    d_logits[start + id] = from_float<X_T>(d);
  }
}
