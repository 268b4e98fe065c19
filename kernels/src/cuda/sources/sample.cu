// Sampling and scores: one thread block per request, over the request's row of logits.
//
// The order of operations is that of the CPU device (kernels/src/cpu/sampling/sample.rs). Mask, bias, forbidden tokens,
// repetition, frequency and presence penalties come first. Then the likeliest token is taken, or temperature, min-p,
// top-k, top-p and one draw by inversion over ascending token ids follow. The random number is Philox4x32-10 of (seed,
// position); see Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

// One request. A list is given by the index of its first word in `words` and its length.
struct Task {
  u64 seed, position;
  u32 row;        // of the logits
  u32 slot;       // that keeps the token; 0: none
  u32 continues;  // 1: the slot's last token belongs to the output, behind `output`
  u32 scores;     // 1: write a score
  float temperature, min_p, top_p, repetition, presence, frequency;
  u32 top_k, tops, first_top;
  u32 bias, bias_count;  // pairs of a token id and the bits of an f32
  u32 forbidden, forbidden_count;
  u32 prompt, prompt_count;
  u32 output, output_count;
  u32 adjusts;  // 1: mask, bias, forbidden tokens or penalties change the logits
  u32 result;   // index of the result
  u32 allowed;  // first word of the mask in `words`; 0: none
};

DEVICE u64 philox(u64 seed, u64 position) {
  u32 c0 = (u32)position, c1 = (u32)(position >> 32), c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u32 even = __umulhi(0xd2511f53u, c0), odd = __umulhi(0xcd9e8d57u, c2);
    u32 low_even = 0xd2511f53u * c0, low_odd = 0xcd9e8d57u * c2;
    c0 = odd ^ c1 ^ k0, c1 = low_odd, c2 = even ^ c3 ^ k1, c3 = low_even;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return c0 | (u64)c1 << 32;
}

// Returns the first index at which the running sum, with this index's value, exceeds `target`; `count` if there is
// none.
template <class Value>
DEVICE u32 locate(u32 count, u64 target, Value value) {
  __shared__ u64 sums[WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 begin = 0, end = count;
  u64 below = 0;
  // Each warp sums one of eight parts of the range. The first part that reaches the target becomes the range.
  while (end - begin > 256) {
    const u32 part = (end - begin + WARPS - 1) / WARPS;
    u64 sum = 0;
    for (u32 i = lane; i < part; i += 32) {
      u32 at = begin + warp * part + i;
      if (at < end) sum += value(at);
    }
    sum = warp_sum_of(sum);
    __syncthreads();
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    u32 chosen = 0;
    while (chosen < WARPS && below + sums[chosen] <= target) below += sums[chosen++];
    if (chosen == WARPS) return count;
    begin += chosen * part;
    end = end - begin < part ? end : begin + part;
  }
  // Every warp scans the remaining range, so that all threads get the result.
  for (; begin < end; begin += 32) {
    u64 sum = begin + lane < end ? value(begin + lane) : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      u64 before = __shfl_up_sync(ALL_LANES, sum, step);
      if (lane >= step) sum += before;
    }
    u32 reached = __ballot_sync(ALL_LANES, below + sum > target);
    if (reached) return begin + __ffs(reached) - 1;
    below += __shfl_sync(ALL_LANES, sum, 31);
  }
  return count;
}

// The last candidate that is kept. Candidates are ordered by descending weights and ascending ids.
struct Cut {
  u32 key, id;  // key: the bits of the weight, which ascend with it
  u64 mass;     // of all kept candidates
};

// Finds the last candidate to keep: the `wanted`-th one or, with BY_MASS, the first one with which the sum of the
// weights reaches `wanted`. This is a radix search by eight bits of the weight per pass.
template <bool BY_MASS>
DEVICE Cut select(const float* weights, u32 count, u64 wanted) {
  __shared__ u32 counts[256];
  __shared__ u64 masses[256];
  u32 prefix = 0;
  u64 mass = 0, number = 0;  // of the candidates above the buckets that are looked at
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += THREADS) counts[i] = 0, masses[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      u32 key = __float_as_uint(weights[i]);
      if (shift < 24 && key >> (shift + 8) != prefix) continue;
      atomicAdd(&counts[key >> shift & 255], 1u);
      atomicAdd(&masses[key >> shift & 255], fixed(weights[i]));
    }
    __syncthreads();
    int bucket = 255;
    for (; bucket > 0; bucket--) {
      if (BY_MASS ? mass + masses[bucket] >= wanted : number + counts[bucket] >= wanted) break;
      mass += masses[bucket], number += counts[bucket];
    }
    prefix = prefix << 8 | bucket;
  }
  // All weights with these bits are equal. The candidates with the lowest ids are kept.
  const u64 each = fixed(__uint_as_float(prefix)), equal = counts[prefix & 255];
  u64 taken = BY_MASS ? (each ? (wanted - mass + each - 1) / each : equal) : wanted - number;
  taken = taken < 1 ? 1 : taken > equal ? equal : taken;
  Cut cut = {prefix, NO_ID, mass + taken * each};
  if (taken < equal) cut.id = locate(count, taken - 1, [&](u32 i) -> u64 { return __float_as_uint(weights[i]) == prefix; });
  return cut;
}

