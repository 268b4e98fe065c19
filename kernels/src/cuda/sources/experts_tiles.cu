// Matrix products of experts on tensor cores: for 16-bit weights whose rows begin at multiples of 16 bytes.
//
// A narrow tile has 16 pairs (of row and expert) and 64 columns, and its four warps divide the columns. Narrow tiles
// are for experts with few rows. Reading weights limits their speed, so they keep many copies in flight. A wide tile
// has 64 pairs and 128 columns, of which a warp computes 32 x 64. Both kinds add the inputs in ascending order, DEPTH
// per step and 16 per instruction. So the bits of a row depend neither on the size of its tile nor on its neighbours.
// Pairs, columns and inputs past the end count as zeros.
constexpr u32 THREADS = 128, DEPTH = 32, CHUNK = 8, CHUNKS = DEPTH / CHUNK;

// ROW_WARPS and COLUMN_WARPS: warps of a thread block along pairs and along columns. ROW_TILES and COLUMN_TILES: a
// warp's tiles of 16 pairs and of 8 columns. STAGES: steps in shared memory.
template <u32 ROW_WARPS_, u32 COLUMN_WARPS_, u32 ROW_TILES_, u32 COLUMN_TILES_, u32 STAGES_>
struct Shape {
  static constexpr u32 COLUMN_WARPS = COLUMN_WARPS_, ROW_TILES = ROW_TILES_, COLUMN_TILES = COLUMN_TILES_, STAGES = STAGES_;
  static constexpr u32 WARP_ROWS = ROW_TILES * 16, ROWS = ROW_WARPS_ * WARP_ROWS;
  static constexpr u32 COLUMNS = COLUMN_WARPS * COLUMN_TILES * 8, HALF = COLUMNS / 2;
  static constexpr u32 HALF_TILES = COLUMN_TILES / 2;  // tiles of a warp in each half of the columns
  static constexpr u32 LINES = ROWS + COLUMNS, SHARE = (LINES * CHUNKS + THREADS - 1) / THREADS;
};
typedef Shape<1, 4, 1, 2, 6> Narrow;
typedef Shape<2, 2, 2, 8, 3> Wide;

// The lines of a step: first one line per pair, then one line per column. The lines are padded, so that the eight rows
// of a matrix lie in different banks.
template <class S>
struct Shared {
  u16 tiles[S::STAGES][S::LINES][DEPTH + 8];
  u32 pairs[S::ROWS];
};

// Returns the first column of a warp's tile of 8. A warp has the same column indices in the gate half and in the up
// half, so that a lane holds a gate and its up value.
template <class S>
DEVICE u32 first_column(u32 warp, u32 tile) {
  return tile / S::HALF_TILES * S::HALF + (warp * S::HALF_TILES + tile % S::HALF_TILES) * 8;
}

