// Writes the keys and values of new tokens into the pages of the KV cache: pages[slots[n]] = row n, bits unchanged.
//
// Layout: k, v [N,W]; k_pages, v_pages [num_slots,W] (num_slots = pages * tokens of a page; W = HK*D); slots int [N].
// Grid: N, block 256. A slot outside [0,num_slots), -1 by custom, writes nothing. The slots of a call are distinct.
// In place: every other slot stays as it is. Deterministic.
#include "common.cuh"

#define THREADS 256

KERNEL(kv_append_forward)(const X_T* k, const X_T* v, X_T* k_pages, X_T* v_pages, const int* slots, i64 width,
                          i64 num_slots) {
  i64 n = blockIdx.x, slot = slots[n];
  if (slot < 0 || slot >= num_slots) return;
  for (i64 c = threadIdx.x; c < width; c += THREADS) {
    k_pages[slot * width + c] = k[n * width + c];
    v_pages[slot * width + c] = v[n * width + c];
  }
}
