// Causal attention of ragged batches over paged keys and values of two bytes or in fp8, on tensor cores. Those in fp8
// are copied as they are stored, and a block widens each tile once. This is exact.
//
// The queries of a row for one kv head are numbered: query i is head i % group of token i / group. A work item is a
// tile of consecutive queries, 16 per warp, so that the query heads of a decode share one pass over its keys. A narrow
// tile has one warp. A wide tile has four warps, which read the keys from shared memory. Each warp computes its own 16
// queries; scores, online softmax and weighted sum of values stay in its registers.
//
// A query's bits do not depend on other queries. Keys are read in tiles of TILE at absolute positions. The online
// softmax restarts at absolute multiples of SPLIT keys. The results of these splits (ranges of SPLIT keys) are folded
// in order: by the item that computes all of them, or by `merge_splits` if each split is a separate item. The item and
// `merge_splits` fold with the same instructions. A tile that is masked for a query does not change the query's state.
//
// Keys that no query of a tile sees are replaced by zeros and not read, because an unwritten entry may hold NaN. The
// lists of items are made by kernels/src/cuda/attention_work.rs.
constexpr u32 TILE = 32;
constexpr u32 SPLIT = 256;
constexpr u32 SPLIT_TILES = SPLIT / TILE;
constexpr u32 WARP_QUERIES = 16;
constexpr u32 ALL_SPLITS = 0xffffffffu;
constexpr float LOG2_E = 1.44269504f;

struct Item {
  u32 row;      // of the step
  u32 first;    // number of the tile's first query in its row
  u32 queries;  // at most WARP_QUERIES per warp
  u32 split;    // the split, whose result is partial, or ALL_SPLITS
  u32 part;     // place of the first query's partial result
};

struct Args {
  const float* qkv;
  const Row* rows;
  const Item* items;
  const int* kv_at;  // of each token; -1: a padding row, whose output is zeros
  const u32* pages;
  float* out;
  float2* part_sums;   // [kv head][parts]: greatest score, sum of weights
  float* part_values;  // [kv head][parts][head_dim]
  u32 parts, heads, kv_heads, page_tokens;
  u32 window;  // at most 2^31 - 1
  float scale;        // of the scores, times the scale of keys
  float value_scale;  // 1 for types other than fp8
};

// A query of a tile. An index past the last query of the tile gives the last query.
struct Query {
  u32 position, token, head;
};

DEVICE Query query_at(const Args& args, const Row& row, const Item& item, u32 index) {
  const u32 group = args.heads / args.kv_heads;
  const u32 query = item.first + min(index, item.queries - 1), token = query / group;
  return {row.start + token, row.first_token + token, blockIdx.y * group + query % group};
}

// Factors that fold the partial result of a split (a range of SPLIT keys) into the result of the earlier splits: values
// = part * take + values * keep.
struct Fold {
  float top, sum, keep, take;
};
DEVICE Fold fold(float top, float sum, float part_top, float part_sum) {
  Fold to;
  to.top = fmaxf(top, part_top);
  const float base = to.top == -INF ? 0.f : to.top;
  to.keep = exp2_(__fsub_rn(top, base)), to.take = exp2_(__fsub_rn(part_top, base));
  to.sum = __fmaf_rn(part_sum, to.take, __fmul_rn(sum, to.keep));
  return to;
}
DEVICE float folded(const Fold& by, float value, float part) { return __fmaf_rn(part, by.take, __fmul_rn(value, by.keep)); }
// Adding zero turns a negative zero, which masked tiles may cause, into a positive one.
DEVICE float normal(float value, float factor) { return __fadd_rn(__fmul_rn(value, factor), 0.f); }

