// Floats of type e4m3, of which instructions convert pairs from compute capability 8.9 on. Older GPUs get the same
// results from integer arithmetic: see kernels/src/e4m3.rs.

// Converts two codes, the first of which is in the low bits.
DEVICE void widen_pair(u32 codes, float& low, float& high) {
#if __CUDA_ARCH__ >= 890
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
  low = F16::widen((u16)halves), high = F16::widen((u16)(halves >> 16));
#else
  // The bits are those of an f32 whose exponent is 120 too small. The product is exact.
  auto one = [](u32 code) {
    const float x = __fmul_rn(__uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20), __uint_as_float(247u << 23));
    return (code & 0x7fu) == 0x7fu ? __int_as_float(0x7fffffff) : x;
  };
  low = one(codes & 0xffu), high = one(codes >> 8 & 0xffu);
#endif
}

// Keys and values of this type.
struct Fp8 {
  typedef u8 Raw;
  static DEVICE float widen(u8 code) {
    float low, high;
    widen_pair(code, low, high);
    return low;
  }
  // Rounds to nearest, ties to even. Numbers beyond the largest become the largest, 448.
  static DEVICE u8 narrow(float x) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    return (u8)pair;
#else
    if (x != x) return 0x7f;
    const float magnitude = fminf(fabsf(x), 448.f);
    const u32 bits = __float_as_uint(magnitude), sign = __float_as_uint(x) >> 24 & 0x80u;
    // The last place of 2^14 is the unit of numbers below 2^-6. A sum with it is rounded to this unit.
    const u32 small = __float_as_uint(__fadd_rn(magnitude, 16384.f)) - __float_as_uint(16384.f);
    const u32 normal = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    return (u8)((magnitude < 0.015625f ? small : normal) | sign);
#endif
  }
  static DEVICE float4 load4(const u8* at) {
    const u32 codes = *reinterpret_cast<const u32*>(at);
    float4 x;
    widen_pair(codes, x.x, x.y), widen_pair(codes >> 16, x.z, x.w);
    return x;
  }
};