DEVICE bool keeps(Cut cut, float weight, u32 id) {
  u32 key = __float_as_uint(weight);
  return key > cut.key || (key == cut.key && id <= cut.id);
}

// Applies bias, forbidden tokens and penalties to the thread block's copy of the logits, to which the mask is applied.
// A logit of negative infinity stays so.
DEVICE void adjust(const Task& task, const u32* words, u32 last_token, float* logits, u32* counts) {
  constexpr u32 SEEN = 1u << 31;  // The token's repetition penalty has been applied.
  for (u32 i = threadIdx.x; i < task.bias_count; i += THREADS) {
    float& logit = logits[words[task.bias + 2 * i]];
    logit = __fadd_rn(logit, __uint_as_float(words[task.bias + 2 * i + 1]));
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < task.forbidden_count; i += THREADS) logits[words[task.forbidden + i]] = -INF;
  const u32 output = task.output_count + task.continues, history = task.prompt_count + output;
  auto of_output = [&](u32 i) { return i < task.output_count ? words[task.output + i] : last_token; };
  auto of_history = [&](u32 i) {
    return i < task.prompt_count ? words[task.prompt + i] : of_output(i - task.prompt_count);
  };
  for (u32 i = threadIdx.x; i < history; i += THREADS) counts[of_history(i)] = 0;
  __syncthreads();
  if (task.repetition != 1.f) {
    for (u32 i = threadIdx.x; i < history; i += THREADS) {
      u32 token = of_history(i);
      if (atomicOr(&counts[token], SEEN) & SEEN) continue;
      float logit = logits[token];
      logits[token] = logit > 0.f ? __fdiv_rn(logit, task.repetition) : __fmul_rn(logit, task.repetition);
    }
    __syncthreads();
  }
  if (task.presence != 0.f || task.frequency != 0.f) {
    for (u32 i = threadIdx.x; i < output; i += THREADS) atomicAdd(&counts[of_output(i)], 1u);
    __syncthreads();
    for (u32 i = threadIdx.x; i < output; i += THREADS) {
      u32 token = of_output(i), count = atomicExch(&counts[token], 0u) & ~SEEN;
      if (count) logits[token] = __fsub_rn(logits[token], __fadd_rn(__fmul_rn(task.frequency, (float)count), task.presence));
    }
    __syncthreads();
  }
}

// Draws a token. Stores in `weights` exp((logit - highest) / temperature), or 0 for tokens that are cut off.
DEVICE u32 draw(const Task& task, const float* logits, float highest, float* weights, u32 count) {
  const float least = task.min_p > 1.f ? 1.f : task.min_p;
  u64 mass = 0;
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    float weight = exp_(__fdiv_rn(__fsub_rn(logits[i], highest), task.temperature));
    if (least > 0.f && weight < least) weight = 0.f;
    weights[i] = weight;
    mass += fixed(weight);
  }
  mass = block_sum_of(mass);
  Cut cut = {0, NO_ID, mass};
  if (task.top_k > 0 && task.top_k < count) cut = select<false>(weights, count, task.top_k);
  if (task.top_p < 1.f) {
    u64 share = (u64)__fmul_rn(fmaxf(task.top_p, 0.f), 4294967296.f) << 32;
    u64 wanted = __umul64hi(cut.mass, share);
    cut = select<true>(weights, count, wanted < 1 ? 1 : wanted);
  }
  // The random number is 53 bits of a fraction below 1, so the target is below the mass.
  u64 target = __umul64hi(cut.mass, philox(task.seed, task.position) & ~0x7ffull);
  return locate(count, target, [&](u32 i) -> u64 { return keeps(cut, weights[i], i) ? fixed(weights[i]) : 0; });
}