// Keys and values of two tiles: one tile is read while the copy of the other one is under way. Rows are padded, so that
// the eight rows of a matrix lie in different banks.
template <class Stored, int D>
struct Shared {
  static constexpr u32 TILES = 2;
  u16 tiles[TILES][2][TILE][D + 8];
  DEVICE u16* copy_of(u32 stage, u32 kind, u32 key) { return tiles[stage][kind][key]; }
  template <class Kv>
  DEVICE void widen(u32) {}
};
// In fp8, two tiles of codes, and one tile of widened numbers.
template <int D>
struct Shared<Fp8, D> {
  static constexpr u32 TILES = 1;
  u16 tiles[TILES][2][TILE][D + 8];
  __align__(16) u8 codes[2][2][TILE][D];
  DEVICE u8* copy_of(u32 stage, u32 kind, u32 key) { return codes[stage][kind][key]; }
  // Widens the tile of a stage. All threads of the block call this function. It ends with a barrier.
  template <class Kv>
  DEVICE void widen(u32 stage) {
    for (u32 i = threadIdx.x; i < 2 * TILE * D / 4; i += blockDim.x) {
      const u32 line = i / (D / 4), d = i % (D / 4) * 4;
      const float4 x = Fp8::load4(&codes[stage][line / TILE][line % TILE][d]);
      const uint2 both = make_uint2(Tensor<Kv>::pair(x.x, x.y), Tensor<Kv>::pair(x.z, x.w));
      *reinterpret_cast<uint2*>(&tiles[0][line / TILE][line % TILE][d]) = both;
    }
    __syncthreads();
  }
};

// Kv is the type of the products, and Stored the type in pages.
template <class Kv, class Stored, int D, int WARPS>
DEVICE void attend(const Args& args, const typename Stored::Raw* kv, Shared<Stored, D>& shared) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Item item = args.items[blockIdx.x];
  const Row row = args.rows[item.row];
  const u32* pages = args.pages + row.first_page;

  const u32 low = query_at(args, row, item, 0).position, high = query_at(args, row, item, item.queries - 1).position;
  const u32 first_key = low >= args.window ? low + 1 - args.window : 0;
  u32 begin = first_key / TILE, end = high / TILE + 1;
  if (item.split != ALL_SPLITS) begin = max(begin, item.split * SPLIT_TILES), end = min(end, (item.split + 1) * SPLIT_TILES);
  if (begin >= end) return;  // the window leaves nothing of the split, which the merge does not read then

  // Each lane computes the location of one key. The lanes that copy the key get the location from that lane.
  auto locate = [&](u32 tile) {
    const u32 key = min(tile * TILE + lane, high);
    return (pages[key / args.page_tokens] * args.kv_heads + blockIdx.y) * 2 * args.page_tokens + key % args.page_tokens;
  };
  constexpr u32 CHUNK = 16 / sizeof(typename Stored::Raw);  // elements per copy
  constexpr u32 CHUNKS = D / CHUNK, WARP_KEYS = TILE / WARPS, KEYS_AT_ONCE = 32 / CHUNKS;
  auto fetch = [&](u32 tile, u32 stage, u32 located) {
    const u32 chunk = lane % CHUNKS * CHUNK;
#pragma unroll
    for (u32 i = 0; i < WARP_KEYS; i += KEYS_AT_ONCE) {
      const u32 at = warp * WARP_KEYS + i + lane / CHUNKS, key = tile * TILE + at;
      const typename Stored::Raw* from = kv + (size_t)__shfl_sync(ALL_LANES, located, at % TILE) * D + chunk;
      const bool seen = key >= first_key && key <= high;
      if (KEYS_AT_ONCE > WARP_KEYS && lane / CHUNKS >= WARP_KEYS) break;  // the key of another warp
      copy16(shared_address(shared.copy_of(stage, 0, at) + chunk), from, seen);
      copy16(shared_address(shared.copy_of(stage, 1, at) + chunk), from + args.page_tokens * D, seen);
    }
    commit_copies();
  };
  fetch(begin, 0, locate(begin));
  u32 located = begin + 1 < end ? locate(begin + 1) : 0;

  // This lane's two queries as fragments of the operand A of mma.m16n8k16, scaled so that the softmax uses powers of
  // two.
  const bool has_queries = warp * WARP_QUERIES < item.queries;
  u32 position[2], q[D / 16][4];
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const Query query = query_at(args, row, item, warp * WARP_QUERIES + h * 8 + g);
    position[h] = query.position;
    const float* from = args.qkv + ((size_t)query.token * (args.heads + 2 * args.kv_heads) + query.head) * D + t * 2;
    const float scale = __fmul_rn(args.scale, LOG2_E);
