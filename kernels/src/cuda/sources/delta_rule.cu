// The gated delta rule. For each token of a row in order, the state matrix S (*memory*) of a value head becomes decay *
// S + k ⊗ delta, with delta = (v - decay * Sᵀk) * beta. The token's output is Sᵀq.
//
// A thread block computes COLUMNS columns of a head's memory for all tokens of a row. Each column is kept in the
// registers of PARTS lanes. It is read from the slot once and written to the slot once. A lane holds quads of rows that
// are PARTS quads apart. It keeps four sums over its quads. The sums of all lanes of a column are then added in an
// order that depends only on the size of a head.
//
// The inputs of TILE tokens are copied by cp.async while the inputs of the previous tile are used. A copy has four
// bytes, because a token's inputs are only aligned to four bytes.
constexpr int THREADS = 128;
constexpr u32 PARTS = 4;
constexpr u32 WARP_COLUMNS = 32 / PARTS;
constexpr u32 COLUMNS = THREADS / 32 * WARP_COLUMNS;
constexpr u32 TILE = 4;

// Inputs of a tile of tokens. Keys and queries have up to KEYS elements and are padded with zeros.
template <u32 KEYS>
struct Stage {
  float q[TILE][KEYS], k[TILE][KEYS], v[TILE][COLUMNS], gates[TILE][2];
};

struct Args {
  const float* inputs;  // [q | k | v | decay | beta] per token
  const Row* rows;
  u32 row_count, tokens;
  u8* states;  // the layer's part of the null slot's memory; a slot begins `stride` bytes behind the one before
  u64 stride;
  u32 key_heads, value_heads, key_dim, value_dim;
  float* out;
};

// Returns the sum over the lanes of a column, with the same bits in all of these lanes.
DEVICE float column_sum(const float (&sums)[4]) {
  float sum = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
#pragma unroll
  for (int mask = WARP_COLUMNS; mask < 32; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, mask));
  return sum;
}

// Loads this lane's elements of a column of the state matrix, or stores them. Rows from `rows` on are loaded as zeros
// and not stored. Each address is computed from the previous address, and no address is kept between load and store,
// because there are too few registers.
template <bool STORE, u32 ELEMENTS>
DEVICE void move(float (&memory)[ELEMENTS], float* at, u32 part, u32 rows, u32 value_dim) {
#pragma unroll
  for (u32 i = 0; i < ELEMENTS; i++) {
    const bool is_held = i / 4 * 4 * PARTS + part * 4 + i % 4 < rows;
    if (!STORE) memory[i] = is_held ? *at : 0.f;
    else if (is_held) *at = memory[i];
    at += (size_t)(i % 4 == 3 ? 4 * PARTS - 3 : 1) * value_dim;
    asm volatile("" : "+l"(at));
  }
}

