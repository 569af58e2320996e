// wgmma (9.0a): products of bf16 or int8 matrices by a warpgroup with operands in shared memory.
//
// A warpgroup consists of 4 consecutive warps, the first with a warp index divisible by 4. All its
// threads call these functions together, with the same arguments except for register operands.
#pragma once

#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {

// The layout of an operand in shared memory, in units of 16 bytes. Rows are contiguous along k.
// With kNone, a block of 8 rows x 16 bytes is 128 contiguous bytes. With a swizzle, 8 rows of 128,
// 64 or 32 bytes are contiguous and aligned to the size of the 8 rows, and unit u of row r is
// stored at unit index u ^ (r % 8), u ^ (r / 2 % 4) or u ^ (r / 4 % 2), respectively. Swizzled()
// computes that position.
enum class Swizzle : uint64_t { kNone = 0, k128Bytes = 1, k64Bytes = 2, k32Bytes = 3 };

// Returns the position, in an operand aligned to the size of 8 rows, at which a swizzle stores byte
// `offset`, where offset = row * (bytes per row) + byte within the row.
template <Swizzle kSwizzle>
MOESERVE_HOST_DEVICE constexpr uint32_t Swizzled(uint32_t offset) {
  static_assert(kSwizzle != Swizzle::kNone);
  constexpr uint32_t kUnits = kSwizzle == Swizzle::k128Bytes  ? 8
                              : kSwizzle == Swizzle::k64Bytes ? 4
                                                              : 2;
  return offset ^ (((offset >> 7) & (kUnits - 1)) << 4);
}

// Returns a matrix descriptor. `group_stride`: bytes from one group of 8 rows to the next group.
// `unit_stride`: with Swizzle::kNone, bytes from one 16-byte unit of a row to the next unit.
// `operand` must be 16-byte aligned. With a swizzle, its groups of 8 rows must begin at multiples
// of the group's size; the descriptor of the next 16 elements of k is AdvanceDescriptor(descriptor,
// 32).
__device__ __forceinline__ uint64_t MatrixDescriptor(const void* operand, Swizzle swizzle,
                                                     uint32_t group_stride,
                                                     uint32_t unit_stride = 16) {
  return static_cast<uint64_t>((SharedAddress(operand) & 0x3ffffu) >> 4) |
         (static_cast<uint64_t>((unit_stride & 0x3ffffu) >> 4) << 16) |
         (static_cast<uint64_t>((group_stride & 0x3ffffu) >> 4) << 32) |
         (static_cast<uint64_t>(swizzle) << 62);
}
// Returns the descriptor of a matrix that is stored transposed, with Swizzle::k128Bytes: 64
// elements along n at one k are contiguous (128 bytes), successive k are 128 bytes apart, and the
// next 64 elements along n begin `plane_stride` bytes later. `operand` must be 1024-byte aligned;
// the descriptor of the next 16 elements of k is AdvanceDescriptor(descriptor, 2048).
__device__ __forceinline__ uint64_t TransposedDescriptor(const void* operand,
                                                         uint32_t plane_stride) {
  return MatrixDescriptor(operand, Swizzle::k128Bytes, 8 * 128, plane_stride);
}
// Returns the descriptor of the same matrix at an address that is `bytes` (a multiple of 16)
// higher.
__device__ __forceinline__ uint64_t AdvanceDescriptor(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Returns `value`, which must be the same in all lanes, so that the compiler knows this. The
// instructions of products read descriptors from registers that all lanes share: computed from such
// a value, a descriptor takes one instruction instead of several.
__device__ __forceinline__ uint32_t SameInAllLanes(uint32_t value) {
  return __reduce_max_sync(kFullMask, value);
}
// Returns the descriptor with these halves. Descriptors of a layout differ in the lower half only.
__device__ __forceinline__ uint64_t JoinDescriptor(uint32_t low, uint32_t high) {
#if defined(MOESERVE_CUDA_EMULATION)
  return low | static_cast<uint64_t>(high) << 32;
#else
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(high));
  return descriptor;
#endif
}

