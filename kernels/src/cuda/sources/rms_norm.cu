// out = x / sqrt(mean(x²) + eps) * weight for each row, in the type that the next matrix product reads. One thread
// block per row.
constexpr int THREADS = 256;

// Rows whose width is a multiple of four are read and written in pieces of four elements. The width alone decides that,
// so the order of a row's sum does not depend on the other rows.
template <class Out>
DEVICE void rms_norm(const float* x, const float* weight, float eps, int width, typename Out::Raw* out) {
  __shared__ float partial[THREADS / 32];
  x += (size_t)blockIdx.x * width;
  out += (size_t)blockIdx.x * width;
  const bool fours = width % 4 == 0;
  float squares = 0.f;
  if (fours) {
#pragma unroll 4
    for (int i = 4 * threadIdx.x; i < width; i += 4 * THREADS) {
      const float4 v = F32::load4(x + i);
      squares = __fmaf_rn(v.x, v.x, squares), squares = __fmaf_rn(v.y, v.y, squares);
      squares = __fmaf_rn(v.z, v.z, squares), squares = __fmaf_rn(v.w, v.w, squares);
    }
  } else {
    for (int i = threadIdx.x; i < width; i += THREADS) squares = __fmaf_rn(x[i], x[i], squares);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = partial[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; warp++) sum = __fadd_rn(sum, partial[warp]);
  const float factor = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)width), eps)));
  if (fours) {
#pragma unroll 4
    for (int i = 4 * threadIdx.x; i < width; i += 4 * THREADS) {
      const float4 v = F32::load4(x + i), w = F32::load4(weight + i);
      Out::store4(out + i, make_float4(__fmul_rn(__fmul_rn(v.x, factor), w.x), __fmul_rn(__fmul_rn(v.y, factor), w.y),
                                       __fmul_rn(__fmul_rn(v.z, factor), w.z), __fmul_rn(__fmul_rn(v.w, factor), w.w)));
    }
  } else {
    for (int i = threadIdx.x; i < width; i += THREADS) out[i] = Out::narrow(__fmul_rn(__fmul_rn(x[i], factor), weight[i]));
  }
}

#define RMS_NORM(NAME, TYPE)                                                                                         \
  KERNEL(THREADS) NAME(const float* x, const float* weight, float eps, int width, TYPE::Raw* out) {                  \
    BEGIN(NAME);                                                                                                     \
    rms_norm<TYPE>(x, weight, eps, width, out);                                                                      \
  }
RMS_NORM(rms_norm_f32, F32)
RMS_NORM(rms_norm_bf16, Bf16)
RMS_NORM(rms_norm_f16, F16)
