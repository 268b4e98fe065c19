// Kernels of the tests of the emulated driver. `kernels.ptx` is compiled from them by NVRTC (see tests/nvrtc.rs).

extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void store_behind(float* y, int n) {
    if (threadIdx.x <= n) y[threadIdx.x] = 1.0f;
}

extern "C" __global__ void store_misaligned(char* y) {
    *(float*)(y + 1) = 1.0f;
}

extern "C" __global__ void append(unsigned* log, unsigned value) {
    unsigned at = log[0];
    log[0] = at + 1;
    log[1 + at] = value;
}

extern "C" __global__ void copy_word(unsigned* to, const unsigned* from) {
    *to = *from;
}

extern "C" __global__ void mixed(char a, float b, short c, unsigned long long d, unsigned long long* out) {
    out[0] = (unsigned char)a;
    out[1] = __float_as_uint(b);
    out[2] = (unsigned short)c;
    out[3] = d;
}

extern "C" __global__ void reverse(float* x, int n) {
    extern __shared__ float line[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) line[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = line[n - 1 - i];
}

extern "C" __global__ void __launch_bounds__(64) bounded(float* x) {
    x[threadIdx.x] = (float)threadIdx.x;
}

__device__ unsigned counter = 7;

extern "C" __global__ void count(void) {
    if (threadIdx.x == 0) atomicAdd(&counter, 1u);
}
