// Kernels around the collectives of a TP group: rows that are packed before, parts that are laid side by side after,
// and keys in place of floats.
constexpr int THREADS = 256;

DEVICE size_t element() { return (size_t)blockIdx.x * THREADS + threadIdx.x; }

// out[i] = x[rows[i]], for `count` elements in rows of `width`.
KERNEL(THREADS) pack_rows(const float* x, const u32* rows, u64 count, u32 width, float* out) {
  BEGIN(pack_rows);
  size_t i = element();
  if (i < count) out[i] = x[(size_t)rows[i / width] * width + i % width];
}

// out[rows[i]][rank] = parts[rank][i], `width` elements each, of which there are `count` in all. `rows` may be null:
// each row keeps its index.
KERNEL(THREADS) lay_side_by_side(const float* parts, const u32* rows, u32 ranks, u32 row_count, u32 width, u64 count, float* out) {
  BEGIN(lay_side_by_side);
  size_t i = element();
  if (i >= count) return;
  u32 part = (u32)(i / width), rank = part / row_count, row = part % row_count;
  size_t at = (size_t)(rows ? rows[row] : row) * ranks + rank;
  out[at * width + i % width] = parts[i];
}

// Replaces x by its key, and back. NCCL's maximum of floats would drop a NaN; the maximum of keys keeps it.
KERNEL(THREADS) to_keys(float* x, u64 count) {
  BEGIN(to_keys);
  size_t i = element();
  if (i < count) x[i] = __uint_as_float(key_of(x[i]));
}
KERNEL(THREADS) from_keys(float* x, u64 count) {
  BEGIN(from_keys);
  size_t i = element();
  if (i < count) x[i] = float_of(__float_as_uint(x[i]));
}
