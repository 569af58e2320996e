// Device primitives that CUDA C++ has no name for, each by its PTX instruction; on the emulated
// device by its definition in the PTX ISA.
#pragma once

#include "kernels/base/dtype.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Whether the code being compiled may use instructions of compute capability 9.0a. On other devices
// the functions marked 9.0a stop the kernel: hosts choose kernels by the device's capability.
#if defined(MOESERVE_CUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOESERVE_HAS_SM90A 1
#else
#define MOESERVE_HAS_SM90A 0
#endif

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

// Copies 16 bytes; both addresses are 16-byte aligned. With `source_bytes` < 16 only that many are
// read and the rest is zero (none are read for 0, but `global` must be a valid pointer).
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
// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void CopyAsyncCommit() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncCommit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all but the latest kPending groups of this thread are complete; other threads see them
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

// --- mbarriers (shared memory, 8-byte aligned) --------------------------------------------------
//
// A phase ends when `count` arrivals and all expected bytes have come; then the next
// phase begins. Phases have parities 0, 1, 0, ... Waiting for the end of a phase makes what was
// written before the arrivals, and the copied bytes, visible.

// One thread initialises; the others use the barrier after MbarrierInitFence() by that thread and
// a barrier of the block.
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
// 9.0a: expects `bytes` more in this phase, then arrives.
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
// 9.0a: expects `bytes` more in this phase without arriving.
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
// Arrives when all cp.async copies of this thread so far are complete. Each such call is one of the
// arrivals that the barrier counts.
__device__ __forceinline__ void CopyAsyncArrive(uint64_t* barrier) {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::CpAsyncMbarrierArrive(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
#endif
}
// Whether the phase with this parity has ended; the current phase has not. May wait a while for it.
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

// Copies `bytes` from global to shared memory and counts them at `barrier`, which has to expect
// them. Addresses and size are multiples of 16. One thread calls this for all.
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
// Orders this thread's ordinary accesses to shared memory before those of the copy engine and of
// wgmma: needed after writing an operand, or after reading a buffer that is copied into next, and
// before the barrier that announces it.
__device__ __forceinline__ void FenceAsyncShared() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// --- Registers of a warpgroup, dependent launches (9.0a; nothing elsewhere) ---------------------

// All warps of a warpgroup; kRegisters is a multiple of 8 in [24, 256].
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
// Every thread calls it before it reads or overwrites memory that they use, and before it exits:
// the next kernel assumes that the end of this one implies the end of all before.
__device__ __forceinline__ void GridDependencyWait() {
#if defined(MOESERVE_CUDA_EMULATION)
  emulator::GridDependencyWait();
#elif MOESERVE_HAS_SM90A
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start when all blocks have called this or ended.
__device__ __forceinline__ void GridDependencyLaunch() {
#if !defined(MOESERVE_CUDA_EMULATION) && MOESERVE_HAS_SM90A
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The first statement of kernels that start by reading the results of others. With this order of
// the two calls at most two kernels run at a time: all before them have ended when the second
// starts.
__device__ __forceinline__ void GridDependencyPass() {
  GridDependencyWait();
  GridDependencyLaunch();
}

}  // namespace moeserve::cuda
