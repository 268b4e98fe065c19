// out[t] = table[ids[t] - first], or zeros for an id whose row this shard of the table does not hold. One thread block
// per token.
//
// The highest bit of an id marks a row that continues a step in flight. The other bits are then a slot, and the id is
// the token that was sampled last for this slot.
constexpr int THREADS = 128;
constexpr u32 FROM_SLOT = 1u << 31;

template <class Table>
DEVICE void embed(const typename Table::Raw* table, const u32* ids, const u32* last_tokens, u32 first, u32 held, u32 width,
                  float* out) {
  u32 id = ids[blockIdx.x];
  if (id & FROM_SLOT) id = last_tokens[id & ~FROM_SLOT];
  u32 row = id - first;  // Wraps round for an id below `first`.
  out += (size_t)blockIdx.x * width;
  for (u32 i = threadIdx.x; i < width; i += THREADS) out[i] = row < held ? Table::widen(table[(size_t)row * width + i]) : 0.f;
}

#define EMBED(NAME, TYPE)                                                                                               \
  KERNEL(THREADS) NAME(const TYPE::Raw* table, const u32* ids, const u32* last_tokens, u32 first, u32 held, u32 width, \
                       float* out) {                                                                                   \
    BEGIN(NAME);                                                                                                       \
    embed<TYPE>(table, ids, last_tokens, first, held, width, out);                                                     \
  }
EMBED(embed_f32, F32)
EMBED(embed_bf16, Bf16)
EMBED(embed_f16, F16)