template <class Stored, bool GATED, class S>
DEVICE void multiply(const Args& args, Shared<S>& shared) {
  const Work work = work_of(args, S::ROWS, blockIdx.x);
  if (work.pairs == 0) return;
  const u32* list = args.lists + (size_t)work.expert * args.capacity + work.first;
  if (threadIdx.x < S::ROWS) shared.pairs[threadIdx.x] = list[min(threadIdx.x, work.pairs - 1)];
  __syncthreads();

  // In every step, a thread copies the same chunk of the same lines.
  const u32 chunk = threadIdx.x % CHUNKS * CHUNK;
  const u16* from[S::SHARE];
  u32 there = 0;
#pragma unroll
  for (u32 i = 0; i < S::SHARE; i++) {
    const u32 line = (i * THREADS + threadIdx.x) / CHUNKS;
    if (line < S::ROWS) {
      from[i] = static_cast<const u16*>(args.x) + (size_t)(shared.pairs[line] / args.divisor) * args.inputs + chunk;
      there |= (u32)(line < work.pairs) << i;
    } else {
      const Column of = column_of<GATED, S::COLUMNS>(args, line - S::ROWS);
      from[i] = reinterpret_cast<const u16*>(args.matrices[work.expert]) + (size_t)(of.is_there ? of.row : 0) * args.inputs + chunk;
      there |= (u32)of.is_there << i;
    }
  }
  auto fetch = [&](u32 step) {
    const u32 k = step * DEPTH;
#pragma unroll
    for (u32 i = 0; i < S::SHARE; i++) {
      const u32 line = (i * THREADS + threadIdx.x) / CHUNKS;
      if (S::LINES * CHUNKS % THREADS != 0 && line >= S::LINES) break;
      const bool is_there = (there >> i & 1) && k + chunk < args.inputs;
      copy16(shared_address(&shared.tiles[step % S::STAGES][line][chunk]), from[i] + (is_there ? k : 0), is_there);
    }
  };
  const u32 steps = (args.inputs + DEPTH - 1) / DEPTH;
#pragma unroll
  for (u32 step = 0; step + 1 < S::STAGES; step++) {
    if (step < steps) fetch(step);
    commit_copies();
  }

  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u32 row_warp = warp / S::COLUMN_WARPS, column_warp = warp % S::COLUMN_WARPS, first_row = row_warp * S::WARP_ROWS;
  // Two tiles of columns are loaded at once. Lanes 16 to 31 address the second.
  const u32 second = S::HALF_TILES == 1 ? S::HALF : 8, column_line = lane / 16 * second + lane % 8;
  float sums[S::ROW_TILES][S::COLUMN_TILES][4] = {};
#pragma unroll 1
  for (u32 step = 0; step < steps; step++) {
    wait_for_copies_but<S::STAGES - 2>();
    __syncthreads();  // the step is there, and no warp reads the one before any more
    if (step + S::STAGES - 1 < steps) fetch(step + S::STAGES - 1);
    commit_copies();
    if (first_row >= work.pairs) continue;
    const auto& tile = shared.tiles[step % S::STAGES];
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += 16) {
      u32 a[S::ROW_TILES][4];
#pragma unroll
      for (u32 r = 0; r < S::ROW_TILES; r++)
        load_matrices(a[r], shared_address(&tile[first_row + r * 16 + lane % 16][k + lane / 16 * 8]));
#pragma unroll
      for (u32 c = 0; c < S::COLUMN_TILES; c += 2) {
        u32 b[4];
        const u32 line = S::ROWS + first_column<S>(column_warp, c) + column_line;
        load_matrices(b, shared_address(&tile[line][k + lane / 8 % 2 * 8]));
#pragma unroll
        for (u32 r = 0; r < S::ROW_TILES; r++) {
          Tensor<Stored>::multiply_add(sums[r][c], a[r], b[0], b[1]);
          Tensor<Stored>::multiply_add(sums[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (u32 i = 0; i < 2 * S::ROW_TILES; i++) {
    const u32 r = i / 2, h = i % 2, row = first_row + r * 16 + h * 8 + g;
    if (row >= work.pairs) continue;
    const size_t to = (size_t)shared.pairs[row] * args.outputs;
#pragma unroll
    for (u32 c = 0; c < (GATED ? S::HALF_TILES : S::COLUMN_TILES); c++) {
      const Column of = column_of<GATED, S::COLUMNS>(args, first_column<S>(column_warp, c) + 2 * t);
      if (!of.is_there) continue;
      const float x = sums[r][c][2 * h], y = sums[r][c][2 * h + 1];
      if (GATED) {
        const float(&ups)[4] = sums[r][(c + S::HALF_TILES) % S::COLUMN_TILES];
        const u32 both = Tensor<Stored>::pair(activated(x, ups[2 * h]), activated(y, ups[2 * h + 1]));
        *reinterpret_cast<u32*>(static_cast<u16*>(args.out) + to + of.row) = both;
      } else {
        *reinterpret_cast<float2*>(static_cast<float*>(args.out) + to + of.row) = make_float2(x, y);
      }
    }
  }
}

#define EXPERTS(NAME, TYPE, GATED, SHAPE)          \
  KERNEL(THREADS) NAME(PARAMETERS) {               \
    BEGIN(NAME);                                   \
    __shared__ __align__(16) Shared<SHAPE> shared; \
    const Args args = ARGS;                        \
    multiply<TYPE, GATED, SHAPE>(args, shared);    \
  }
EXPERTS(expert_gates_narrow_bf16, Bf16, true, Narrow)
EXPERTS(expert_gates_narrow_f16, F16, true, Narrow)
EXPERTS(expert_gates_wide_bf16, Bf16, true, Wide)
EXPERTS(expert_gates_wide_f16, F16, true, Wide)
EXPERTS(expert_outputs_narrow_bf16, Bf16, false, Narrow)
EXPERTS(expert_outputs_narrow_f16, F16, false, Narrow)
EXPERTS(expert_outputs_wide_bf16, Bf16, false, Wide)
EXPERTS(expert_outputs_wide_f16, F16, false, Wide)
