// Kernels of the emulator's tests: reductions, divergence, local arrays, calls. No header is needed.
typedef unsigned int u32;
typedef unsigned short u16;

__device__ float to_float(u16 bits) {
  return __uint_as_float(u32(bits) << 16);
}

__device__ u16 to_bf16(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Multiplies a row of bf16 per block by the reciprocal root of its mean square.
extern "C" __global__ void normalise(const u16* input, const u16* weights, u16* output, int n, float epsilon) {
  __shared__ float parts[32];
  const u16* row = input + size_t(blockIdx.x) * n;
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    float x = to_float(row[i]);
    sum += x * x;
  }
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0;
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x == 0) parts[0] = rsqrtf(sum / n + epsilon);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    output[size_t(blockIdx.x) * n + i] = to_bf16(to_float(row[i]) * parts[0] * to_float(weights[i]));
}

__device__ __noinline__ u32 steps(u32 n) {
  u32 count = 0;
  while (n != 1) {
    n = n % 2 ? 3 * n + 1 : n / 2;
    count++;
  }
  return count;
}

// Several kinds of branches, an array with computed indices, 64-bit division, a divergent call.
extern "C" __global__ void mixture(u32* output, unsigned long long divisor) {
  u32 table[8], t = blockIdx.x * blockDim.x + threadIdx.x;
  for (u32 i = 0; i < 8; i++) table[i] = i * i + t;
  u32 value = table[t * 5 % 8];
  switch (t % 12) {
    case 0: value += 100; break;
    case 1: value ^= 7; break;
    case 2: value *= 3; break;
    case 3: value -= 9; break;
    case 4: value = ~value; break;
    case 5: value <<= 3; break;
    case 6: value /= 3; break;
    case 7: value %= 5; break;
    case 8: value = steps(t + 1); break;
    default: value = u32((0x123456789abcdefull * (t + 1)) % divisor);
  }
  if (t % 3 == 1) value = __popc(__ballot_sync(__activemask(), value & 1)) ? value : 1;
  output[t] = value;
}

// Counts a histogram in shared memory, then adds each bin with one atomic operation; the last block sums.
__device__ u32 finished = 0;
extern "C" __global__ void histogram(const u32* input, int n, u32* bins, u32* total) {
  __shared__ u32 own[64];
  __shared__ bool last;
  for (u32 i = threadIdx.x; i < 64; i += blockDim.x) own[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&own[input[i] % 64], 1u);
  __syncthreads();
  for (u32 i = threadIdx.x; i < 64; i += blockDim.x) atomicAdd(&bins[i], own[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x == 0) {
    u32 sum = 0;
    for (u32 i = 0; i < 64; i++) sum += bins[i] * i;
    *total = sum;
    finished = 0;
  }
}

// sin and cos with all of their range reduction, exp, log and power.
extern "C" __global__ void functions(const float* input, float* output) {
  u32 t = blockIdx.x * blockDim.x + threadIdx.x;
  float x = input[t];
  output[5 * t] = sinf(x);
  output[5 * t + 1] = cosf(x);
  output[5 * t + 2] = expf(x / 64);
  output[5 * t + 3] = logf(fabsf(x) + 0.5f);
  output[5 * t + 4] = tanhf(x);
}