#pragma unroll
    for (u32 k = 0; k < D / 8; k++) {
      const float2 x = *reinterpret_cast<const float2*>(from + k * 8);
      q[k / 2][k % 2 * 2 + h] = Tensor<Kv>::pair(__fmul_rn(x.x, scale), __fmul_rn(x.y, scale));
    }
  }
  const u32 warp_low = query_at(args, row, item, warp * WARP_QUERIES).position;
  const u32 warp_high = query_at(args, row, item, warp * WARP_QUERIES + WARP_QUERIES - 1).position;

  // Results of the earlier splits (`total...`), and of the current split. Until the current split ends, `sum` covers
  // only this lane's keys.
  float total_top[2] = {-INF, -INF}, total_sum[2] = {0.f, 0.f}, total[D / 8][4] = {};
  float top[2] = {-INF, -INF}, sum[2] = {0.f, 0.f}, values[D / 8][4] = {};

  const u32 key_row = lane / 16 * 8 + lane % 8, key_column = lane / 8 % 2 * 8;      // of a matrix of keys
  const u32 value_row = lane / 8 % 2 * 8 + lane % 8, value_column = lane / 16 * 8;  // of a matrix of values
#pragma unroll 1
  for (u32 tile = begin, stage = 0; tile < end; tile++, stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // the tile is there, and no warp reads the other stage any more
    if (tile + 1 < end) {
      fetch(tile + 1, stage ^ 1, located);
      if (tile + 2 < end) located = locate(tile + 2);
    }
    shared.template widen<Kv>(stage);
    const auto& tiles = shared.tiles[stage % Shared<Stored, D>::TILES];
    if (has_queries && tile * TILE <= warp_high) {
      float scores[TILE / 8][4] = {};
#pragma unroll
      for (u32 k = 0; k < D / 16; k++) {
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n += 2) {
          u32 b[4];
          load_matrices(b, shared_address(&tiles[0][n * 8 + key_row][k * 16 + key_column]));
          Tensor<Kv>::multiply_add(scores[n], q[k], b[0], b[1]);
          Tensor<Kv>::multiply_add(scores[n + 1], q[k], b[2], b[3]);
        }
      }
      if (tile * TILE + TILE - 1 > warp_low || tile * TILE + args.window <= warp_high) {
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n++)
#pragma unroll
          for (u32 i = 0; i < 4; i++)
            // For a key at a later position than the query's, the unsigned distance wraps around to a large number.
            if (position[i / 2] - (tile * TILE + n * 8 + t * 2 + i % 2) >= args.window) scores[n][i] = -INF;
      }
      u32 weights[TILE / 16][4];
      float fade[2];
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float best = top[h];
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n++) best = fmaxf(best, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
        best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 1));
        best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 2));
        const float base = best == -INF ? 0.f : best;  // no key yet
        fade[h] = exp2_(__fsub_rn(top[h], base));
        top[h] = best;
        sum[h] = __fmul_rn(sum[h], fade[h]);
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n++) {
          const float x = exp2_(__fsub_rn(scores[n][2 * h], base)), y = exp2_(__fsub_rn(scores[n][2 * h + 1], base));
          sum[h] = __fadd_rn(__fadd_rn(sum[h], x), y);
          weights[n / 2][n % 2 * 2 + h] = Tensor<Kv>::pair(x, y);
        }
      }
