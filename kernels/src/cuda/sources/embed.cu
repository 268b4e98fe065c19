// out[t] = table[ids[t] - first], or zeros for an id whose row this shard of the table does not hold. One thread block
// per token. A table of codes gives its values in f32, not rounded.
//
// The highest bit of an id marks a row that continues a step in flight. The other bits are then a slot, and the id is
// the token that was sampled last for this slot.
constexpr int THREADS = 128;
constexpr u32 FROM_SLOT = 1u << 31;

// Returns the row of the block's token in a shard. The row wraps round for an id below `first`.
DEVICE u32 row_of(const u32* ids, const u32* last_tokens, u32 first) {
  u32 id = ids[blockIdx.x];
  if (id & FROM_SLOT) id = last_tokens[id & ~FROM_SLOT];
  return id - first;
}

template <class Table>
DEVICE void embed(const typename Table::Raw* table, u32 row, u32 held, u32 width, float* out) {
  out += (size_t)blockIdx.x * width;
  for (u32 i = threadIdx.x; i < width; i += THREADS) out[i] = row < held ? Table::widen(table[(size_t)row * width + i]) : 0.f;
}

#define EMBED(NAME, TYPE)                                                                                               \
  KERNEL(THREADS) NAME(const TYPE::Raw* table, const u32* ids, const u32* last_tokens, u32 first, u32 held, u32 width, \
                       float* out) {                                                                                   \
    BEGIN(NAME);                                                                                                       \
    embed<TYPE>(table, row_of(ids, last_tokens, first), held, width, out);                                             \
  }
EMBED(embed_f32, F32)
EMBED(embed_bf16, Bf16)
EMBED(embed_f16, F16)

template <class Code>
DEVICE void embed_codes(const Codes& codes, u32 row, u32 held, u32 width, float* out) {
  const u8* at = codes.codes + (size_t)row * codes.stride;
  out += (size_t)blockIdx.x * width;
  for (u32 i = threadIdx.x; i < width; i += THREADS) {
    out[i] = 0.f;
    if (row >= held) continue;
    const u32 code = Code::BITS == 8 ? at[i] : at[i / 2] >> i % 2 * 4 & 15u;
    const Group group = group_of<Code>(codes, row, codes.shift == WHOLE_ROWS ? 0 : i >> codes.shift);
    const float raw = Code::raw(code);
    out[i] = codes.kinds & MINIMA ? weight_of<Code, true>(raw, group) : weight_of<Code, false>(raw, group);
  }
}

#define EMBED_CODES(NAME, CODE)                                                                                   \
  KERNEL(THREADS)                                                                                                \
  NAME(const u8* codes, const u8* scales, const u8* offsets, u32 stride, u32 groups, u32 shift, u32 kinds,       \
       const u32* ids, const u32* last_tokens, u32 first, u32 held, u32 width, float* out) {                     \
    BEGIN(NAME);                                                                                                 \
    const Codes table = {codes, scales, offsets, stride, groups, shift, kinds};                                  \
    embed_codes<CODE>(table, row_of(ids, last_tokens, first), held, width, out);                                 \
  }
EMBED_CODES(embed_int4, Int4)
EMBED_CODES(embed_int8, Int8)
EMBED_CODES(embed_e4m3, E4m3)
EMBED_CODES(embed_e2m1, E2m1)
