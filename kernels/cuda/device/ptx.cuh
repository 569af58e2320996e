// Device primitives for which CUDA C++ has no function. Each is implemented by its PTX instruction;
// for the emulated device, by the definition of that instruction in the PTX ISA.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// 1 if the code being compiled may use instructions of compute capability 9.0a. If it is 0, the
// functions marked 9.0a stop the kernel; the host selects kernels by the device's capability, so
// such kernels do not run.
#if defined(MOESERVE_CUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOESERVE_HAS_SM90A 1
#else
#define MOESERVE_HAS_SM90A 0
#endif

inline constexpr unsigned kFullMask = 0xffffffffu;

// Returns the 32-bit shared-memory address that PTX instructions take.
__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
#if defined(MOESERVE_CUDA_EMULATION)
  return emulator::SharedAddress(pointer);
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

// --- bf16 -----------------------------------------------------------------------------------

// Returns two floats, rounded to bf16 (nearest, ties to even), as a pair. `low` is in the lower
// half, where a matrix fragment has the first element of a pair.
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
// Returns the differences a - b of two pairs, each rounded to bf16.
__device__ __forceinline__ uint32_t SubtractBf16(uint32_t a, uint32_t b) {
#if defined(MOESERVE_CUDA_EMULATION)
  return PackBf16(LowBf16(a) - LowBf16(b), HighBf16(a) - HighBf16(b));
#else
  constexpr uint32_t kMinusOne = 0xbf80bf80u;
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(b), "r"(kMinusOne), "r"(a));
  return pair;
#endif
}

// Returns (x & mask) | bits by one instruction, where a compiler takes two for constants.
__device__ __forceinline__ uint32_t AndOr(uint32_t x, uint32_t mask, uint32_t bits) {
#if defined(MOESERVE_CUDA_EMULATION)
  return (x & mask) | bits;
#else
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
#endif
}
// Return the bytes 0 and 2, or 1 and 3, which are signed integers, as a pair of bf16. The lowest 7
// bits of an integer are the mantissa of a number from 128 to 255. From this number, 128 is
// subtracted, or 256 if the integer is negative: its sign bit is the lowest bit of the exponent.
__device__ __forceinline__ uint32_t Bf16FromEvenBytes(uint32_t bytes) {
  constexpr uint32_t k128 = 0x43004300u;
  return SubtractBf16(AndOr(bytes, 0x007f007fu, k128), AndOr(bytes, 0x00800080u, k128));
}
__device__ __forceinline__ uint32_t Bf16FromOddBytes(uint32_t bytes) {
  return Bf16FromEvenBytes(bytes >> 8);
}

// Returns the products of two pairs of bf16, rounded to bf16 (nearest, ties to even). Subnormal
// numbers are numbers. Devices before 9.0 have no multiplication, and adding -0 keeps the signs of
// zeros.
__device__ __forceinline__ uint32_t MultiplyBf16Pairs(uint32_t a, uint32_t b) {
#if defined(MOESERVE_CUDA_EMULATION)
  return PackBf16(LowBf16(a) * LowBf16(b), HighBf16(a) * HighBf16(b));
#else
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));
  return pair;
#endif
}

// --- Asynchronous copies by threads (cp.async) ------------------------------------------------

// Copies 16 bytes; both addresses must be 16-byte aligned. With `source_bytes` < 16 only that many
// bytes are read and the rest of `shared` is filled with zeros. With 0 nothing is read, but
// `global` must still be a valid pointer.
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
// As CopyAsync16(), with 4 bytes, or 0.
__device__ __forceinline__ void CopyAsync4(void* shared, const void* global, int source_bytes) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsync(shared, global, 4, source_bytes);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(source_bytes)
               : "memory");
#endif
}
// Puts all copies that this thread has started since its last commit into one group.
__device__ __forceinline__ void CopyAsyncCommit() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncCommit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all but the latest kPending groups of this thread are complete. Other threads of the
// block see the copied bytes after a barrier.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncWait(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// --- Matrix fragments of a warp -----------------------------------------------------------------

// ldmatrix: loads 2 or 4 8x8 matrices of 16-bit elements from shared memory. Each lane passes the
// address of one matrix row (16 bytes, aligned): lane 8 i + j that of row j of matrix i. Afterwards
// lane l has two elements of matrix i in registers[i]: (l / 4, 2 (l % 4)) and its right neighbour.
// The transposed variants load (2 (l % 4), l / 4) and the element below it. All lanes must pass a
// valid pointer.
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

// Computes d += a b on the tensor cores: a is 16 x 16 bf16, row-major; b is 16 x 8 bf16,
// column-major; d is 16 x 8 float. Let g = lane / 4 and p = 2 (lane % 4). A register of a or b has
// two elements adjacent in k, the first one in the low half. The registers hold
//   a: the pairs from (g, p), (g + 8, p), (g, p + 8), (g + 8, p + 8);
//   b: the pairs of column g from k = p and k = p + 8;
//   d: the elements (g, p), (g, p + 1), (g + 8, p), (g + 8, p + 1).
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

