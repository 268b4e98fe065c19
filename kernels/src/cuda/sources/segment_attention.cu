// Attention in both directions inside segments of rows, in f32: encoders of pictures and sound.
//
// A thread block computes a tile of QUERIES queries of one head over all keys of their segment, KEYS at a time, with an
// online softmax (Milakov and Gimelshein, arXiv:1805.02867). A thread has four queries. Eight neighbouring lanes share
// them: each has four of the keys and an eighth of the elements of a head. Heads are padded to D elements with zeros.
//
// A query's bits depend on its segment only: keys are counted from the segment's first row, and their order is fixed.
// The lists of tiles are made by kernels/src/cuda/device/encoder.rs.
constexpr u32 KEYS = 32;
constexpr float LOG2_E = 1.44269504f;

struct Tile {
  u32 first, end;  // rows of the segment
  u32 query;       // row of the tile's first query
};

// Rows are padded, so that the rows that eight lanes read at once lie in different banks.
template <int D, int QUERIES>
struct Shared {
  float queries[QUERIES][D + 4];
  float values[KEYS][D + 4];
  // The keys are no longer needed when their weights are known.
  union {
    float keys[KEYS][D + 4];
    float weights[QUERIES][KEYS + 4];
  };
};

// Begins to copy one head of `rows` rows that are `stride` elements apart. Elements behind the head and rows behind the
// last one are zeros.
template <int D, u32 ROWS, u32 THREADS>
DEVICE void fetch(float (&to)[ROWS][D + 4], const float* from, size_t stride, u32 rows, u32 head_dim) {
  for (u32 i = threadIdx.x; i < ROWS * (D / 4); i += THREADS) {
    const u32 row = i / (D / 4), d = i % (D / 4) * 4;
    const float* at = from + row * stride + d;
    if (head_dim % 4 == 0) {
      const bool there = row < rows && d < head_dim;
      copy16(shared_address(&to[row][d]), there ? at : from, there);
    } else {
#pragma unroll
      for (u32 e = 0; e < 4; e++) to[row][d + e] = row < rows && d + e < head_dim ? at[e] : 0.f;
    }
  }
  commit_copies();
}

// Returns the maximum over the eight lanes that share queries.
DEVICE float max_of_eight(float x) {
#pragma unroll
  for (int mask = 4; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
  return x;
}

template <int D, int QUERIES>
DEVICE void attend(const float* qkv, const Tile* tiles, u32 heads, u32 head_dim, float scale, float* out,
                   Shared<D, QUERIES>& shared) {
  constexpr u32 THREADS = 2 * QUERIES, GROUPS = QUERIES / 4;
  const u32 lane = threadIdx.x % 8, group = threadIdx.x / 8;
  const Tile tile = tiles[blockIdx.x];
  const size_t width = (size_t)heads * head_dim, stride = 3 * width;
  const float* head = qkv + (size_t)blockIdx.y * head_dim;
  const u32 queries = min((u32)QUERIES, tile.end - tile.query);
  fetch<D, QUERIES, THREADS>(shared.queries, head + tile.query * stride, stride, queries, head_dim);

  float best[4] = {-INF, -INF, -INF, -INF}, sum[4] = {}, totals[4][D / 8] = {};
#pragma unroll 1
  for (u32 key = tile.first; key < tile.end; key += KEYS) {
    const u32 keys = min(KEYS, tile.end - key);
    const float* at = head + key * stride + width;
    __syncthreads();  // no thread reads the keys and values before any more
    fetch<D, KEYS, THREADS>(shared.keys, at, stride, keys, head_dim);
    fetch<D, KEYS, THREADS>(shared.values, at + width, stride, keys, head_dim);
    wait_for_copies_but<1>();
    __syncthreads();  // queries and keys are there

    float scores[4][4] = {};
#pragma unroll 4
    for (u32 d = 0; d < D; d += 4) {
      float4 k[4];
#pragma unroll
      for (u32 j = 0; j < 4; j++) k[j] = F32::load4(&shared.keys[lane + 8 * j][d]);
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float4 q = F32::load4(&shared.queries[group + GROUPS * i][d]);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          float& score = scores[i][j];
          score = __fmaf_rn(q.x, k[j].x, score), score = __fmaf_rn(q.y, k[j].y, score);
          score = __fmaf_rn(q.z, k[j].z, score), score = __fmaf_rn(q.w, k[j].w, score);
        }
      }
    }
    __syncthreads();  // the weights take the place of the keys
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      float top = best[i];
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        scores[i][j] = lane + 8 * j < keys ? __fmul_rn(scores[i][j], __fmul_rn(scale, LOG2_E)) : -INF;
        top = fmaxf(top, scores[i][j]);
      }
      top = max_of_eight(top);
      const float base = top == -INF ? 0.f : top;
      const float fade = exp2_(__fsub_rn(best[i], base));
      best[i] = top;
      sum[i] = __fmul_rn(sum[i], fade);
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float weight = exp2_(__fsub_rn(scores[i][j], base));
        sum[i] = __fadd_rn(sum[i], weight);
        shared.weights[group + GROUPS * i][lane + 8 * j] = weight;
      }
