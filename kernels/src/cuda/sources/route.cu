// Routing of rows to experts, before and after the experts' matrix products.
//
// A pair is a row and one of its experts: pair = row * top_k + slot. The slots of a row hold its experts in ascending
// order, and `sum_experts` adds them in this order. All lists are in the order of pairs. So nothing here depends on the
// order in which blocks run, and no sum depends on the number of rows. The host does not need the number of rows per
// expert.
constexpr int THREADS = 256;
constexpr u32 WARPS = THREADS / 32;

// Key by which experts are chosen: by logit and, among equal logits, by the lower index. NaN is above infinity. No key
// is 0, and no key has all bits set.
DEVICE u64 order_of(float logit, u32 expert) { return (u64)key_of(logit) << 32 | (0x7fffffffu - expert); }

DEVICE u64 largest_of_warp(u64 x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const u64 other = __shfl_xor_sync(ALL_LANES, x, mask);
    x = other > x ? other : x;
  }
  return x;
}

// Chooses the experts of each row and computes their weights: one warp per row. A weight is the softmax over all logits
// of the row. A logit that is NaN or positive infinity makes the sum of the softmax NaN, and then all weights of the
// row are NaN.
KERNEL(THREADS) route_rows(const float* logits, u32 rows, u32 experts, u32 top_k, u32 renormalise, u32* chosen, float* weights) {
  BEGIN(route_rows);
  const u32 lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  logits += (size_t)row * experts;
  u64 last = ~0ull, first = 0;
  for (u32 i = 0; i < top_k; i++) {
    u64 next = 0;
    for (u32 expert = lane; expert < experts; expert += 32) {
      const u64 order = order_of(logits[expert], expert);
      if (order < last && order > next) next = order;
    }
    last = largest_of_warp(next);
    if (i == 0) first = last;
  }
  const float most = float_of((u32)(first >> 32));
  float sum = 0.f, part = 0.f;
  for (u32 expert = lane; expert < experts; expert += 32) {
    const float power = exp_(__fsub_rn(logits[expert], most));
    sum = __fadd_rn(sum, power);
    if (order_of(logits[expert], expert) >= last) part = __fadd_rn(part, power);
  }
  sum = warp_sum(sum), part = warp_sum(part);
  // The sum of the chosen weights. It is NaN if the sum over all experts is NaN.
  part = __fdiv_rn(part, sum);
  u32 pair = row * top_k;
  for (u32 begin = 0; begin < experts; begin += 32) {
    const u32 expert = begin + lane;
    const float logit = expert < experts ? logits[expert] : 0.f;
    const bool is_chosen = expert < experts && order_of(logit, expert) >= last;
    const u32 all = __ballot_sync(ALL_LANES, is_chosen);
    if (is_chosen) {
      const u32 at = pair + __popc(all & ((1u << lane) - 1));
      const float weight = __fdiv_rn(exp_(__fsub_rn(logit, most)), sum);
      chosen[at] = expert;
      weights[at] = renormalise ? __fdiv_rn(weight, part) : weight;
    }
    pair += __popc(all);
  }
}

// Lists the pairs of each expert in ascending order, and counts them: one thread block per expert. `totals` counts the
// pairs of all launches. This rank holds `held` experts from `first` on, and each of these has a list of `capacity`
// entries. Pairs of other experts are only counted.
KERNEL(THREADS) group_rows(const u32* chosen, u32 pairs, u32 first, u32 held, u32 capacity, u32* counts, u32* lists, u64* totals) {
  BEGIN(group_rows);
  __shared__ u32 of_warp[WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, expert = blockIdx.x;
  // Each warp handles consecutive pairs. The warp first counts the expert's pairs, and then stores them after the pairs
  // of the earlier warps.
  const u32 share = (pairs + THREADS - 1) / THREADS * 32, begin = warp * share, end = min(begin + share, pairs);
  u32 count = 0;
  for (u32 at = begin + lane; at - lane < end; at += 32) count += at < end && chosen[at] == expert;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) count += __shfl_xor_sync(ALL_LANES, count, mask);
  if (lane == 0) of_warp[warp] = count;
  __syncthreads();
  u32 place = 0, all = 0;
#pragma unroll
  for (u32 other = 0; other < WARPS; other++) {
    if (other < warp) place += of_warp[other];
    all += of_warp[other];
  }
  if (threadIdx.x == 0) totals[expert] += all;
  const u32 local = expert - first;  // of an expert before the first it is beyond all that are here
  if (local >= held) return;
  if (threadIdx.x == 0) counts[local] = all;
  lists += (size_t)local * capacity;
  for (u32 at = begin + lane; at - lane < end; at += 32) {
    const bool is_own = at < end && chosen[at] == expert;
    const u32 own = __ballot_sync(ALL_LANES, is_own);
    if (is_own) lists[place + __popc(own & ((1u << lane) - 1))] = at;
    place += __popc(own);
  }
}

// out[row] = the weighted sum of the outputs of the row's experts, without the experts of other ranks. One thread per
// element.
KERNEL(THREADS) sum_experts(const float* outputs, const u32* chosen, const float* weights, u32 top_k, u32 first, u32 held, u32 width,
                            u64 count, float* out) {
  BEGIN(sum_experts);
  const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= count) return;
  const u32 pair = (u32)(i / width) * top_k, column = (u32)(i % width);
  float sum = 0.f;
  for (u32 at = pair; at < pair + top_k; at++) {
    if (chosen[at] - first >= held) continue;
    sum = __fadd_rn(sum, __fmul_rn(weights[at], outputs[(size_t)at * width + column]));
  }
  out[i] = sum;
}
