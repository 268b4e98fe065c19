// Rotary angles, and the preparation of each token's q, k and v: norm of each head, rotation, and storing in pages.
//
// The pages of a layer have the layout [page][kv head][keys, values][page_tokens][head_dim].
constexpr int THREADS = 128;

// out[t] = [cos | sin](positions[axis of i][t] * inverse[i]) * scale, `half` elements of each. A null `axes` means the
// first axis.
KERNEL(THREADS) rope_angles(const float* positions, u32 tokens, const float* inverse, const u32* axes, u32 half, float scale,
                            float* out) {
  BEGIN(rope_angles);
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= tokens * half) return;
  u32 token = at / half, i = at % half, axis = axes ? axes[i] : 0;
  float angle = __fmul_rn(positions[axis * tokens + token], inverse[i]);
  float* to = out + (size_t)token * 2 * half + i;
  to[0] = __fmul_rn(cosf(angle), scale);
  to[half] = __fmul_rn(sinf(angle), scale);
}

// One warp per head of a token: first the q heads, then the k heads, then the v heads. `kv_at` of a token is page *
// page_tokens + index in the page. It is -1 in the null page, where nothing is stored. The norms' weights may be null.
// Keys and values are divided by their scales, which are 1 for types other than fp8.
template <class Kv>
DEVICE void rotate_and_store(float* qkv, const float* angles, const float* q_norm, const float* k_norm, const int* kv_at,
                             typename Kv::Raw* kv, float eps, u32 tokens, u32 heads, u32 kv_heads, u32 head_dim, u32 rotated,
                             u32 page_tokens, float key_scale, float value_scale) {
  const u32 all_heads = heads + 2 * kv_heads, lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (item >= tokens * all_heads) return;
  const u32 token = item / all_heads, head = item % all_heads;
  float* x = qkv + (size_t)item * head_dim;
  const bool is_query = head < heads, is_value = head >= heads + kv_heads;
  const int at = kv_at[token];
  if (!is_query && at < 0) return;

  typename Kv::Raw* stored = 0;
  if (!is_query) {
    u32 kv_head = is_value ? head - heads - kv_heads : head - heads;
    u64 run = ((u64)(at / page_tokens) * kv_heads + kv_head) * 2 + is_value;
    stored = kv + (run * page_tokens + at % page_tokens) * head_dim;
  }
  if (is_value) {
    for (u32 i = lane; i < head_dim; i += 32) stored[i] = Kv::narrow(__fdiv_rn(x[i], value_scale));
    return;
  }
  const float* weight = is_query ? q_norm : k_norm;
  float factor = 1.f;
  if (weight) {
    float squares = 0.f;
    for (u32 i = lane; i < head_dim; i += 32) squares = __fmaf_rn(x[i], x[i], squares);
    factor = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(squares), (float)head_dim), eps)));
  }
  auto normal = [&](u32 i) { return weight ? __fmul_rn(__fmul_rn(x[i], factor), weight[i]) : x[i]; };
  auto put = [&](u32 i, float value) {
    if (is_query) x[i] = value;
    else stored[i] = Kv::narrow(__fdiv_rn(value, key_scale));
  };
  const u32 half = rotated / 2;
  angles += (size_t)token * rotated;
  for (u32 i = lane; i < half; i += 32) {
    float a = normal(i), b = normal(half + i), cos = angles[i], sin = angles[half + i];
    put(i, __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)));
    put(half + i, __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin)));
  }
  for (u32 i = rotated + lane; i < head_dim; i += 32) put(i, normal(i));
}

#define ROTATE_AND_STORE(NAME, TYPE)                                                                                   \
  KERNEL(THREADS) NAME(float* qkv, const float* angles, const float* q_norm, const float* k_norm, const int* kv_at,    \
                       TYPE::Raw* kv, float eps, u32 tokens, u32 heads, u32 kv_heads, u32 head_dim, u32 rotated,       \
                       u32 page_tokens, float key_scale, float value_scale) {                                          \
    BEGIN(NAME);                                                                                                       \
    rotate_and_store<TYPE>(qkv, angles, q_norm, k_norm, kv_at, kv, eps, tokens, heads, kv_heads, head_dim, rotated,    \
                           page_tokens, key_scale, value_scale);                                                       \
  }
ROTATE_AND_STORE(rotate_and_store_f32, F32)
ROTATE_AND_STORE(rotate_and_store_bf16, Bf16)
ROTATE_AND_STORE(rotate_and_store_f16, F16)
ROTATE_AND_STORE(rotate_and_store_fp8, Fp8)
