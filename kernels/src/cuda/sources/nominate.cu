// One rank's share of sampling a row whose token depends only on its best tokens (kernels/src/sampling/nomination.rs).
// `first` is the first token id of this rank's share of the vocabulary. A row is divided into slices of equal width,
// one per thread block in the y direction. Each slice has results of its own, which a second kernel merges.

// One row to nominate. A list is given by the index of its first word in `words` and its length. A list contains a
// token at most once.
struct Nomination {
  u32 row, count;
  float temperature, repetition, presence, frequency;
  u32 adjusts;               // 1: the mask or the lists change the logits
  u32 allowed;               // first word of the mask of the whole vocabulary in `words`; 0: none
  u32 bias, bias_count;      // pairs of a token id and the bits of an f32
  u32 forbidden, forbidden_count;
  u32 repeated, repeated_count;
  u32 counted, counted_count;  // pairs of a token id and a number
};

// A thread block's slice of a row of `width` logits. The last slices may be shorter, or empty.
struct Slice {
  u32 start, width;
};

DEVICE Slice slice_of(u32 width) {
  const u32 each = (width + gridDim.y - 1) / gridDim.y, start = min(blockIdx.y * each, width);
  return Slice{start, min(each, width - start)};
}

DEVICE float peak_of(Best best) { return best.nan ? __int_as_float(0x7fffffff) : best.logit; }

// Applies mask, bias, forbidden tokens and penalties in place. peaks[row][slice] = the slice's largest logit before and
// after these changes.
KERNEL(THREADS) adjust_shard(float* all_logits, u32 width, u32 first, const Nomination* tasks, const u32* words, float* peaks) {
  BEGIN(adjust_shard);
  const Nomination& task = tasks[blockIdx.x];
  const Slice slice = slice_of(width);
  float* logits = all_logits + (size_t)task.row * width + slice.start;
  width = slice.width, first += slice.start;
  const Best raw = best_of(logits, width);
  Best adjusted = raw;
  if (task.adjusts) {
    if (task.allowed) {
      const u32* mask = words + task.allowed;
      for (u32 i = threadIdx.x; i < width; i += THREADS) {
        if (!is_allowed(mask, first + i)) logits[i] = -INF;
      }
      __syncthreads();
    }
    // Tokens of other slices are skipped. For such a token, the unsigned difference to `first` is at least `width`.
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
  if (threadIdx.x == 0) {
    peaks += 2 * ((size_t)task.row * gridDim.y + blockIdx.y);
    peaks[0] = peak_of(raw), peaks[1] = peak_of(adjusted);
  }
}

// peaks[row] = the largest logits of the row's slices; NaN if a slice has a NaN. One thread per row.
KERNEL(32) merge_peaks(const float* of_slices, u32 slices, const Nomination* tasks, u32 rows, float* peaks) {
  BEGIN(merge_peaks);
  const u32 index = blockIdx.x * 32 + threadIdx.x;
  if (index >= rows) return;
  const u32 row = tasks[index].row;
  of_slices += (size_t)row * slices * 2;
  float raw = -INF, adjusted = -INF;
  for (u32 slice = 0; slice < slices; slice++) {
    const float x = of_slices[2 * slice], y = of_slices[2 * slice + 1];
    // `x != x` keeps a NaN, and no number is larger than a NaN.
    if (x != x || x > raw) raw = x;
    if (y != y || y > adjusted) adjusted = y;
  }
  peaks[2 * row] = raw, peaks[2 * row + 1] = adjusted;
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

// Writes the best `wanted` of `count` tokens to `out` in order, as pairs of a logit and a token id, followed by pairs
// without a token, `out_count` pairs in all. logit(i) and id(i) are the i-th token's; among tokens of one key, the
// first ones are the best. `wanted` is at most THREADS and `count`.
template <class Logit, class Id>
DEVICE void write_best(u32 count, u32 wanted, float highest, float temperature, Logit logit, Id id, u32 out_count, float* out) {
  __shared__ u32 keys[THREADS], at_index[THREADS], kept;
  // If a token is drawn at random, tokens are ordered by weight, as truncation orders them. Weights are not negative,
  // so their bits have the same order as their values.
  auto key = [&](u32 i) -> u32 {
    if (!(temperature > 0.f)) return key_of(logit(i));
    return __float_as_uint(exp_(__fdiv_rn(__fsub_rn(logit(i), highest), temperature)));
  };
  if (wanted > 0) {
    const Nth last = nth_largest(count, wanted, key);
    // Among tokens with equal keys, the first ones are taken.
    const u32 taken = wanted - last.above;
    u32 last_index = NO_ID;
    if (taken < last.equal) {
      last_index = ~nth_largest(count, taken, [&](u32 i) -> u32 { return key(i) == last.key ? ~i : 0; }).key;
    }
    if (threadIdx.x == 0) kept = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      u32 own = key(i);
      if (own < last.key || (own == last.key && i > last_index)) continue;
      u32 at = atomicAdd(&kept, 1u);
      keys[at] = own, at_index[at] = i;
    }
    __syncthreads();
  }
  for (u32 i = threadIdx.x; i < out_count; i += THREADS) {
    if (i >= wanted) {
      out[2 * i] = -INF, out[2 * i + 1] = -1.f;
      continue;
    }
    u32 before = 0;
    for (u32 j = 0; j < wanted; j++) before += keys[j] > keys[i] || (keys[j] == keys[i] && at_index[j] < at_index[i]);
    out[2 * before] = logit(at_index[i]), out[2 * before + 1] = id(at_index[i]);
  }
}

// out[row][slice] = the slice's best `task.count` tokens, or all of its tokens if it has fewer.
KERNEL(THREADS) nominate(const float* all_logits, u32 width, u32 first, const Nomination* tasks, const float* peaks, u32 out_count,
                         float* all_out) {
  BEGIN(nominate);
  const Nomination& task = tasks[blockIdx.x];
  const Slice slice = slice_of(width);
  const float* logits = all_logits + (size_t)task.row * width + slice.start;
  float* out = all_out + ((size_t)task.row * gridDim.y + blockIdx.y) * 2 * out_count;
  first += slice.start;
  write_best(
      slice.width, min(task.count, slice.width), peaks[2 * task.row + 1], task.temperature, [&](u32 i) { return logits[i]; },
      [&](u32 i) { return (float)(first + i); }, out_count, out);
}

// out[row] = the best `task.count` tokens of the row's slices, each of which has at least as many. Among equal keys the
// first token has the lowest id: the slices are in the order of token ids, and a slice's tokens in the order of keys.
KERNEL(THREADS) merge_nominated(const float* of_slices, u32 slices, const Nomination* tasks, const float* peaks, u32 out_count,
                                float* all_out) {
  BEGIN(merge_nominated);
  const Nomination& task = tasks[blockIdx.x];
  const float* pairs = of_slices + (size_t)task.row * slices * 2 * out_count;
  const u32 each = task.count;
  auto pair = [&](u32 i) { return pairs + 2 * (i / each * out_count + i % each); };
  write_best(
      slices * each, each, peaks[2 * task.row + 1], task.temperature, [&](u32 i) { return pair(i)[0]; },
      [&](u32 i) { return pair(i)[1]; }, out_count, all_out + (size_t)task.row * 2 * out_count);
}
