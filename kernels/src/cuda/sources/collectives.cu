// Kernels around the collectives of a TP group. They pack rows before a gather, lay the gathered parts side by side,
// and convert floats to keys.
constexpr int THREADS = 256;

DEVICE size_t element() { return (size_t)blockIdx.x * THREADS + threadIdx.x; }

// out[i] = x[rows[i]], for rows of `width` elements. `count` is the total number of elements.
KERNEL(THREADS) pack_rows(const float* x, const u32* rows, u64 count, u32 width, float* out) {
  BEGIN(pack_rows);
  size_t i = element();
  if (i < count) out[i] = x[(size_t)rows[i / width] * width + i % width];
}

// out[rows[i]][rank] = parts[rank][i], `width` elements each. `count` is the total number of elements. A null `rows`
// keeps each row's index.
KERNEL(THREADS) lay_side_by_side(const float* parts, const u32* rows, u32 ranks, u32 row_count, u32 width, u64 count, float* out) {
  BEGIN(lay_side_by_side);
  size_t i = element();
  if (i >= count) return;
  u32 part = (u32)(i / width), rank = part / row_count, row = part % row_count;
  size_t at = (size_t)(rows ? rows[row] : row) * ranks + rank;
  out[at * width + i % width] = parts[i];
}

// Converts x to keys, or keys back to floats. NCCL's maximum of floats would drop a NaN; the maximum of keys keeps it.
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