// `adjusted`, `weights` and `counts` are scratch memory with one row per thread block. The contents of `counts` may be
// undefined.
KERNEL(THREADS) sample(const float* all_logits, u32 width, const Task* tasks, const u32* words, float* adjusted, float* weights,
                       u32* counts, u32* last_tokens, Result* results, Top* tops) {
  BEGIN(sample);
  const Task& task = tasks[blockIdx.x];
  Result* result = results + task.result;
  const float* raw = all_logits + (size_t)task.row * width;
  const size_t scratch = (size_t)blockIdx.x * width;
  const Best largest = best_of(raw, width);
  u32 status = status_of(largest), token = largest.token;
  if (status == SAMPLED) {
    const float* logits = raw;
    Best highest = largest;
    if (task.adjusts) {
      adjusted += scratch;
      const u32* mask = task.allowed ? words + task.allowed : nullptr;
      for (u32 i = threadIdx.x; i < width; i += THREADS) adjusted[i] = is_allowed(mask, i) ? raw[i] : -INF;
      __syncthreads();
      adjust(task, words, task.continues ? last_tokens[task.slot] : 0, adjusted, counts + scratch);
      __syncthreads();
      logits = adjusted;
      highest = best_of(logits, width);
      if (status_of(highest) != SAMPLED) status = NO_TOKEN;
    }
    token = highest.token;
    if (status == SAMPLED && task.temperature > 0.f) token = draw(task, logits, highest.logit, weights + scratch, width);
    if (token >= width && status == SAMPLED) status = NOT_FINITE;
  }
  if (status != SAMPLED) token = 0;
  if (threadIdx.x == 0) {
    *result = Result{token, status, largest.logit, largest.logit, 0, 0, 0};
    if (task.slot) last_tokens[task.slot] = token;
  }
  if (task.scores) score(raw, width, token, task.tops, largest, result, tops + task.first_top);
}

// Samples from a row's best tokens: `width` pairs of a logit and a token id, where a negative id stands for no token.
// `peaks` holds the largest logit of the whole row before and after its adjustments. The token is the one that `sample`
// finds in the whole row, because no sum includes the tokens that truncation cuts off. `logits`, `weights` and `ids`
// are scratch memory with one row per thread block.
KERNEL(THREADS) sample_candidates(const float* all_candidates, u32 width, const float* peaks, const Task* tasks, float* logits,
                                  float* weights, u32* ids, u32* last_tokens, Result* results) {
  BEGIN(sample_candidates);
  const Task& task = tasks[blockIdx.x];
  const float* candidates = all_candidates + (size_t)task.row * 2 * width;
  const size_t scratch = (size_t)blockIdx.x * width;
  logits += scratch, weights += scratch, ids += scratch;
  // The candidates are sorted by ascending token id, the order in which `sample` adds weights.
  u64 mine = 0;
  for (u32 i = threadIdx.x; i < width; i += THREADS) {
    const float id = candidates[2 * i + 1];
    if (!(id >= 0.f)) continue;
    u32 before = 0;
    for (u32 j = 0; j < width; j++) {
      float other = candidates[2 * j + 1];
      before += other >= 0.f && other < id;
    }
    logits[before] = candidates[2 * i], ids[before] = (u32)id;
    mine++;
  }
  const u32 count = (u32)block_sum_of(mine);
  const float raw = peaks[2 * task.row], highest = task.adjusts ? peaks[2 * task.row + 1] : raw;
  auto is_finite = [](float x) { return x < INF && x > -INF; };
  u32 status = raw != raw ? NOT_A_NUMBER : !is_finite(raw) ? NOT_FINITE : !is_finite(highest) ? NO_TOKEN : SAMPLED;
  u32 token = 0;
  if (status == SAMPLED) {
    u32 chosen = count;
    if (task.temperature > 0.f) {
      chosen = draw(task, logits, highest, weights, count);
    } else {
      const Best best = best_of(logits, count);
      if (best.logit == highest) chosen = best.token;
    }
    if (chosen < count) token = ids[chosen];
    else status = NOT_FINITE;
  }
  if (threadIdx.x == 0) {
    results[task.result] = Result{token, status, raw, raw, 0, 0, 0};
    if (task.slot) last_tokens[task.slot] = token;
  }
}

// The request for the score of a known token in a row of logits.
struct ScoreTask {
  u32 row, token, tops, first_top;
};

KERNEL(THREADS) score_tokens(const float* all_logits, u32 width, const ScoreTask* tasks, Result* results, Top* tops) {
  BEGIN(score_tokens);
  const ScoreTask task = tasks[blockIdx.x];
  const float* logits = all_logits + (size_t)task.row * width;
  const Best best = best_of(logits, width);
  const u32 status = status_of(best);
  if (threadIdx.x == 0) results[blockIdx.x].token = task.token, results[blockIdx.x].status = status;
  score(logits, width, task.token, task.tops, best, results + blockIdx.x, tops + task.first_top);
}
