// Operations on single elements and whole rows: conversion, addition, bias, the gated activation, sigmoid gates, and
// keeping some rows.
constexpr int THREADS = 256;

DEVICE size_t element() { return (size_t)blockIdx.x * THREADS + threadIdx.x; }

// out = x, in the type that the next matrix product reads.
KERNEL(THREADS) cast_bf16(const float* x, u64 count, u16* out) {
  BEGIN(cast_bf16);
  size_t i = element();
  if (i < count) out[i] = Bf16::narrow(x[i]);
}
KERNEL(THREADS) cast_f16(const float* x, u64 count, u16* out) {
  BEGIN(cast_f16);
  size_t i = element();
  if (i < count) out[i] = F16::narrow(x[i]);
}

// out += x.
KERNEL(THREADS) add(const float* x, u64 count, float* out) {
  BEGIN(add);
  size_t i = element();
  if (i < count) out[i] = __fadd_rn(out[i], x[i]);
}

// out[row] += bias.
KERNEL(THREADS) add_bias(const float* bias, u32 width, u64 count, float* out) {
  BEGIN(add_bias);
  size_t i = element();
  if (i < count) out[i] = __fadd_rn(out[i], bias[i % width]);
}

// out[row] = silu(gate) * up. gate_up[row] holds `width` elements of gate and then `width` elements of up. A thread
// takes four neighbouring elements of a row. If `narrow` is not null, also stores the result there, in the type that
// the next matrix product reads.
template <class Narrow>
DEVICE void gated(const float* gate_up, u32 width, float* out, typename Narrow::Raw* narrow) {
  const u32 first = 4 * (blockIdx.x * THREADS + threadIdx.x);
  if (first >= width) return;
  const float *gate = gate_up + (size_t)blockIdx.y * 2 * width, *up = gate + width;
  out += (size_t)blockIdx.y * width;
  if (narrow) narrow += (size_t)blockIdx.y * width;
  if (width % 4 == 0) {
    const float4 g = F32::load4(gate + first), u = F32::load4(up + first);
    const float4 x = make_float4(__fmul_rn(silu(g.x), u.x), __fmul_rn(silu(g.y), u.y), __fmul_rn(silu(g.z), u.z),
                                 __fmul_rn(silu(g.w), u.w));
    F32::store4(out + first, x);
    if (narrow) Narrow::store4(narrow + first, x);
    return;
  }
  for (u32 i = first; i < min(first + 4, width); i++) {
    const float x = __fmul_rn(silu(gate[i]), up[i]);
    out[i] = x;
    if (narrow) narrow[i] = Narrow::narrow(x);
  }
}

#define GATED(NAME, TYPE)                                                                                            \
  KERNEL(THREADS) NAME(const float* gate_up, u32 width, float* out, TYPE::Raw* narrow) {                             \
    BEGIN(NAME);                                                                                                     \
    gated<TYPE>(gate_up, width, out, narrow);                                                                        \
  }
GATED(gated_f32, F32)
GATED(gated_bf16, Bf16)
GATED(gated_f16, F16)

// x[row] *= sigmoid(gate[row]). A row has `gates` gates: one per element, or one for all elements.
KERNEL(THREADS) sigmoid_gate(const float* gate, u32 gates, u32 width, u64 count, float* x) {
  BEGIN(sigmoid_gate);
  size_t i = element();
  if (i >= count) return;
  x[i] = __fdiv_rn(x[i], __fadd_rn(1.f, exp_(-gate[gates == 1 ? i / width : i])));
}

// x[i] = x[rows[i]] for ascending rows, in place. A thread moves one column, beginning with the first row. Row i comes
// from row i or from a later one, so no row is overwritten before it is read.
KERNEL(THREADS) keep_rows(float* x, const u32* rows, u32 count, u32 width) {
  BEGIN(keep_rows);
  size_t column = element();
  if (column >= width) return;
  for (u32 i = 0; i < count; i++) x[(size_t)i * width + column] = x[(size_t)rows[i] * width + column];
}
