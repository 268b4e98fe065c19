// The likeliest token of each row of logits: one thread block per row. Among equal logits, the lowest token id wins.

// Writes a result per row. Also stores each row's token as the last token of its slot, unless that slot is the null
// slot. A null `slots` means that no row has a slot.
KERNEL(THREADS) argmax(const float* logits, u32 width, const u32* slots, u32* last_tokens, Result* results) {
  BEGIN(argmax);
  Best best = best_of(logits + (size_t)blockIdx.x * width, width);
  if (threadIdx.x != 0) return;
  u32 status = status_of(best), slot = slots ? slots[blockIdx.x] : 0;
  u32 token = status == SAMPLED ? best.token : 0;
  results[blockIdx.x] = Result{token, status, best.logit, best.logit, 0, 0, 0};
  if (slot) last_tokens[slot] = token;
}

// out[row] = [logit, token id] of the row's largest logit. Token ids begin at `first`. The logit is NaN if any logit of
// the row is NaN.
KERNEL(THREADS) partial_argmax(const float* logits, u32 width, u32 first, float* out) {
  BEGIN(partial_argmax);
  Best best = best_of(logits + (size_t)blockIdx.x * width, width);
  if (threadIdx.x != 0) return;
  out[blockIdx.x * 2] = best.nan ? __int_as_float(0x7fffffff) : best.logit;
  out[blockIdx.x * 2 + 1] = (float)(best.token == NO_ID ? 0 : first + best.token);
}

// Finds the best of each row's candidates, which are pairs of a logit and a token id.
KERNEL(32) best_candidates(const float* candidates, u32 count, u32 rows, const u32* slots, u32* last_tokens, Result* results) {
  BEGIN(best_candidates);
  u32 row = blockIdx.x * 32 + threadIdx.x;
  if (row >= rows) return;
  Best best = {-INF, NO_ID, 0};
  for (u32 i = 0; i < count; i++) {
    const float* candidate = candidates + ((size_t)row * count + i) * 2;
    best = better(best, Best{candidate[0], (u32)candidate[1], candidate[0] != candidate[0]});
  }
  u32 status = status_of(best), slot = slots ? slots[row] : 0;
  u32 token = status == SAMPLED ? best.token : 0;
  results[row] = Result{token, status, best.logit, best.logit, 0, 0, 0};
  if (slot) last_tokens[slot] = token;
}