#pragma unroll
      for (u32 n = 0; n < D / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) values[n][i] = __fmul_rn(values[n][i], fade[i / 2]);
#pragma unroll
      for (u32 k = 0; k < TILE / 16; k++) {
#pragma unroll
        for (u32 n = 0; n < D / 8; n += 2) {
          u32 b[4];
          load_transposed(b, shared_address(&tiles[1][k * 16 + value_row][n * 8 + value_column]));
          Tensor<Kv>::multiply_add(values[n], weights[k], b[0], b[1]);
          Tensor<Kv>::multiply_add(values[n + 1], weights[k], b[2], b[3]);
        }
      }
    }
    if ((tile + 1) % SPLIT_TILES != 0 && tile + 1 != end) continue;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(ALL_LANES, sum[h], 1));
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(ALL_LANES, sum[h], 2));
    }
    if (item.split != ALL_SPLITS) break;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const Fold by = fold(total_top[h], total_sum[h], top[h], sum[h]);
      total_top[h] = by.top, total_sum[h] = by.sum, top[h] = -INF, sum[h] = 0.f;
#pragma unroll
      for (u32 i = 0; i < D / 4; i++) {
        float &x = total[i / 2][2 * h + i % 2], &part = values[i / 2][2 * h + i % 2];
        x = folded(by, x, part), part = 0.f;
      }
    }
  }

#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const u32 index = warp * WARP_QUERIES + h * 8 + g;
    if (index >= item.queries) continue;
    if (item.split != ALL_SPLITS) {
      const size_t part = (size_t)blockIdx.y * args.parts + item.part + index;
      if (t == 0) args.part_sums[part] = make_float2(top[h], sum[h]);
      float* to = args.part_values + part * D + t * 2;
#pragma unroll
      for (u32 n = 0; n < D / 8; n++)
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(values[n][2 * h], values[n][2 * h + 1]);
      continue;
    }
    const Query query = query_at(args, row, item, index);
    const bool is_padding = args.kv_at[query.token] < 0;
    const float factor = __fdiv_rn(args.value_scale, total_sum[h]);
    float* to = args.out + ((size_t)query.token * args.heads + query.head) * D + t * 2;
#pragma unroll
    for (u32 n = 0; n < D / 8; n++)
      *reinterpret_cast<float2*>(to + n * 8) =
          is_padding ? make_float2(0.f, 0.f)
                     : make_float2(normal(total[n][2 * h], factor), normal(total[n][2 * h + 1], factor));
  }
}

// Folds the partial results of a tile's queries, one split (range of SPLIT keys) after another. An item holds the tile
// and the index of its first split's results. The results of the later splits follow. A thread computes four elements
// of a query.
template <int D>
DEVICE void merge(const Args& args) {
  const Item item = args.items[blockIdx.x];
  const Row row = args.rows[item.row];
  for (u32 i = threadIdx.x; i < item.queries * (D / 4); i += blockDim.x) {
    const u32 index = i / (D / 4), d = i % (D / 4) * 4;
    const Query query = query_at(args, row, item, index);
    const u32 first_key = query.position >= args.window ? query.position + 1 - args.window : 0;
    float top = -INF, sum = 0.f;
    float4 values = make_float4(0.f, 0.f, 0.f, 0.f);
    for (u32 split = first_key / SPLIT; split <= query.position / SPLIT; split++) {
      const size_t part = (size_t)blockIdx.y * args.parts + item.part + split * item.queries + index;
      const float2 sums = args.part_sums[part];
      const float4 more = *reinterpret_cast<const float4*>(args.part_values + part * D + d);
      const Fold by = fold(top, sum, sums.x, sums.y);
      top = by.top, sum = by.sum;
      values = make_float4(folded(by, values.x, more.x), folded(by, values.y, more.y), folded(by, values.z, more.z),
                           folded(by, values.w, more.w));
    }
    const float factor = __fdiv_rn(args.value_scale, sum);
    float4 result = make_float4(normal(values.x, factor), normal(values.y, factor), normal(values.z, factor),
                                normal(values.w, factor));
    if (args.kv_at[query.token] < 0) result = make_float4(0.f, 0.f, 0.f, 0.f);
    *reinterpret_cast<float4*>(args.out + ((size_t)query.token * args.heads + query.head) * D + d) = result;
  }
}

