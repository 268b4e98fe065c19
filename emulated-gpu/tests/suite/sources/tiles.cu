// Products of matrices on tensor cores: cp.async in two stages, ldmatrix, mma.sync.
typedef unsigned int u32;
typedef unsigned short u16;

constexpr int TILE = 64, DEPTH = 32, PITCH = DEPTH + 8;

__device__ u32 shared_address(const void* p) {
  return u32(__cvta_generic_to_shared(p));
}

// Copies the first `bytes` bytes, and fills the rest of the 16 bytes with zeros.
__device__ void copy(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

template <int N> __device__ void load(u32 (&r)[4], const u16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)));
}

// C[m][n] = sum over k of A[m][k] B[n][k], bf16 to f32. A block computes 64 x 64 of C, each of its four warps 16 rows.
extern "C" __global__ void __launch_bounds__(128) multiply(const u16* a, const u16* b, float* c, int m, int n, int k) {
  __shared__ __align__(128) u16 left[2][TILE][PITCH], right[2][TILE][PITCH];
  int top = blockIdx.y * TILE, side = blockIdx.x * TILE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto fetch = [&](int step) {
    for (int i = threadIdx.x; i < TILE * DEPTH / 8; i += blockDim.x) {
      int row = i / (DEPTH / 8), column = i % (DEPTH / 8) * 8, at = step * DEPTH + column;
      copy(&left[step % 2][row][column], a + size_t(min(top + row, m - 1)) * k + at, top + row < m ? 16 : 0);
      copy(&right[step % 2][row][column], b + size_t(min(side + row, n - 1)) * k + at, side + row < n ? 16 : 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float sums[TILE / 8][4] = {};
  int steps = k / DEPTH;
  fetch(0);
  for (int step = 0; step < steps; step++) {
    if (step + 1 < steps) {
      fetch(step + 1);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads();
    for (int depth = 0; depth < DEPTH; depth += 16) {
      u32 ra[4];
      load<4>(ra, &left[step % 2][warp * 16 + lane % 16][depth + lane / 16 * 8]);
      for (int j = 0; j < TILE / 16; j++) {
        u32 rb[4];
        load<4>(rb, &right[step % 2][j * 16 + lane / 16 * 8 + lane % 8][depth + lane / 8 % 2 * 8]);
        for (int h = 0; h < 2; h++) {
          float* d = sums[2 * j + h];
          asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                       : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                       : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[2 * h]), "r"(rb[2 * h + 1]));
        }
      }
    }
    __syncthreads();  // Before the next fetch writes to this stage.
  }
  for (int j = 0; j < TILE / 8; j++)
    for (int i = 0; i < 4; i++) {
      int row = top + warp * 16 + lane / 4 + i / 2 * 8, column = side + j * 8 + lane % 4 * 2 + i % 2;
      if (row < m && column < n) c[size_t(row) * n + column] = sums[j][i];
    }
}
