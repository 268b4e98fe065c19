// state = decay * state + x[t], out[t] = state, for each token of a row in order. One thread per channel; blockIdx.y is
// the row. `state` points to the layer's state in the null slot, and slots are `stride` bytes apart.
constexpr int THREADS = 128;

KERNEL(THREADS) decayed_sum(const float* x, const float* decay, const Row* rows, u32 row_count, u32 tokens, u32 width, u8* state,
                            u64 stride, float* out) {
  BEGIN(decayed_sum);
  u32 channel = blockIdx.x * THREADS + threadIdx.x;
  if (channel >= width) return;
  const Row row = rows[blockIdx.y];
  const u32 end = blockIdx.y + 1 < row_count ? rows[blockIdx.y + 1].first_token : tokens;
  float* held = reinterpret_cast<float*>(state + row.slot * stride) + channel;
  // A padding row has the null slot, which has no state.
  float sum = row.slot ? *held : 0.f;
  for (u32 token = row.first_token; token < end; token++) {
    sum = __fadd_rn(__fmul_rn(decay[channel], sum), x[(size_t)token * width + channel]);
    out[(size_t)token * width + channel] = sum;
  }
  if (row.slot) *held = sum;
}
