// Matrix products of experts whose weights are codes. The inputs are bf16. A tile has rows of one expert's pairs: see
// codes_tiles.cuh.

// Where scales and offsets are in each expert's matrix, and the layout that all these matrices share.
struct Layout {
  u64 scales_at, offsets_at;
  u32 stride, groups, shift, kinds;
};

template <class Code, class S>
struct ExpertShared : Shared<Code, S> {
  u32 pairs[S::ROWS];
};

// `gated` is the type of the activations that the product with gate and up gives. A down projection gives f32, and its
// `gated` is 0.
constexpr u32 IN_BF16 = 1, IN_F16 = 2, IN_F32 = 3;

template <class Code, bool HAS_MINIMA, class S>
DEVICE void multiply(const Args& args, u32 gated, const Layout& layout, ExpertShared<Code, S>& shared) {
  const Work work = work_of(args, S::ROWS, blockIdx.x);
  if (work.pairs == 0) return;
  const u32* list = args.lists + (size_t)work.expert * args.capacity + work.first;
  if (threadIdx.x < S::ROWS) shared.pairs[threadIdx.x] = list[min(threadIdx.x, work.pairs - 1)];
  __syncthreads();
  const u8* at = reinterpret_cast<const u8*>(args.matrices[work.expert]);
  const Codes codes = {at,           at + layout.scales_at, at + layout.offsets_at, layout.stride,
                       layout.groups, layout.shift,          layout.kinds};
  auto row = [&](u32 line) {
    const u16* x = static_cast<const u16*>(args.x);
    return line < work.pairs ? x + (size_t)(shared.pairs[line] / args.divisor) * args.inputs : nullptr;
  };
  auto column = [&](u32 line) {
    const Column of = gated ? column_of<true, S::COLUMNS>(args, line) : column_of<false, S::COLUMNS>(args, line);
    return of.is_there ? of.row : ALL_LANES;
  };
  float totals[S::ROW_TILES][S::COLUMN_TILES][4] = {};
  const u32 end = (args.inputs + DEPTH - 1) / DEPTH;
  add_steps<Code, HAS_MINIMA, S>(shared, codes, args.inputs, 0, end, work.pairs, row, column, totals);

  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (u32 i = 0; i < 2 * S::ROW_TILES; i++) {
    const u32 r = i / 2, h = i % 2, line = r * 16 + h * 8 + g;
    if (line >= work.pairs) continue;
    const size_t to = (size_t)shared.pairs[line] * args.outputs;
#pragma unroll
    for (u32 c = 0; c < S::COLUMN_TILES; c++) {
      // The lane holds the gate and, in the other half of the columns, its up value.
      if (gated && c >= S::COLUMN_TILES / 2) break;
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        const u32 of = column(first_column<S>(warp, c) + 2 * t + j);
        if (of == ALL_LANES) continue;
        const float x = totals[r][c][2 * h + j], up = totals[r][(c + S::COLUMN_TILES / 2) % S::COLUMN_TILES][2 * h + j];
        if (gated == IN_BF16)
          static_cast<u16*>(args.out)[to + of] = Bf16::narrow(activated(x, up));
        else if (gated == IN_F16)
          static_cast<u16*>(args.out)[to + of] = F16::narrow(activated(x, up));
        else
          static_cast<float*>(args.out)[to + of] = gated == IN_F32 ? activated(x, up) : x;
      }
    }
  }
}

#define EXPERTS(NAME, CODE, SHAPE)                                                                                     \
  KERNEL(THREADS)                                                                                                      \
  NAME(PARAMETERS, u32 gated, u64 scales_at, u64 offsets_at, u32 stride, u32 groups, u32 shift, u32 kinds) {           \
    BEGIN(NAME);                                                                                                       \
    __shared__ __align__(16) ExpertShared<CODE, SHAPE> shared;                                                         \
    const Args args = ARGS;                                                                                            \
    const Layout layout = {scales_at, offsets_at, stride, groups, shift, kinds};                                       \
    if (CODE::IS_INTEGER && (kinds & MINIMA))                                                                          \
      multiply<CODE, CODE::IS_INTEGER, SHAPE>(args, gated, layout, shared);                                            \
    else                                                                                                               \
      multiply<CODE, false, SHAPE>(args, gated, layout, shared);                                                       \
  }
EXPERTS(experts_narrow_int4, Int4, Narrow)
EXPERTS(experts_narrow_int8, Int8, Narrow)
EXPERTS(experts_narrow_e4m3, E4m3, Narrow)
EXPERTS(experts_narrow_e2m1, E2m1, Narrow)
EXPERTS(experts_wide_int4, Int4, Wide)
EXPERTS(experts_wide_int8, Int8, Wide)
EXPERTS(experts_wide_e4m3, E4m3, Wide)
EXPERTS(experts_wide_e2m1, E2m1, Wide)