// Must be called before the first product, and after any other access to the accumulators or to the
// registers of operand a.
__device__ __forceinline__ void WgmmaFence() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Puts all products started since the last commit into one group.
__device__ __forceinline__ void WgmmaCommit() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::WgmmaCommit();
#elif MOESERVE_HAS_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until all but the latest kPending groups are complete. Until a group is complete, the code
// must not access its accumulators, the registers of operand a or its operands in shared memory.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  static_assert(kPending >= 0 && kPending <= 7);
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::WgmmaWait(kPending);
#elif MOESERVE_HAS_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
// Prevents the compiler from moving uses of accumulators across this call. To be called before and
// after the products of a group, and after the wait for the group.
template <int kCount>
__device__ __forceinline__ void WgmmaKeepInPlace([[maybe_unused]] float (&d)[kCount]) {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

template <int kCount>
__device__ __forceinline__ void WgmmaKeepInPlace([[maybe_unused]] int32_t (&d)[kCount]) {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
#endif
}

// As above, for registers that a product reads as operand a: prevents the compiler from reusing
// them before this call.
template <int kCount>
__device__ __forceinline__ void WgmmaKeepInPlace([[maybe_unused]] uint32_t (&a)[kCount][4]) {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][j])::"memory");
  }
#endif
}

// Computes d += a b, or d = a b unless `accumulate`. a is 64 x 16, b is 16 x kN, with kN in 8, 16,
// 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256. Descriptor `b` describes kN rows of
// 16 elements along k, descriptor `a` 64 such rows. With w = the warp's index in the warpgroup, g =
// lane / 4 and p = 2 (lane % 4), d[4 j + i] is the element at row 16 w + g + 8 (i / 2), column 8 j
// + p + i % 2. Arrays must stay in registers, so they may only be indexed with constants.
template <int kN>
struct Wgmma;
// The same for int8, with exact sums: a is 64 x 32, b is 32 x kN, with kN in 64, 96, 128, 192, 256,
// and the rows of both have 32 integers along k. The next 32 of them are 32 bytes further.
template <int kN>
struct WgmmaInt8;

#if defined(MOESERVE_CUDA_EMULATION)

template <int kN>
struct WgmmaInt8 {
  static void Shared(int32_t (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulator::WgmmaInt8Shared(d, kN, a, b, accumulate);
  }
};

template <int kN>
struct Wgmma {
  static void Shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulator::WgmmaShared(d, kN, a, b, accumulate);
  }
  // Operand a is in registers: the 16 rows of the warp, in the layout of MmaBf16().
  static void Registers(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    emulator::WgmmaRegisters(d, kN, a, b, accumulate);
  }
  // As Registers(), but `b` is described by TransposedDescriptor().
  static void RegistersTransposed(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b,
                                  bool accumulate) {
    emulator::WgmmaRegistersTransposed(d, kN, a, b, accumulate);
  }
};

#else

// Operands of the assembly: kN / 2 accumulators first; i0 to i5 are the numbers of the operands
// after them.
#if MOESERVE_HAS_SM90A
#define MOESERVE_WGMMA(n, list, operands, i0, i1, i2, i3, i4, i5)                                  \
  template <>                                                                                      \
  struct Wgmma<n> {                                                                                \
    static __device__ __forceinline__ void Shared(float (&d)[n / 2], uint64_t a, uint64_t b,       \
                                                  bool accumulate) {                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                        \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list         \
                   "}, %" #i0 ", %" #i1 ", p, 1, 1, 0, 0;\n}"                                      \
                   : operands                                                                      \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                           \
    }                                                                                              \
    static __device__ __forceinline__ void Registers(float (&d)[n / 2], const uint32_t (&a)[4],    \
                                                     uint64_t b, bool accumulate) {                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                        \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list         \
                   "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, 0;\n}"         \
                   : operands                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                           \
                     "r"(static_cast<int>(accumulate)));                                           \
    }                                                                                              \
    static __device__ __forceinline__ void RegistersTransposed(float (&d)[n / 2],                  \
                                                               const uint32_t (&a)[4], uint64_t b, \
                                                               bool accumulate) {                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                        \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list         \
                   "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, 1;\n}"         \
                   : operands                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                           \
                     "r"(static_cast<int>(accumulate)));                                           \
    }                                                                                              \
  };