// Computes d += a b on the tensor cores with 8-bit integers: a is 16 x 32, row-major, signed or,
// with kUnsigned, unsigned; b is 32 x 8 and signed, column-major; d is 16 x 8 and exact. Let g =
// lane / 4 and q = 4 (lane % 4). A register of a or b has four elements adjacent in k, the first
// one in the lowest byte. The registers hold
//   a: those from (g, q), (g + 8, q), (g, q + 16), (g + 8, q + 16);
//   b: those of column g from k = q and k = q + 16;
//   d: as MmaBf16().
template <bool kUnsigned = false>
__device__ __forceinline__ void MmaInt8(int32_t (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MmaInt8(d, a, b, kUnsigned);
#else
  if constexpr (kUnsigned) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

// --- Barriers for some of a block's warps -------------------------------------------------------

// Waits at barrier `id` (1..15; 0 is the barrier of __syncthreads) for `threads` threads, a
// multiple of 32.
__device__ __forceinline__ void NamedBarrierSync(int id, int threads) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::BarrierSync(id, threads, 0, nullptr, emulator::Location::current());
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
// Arrives at the barrier without waiting.
__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::BarrierArrive(id, threads, emulator::Location::current());
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// --- mbarriers (shared memory, 8-byte aligned) --------------------------------------------------
//
// A phase ends when `count` arrivals have happened and all expected bytes have been copied; then
// the next phase begins. The parity of the first phase is 0, and it alternates. After waiting for
// the end of a phase, a thread sees everything written before the arrivals, and the copied bytes.

// One thread initialises the barrier and calls MbarrierInitFence(). Other threads may use the
// barrier after the next block-wide barrier.
__device__ __forceinline__ void MbarrierInit(uint64_t* barrier, uint32_t count) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierInit(barrier, count);
#else
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
#endif
}
// Makes initialised mbarriers visible to the copy engine.
__device__ __forceinline__ void MbarrierInitFence() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void MbarrierInvalidate(uint64_t* barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierInvalidate(barrier);
#else
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
#endif
}
__device__ __forceinline__ void MbarrierArrive(uint64_t* barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierArrive(barrier, 0);
#else
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}" ::"r"(SharedAddress(barrier))
      : "memory");
#endif
}
// 9.0a: raises the number of bytes expected in this phase by `bytes`, then arrives.
__device__ __forceinline__ void MbarrierArriveExpect(uint64_t* barrier, uint32_t bytes) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierArrive(barrier, bytes);
#elif MOESERVE_HAS_SM90A
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
#else
  __trap();
#endif
}
// 9.0a: raises the number of bytes expected in this phase by `bytes` without arriving.
__device__ __forceinline__ void MbarrierExpect(uint64_t* barrier, uint32_t bytes) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierExpect(barrier, bytes);
#elif MOESERVE_HAS_SM90A
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
#else
  __trap();
#endif
}
// Makes the barrier count an arrival when all cp.async copies that this thread has started are
// complete. The barrier's `count` must include this arrival.
__device__ __forceinline__ void CopyAsyncArrive(uint64_t* barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncMbarrierArrive(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
#endif
}
// Returns whether the phase with this parity has ended. If the current phase has this parity, the
// function may wait for some time before it returns false.
__device__ __forceinline__ bool MbarrierTryWait(uint64_t* barrier, uint32_t parity) {
#if defined(MOESERVE_CUDA_EMULATION)
  return emulator::MbarrierTest(barrier, parity);
#else
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
#if MOESERVE_HAS_SM90A
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 ended, [%1], %2;\n"
#endif
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
#endif
}
__device__ __forceinline__ void MbarrierWait(uint64_t* barrier, uint32_t parity) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::MbarrierWait(barrier, parity);
#else
  while (!MbarrierTryWait(barrier, parity)) {
  }
#endif
}

// --- The copy engine (9.0a) -----------------------------------------------------------------

// Copies `bytes` bytes from global to shared memory and reports their completion to `barrier`,
// which must expect them. Addresses and size must be multiples of 16. A single thread calls this
// function for the whole block.
__device__ __forceinline__ void CopyBulkAsync(void* shared, const void* global, uint32_t bytes,
                                              uint64_t* barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncBulk(shared, global, bytes, barrier);
#elif MOESERVE_HAS_SM90A
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
#else
  __trap();
#endif
}
// Prefetches `bytes` bytes of global memory into the second-level cache. Address and size must be
// multiples of 16. Has no effect on other devices than 9.0.
__device__ __forceinline__ void PrefetchBulk(const void* global, uint32_t bytes) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::PrefetchBulk(global, bytes);
#elif MOESERVE_HAS_SM90A
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
#endif
}
// Orders this thread's ordinary accesses to shared memory before accesses by the copy engine and by
// wgmma. Must be called after writing an operand of wgmma, and after reading a buffer that the copy
// engine will overwrite, and in both cases before the barrier that signals this to other threads.
__device__ __forceinline__ void FenceAsyncShared() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// --- Register counts of a warpgroup; dependent launches (9.0a; no effect on other devices) ------

// Set the maximum number of registers of each thread to kRegisters, a multiple of 8 in [24, 256].
// All warps of a warpgroup must call these functions.
template <int kRegisters>
__device__ __forceinline__ void IncreaseRegisters() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void DecreaseRegisters() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Waits until the kernels that this launch depends on have ended and their writes are visible.
// Every thread must call it before it accesses memory that those kernels use, and before it exits,
// because the next kernel assumes that when this kernel has ended, all kernels before it have
// ended, too.
__device__ __forceinline__ void GridDependencyWait() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::GridDependencyWait();
#elif MOESERVE_HAS_SM90A
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next kernel to start when all blocks of this one have called this function or ended.
__device__ __forceinline__ void GridDependencyLaunch() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The first statement of kernels that immediately read results of other kernels. Because it waits
// before it allows the next kernel to start, at most two kernels run at a time: when the second
// starts, all kernels before the first have ended.
__device__ __forceinline__ void GridDependencyPass() {
  GridDependencyWait();
  GridDependencyLaunch();
}

}  // namespace moeserve::cuda
