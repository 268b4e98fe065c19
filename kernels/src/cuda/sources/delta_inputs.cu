// Inputs of the gated delta rule: causal convolutions with SiLU over the tokens of each row, norms of q and k, decays,
// betas.
//
// A thread block computes one head of q, k or v for TILE tokens of the step, which may belong to several rows. A warp
// computes one token at a time. The convolutions of a row's first tokens reach back into the state of its slot. The
// block with the row's first token computes all of these tokens, and replaces the state after a barrier. No other block
// reads or writes the state.
constexpr int THREADS = 128;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 TILE = 16;
// Elements of a head per lane. The norm of q and k needs all elements of a head at once, so such a head has at most 256
// elements.
constexpr u32 LANE_ELEMENTS = 8;
constexpr float NORM_EPS = 1e-6f;
// Argument above which softplus is the identity, as in torch.
constexpr float SOFTPLUS_THRESHOLD = 20.f;

// `projected` has [q | k | v | z | b | a] per token, `out` receives [q | k | v | decay | beta]. `weights` are
// [taps][channels], the oldest input first. A state is the last taps - 1 inputs of each key head, [q | k], or of each
// value head. The pointers to states point to the layer's state in the null slot. Slots are `stride` bytes apart.
KERNEL(THREADS, 6) delta_inputs(const float* projected, const Row* rows, const u32* row_of, u32 row_count, u32 tokens,
                             const float* weights, const float* rate, const float* bias, u8* key_states, u64 key_stride,
                             u8* value_states, u64 value_stride, u32 key_heads, u32 value_heads, u32 key_dim, u32 value_dim,
                             u32 taps, float* out) {
  BEGIN(delta_inputs);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, kept = taps - 1;
  const u32 keys = key_heads * key_dim, values = value_heads * value_dim, channels = 2 * keys + values;
  const u32 projected_width = channels + values + 2 * value_heads, out_width = channels + 2 * value_heads;
  // Heads of q, then of k, then of v.
  const bool is_value = blockIdx.x >= 2 * key_heads, is_key = !is_value && blockIdx.x >= key_heads;
  const u32 head = is_value ? blockIdx.x - 2 * key_heads : blockIdx.x % key_heads;
  const u32 width = is_value ? value_dim : key_dim, column = is_value ? 2 * keys + head * value_dim : blockIdx.x * key_dim;
  u8* states = is_value ? value_states : key_states;
  const u64 stride = is_value ? value_stride : key_stride;
  const size_t part = (size_t)(is_value ? head : 2 * head + is_key) * kept * width;
  auto state_of = [&](const Row& row) { return reinterpret_cast<float*>(states + row.slot * stride) + part; };
  auto inputs_of = [&](const Row& row) { return projected + (size_t)row.first_token * projected_width + column; };
  const float scale = is_key ? 1.f : __fdiv_rn(1.f, __fsqrt_rn((float)key_dim));

  const u32 begin = blockIdx.y * TILE, end = min(begin + TILE, tokens);
  for (u32 token = begin + warp; token < min(end + kept, tokens); token += WARPS) {
    const Row row = rows[row_of[token]];
    const u32 index = token - row.first_token, home = index < kept ? row.first_token : token;
    if (home < begin || home >= end) continue;
    float* to = out + (size_t)token * out_width;
    if (!row.slot) {
      for (u32 i = lane; i < width; i += 32) to[column + i] = 0.f;
      if (is_value && lane < 2) to[channels + lane * value_heads + head] = 0.f;
      continue;
    }
    const float *state = state_of(row), *inputs = inputs_of(row);
    for (u32 first = 0; first < width; first += 32 * LANE_ELEMENTS) {
      float x[LANE_ELEMENTS] = {}, squares = 0.f, factor = 1.f;
      for (u32 tap = 0; tap < taps; tap++) {
        const u32 at = index + tap;  // counted from the oldest input of the state on
        const float* from = at < kept ? state + at * width : inputs + (size_t)(at - kept) * projected_width;
        const float* weight = weights + (size_t)tap * channels + column;
#pragma unroll
        for (u32 i = 0; i < LANE_ELEMENTS; i++) {
          const u32 c = first + i * 32 + lane;
          if (c < width) x[i] = __fmaf_rn(weight[c], from[c], x[i]);
        }
      }
#pragma unroll
      for (u32 i = 0; i < LANE_ELEMENTS; i++) x[i] = silu(x[i]), squares = __fmaf_rn(x[i], x[i], squares);
      if (!is_value) factor = __fdiv_rn(scale, __fsqrt_rn(__fadd_rn(warp_sum(squares), NORM_EPS)));
#pragma unroll
      for (u32 i = 0; i < LANE_ELEMENTS; i++) {
        const u32 c = first + i * 32 + lane;
        if (c < width) to[column + c] = __fmul_rn(x[i], factor);
      }
    }
    if (is_value && lane == 0) {
      const float* gates = projected + (size_t)token * projected_width + channels + values + head;
      const float b = gates[0], a = __fadd_rn(gates[value_heads], bias[head]);
      const float softplus = a > SOFTPLUS_THRESHOLD ? a : log1pf(exp_(a));
      to[channels + head] = exp_(__fmul_rn(rate[head], softplus));
      to[channels + value_heads + head] = __fdiv_rn(1.f, __fadd_rn(1.f, exp_(-b)));
    }
  }

  __syncthreads();  // no warp reads the states of the rows that begin here any more
  u32 begun = row_of[begin];
  begun += rows[begun].first_token < begin;
  for (u32 r = begun + warp; r < row_count; r += WARPS) {
    const Row row = rows[r];
    if (row.first_token >= end) break;
    if (!row.slot) continue;
    const u32 count = (r + 1 < row_count ? rows[r + 1].first_token : tokens) - row.first_token;
    float* state = state_of(row);
    const float* inputs = inputs_of(row);
    for (u32 c = lane; c < width; c += 32)
      // If a row is shorter than the state, the newest inputs of the old state move to the front. Each input moves from
      // a later index, which has not been overwritten yet.
      for (u32 i = 0; i < kept; i++) {
        const u32 at = count + i;
        state[i * width + c] = at < kept ? state[at * width + c] : inputs[(size_t)(at - kept) * projected_width + c];
      }
  }
}
