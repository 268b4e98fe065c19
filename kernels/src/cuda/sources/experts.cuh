// The work of the experts' products. A launch has one row of blocks per tile of columns. Each row has one block per
// tile of an expert's pairs (route.cu). Only the GPU knows the number of such tiles, so the launch has a block for each
// possible tile, and blocks without a tile end at once. An expert without rows has no tile, and its weights are not
// read.

struct Args {
  const void* x;        // input, rows of `inputs` elements; pair p reads row p / divisor
  const u64* matrices;  // address of each expert's matrix, [outputs, inputs]; of a gated product, gate above up
  const u32* counts;    // pairs of each expert
  const u32* lists;     // the pairs, `capacity` entries per expert
  void* out;            // [pairs, outputs]
  u32 experts, capacity, divisor, inputs, outputs;
};

struct Work {
  u32 expert;
  u32 first;  // index of the tile's first pair in the expert's list
  u32 pairs;  // number of pairs in the tile; 0: no work
};

// Finds the tile of a block. The tiles of all experts are numbered consecutively. All lanes of a warp call this
// function.
DEVICE Work work_of(const Args& args, u32 height, u32 index) {
  const u32 lane = threadIdx.x % 32;
  for (u32 first = 0; first < args.experts; first += 32) {
    const u32 pairs = first + lane < args.experts ? args.counts[first + lane] : 0, tiles = (pairs + height - 1) / height;
    u32 through = tiles;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 before = __shfl_up_sync(ALL_LANES, through, step);
      if (lane >= step) through += before;
    }
    const u32 reached = __ballot_sync(ALL_LANES, index < through);
    if (reached) {
      const u32 owner = __ffs(reached) - 1, begin = (index - __shfl_sync(ALL_LANES, through - tiles, owner)) * height;
      return {first + owner, begin, min(height, __shfl_sync(ALL_LANES, pairs, owner) - begin)};
    }
    index -= __shfl_sync(ALL_LANES, through, 31);
  }
  return {0, 0, 0};
}

// The row of an expert's matrix for a column of the block's tile. The first half of a gated tile's columns are rows of
// gate, and the second half are the rows of up with the same indices.
struct Column {
  u32 row;
  bool is_there;
};
template <bool GATED, u32 COLUMNS>
DEVICE Column column_of(const Args& args, u32 column) {
  if (!GATED) {
    const u32 row = blockIdx.y * COLUMNS + column;
    return {row, row < args.outputs};
  }
  const u32 index = blockIdx.y * (COLUMNS / 2) + column % (COLUMNS / 2);
  return {column < COLUMNS / 2 ? index : args.outputs + index, index < args.outputs};
}

// silu(gate) * up, computed as in `gated` (rows.cu).
DEVICE float activated(float gate, float up) { return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.f, exp_(-gate))), up); }

#define PARAMETERS                                                                                                   \
  const void *x, const u64 *matrices, const u32 *counts, const u32 *lists, void *out, u32 experts, u32 capacity,     \
      u32 divisor, u32 inputs, u32 outputs
#define ARGS {x, matrices, counts, lists, out, experts, capacity, divisor, inputs, outputs}
