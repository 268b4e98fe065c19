// Tensor cores and asynchronous copies, one wrapper per instruction, for compute capability 8.0 and later.
//
// Fragments of mma.m16n8k16 (PTX, "Matrix Fragments"): with lane = 4 * g + t, a lane's sums are rows g and g + 8 of
// columns 2t and 2t + 1. Each register of A and B holds two values that are adjacent along the summed dimension.
DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Copies 16 bytes to shared memory. If `there` is false, writes 16 zeros and reads nothing.
DEVICE void copy16(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Copies 4 bytes to shared memory.
DEVICE void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for the copies of this thread. Copies of other threads are visible only after a barrier.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
// Waits for all groups of copies of this thread except the last GROUPS.
template <u32 GROUPS>
DEVICE void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Loads four 8x8 matrices: lane 8 * m + r holds the address of row r of matrix m.
DEVICE void load_matrices(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}
DEVICE void load_transposed(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

#define MULTIPLY_ADD(TYPE)                                                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
      "{%0, %1, %2, %3};"                                                                                       \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// Wrappers for inputs of type Kv: sums += a * b, and the conversion of two values to one register.
template <class Kv>
struct Tensor;
template <>
struct Tensor<Bf16> {
  static DEVICE void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) { MULTIPLY_ADD("bf16"); }
  static DEVICE u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};
template <>
struct Tensor<F16> {
  static DEVICE void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) { MULTIPLY_ADD("f16"); }
  static DEVICE u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};

// 2 to the power of x. The result is exactly 1 at 0, and 0 at minus infinity.
DEVICE float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