#else
#define MOESERVE_WGMMA(n, list, operands, i0, i1, i2, i3, i4, i5)                               \
  template <>                                                                                   \
  struct Wgmma<n> {                                                                             \
    static __device__ __forceinline__ void Shared(float (&)[n / 2], uint64_t, uint64_t, bool) { \
      __trap();                                                                                 \
    }                                                                                           \
    static __device__ __forceinline__ void Registers(float (&)[n / 2], const uint32_t (&)[4],   \
                                                     uint64_t, bool) {                          \
      __trap();                                                                                 \
    }                                                                                           \
    static __device__ __forceinline__ void RegistersTransposed(float (&)[n / 2],                \
                                                               const uint32_t (&)[4], uint64_t, \
                                                               bool) {                          \
      __trap();                                                                                 \
    }                                                                                           \
  };
#endif

#define MOESERVE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOESERVE_D16(i) MOESERVE_D4(i), MOESERVE_D4(i + 4), MOESERVE_D4(i + 8), MOESERVE_D4(i + 12)
#define MOESERVE_D32(i) MOESERVE_D16(i), MOESERVE_D16(i + 16)
#define MOESERVE_D64(i) MOESERVE_D32(i), MOESERVE_D32(i + 32)
#define MOESERVE_R4 "%0,%1,%2,%3"
#define MOESERVE_R8 MOESERVE_R4 ",%4,%5,%6,%7"
#define MOESERVE_R12 MOESERVE_R8 ",%8,%9,%10,%11"
#define MOESERVE_R16 MOESERVE_R12 ",%12,%13,%14,%15"
#define MOESERVE_R20 MOESERVE_R16 ",%16,%17,%18,%19"
#define MOESERVE_R24 MOESERVE_R20 ",%20,%21,%22,%23"
#define MOESERVE_R28 MOESERVE_R24 ",%24,%25,%26,%27"
#define MOESERVE_R32 MOESERVE_R28 ",%28,%29,%30,%31"
#define MOESERVE_R40 MOESERVE_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define MOESERVE_R48 MOESERVE_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define MOESERVE_R56 MOESERVE_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define MOESERVE_R64 MOESERVE_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define MOESERVE_R80 MOESERVE_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define MOESERVE_R96 MOESERVE_R80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MOESERVE_R112 \
  MOESERVE_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define MOESERVE_R128 \
  MOESERVE_R112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MOESERVE_O4 MOESERVE_D4(0)
#define MOESERVE_O8 MOESERVE_D4(0), MOESERVE_D4(4)
#define MOESERVE_O12 MOESERVE_D4(0), MOESERVE_D4(4), MOESERVE_D4(8)
#define MOESERVE_O16 MOESERVE_D16(0)
#define MOESERVE_O20 MOESERVE_D16(0), MOESERVE_D4(16)
#define MOESERVE_O24 MOESERVE_D16(0), MOESERVE_D4(16), MOESERVE_D4(20)
#define MOESERVE_O28 MOESERVE_D16(0), MOESERVE_D4(16), MOESERVE_D4(20), MOESERVE_D4(24)
#define MOESERVE_O32 MOESERVE_D32(0)
#define MOESERVE_O40 MOESERVE_D32(0), MOESERVE_D4(32), MOESERVE_D4(36)
#define MOESERVE_O48 MOESERVE_D32(0), MOESERVE_D16(32)
#define MOESERVE_O56 MOESERVE_D32(0), MOESERVE_D16(32), MOESERVE_D4(48), MOESERVE_D4(52)
#define MOESERVE_O64 MOESERVE_D64(0)
#define MOESERVE_O80 MOESERVE_D64(0), MOESERVE_D16(64)
#define MOESERVE_O96 MOESERVE_D64(0), MOESERVE_D32(64)
#define MOESERVE_O112 MOESERVE_D64(0), MOESERVE_D32(64), MOESERVE_D16(96)
#define MOESERVE_O128 MOESERVE_D64(0), MOESERVE_D64(64)
MOESERVE_WGMMA(8, MOESERVE_R4, MOESERVE_O4, 4, 5, 6, 7, 8, 9)
MOESERVE_WGMMA(16, MOESERVE_R8, MOESERVE_O8, 8, 9, 10, 11, 12, 13)
MOESERVE_WGMMA(24, MOESERVE_R12, MOESERVE_O12, 12, 13, 14, 15, 16, 17)
MOESERVE_WGMMA(32, MOESERVE_R16, MOESERVE_O16, 16, 17, 18, 19, 20, 21)
MOESERVE_WGMMA(40, MOESERVE_R20, MOESERVE_O20, 20, 21, 22, 23, 24, 25)
MOESERVE_WGMMA(48, MOESERVE_R24, MOESERVE_O24, 24, 25, 26, 27, 28, 29)
MOESERVE_WGMMA(56, MOESERVE_R28, MOESERVE_O28, 28, 29, 30, 31, 32, 33)
MOESERVE_WGMMA(64, MOESERVE_R32, MOESERVE_O32, 32, 33, 34, 35, 36, 37)
MOESERVE_WGMMA(80, MOESERVE_R40, MOESERVE_O40, 40, 41, 42, 43, 44, 45)
MOESERVE_WGMMA(96, MOESERVE_R48, MOESERVE_O48, 48, 49, 50, 51, 52, 53)
MOESERVE_WGMMA(112, MOESERVE_R56, MOESERVE_O56, 56, 57, 58, 59, 60, 61)
MOESERVE_WGMMA(128, MOESERVE_R64, MOESERVE_O64, 64, 65, 66, 67, 68, 69)
MOESERVE_WGMMA(160, MOESERVE_R80, MOESERVE_O80, 80, 81, 82, 83, 84, 85)
MOESERVE_WGMMA(192, MOESERVE_R96, MOESERVE_O96, 96, 97, 98, 99, 100, 101)
MOESERVE_WGMMA(224, MOESERVE_R112, MOESERVE_O112, 112, 113, 114, 115, 116, 117)
MOESERVE_WGMMA(256, MOESERVE_R128, MOESERVE_O128, 128, 129, 130, 131, 132, 133)
#undef MOESERVE_WGMMA

