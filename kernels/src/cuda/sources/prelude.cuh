// Declarations that precede every source. NVRTC compiles all sources without CUDA's headers.
//
// Contraction is off (--fmad=false). A fused multiply-add is only used where it is written, so that the same formula
// has the same bits in every kernel. Nothing here depends on the number of rows of a launch.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INF __int_as_float(0x7f800000)
// Arguments: the threads per block and, if given, the minimum number of blocks per multiprocessor.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#define DEVICE __device__ __forceinline__

constexpr u32 ALL_LANES = 0xffffffffu;

// Each kernel begins with BEGIN(its name), which stores a hash of the name in pinned host memory. The host reads the
// hash when the GPU fails or hangs, because CUDA reports a failed kernel late and without its name. The host sets
// `progress`; null means that no hash is stored.
extern "C" {
__constant__ volatile u32* progress;
}

// FNV-1a of 32 bits (Fowler, Noll, Vo; RFC 9923).
DEVICE constexpr u32 hash_of(const char* name) {
  u32 hash = 0x811c9dc5u;
  while (*name) hash = (hash ^ (u8)*name++) * 0x01000193u;
  return hash;
}

template <u32 NAME>
DEVICE void begin() {
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && progress) *progress = NAME;
}
#define BEGIN(NAME) begin<hash_of(#NAME)>()

// Storage types of weights, keys and values. All arithmetic is in f32.
struct F32 {
  typedef float Raw;
  static DEVICE float widen(float x) { return x; }
  static DEVICE float narrow(float x) { return x; }
  // Four consecutive elements, aligned to their size.
  static DEVICE float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
  static DEVICE void store4(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }
};

struct Bf16 {
  typedef u16 Raw;
  static DEVICE float widen(u16 x) { return __uint_as_float((u32)x << 16); }
  static DEVICE u16 narrow(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
  static DEVICE float4 load4(const u16* at) {
    uint2 x = *reinterpret_cast<const uint2*>(at);
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
                       __uint_as_float(x.y & 0xffff0000u));
  }
  static DEVICE void store4(u16* at, float4 x) {
    const u32 low = narrow(x.x) | (u32)narrow(x.y) << 16, high = narrow(x.z) | (u32)narrow(x.w) << 16;
    *reinterpret_cast<uint2*>(at) = make_uint2(low, high);
  }
};

struct F16 {
  typedef u16 Raw;
  static DEVICE float widen(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  static DEVICE u16 narrow(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
  static DEVICE float4 load4(const u16* at) {
    uint2 x = *reinterpret_cast<const uint2*>(at);
    return make_float4(widen((u16)x.x), widen((u16)(x.x >> 16)), widen((u16)x.y), widen((u16)(x.y >> 16)));
  }
  static DEVICE void store4(u16* at, float4 x) {
    const u32 low = narrow(x.x) | (u32)narrow(x.y) << 16, high = narrow(x.z) | (u32)narrow(x.w) << 16;
    *reinterpret_cast<uint2*>(at) = make_uint2(low, high);
  }
};

// One request's share of a step: index and position of its first token, index of its first entry in the step's list of
// pages, and its slot.
struct Row {
  u32 first_token, start, first_page, slot;
};

// Returns the sum over a warp's lanes, with the same bits in all lanes.
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, mask));
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
  return x;
}

// Converts a float to a key. Keys as integers have the same order as the floats; -0 equals 0, and NaN is above
// infinity.
DEVICE u32 key_of(float x) {
  u32 bits = __float_as_uint(__fadd_rn(x, 0.f));
  if (x != x) return 0xffffffffu;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float float_of(u32 key) {
  if (key == 0xffffffffu) return __int_as_float(0x7fffffff);
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// e to the power of x, by the same polynomial as on the CPU (kernels/src/cpu/simd/math.rs): 0 below -87, infinity above
// 88.
DEVICE float exp_(float x) {
  float clamped = x < -87.f ? -87.f : x;
  clamped = clamped > 88.f ? 88.f : clamped;
  float n = rintf(__fmul_rn(clamped, 1.44269504f));
  float r = __fmaf_rn(n, -0.693359375f, clamped);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.f / 5040.f;
  p = __fmaf_rn(p, r, 1.f / 720.f);
  p = __fmaf_rn(p, r, 1.f / 120.f);
  p = __fmaf_rn(p, r, 1.f / 24.f);
  p = __fmaf_rn(p, r, 1.f / 6.f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.f);
  p = __fmaf_rn(p, r, 1.f);
  float y = __fmul_rn(p, __int_as_float(((int)n + 127) << 23));
  y = x < -87.f ? 0.f : y;
  y = x > 88.f ? INF : y;
  return x != x ? x : y;
}

DEVICE float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.f, exp_(-x))); }
