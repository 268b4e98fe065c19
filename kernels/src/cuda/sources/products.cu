// Matrix products with weights that are codes: out[row][column] = sum of x[row][input] * weight[column][input].
//
// A launch has a block per tile or, if those would leave most of the GPU idle, per tile and split. In the latter case,
// the blocks write the sums of their splits, and `sum_splits` adds them. Both ways give the same bits.
struct Args {
  const u16* x;  // [rows, inputs] in bf16
  float* out;    // [rows, outputs], or the splits' sums, [splits, rows, outputs]
  u32 rows, inputs, outputs;
  u32 splits;      // 1, or the number of splits that blocks compute
  u32 accumulate;  // not 0: adds to `out`
};

template <class Code, bool HAS_MINIMA, class S>
DEVICE void multiply(const Args& args, const Codes& codes, Shared<Code, S>& shared) {
  const u32 tiles = (args.outputs + S::COLUMNS - 1) / S::COLUMNS, split = blockIdx.x / tiles;
  const u32 first_row = blockIdx.y * S::ROWS, first = blockIdx.x % tiles * S::COLUMNS;
  const u32 rows = min(S::ROWS, args.rows - first_row);
  u32 begin = 0, end = (args.inputs + DEPTH - 1) / DEPTH;
  if (args.splits > 1) begin = split * STEPS_PER_SPLIT, end = min(end, begin + STEPS_PER_SPLIT);
  auto row = [&](u32 line) { return line < rows ? args.x + (size_t)(first_row + line) * args.inputs : nullptr; };
  auto column = [&](u32 line) { return first + line < args.outputs ? first + line : ALL_LANES; };
  float totals[S::ROW_TILES][S::COLUMN_TILES][4] = {};
  add_steps<Code, HAS_MINIMA, S>(shared, codes, args.inputs, begin, end, rows, row, column, totals);

  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  float* out = args.out + (size_t)split * args.rows * args.outputs;
#pragma unroll
  for (u32 i = 0; i < 2 * S::ROW_TILES; i++) {
    const u32 r = i / 2, h = i % 2, line = r * 16 + h * 8 + g;
    if (line >= rows) continue;
#pragma unroll
    for (u32 c = 0; c < S::COLUMN_TILES; c++) {
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        const u32 of = column(first_column<S>(warp, c) + 2 * t + j);
        if (of == ALL_LANES) continue;
        float& to = out[(size_t)(first_row + line) * args.outputs + of];
        to = args.accumulate ? __fadd_rn(to, totals[r][c][2 * h + j]) : totals[r][c][2 * h + j];
      }
    }
  }
}

#define PRODUCTS(NAME, CODE, SHAPE)                                                                                    \
  KERNEL(THREADS)                                                                                                      \
  NAME(const u16* x, const u8* codes, const u8* scales, const u8* offsets, float* out, u32 rows, u32 inputs,           \
       u32 outputs, u32 stride, u32 groups, u32 shift, u32 kinds, u32 splits, u32 accumulate) {                        \
    BEGIN(NAME);                                                                                                       \
    __shared__ __align__(16) Shared<CODE, SHAPE> shared;                                                               \
    const Args args = {x, out, rows, inputs, outputs, splits, accumulate};                                             \
    const Codes of = {codes, scales, offsets, stride, groups, shift, kinds};                                           \
    if (CODE::IS_INTEGER && (kinds & MINIMA))                                                                          \
      multiply<CODE, CODE::IS_INTEGER, SHAPE>(args, of, shared);                                                       \
    else                                                                                                               \
      multiply<CODE, false, SHAPE>(args, of, shared);                                                                  \
  }
PRODUCTS(multiply_narrow_int4, Int4, Narrow)
PRODUCTS(multiply_narrow_int8, Int8, Narrow)
PRODUCTS(multiply_narrow_e4m3, E4m3, Narrow)
PRODUCTS(multiply_narrow_e2m1, E2m1, Narrow)
PRODUCTS(multiply_wide_int4, Int4, Wide)
PRODUCTS(multiply_wide_int8, Int8, Wide)
PRODUCTS(multiply_wide_e4m3, E4m3, Wide)
PRODUCTS(multiply_wide_e2m1, E2m1, Wide)

// Adds the sums of splits in ascending order.
KERNEL(256) sum_splits(const float* parts, u32 splits, u64 count, u32 accumulate, float* out) {
  BEGIN(sum_splits);
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  float total = 0.f;
  for (u32 split = 0; split < splits; split++) total = __fadd_rn(total, parts[split * count + i]);
  out[i] = accumulate ? __fadd_rn(out[i], total) : total;
}
