// Matrix products of experts in f32, without tensor cores: for weights in f32, and for 16-bit weights whose widths are
// not multiples of 8.
//
// A thread block computes a tile of 32 pairs (of row and expert) and 64 columns of one expert, and a thread computes
// 4x4 sums of the tile. Each sum adds its products in the order of the inputs, so its bits depend only on its row.
constexpr u32 THREADS = 128, ROWS = 32, COLUMNS = 64, HALF = COLUMNS / 2, DEPTH = 16;

// The pairs' inputs and the columns' weights, with all elements for one input side by side. The padding avoids bank
// conflicts.
struct Shared {
  float x[DEPTH][ROWS + 4], weights[DEPTH][COLUMNS + 4];
  u32 pairs[ROWS];
};

template <class Stored, bool GATED>
DEVICE void multiply(const Args& args, Shared& shared) {
  typedef typename Stored::Raw Raw;
  const Work work = work_of(args, ROWS, blockIdx.x);
  if (work.pairs == 0) return;
  const u32* list = args.lists + (size_t)work.expert * args.capacity + work.first;
  if (threadIdx.x < ROWS) shared.pairs[threadIdx.x] = list[min(threadIdx.x, work.pairs - 1)];
  __syncthreads();
  const Raw* x = static_cast<const Raw*>(args.x);
  const Raw* matrix = reinterpret_cast<const Raw*>(args.matrices[work.expert]);

  const u32 m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 2;  // first pair, and first column of each half
  const u32 line = threadIdx.x / DEPTH, depth = threadIdx.x % DEPTH;
  float sums[4][4] = {};
  for (u32 begin = 0; begin < args.inputs; begin += DEPTH) {
    const u32 k = begin + depth;
#pragma unroll
    for (u32 row = line; row < ROWS; row += THREADS / DEPTH) {
      const size_t from = (size_t)(shared.pairs[row] / args.divisor) * args.inputs + k;
      shared.x[depth][row] = row < work.pairs && k < args.inputs ? Stored::widen(x[from]) : 0.f;
    }
#pragma unroll
    for (u32 column = line; column < COLUMNS; column += THREADS / DEPTH) {
      const Column of = column_of<GATED, COLUMNS>(args, column);
      const size_t from = (size_t)of.row * args.inputs + k;
      shared.weights[depth][column] = of.is_there && k < args.inputs ? Stored::widen(matrix[from]) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < DEPTH; i++) {
      const float4 a = *reinterpret_cast<const float4*>(&shared.x[i][m]);
      const float2 low = *reinterpret_cast<const float2*>(&shared.weights[i][n]);
      const float2 high = *reinterpret_cast<const float2*>(&shared.weights[i][HALF + n]);
      const float rows[4] = {a.x, a.y, a.z, a.w}, columns[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
      for (u32 r = 0; r < 4; r++)
#pragma unroll
        for (u32 c = 0; c < 4; c++) sums[r][c] = __fmaf_rn(rows[r], columns[c], sums[r][c]);
    }
    __syncthreads();
  }
#pragma unroll
  for (u32 r = 0; r < 4; r++) {
    if (m + r >= work.pairs) continue;
    const size_t to = (size_t)shared.pairs[m + r] * args.outputs;
#pragma unroll
    for (u32 c = 0; c < (GATED ? 2 : 4); c++) {
      const Column of = column_of<GATED, COLUMNS>(args, c / 2 * HALF + n + c % 2);
      if (!of.is_there) continue;
      if (GATED) static_cast<Raw*>(args.out)[to + of.row] = Stored::narrow(activated(sums[r][c], sums[r][c + 2]));
      if (!GATED) static_cast<float*>(args.out)[to + of.row] = sums[r][c];
    }
  }
}

#define EXPERTS(NAME, TYPE, GATED)    \
  KERNEL(THREADS) NAME(PARAMETERS) {  \
    BEGIN(NAME);                      \
    __shared__ Shared shared;         \
    const Args args = ARGS;           \
    multiply<TYPE, GATED>(args, shared); \
  }
EXPERTS(expert_gates_f32, F32, true)
EXPERTS(expert_gates_bf16, Bf16, true)
EXPERTS(expert_gates_f16, F16, true)
EXPERTS(expert_outputs_f32, F32, false)
EXPERTS(expert_outputs_bf16, Bf16, false)
EXPERTS(expert_outputs_f16, F16, false)
