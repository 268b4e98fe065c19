// One rank's share of sampling a row whose token depends only on its best tokens (kernels/src/sampling/nomination.rs).
// One thread block per row computes this rank's share of the vocabulary, whose token ids begin at `first`.

// One row to nominate. A list is given by the index of its first word in `words` and its length. A list contains a
// token at most once.
struct Nomination {
  u32 row, count;
  float temperature, repetition, presence, frequency;
  u32 adjusts;               // 1: the lists change the logits
  u32 bias, bias_count;      // pairs of a token id and the bits of an f32
  u32 forbidden, forbidden_count;
  u32 repeated, repeated_count;
  u32 counted, counted_count;  // pairs of a token id and a number
};

DEVICE float peak_of(Best best) { return best.nan ? __int_as_float(0x7fffffff) : best.logit; }

// Applies bias, forbidden tokens and penalties in place. peaks[row] = the largest logit before and after these changes.
KERNEL(THREADS) adjust_shard(float* all_logits, u32 width, u32 first, const Nomination* tasks, const u32* words, float* peaks) {
  BEGIN(adjust_shard);
  const Nomination& task = tasks[blockIdx.x];
  float* logits = all_logits + (size_t)task.row * width;
  const Best raw = best_of(logits, width);
  Best adjusted = raw;
  if (task.adjusts) {
    // Tokens of other ranks are skipped. For such a token, the unsigned difference to `first` is at least `width`.
    for (u32 i = threadIdx.x; i < task.bias_count; i += THREADS) {
      u32 own = words[task.bias + 2 * i] - first;
      if (own < width) logits[own] = __fadd_rn(logits[own], __uint_as_float(words[task.bias + 2 * i + 1]));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < task.forbidden_count; i += THREADS) {
      u32 own = words[task.forbidden + i] - first;
      if (own < width) logits[own] = -INF;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < task.repeated_count; i += THREADS) {
      u32 own = words[task.repeated + i] - first;
      if (own < width) {
        float logit = logits[own];
        logits[own] = logit > 0.f ? __fdiv_rn(logit, task.repetition) : __fmul_rn(logit, task.repetition);
      }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < task.counted_count; i += THREADS) {
      u32 own = words[task.counted + 2 * i] - first;
      float count = (float)words[task.counted + 2 * i + 1];
      if (own < width) logits[own] = __fsub_rn(logits[own], __fadd_rn(__fmul_rn(task.frequency, count), task.presence));
    }
    __syncthreads();
    adjusted = best_of(logits, width);
  }
  if (threadIdx.x == 0) peaks[2 * task.row] = peak_of(raw), peaks[2 * task.row + 1] = peak_of(adjusted);
}

// The n-th largest key.
struct Nth {
  u32 key, above, equal;  // numbers of larger keys and of equal ones
};

// Finds the `wanted`-th largest of `count` keys; 1 is the largest. The search is by eight bits of the key at a time.
template <class Key>
DEVICE Nth nth_largest(u32 count, u32 wanted, Key key) {
  __shared__ u32 counts[256];
  u32 prefix = 0, above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      u32 own = key(i);
      if (shift < 24 && own >> (shift + 8) != prefix) continue;
      atomicAdd(&counts[own >> shift & 255], 1u);
    }
    __syncthreads();
    int bucket = 255;
    for (; bucket > 0 && above + counts[bucket] < wanted; bucket--) above += counts[bucket];
    prefix = prefix << 8 | bucket;
  }
  return Nth{prefix, above, counts[prefix & 255]};
}

// out[row] = the best `task.count` tokens in order, as pairs of a logit and a token id, followed by pairs without a
// token. `task.count` is at most THREADS, `width` and `out_count` (the number of pairs).
KERNEL(THREADS) nominate(const float* all_logits, u32 width, u32 first, const Nomination* tasks, const float* peaks, u32 out_count,
                         float* all_out) {
  BEGIN(nominate);
  __shared__ u32 keys[THREADS], ids[THREADS], kept;
  const Nomination& task = tasks[blockIdx.x];
  const float* logits = all_logits + (size_t)task.row * width;
  const float highest = peaks[2 * task.row + 1], temperature = task.temperature;
  // If a token is drawn at random, tokens are ordered by weight, as truncation orders them. Weights are not negative,
  // so their bits have the same order as their values.
  auto key = [&](u32 i) -> u32 {
    if (!(temperature > 0.f)) return key_of(logits[i]);
    return __float_as_uint(exp_(__fdiv_rn(__fsub_rn(logits[i], highest), temperature)));
  };
  const Nth last = nth_largest(width, task.count, key);
  // Among tokens with equal keys, the lowest ids are taken.
  const u32 taken = task.count - last.above;
  u32 last_id = NO_ID;
  if (taken < last.equal) last_id = ~nth_largest(width, taken, [&](u32 i) -> u32 { return key(i) == last.key ? ~i : 0; }).key;
  if (threadIdx.x == 0) kept = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < width; i += THREADS) {
    u32 own = key(i);
    if (own < last.key || (own == last.key && i > last_id)) continue;
    u32 at = atomicAdd(&kept, 1u);
    keys[at] = own, ids[at] = i;
  }
  __syncthreads();
  float* out = all_out + (size_t)task.row * 2 * out_count;
  for (u32 i = threadIdx.x; i < out_count; i += THREADS) {
    if (i >= task.count) {
      out[2 * i] = -INF, out[2 * i + 1] = -1.f;
      continue;
    }
    u32 before = 0;
    for (u32 j = 0; j < task.count; j++) before += keys[j] > keys[i] || (keys[j] == keys[i] && ids[j] < ids[i]);
    out[2 * before] = logits[ids[i]], out[2 * before + 1] = (float)(first + ids[i]);
  }
}