#if MOESERVE_HAS_SM90A
#define MOESERVE_WGMMA_INT8(n, list, operands, i0, i1, i2)                                        \
  template <>                                                                                     \
  struct WgmmaInt8<n> {                                                                           \
    static __device__ __forceinline__ void Shared(int32_t (&d)[n / 2], uint64_t a, uint64_t b,    \
                                                  bool accumulate) {                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                       \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" list "}, %" #i0 \
                   ", %" #i1 ", p;\n}"                                                            \
                   : operands                                                                     \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                          \
    }                                                                                             \
  };
#else
#define MOESERVE_WGMMA_INT8(n, list, operands, i0, i1, i2)                                        \
  template <>                                                                                     \
  struct WgmmaInt8<n> {                                                                           \
    static __device__ __forceinline__ void Shared(int32_t (&)[n / 2], uint64_t, uint64_t, bool) { \
      __trap();                                                                                   \
    }                                                                                             \
  };
#endif
#undef MOESERVE_D4
#define MOESERVE_D4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
MOESERVE_WGMMA_INT8(64, MOESERVE_R32, MOESERVE_O32, 32, 33, 34)
MOESERVE_WGMMA_INT8(96, MOESERVE_R48, MOESERVE_O48, 48, 49, 50)
MOESERVE_WGMMA_INT8(128, MOESERVE_R64, MOESERVE_O64, 64, 65, 66)
MOESERVE_WGMMA_INT8(192, MOESERVE_R96, MOESERVE_O96, 96, 97, 98)
MOESERVE_WGMMA_INT8(256, MOESERVE_R128, MOESERVE_O128, 128, 129, 130)
#undef MOESERVE_WGMMA_INT8
#undef MOESERVE_D4
#undef MOESERVE_D16
#undef MOESERVE_D32
#undef MOESERVE_D64
#undef MOESERVE_R4
#undef MOESERVE_R8
#undef MOESERVE_R12
#undef MOESERVE_R16
#undef MOESERVE_R20
#undef MOESERVE_R24
#undef MOESERVE_R28
#undef MOESERVE_R32
#undef MOESERVE_R40
#undef MOESERVE_R48
#undef MOESERVE_R56
#undef MOESERVE_R64
#undef MOESERVE_R80
#undef MOESERVE_R96
#undef MOESERVE_R112
#undef MOESERVE_R128
#undef MOESERVE_O4
#undef MOESERVE_O8
#undef MOESERVE_O12
#undef MOESERVE_O16
#undef MOESERVE_O20
#undef MOESERVE_O24
#undef MOESERVE_O28
#undef MOESERVE_O32
#undef MOESERVE_O40
#undef MOESERVE_O48
#undef MOESERVE_O56
#undef MOESERVE_O64
#undef MOESERVE_O80
#undef MOESERVE_O96
#undef MOESERVE_O112
#undef MOESERVE_O128

#endif

}  // namespace moeserve::cuda
