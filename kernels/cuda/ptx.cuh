// Device primitives that CUDA C++ has no name for, each by its PTX instruction; on the emulated
// device by its definition in the PTX ISA.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cuda/runtime.h"

namespace moeserve::cuda {

inline constexpr unsigned kFullMask = 0xffffffffu;

// The 32-bit address of shared memory that PTX takes.
__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
#if defined(MOESERVE_CUDA_EMULATION)
  return emulator::SharedAddress(pointer);
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

// --- bf16 -----------------------------------------------------------------------------------

// Two floats rounded to nearest even as bf16: `low` in the lower half, where the first element of a
// fragment's pair is.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
#if defined(MOESERVE_CUDA_EMULATION)
  return Bf16FromF32(low) | (static_cast<uint32_t>(Bf16FromF32(high)) << 16);
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
__device__ __forceinline__ float LowBf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighBf16(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// --- Asynchronous copies by threads (cp.async) ------------------------------------------------

// Copies 16 bytes; both addresses are 16-byte aligned. With `source_bytes` < 16 only so many are
// read and the rest is zeros (none are read for 0, but `global` must be a valid pointer).
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global,
                                            int source_bytes = 16) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsync(shared, global, 16, source_bytes);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(source_bytes)
               : "memory");
#endif
}
// Copies 4 or 8 bytes, aligned to their size.
template <int kBytes>
__device__ __forceinline__ void CopyAsyncSmall(void* shared, const void* global,
                                               int source_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8);
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsync(shared, global, kBytes, source_bytes);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(SharedAddress(shared)),
               "l"(__cvta_generic_to_global(global)), "n"(kBytes), "r"(source_bytes)
               : "memory");
#endif
}
// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void CopyAsyncCommit() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncCommit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all but the latest kPending groups of this thread are there; other threads see them
// after a barrier.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncWait(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// --- Matrix fragments of a warp -----------------------------------------------------------------

// ldmatrix: 8x8 matrices of 16-bit elements from shared memory, whose rows (16 bytes, aligned) the
// lanes name: lane 8 i + j row j of matrix i. Lane l then holds elements (l / 4, 2 (l % 4)) and the
// one right of it of matrix i in registers[i]; transposed: (2 (l % 4), l / 4) and the one below.
// All lanes pass a valid pointer.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&registers)[4], const void* row) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::LoadMatrix(registers, 4, false, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(SharedAddress(row))
               : "memory");
#endif
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&registers)[4], const void* row) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::LoadMatrix(registers, 4, true, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(SharedAddress(row))
               : "memory");
#endif
}
__device__ __forceinline__ void LoadMatrix2(uint32_t (&registers)[2], const void* row) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::LoadMatrix(registers, 2, false, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(SharedAddress(row))
               : "memory");
#endif
}
__device__ __forceinline__ void LoadMatrix2Transposed(uint32_t (&registers)[2], const void* row) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::LoadMatrix(registers, 2, true, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(SharedAddress(row))
               : "memory");
#endif
}

// d += a b on the tensor cores: a 16 x 16 row-major, b 16 x 8 by columns, bf16; d 16 x 8 float.
// With g = lane / 4 and p = 2 (lane % 4), pairs of elements along k (a, b) or n (d), first one low:
// a: (g, p), (g + 8, p), (g, p + 8), (g + 8, p + 8); b: k = p and p + 8 of column g;
// d: (g, p), (g, p + 1), (g + 8, p), (g + 8, p + 1).
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MmaBf16(d, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// --- Barriers for some of a block's warps -------------------------------------------------------

// Barrier `id` (1..15; 0 is __syncthreads's) for `threads` threads, a multiple of 32.
__device__ __forceinline__ void NamedBarrierSync(int id, int threads) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::BarrierSync(id, threads, 0, nullptr, emulator::Location::current());
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
// Counts as arrived without waiting.
__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::BarrierArrive(id, threads, emulator::Location::current());
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

}  // namespace moeserve::cuda