template <u32 KEYS>
DEVICE void delta_rule(const Args& args) {
  __shared__ __align__(16) Stage<KEYS> stages[2];
  const u32 key_heads = args.key_heads, value_heads = args.value_heads, key_dim = args.key_dim, value_dim = args.value_dim;
  const u32 lane = threadIdx.x % 32, part = lane / WARP_COLUMNS;
  const u32 slices = (value_dim + COLUMNS - 1) / COLUMNS, head = blockIdx.x / slices, first = blockIdx.x % slices * COLUMNS;
  const u32 own = threadIdx.x / 32 * WARP_COLUMNS + lane % WARP_COLUMNS, column = first + own;
  const bool is_inside = column < value_dim;
  const Row row = args.rows[blockIdx.y];
  const u32 last = blockIdx.y + 1 < args.row_count ? args.rows[blockIdx.y + 1].first_token : args.tokens;
  const u32 count = last - row.first_token, values = value_heads * value_dim;
  float* out = args.out + (size_t)row.first_token * values + head * value_dim + column;
  if (!row.slot) {
    if (is_inside && part == 0)
      for (u32 token = 0; token < count; token++) out[(size_t)token * values] = 0.f;
    return;
  }

  const u32 channels = 2 * key_heads * key_dim + values, width = channels + 2 * value_heads;
  const u32 key_column = head / (value_heads / key_heads) * key_dim;
  const u32 value_column = 2 * key_heads * key_dim + head * value_dim + first;
  const float* inputs = args.inputs + (size_t)row.first_token * width;
  auto fetch = [&](u32 begin, Stage<KEYS>& stage) {
    const u32 end = min(begin + TILE, count);
    const float* from = inputs + (size_t)begin * width;
#pragma unroll 1
    for (u32 t = 0; t < end - begin; t++, from += width) {
#pragma unroll 1
      for (u32 i = threadIdx.x; i < key_dim; i += THREADS) {
        copy4(shared_address(&stage.q[t][i]), from + key_column + i);
        copy4(shared_address(&stage.k[t][i]), from + key_heads * key_dim + key_column + i);
      }
      if (threadIdx.x < min(COLUMNS, value_dim - first))
        copy4(shared_address(&stage.v[t][threadIdx.x]), from + value_column + threadIdx.x);
      if (threadIdx.x < 2)
        copy4(shared_address(&stage.gates[t][threadIdx.x]), from + channels + threadIdx.x * value_heads + head);
    }
    commit_copies();
  };
  fetch(0, stages[0]);
  for (u32 t = 0; t < TILE; t++)
    for (u32 i = key_dim + threadIdx.x; i < KEYS; i += THREADS)
      stages[0].q[t][i] = stages[0].k[t][i] = stages[1].q[t][i] = stages[1].k[t][i] = 0.f;

  const u32 rows = is_inside ? key_dim : 0;
  float memory[KEYS / PARTS];
  float* state = reinterpret_cast<float*>(args.states + row.slot * args.stride);
  float* held = state + ((size_t)head * key_dim + part * 4) * value_dim + column;
  move<false>(memory, held, part, rows, value_dim);

#pragma unroll 1
  for (u32 begin = 0, at = 0; begin < count; begin += TILE, at ^= 1) {
    wait_for_copies();
    __syncthreads();  // the tile is there, and no warp reads the other stage any more
    if (begin + TILE < count) fetch(begin + TILE, stages[at ^ 1]);
    const Stage<KEYS>& stage = stages[at];
#pragma unroll 1
    for (u32 t = 0; t < min(TILE, count - begin); t++) {
      const float4* k = reinterpret_cast<const float4*>(stage.k[t]) + part;
      const float4* q = reinterpret_cast<const float4*>(stage.q[t]) + part;
      const float decay = stage.gates[t][0], beta = stage.gates[t][1];
      const float value = is_inside ? stage.v[t][own] : 0.f;
      float known[4] = {}, sums[4] = {};
#pragma unroll
      for (u32 i = 0; i < KEYS / PARTS; i += 4) {
        const float4 x = k[i / 4 * PARTS];
        known[0] = __fmaf_rn(memory[i], x.x, known[0]), known[1] = __fmaf_rn(memory[i + 1], x.y, known[1]);
        known[2] = __fmaf_rn(memory[i + 2], x.z, known[2]), known[3] = __fmaf_rn(memory[i + 3], x.w, known[3]);
      }
      const float delta = __fmul_rn(__fsub_rn(value, __fmul_rn(decay, column_sum(known))), beta);
      asm volatile("" ::: "memory");  // keys are read again, not held
#pragma unroll
      for (u32 i = 0; i < KEYS / PARTS; i += 4) {
        const float4 x = k[i / 4 * PARTS], y = q[i / 4 * PARTS];
        memory[i] = __fmaf_rn(x.x, delta, __fmul_rn(decay, memory[i]));
        memory[i + 1] = __fmaf_rn(x.y, delta, __fmul_rn(decay, memory[i + 1]));
        memory[i + 2] = __fmaf_rn(x.z, delta, __fmul_rn(decay, memory[i + 2]));
        memory[i + 3] = __fmaf_rn(x.w, delta, __fmul_rn(decay, memory[i + 3]));
        sums[0] = __fmaf_rn(memory[i], y.x, sums[0]), sums[1] = __fmaf_rn(memory[i + 1], y.y, sums[1]);
        sums[2] = __fmaf_rn(memory[i + 2], y.z, sums[2]), sums[3] = __fmaf_rn(memory[i + 3], y.w, sums[3]);
      }
      const float sum = column_sum(sums);
      if (is_inside && part == 0) out[(size_t)(begin + t) * values] = sum;
    }
  }
  move<true>(memory, held, part, rows, value_dim);
}

#define DELTA_RULE(NAME, KEYS, BLOCKS)                                                                                       \
  KERNEL(THREADS, BLOCKS) NAME(const float* inputs, const Row* rows, u32 row_count, u32 tokens, u8* states, u64 stride,      \
                               u32 key_heads, u32 value_heads, u32 key_dim, u32 value_dim, float* out) {                     \
    BEGIN(NAME);                                                                                                             \
    delta_rule<KEYS>({inputs, rows, row_count, tokens, states, stride, key_heads, value_heads, key_dim, value_dim, out});    \
  }
DELTA_RULE(delta_rule_32, 32, 6)
DELTA_RULE(delta_rule_64, 64, 6)
DELTA_RULE(delta_rule_128, 128, 4)
DELTA_RULE(delta_rule_256, 256, 3)
