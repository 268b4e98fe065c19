// out = x / sqrt(mean(x²) + eps) * weight for each row, in the type that the next matrix product reads. One thread
// block per row.
constexpr int THREADS = 256;

template <class Out>
DEVICE void rms_norm(const float* x, const float* weight, float eps, int width, typename Out::Raw* out) {
  __shared__ float partial[THREADS / 32];
  x += (size_t)blockIdx.x * width;
  out += (size_t)blockIdx.x * width;
  float squares = 0.f;
  for (int i = threadIdx.x; i < width; i += THREADS) squares = __fmaf_rn(x[i], x[i], squares);
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = partial[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; warp++) sum = __fadd_rn(sum, partial[warp]);
  float factor = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)width), eps)));
  for (int i = threadIdx.x; i < width; i += THREADS) out[i] = Out::narrow(__fmul_rn(__fmul_rn(x[i], factor), weight[i]));
}

#define RMS_NORM(NAME, TYPE)                                                                                         \
  KERNEL(THREADS) NAME(const float* x, const float* weight, float eps, int width, TYPE::Raw* out) {                  \
    BEGIN(NAME);                                                                                                     \
    rms_norm<TYPE>(x, weight, eps, width, out);                                                                      \
  }
RMS_NORM(rms_norm_f32, F32)
RMS_NORM(rms_norm_bf16, Bf16)
RMS_NORM(rms_norm_f16, F16)
