// Weights that a checkpoint stores as codes with scales of groups of inputs. The value of a weight is
// (code - zero point) * scale, or code * scale - minimum, computed in f32.

// A matrix of codes: a kernel gets the addresses and the layout from kernels/src/cuda/tensor/codes.rs.
struct Codes {
  const u8* codes;    // `outputs` rows of `stride` bytes, a multiple of 16
  const u8* scales;   // [outputs, groups], in f16 or f32
  const u8* offsets;  // in the same shape: zero points of one byte, or minima of the scales' type
  u32 stride, groups;
  u32 shift;  // a group is 1 << shift inputs; 31 for whole rows
  u32 kinds;  // the flags below
};
constexpr u32 F16_SCALES = 1, ZERO_POINTS = 2, MINIMA = 4;
constexpr u32 WHOLE_ROWS = 31;

// 2 to the power of 23. The float UNITS + n, for an integer n below it, has n in its low bits.
constexpr float UNITS = 8388608.f;
constexpr u32 UNITS_BITS = 0x4b000000u;

// The types of codes. `Word` is eight codes of a row. `raw` converts a code to a float. Of an integer, the float is
// BIAS too large, and its zero point without offsets is CENTRE.
struct Int4 {
  typedef u32 Word;
  static constexpr u32 BITS = 4;
  static constexpr bool IS_INTEGER = true;
  static constexpr float BIAS = UNITS, CENTRE = 8.f;
  static DEVICE float raw(u32 code) { return __uint_as_float(UNITS_BITS | code); }
  static DEVICE float zero_point(u8 zero) { return (float)zero; }
};
struct Int8 {
  typedef uint2 Word;
  static constexpr u32 BITS = 8;
  static constexpr bool IS_INTEGER = true;
  static constexpr float BIAS = UNITS + 128.f, CENTRE = 0.f;
  static DEVICE float raw(u32 code) { return __uint_as_float(UNITS_BITS | (code ^ 0x80u)); }
  static DEVICE float zero_point(u8 zero) { return (float)(signed char)zero; }
};
struct E2m1 {
  typedef u32 Word;
  static constexpr u32 BITS = 4;
  static constexpr bool IS_INTEGER = false;
  static constexpr float BIAS = 0.f, CENTRE = 0.f;
  // The bits are those of an f32 whose exponent is 126 too small. The product is exact.
  static DEVICE float raw(u32 code) {
    return __fmul_rn(__uint_as_float((code & 8u) << 28 | (code & 7u) << 22), __uint_as_float(253u << 23));
  }
  static DEVICE float zero_point(u8) { return 0.f; }
};
struct E4m3 {
  typedef uint2 Word;
  static constexpr u32 BITS = 8;
  static constexpr bool IS_INTEGER = false;
  static constexpr float BIAS = 0.f, CENTRE = 0.f;
  static DEVICE float raw(u32 code) {
    float low, high;
    widen_pair(code, low, high);
    return low;
  }
  static DEVICE float zero_point(u8) { return 0.f; }
};

// The scale of a group, and what is subtracted: of an integer without minima, the zero point with the type's BIAS,
// otherwise the minimum.
struct Group {
  float scale, offset;
};

// Returns the group of an output with this index.
template <class Code>
DEVICE Group group_of(const Codes& of, u32 output, u32 index) {
  const size_t at = (size_t)output * of.groups + index;
  auto number = [&](const u8* from) {
    if (of.kinds & F16_SCALES) return F16::widen(reinterpret_cast<const u16*>(from)[at]);
    return reinterpret_cast<const float*>(from)[at];
  };
  if (of.kinds & MINIMA) return {number(of.scales), number(of.offsets)};
  const float zero = of.kinds & ZERO_POINTS ? Code::zero_point(of.offsets[at]) : Code::CENTRE;
  return {number(of.scales), __fadd_rn(Code::BIAS, zero)};
}

// Returns the weight of a code that `raw` has converted.
template <class Code, bool HAS_MINIMA>
DEVICE float weight_of(float raw, Group group) {
  if (HAS_MINIMA) return __fsub_rn(__fmul_rn(__fsub_rn(raw, Code::BIAS), group.scale), group.offset);
  return __fmul_rn(Code::IS_INTEGER ? __fsub_rn(raw, group.offset) : raw, group.scale);
}

DEVICE u32 half_of(u32 word, u32 half) { return word >> 16 * half; }
DEVICE u32 half_of(uint2 word, u32 half) { return half == 0 ? word.x : word.y; }

// Computes the four weights in a half of a word of eight codes.
template <class Code, bool HAS_MINIMA>
DEVICE void weights_of(typename Code::Word word, u32 half, Group group, float (&to)[4]) {
  const u32 codes = half_of(word, half);
#pragma unroll
  for (u32 i = 0; i < 4; i++) to[i] = Code::raw(codes >> Code::BITS * i & ((1u << Code::BITS) - 1));
#pragma unroll
  for (u32 i = 0; i < 4; i++) to[i] = weight_of<Code, HAS_MINIMA>(to[i], group);
}
template <>
DEVICE void weights_of<E4m3, false>(uint2 word, u32 half, Group group, float (&to)[4]) {
  const u32 codes = half_of(word, half);
  widen_pair(codes, to[0], to[1]);
  widen_pair(codes >> 16, to[2], to[3]);
#pragma unroll
  for (u32 i = 0; i < 4; i++) to[i] = __fmul_rn(to[i], group.scale);
}
