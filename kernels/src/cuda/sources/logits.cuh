// Statistics of a row of logits, which a block computes.
//
// Sums of probabilities are integers in units of 2^-44, where the likeliest token of a row counts as 1. Integers have
// the same sum in any order. A row's sum stays below 2^63 for up to 2^19 tokens.
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Values of Result::status. kernels/src/cuda/results.rs turns them into errors.
constexpr u32 SAMPLED = 0, NOT_A_NUMBER = 1, NOT_FINITE = 2, NO_TOKEN = 3;

// Result of a sampled or scored row for the host. The host computes logprobs from it, in f64.
struct Result {
  u32 token, status;
  float logit;    // of the token, before penalties and bias
  float largest;  // logit of the row
  u64 sum;        // of exp(logit - largest)
  u32 rank;       // 1 + the number of strictly larger logits
  u32 tops;       // number of likeliest tokens that follow
};
struct Top {
  u32 token;
  float logit;
};

// The largest logit and its token; among equal logits, the lowest token id. `nan` is set if any logit was NaN.
struct Best {
  float logit;
  u32 token, nan;
};
constexpr u32 NO_ID = 0xffffffffu;

DEVICE Best better(Best a, Best b) {
  u32 nan = a.nan | b.nan;
  Best best = b.logit > a.logit || (b.logit == a.logit && b.token < a.token) ? b : a;
  best.nan = nan;
  return best;
}

// True if a mask allows a token: bit `token % 32` of word `token / 32`. A null mask allows all.
DEVICE bool is_allowed(const u32* mask, u32 token) { return !mask || mask[token >> 5] >> (token & 31) & 1; }

DEVICE u64 fixed(float weight) { return (u64)__fmul_rn(weight, 17592186044416.f); }

// Merges the bests of a block's threads. All threads get the result.
DEVICE Best block_best(Best mine) {
  __shared__ Best bests[WARPS];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    Best other;
    other.logit = __shfl_xor_sync(ALL_LANES, mine.logit, mask);
    other.token = __shfl_xor_sync(ALL_LANES, mine.token, mask);
    other.nan = __shfl_xor_sync(ALL_LANES, mine.nan, mask);
    mine = better(mine, other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = mine;
  __syncthreads();
  Best best = bests[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) best = better(best, bests[warp]);
  return best;
}

// Returns the best logit after (logit, token), in the order of descending logits and ascending ids.
DEVICE Best best_after(const float* logits, u32 count, float logit, u32 token) {
  Best mine = {-INF, NO_ID, 0};
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    float x = logits[i];
    bool after = x < logit || (x == logit && i > token);
    if (after) mine = better(mine, Best{x, i, 0});
  }
  return block_best(mine);
}

DEVICE Best best_of(const float* logits, u32 count) {
  Best mine = {-INF, NO_ID, 0};
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    float x = logits[i];
    mine = better(mine, Best{x, i, x != x});
  }
  return block_best(mine);
}

DEVICE u32 status_of(Best best) {
  if (best.nan) return NOT_A_NUMBER;
  return best.token != NO_ID && best.logit < INF && best.logit > -INF ? SAMPLED : NOT_FINITE;
}

DEVICE u64 warp_sum_of(u64 x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
  return x;
}

DEVICE u64 block_sum_of(u64 mine) {
  __shared__ u64 sums[WARPS];
  mine = warp_sum_of(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
  __syncthreads();
  u64 sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += sums[warp];
  return sum;
}

// Writes the numbers from which the host computes the logprobs of `token` and of the `tops` likeliest tokens.
DEVICE void score(const float* logits, u32 count, u32 token, u32 tops, Best best, Result* result, Top* list) {
  float logit = logits[token];
  u64 sum = 0, above = 0;
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    sum += fixed(exp_(__fsub_rn(logits[i], best.logit)));
    above += logits[i] > logit;
  }
  sum = block_sum_of(sum), above = block_sum_of(above);
  if (threadIdx.x == 0) {
    result->logit = logit, result->largest = best.logit;
    result->sum = sum, result->rank = 1 + (u32)above, result->tops = tops;
  }
  for (u32 i = 0; i < tops; i++) {
    if (threadIdx.x == 0) list[i] = Top{best.token, best.logit};
    best = best_after(logits, count, best.logit, best.token);
  }
}