#pragma unroll
      for (u32 c = 0; c < D / 8; c++) totals[i][c] = __fmul_rn(totals[i][c], fade);
    }
    wait_for_copies();
    __syncthreads();  // weights and values are there

#pragma unroll 1
    for (u32 k = 0; k < KEYS; k += 4) {
      float w[4][4];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const float4 four = F32::load4(&shared.weights[group + GROUPS * i][k]);
        w[i][0] = four.x, w[i][1] = four.y, w[i][2] = four.z, w[i][3] = four.w;
      }
#pragma unroll
      for (u32 e = 0; e < 4; e++) {
#pragma unroll
        for (u32 c = 0; c < D / 8; c += 2) {
          const float2 v = *reinterpret_cast<const float2*>(&shared.values[k + e][2 * lane + 8 * c]);
#pragma unroll
          for (u32 i = 0; i < 4; i++) {
            totals[i][c] = __fmaf_rn(w[i][e], v.x, totals[i][c]);
            totals[i][c + 1] = __fmaf_rn(w[i][e], v.y, totals[i][c + 1]);
          }
        }
      }
    }
  }

#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    float total = sum[i];
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) total = __fadd_rn(total, __shfl_xor_sync(ALL_LANES, total, mask));
    const u32 query = group + GROUPS * i;
    if (query >= queries) continue;
    float* to = out + (tile.query + query) * width + (size_t)blockIdx.y * head_dim;
#pragma unroll
    for (u32 c = 0; c < D / 8; c++) {
      const u32 d = 2 * lane + 8 * (c & ~1u) + c % 2;
      if (d < head_dim) to[d] = __fdiv_rn(totals[i][c], total);
    }
  }
}

#define SEGMENT_ATTENTION(NAME, D, QUERIES)                                                                          \
  KERNEL(2 * QUERIES) NAME(const float* qkv, const Tile* tiles, u32 heads, u32 head_dim, float scale, float* out) {  \
    BEGIN(NAME);                                                                                                     \
    __shared__ __align__(16) Shared<D, QUERIES> shared;                                                              \
    attend<D, QUERIES>(qkv, tiles, heads, head_dim, scale, out, shared);                                             \
  }
// The numbers of queries are those of kernels/src/cuda/device/encoder.rs. Heads of 128 elements leave room for fewer.
SEGMENT_ATTENTION(segment_attention_32, 32, 64)
SEGMENT_ATTENTION(segment_attention_64, 64, 64)
SEGMENT_ATTENTION(segment_attention_80, 80, 64)
SEGMENT_ATTENTION(segment_attention_128, 128, 16)
