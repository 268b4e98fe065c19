// Causal attention of ragged batches over paged keys and values, in f32 without tensor cores. The kernels on tensor
// cores are compared with this one.
//
// A warp computes one query head of one token. It loops over tiles of 32 keys at absolute positions. For the scores
// each lane has a key; for the weighted sum of values each lane has elements of the head. The online softmax restarts
// at absolute multiples of SPLIT keys, and the partial results are folded in order. A query's bits therefore depend
// neither on its neighbours nor on its chunk.
//
// Keys outside of a query's window are never read: an unwritten entry of a page may hold NaN.
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr u32 TILE = 32;
constexpr u32 SPLIT = 512;
// Elements of the head per lane. A head has at most 32 * 8 = 256 elements.
constexpr int LANE_ELEMENTS = 8;

struct Args {
  const float* qkv;
  const Row* rows;
  const u32* row_of;  // of each token
  const int* kv_at;   // of each token; -1: a padding row, whose output is zeros
  const u32* pages;
  float* out;
  u32 tokens, heads, kv_heads, head_dim, page_tokens, window;
  float scale;        // of the scores, times the scale of keys
  float value_scale;  // 1 for types other than fp8
};

struct State {
  float top, sum, values[LANE_ELEMENTS];
};

DEVICE void reset(State& state) {
  state.top = -INF, state.sum = 0.f;
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i++) state.values[i] = 0.f;
}

// Folds the partial result of a split (a range of SPLIT keys) into the result of the earlier splits.
DEVICE void fold(State& total, const State& part) {
  float top = fmaxf(total.top, part.top), base = top == -INF ? 0.f : top;
  float keep = exp_(__fsub_rn(total.top, base)), take = exp_(__fsub_rn(part.top, base));
  total.top = top;
  total.sum = __fmaf_rn(part.sum, take, __fmul_rn(total.sum, keep));
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i++)
    total.values[i] = __fmaf_rn(part.values[i], take, __fmul_rn(total.values[i], keep));
}

template <class Kv>
DEVICE void attend(const Args& args, const typename Kv::Raw* kv) {
  extern __shared__ __align__(16) float queries[];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, head_dim = args.head_dim;
  const u32 query = blockIdx.x * WARPS + warp;
  if (query >= args.tokens * args.heads) return;
  const u32 token = query / args.heads, head = query % args.heads;
  float* out = args.out + (size_t)query * head_dim;
  if (args.kv_at[token] < 0) {
    for (u32 d = lane; d < head_dim; d += 32) out[d] = 0.f;
    return;
  }
  const Row row = args.rows[args.row_of[token]];
  const u32* pages = args.pages + row.first_page;
  const u32 position = row.start + (token - row.first_token);
  const u32 first = position >= args.window ? position + 1 - args.window : 0;
  const u32 kv_head = head / (args.heads / args.kv_heads);

  float* q = queries + warp * head_dim;
  const float* from = args.qkv + ((size_t)token * (args.heads + 2 * args.kv_heads) + head) * head_dim;
  for (u32 d = lane; d < head_dim; d += 32) q[d] = from[d];
  __syncwarp();

  State total, part;
  reset(total), reset(part);
  for (u32 tile = first / TILE; tile <= position / TILE; tile++) {
    const u32 key = tile * TILE + lane;
    float score = -INF;
    u64 key_run = 0;  // the key's row of head_dim elements; its value is page_tokens rows further
    if (key >= first && key <= position) {
      key_run = ((u64)pages[key / args.page_tokens] * args.kv_heads + kv_head) * 2 * args.page_tokens + key % args.page_tokens;
      const typename Kv::Raw* k = kv + key_run * head_dim;
      float dot = 0.f;
      for (u32 d = 0; d < head_dim; d += 4) {
        float4 x = Kv::load4(k + d), y = *reinterpret_cast<const float4*>(q + d);
        dot = __fmaf_rn(x.x, y.x, dot), dot = __fmaf_rn(x.y, y.y, dot);
        dot = __fmaf_rn(x.z, y.z, dot), dot = __fmaf_rn(x.w, y.w, dot);
      }
      score = __fmul_rn(dot, args.scale);
    }
    const float top = fmaxf(part.top, warp_max(score)), fade = exp_(__fsub_rn(part.top, top));
    const float weight = exp_(__fsub_rn(score, top));
    part.top = top;
    part.sum = __fmaf_rn(part.sum, fade, warp_sum(weight));
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i++) part.values[i] = __fmul_rn(part.values[i], fade);
    const u32 begin = first > tile * TILE ? first - tile * TILE : 0;
    const u32 end = position - tile * TILE < TILE ? position - tile * TILE + 1 : TILE;
    for (u32 j = begin; j < end; j++) {
      const float w = __shfl_sync(ALL_LANES, weight, j);
      const typename Kv::Raw* v = kv + (__shfl_sync(ALL_LANES, key_run, j) + args.page_tokens) * head_dim;
#pragma unroll
      for (int i = 0; i < LANE_ELEMENTS; i++) {
        u32 d = lane + 32 * i;
        if (d < head_dim) part.values[i] = __fmaf_rn(w, Kv::widen(v[d]), part.values[i]);
      }
    }
    if ((tile + 1) * TILE % SPLIT == 0 || tile == position / TILE) fold(total, part), reset(part);
  }
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i++) {
    u32 d = lane + 32 * i;
    if (d < head_dim) out[d] = __fmul_rn(__fdiv_rn(total.values[i], total.sum), args.value_scale);
  }
}

#define ATTENTION(NAME, TYPE)                                                                                          \
  KERNEL(THREADS) NAME(const float* qkv, const Row* rows, const u32* row_of, const int* kv_at, const u32* pages,       \
                       float* out, u32 tokens, u32 heads, u32 kv_heads, u32 head_dim, u32 page_tokens, u32 window,     \
                       float scale, float value_scale, const TYPE::Raw* kv) {                                          \
    BEGIN(NAME);                                                                                                       \
    const Args args = {qkv,   rows,     row_of,   kv_at,       pages,  out,   tokens,                                  \
                       heads, kv_heads, head_dim, page_tokens, window, scale, value_scale};                            \
    attend<TYPE>(args, kv);                                                                                            \
  }
ATTENTION(attention_f32, F32)
ATTENTION(attention_bf16, Bf16)
ATTENTION(attention_f16, F16)
ATTENTION(attention_fp8, Fp8)