#define PARAMETERS                                                                                                          \
  const float *qkv, const Row *rows, const Item *items, const int *kv_at, const u32 *pages, float *out, float2 *part_sums,  \
      float *part_values, u32 parts, u32 heads, u32 kv_heads, u32 page_tokens, u32 window, float scale,          \
      float value_scale
#define ARGS                                                                                                           \
  {qkv, rows, items, kv_at, pages, out, part_sums, part_values, parts, heads, kv_heads, page_tokens, window, scale,    \
   value_scale}

#define ATTENTION(NAME, TYPE, STORED, D, WARPS, BLOCKS)                \
  KERNEL(32 * WARPS, BLOCKS) NAME(PARAMETERS, const STORED::Raw* kv) { \
    BEGIN(NAME);                                                       \
    __shared__ __align__(16) Shared<STORED, D> shared;                 \
    const Args args = ARGS;                                            \
    attend<TYPE, STORED, D, WARPS>(args, kv, shared);                  \
  }
#define MERGE(NAME, D)             \
  KERNEL(128) NAME(PARAMETERS) {   \
    BEGIN(NAME);                   \
    const Args args = ARGS;        \
    merge<D>(args);                \
  }
ATTENTION(narrow_bf16_32, Bf16, Bf16, 32, 1, 8)
ATTENTION(narrow_bf16_64, Bf16, Bf16, 64, 1, 8)
ATTENTION(narrow_bf16_128, Bf16, Bf16, 128, 1, 6)
ATTENTION(narrow_f16_32, F16, F16, 32, 1, 8)
ATTENTION(narrow_f16_64, F16, F16, 64, 1, 8)
ATTENTION(narrow_f16_128, F16, F16, 128, 1, 6)
ATTENTION(wide_bf16_32, Bf16, Bf16, 32, 4, 4)
ATTENTION(wide_bf16_64, Bf16, Bf16, 64, 4, 3)
ATTENTION(wide_bf16_128, Bf16, Bf16, 128, 4, 2)
ATTENTION(wide_f16_32, F16, F16, 32, 4, 4)
ATTENTION(wide_f16_64, F16, F16, 64, 4, 3)
ATTENTION(wide_f16_128, F16, F16, 128, 4, 2)
ATTENTION(narrow_fp8_bf16_32, Bf16, Fp8, 32, 1, 8)
ATTENTION(narrow_fp8_bf16_64, Bf16, Fp8, 64, 1, 8)
ATTENTION(narrow_fp8_bf16_128, Bf16, Fp8, 128, 1, 6)
ATTENTION(narrow_fp8_f16_32, F16, Fp8, 32, 1, 8)
ATTENTION(narrow_fp8_f16_64, F16, Fp8, 64, 1, 8)
ATTENTION(narrow_fp8_f16_128, F16, Fp8, 128, 1, 6)
ATTENTION(wide_fp8_bf16_32, Bf16, Fp8, 32, 4, 4)
ATTENTION(wide_fp8_bf16_64, Bf16, Fp8, 64, 4, 3)
ATTENTION(wide_fp8_bf16_128, Bf16, Fp8, 128, 4, 2)
ATTENTION(wide_fp8_f16_32, F16, Fp8, 32, 4, 4)
ATTENTION(wide_fp8_f16_64, F16, Fp8, 64, 4, 3)
ATTENTION(wide_fp8_f16_128, F16, Fp8, 128, 4, 2)
MERGE(merge_splits_32, 32)
MERGE(merge_splits_64, 64)
MERGE(merge_splits_128, 128)
