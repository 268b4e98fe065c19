// x = x / sqrt(mean(x²) + eps) * weight * silu(gate), head by head: the norm of a delta rule's output. One warp per
// head of a row. The gates of a row are adjacent among its `gate_width` elements.
constexpr int THREADS = 128;

KERNEL(THREADS) gated_norm(const float* gate, u32 gate_width, const float* weight, float eps, u32 rows, u32 heads, u32 width,
                           float* x) {
  BEGIN(gated_norm);
  const u32 lane = threadIdx.x % 32, item = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (item >= rows * heads) return;
  x += (size_t)item * width;
  gate += (size_t)(item / heads) * gate_width + item % heads * width;
  float squares = 0.f;
  for (u32 i = lane; i < width; i += 32) squares = __fmaf_rn(x[i], x[i], squares);
  const float factor = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(squares), (float)width), eps)));
  for (u32 i = lane; i < width; i += 32) x[i] = __fmul_rn(__fmul_rn(__fmul_rn(x[i], factor), weight[i]), silu(gate[i]));
}
