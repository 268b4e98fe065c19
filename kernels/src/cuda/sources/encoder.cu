// Operations of encoders of pictures and sound on rows: layer norm, GELU, rotation by given angles, and the gathering
// of the inputs of a convolution. The formulas are those of kernels/src/cpu/encoder.
constexpr int THREADS = 256;

// Returns the sum over a block's threads, with the same bits in all threads.
DEVICE float block_sum(float x) {
  __shared__ float partial[THREADS / 32];
  x = warp_sum(x);
  __syncthreads();  // no thread reads an earlier sum any more
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = partial[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; warp++) sum = __fadd_rn(sum, partial[warp]);
  return sum;
}

// Calls `four(i, v)` for each four elements of a row from element i on, or `one(i, x)` for each element if the width is
// no multiple of four. The width alone decides that, so a row's sums do not depend on the other rows.
template <class Four, class One>
DEVICE void each_of_row(const float* x, int width, Four four, One one) {
  if (width % 4 == 0) {
#pragma unroll 4
    for (int i = 4 * threadIdx.x; i < width; i += 4 * THREADS) four(i, F32::load4(x + i));
  } else {
    for (int i = threadIdx.x; i < width; i += THREADS) one(i, x[i]);
  }
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias for each row. One thread block per row.
KERNEL(THREADS) layer_norm(const float* x, const float* weight, const float* bias, float eps, int width, float* out) {
  BEGIN(layer_norm);
  x += (size_t)blockIdx.x * width;
  out += (size_t)blockIdx.x * width;
  float sum = 0.f;
  each_of_row(
      x, width,
      [&](int, float4 v) { sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w))); },
      [&](int, float v) { sum = __fadd_rn(sum, v); });
  const float mean = __fdiv_rn(block_sum(sum), (float)width);
  float squares = 0.f;
  auto square = [&](float v) {
    const float off = __fsub_rn(v, mean);
    squares = __fmaf_rn(off, off, squares);
  };
  each_of_row(
      x, width, [&](int, float4 v) { square(v.x), square(v.y), square(v.z), square(v.w); }, [&](int, float v) { square(v); });
  const float factor = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(block_sum(squares), (float)width), eps)));
  auto normal = [&](float v, float w, float b) { return __fmaf_rn(__fmul_rn(__fsub_rn(v, mean), factor), w, b); };
  each_of_row(
      x, width,
      [&](int i, float4 v) {
        const float4 w = F32::load4(weight + i), b = F32::load4(bias + i);
        F32::store4(out + i, make_float4(normal(v.x, w.x, b.x), normal(v.y, w.y, b.y), normal(v.z, w.z, b.z),
                                         normal(v.w, w.w, b.w)));
      },
      [&](int i, float v) { out[i] = normal(v, weight[i], bias[i]); });
}

// The error function, with an error of at most 5e-7: a rational approximation whose coefficients are those of Eigen and
// XLA. It is 1 up to the last bit beyond 4. A NaN stays a NaN.
DEVICE float erf_(float x) {
  x = x < -4.f ? -4.f : x;
  x = x > 4.f ? 4.f : x;
  const float square = __fmul_rn(x, x);
  float above = -2.7261423e-10f;
  above = __fmaf_rn(above, square, 2.7706815e-8f);
  above = __fmaf_rn(above, square, -2.1010241e-6f);
  above = __fmaf_rn(above, square, -5.6925064e-5f);
  above = __fmaf_rn(above, square, -7.349906e-4f);
  above = __fmaf_rn(above, square, -2.9546e-3f);
  above = __fmaf_rn(above, square, -1.6096033e-2f);
  float below = -1.4566071e-5f;
  below = __fmaf_rn(below, square, -2.1337406e-4f);
  below = __fmaf_rn(below, square, -1.682827e-3f);
  below = __fmaf_rn(below, square, -7.373329e-3f);
  below = __fmaf_rn(below, square, -1.4264739e-2f);
  return __fdiv_rn(__fmul_rn(x, above), below);
}

struct Exact {
  static DEVICE float gelu(float x) {
    const float half = __fmul_rn(x, 0.5f);
    return __fmaf_rn(half, erf_(__fmul_rn(x, 0.70710678f)), half);
  }
};

// x * (1 + tanh(u)) / 2 is x / (1 + e^(-2u)).
struct Tanh {
  static DEVICE float gelu(float x) {
    const float cubic = __fmaf_rn(__fmul_rn(x, x), 0.044715f, 1.f);
    const float decay = exp_(__fmul_rn(__fmul_rn(x, cubic), -1.595769f));
    return __fdiv_rn(x, __fadd_rn(1.f, decay));
  }
};

// x = gelu(x). A thread takes four neighbouring elements.
template <class Form>
DEVICE void gelu(u64 count, float* x) {
  const u64 first = 4 * ((u64)blockIdx.x * THREADS + threadIdx.x);
  if (first + 4 <= count) {
    const float4 v = F32::load4(x + first);
    F32::store4(x + first, make_float4(Form::gelu(v.x), Form::gelu(v.y), Form::gelu(v.z), Form::gelu(v.w)));
    return;
  }
  for (u64 i = first; i < count; i++) x[i] = Form::gelu(x[i]);
}

KERNEL(THREADS) gelu_exact(u64 count, float* x) {
  BEGIN(gelu_exact);
  gelu<Exact>(count, x);
}
KERNEL(THREADS) gelu_tanh(u64 count, float* x) {
  BEGIN(gelu_tanh);
  gelu<Tanh>(count, x);
}

// Rotates the heads of q and k, the first `2 * heads` heads of a row of `3 * heads`. `angles` holds the cosines and
// then the sines of each row. One thread block per row; a thread takes one pair of elements of a head at a time.
KERNEL(THREADS) rotate_heads(const float* angles, u32 heads, u32 head_dim, float* qkv) {
  BEGIN(rotate_heads);
  const u32 half = head_dim / 2;
  angles += (size_t)blockIdx.x * head_dim;
  qkv += (size_t)blockIdx.x * 3 * heads * head_dim;
  for (u32 i = threadIdx.x; i < 2 * heads * half; i += THREADS) {
    const u32 pair = i % half;
    float *low = qkv + i / half * head_dim + pair, *high = low + half;
    const float a = *low, b = *high, cos = angles[pair], sin = angles[half + pair];
    *low = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    *high = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
  }
}

// Gathers the windows of 3 x 3 pixels around every second pixel of every second line, [channels][3][3] per row of
// `out`, with zeros outside of the picture. `x` has one row of `channels` elements per pixel, picture by picture. One
// thread block per output pixel.
KERNEL(THREADS) gather_convolution(const float* x, u32 height, u32 width, u32 channels, float* out) {
  BEGIN(gather_convolution);
  const u32 lines = (height + 1) / 2, columns = (width + 1) / 2;
  const u32 column = blockIdx.x % columns, line = blockIdx.x / columns % lines, picture = blockIdx.x / columns / lines;
  x += (size_t)picture * height * width * channels;
  out += (size_t)blockIdx.x * channels * 9;
  for (u32 i = threadIdx.x; i < channels * 9; i += THREADS) {
    // The window begins one pixel above and one pixel left of its centre. An index below zero wraps around.
    const u32 y = 2 * line + i % 9 / 3 - 1, z = 2 * column + i % 3 - 1;
    out[i] = y < height && z < width ? x[((size_t)y * width + z) * channels + i / 9] : 0.f;
  }
}
