// Emulates wgmma: matrix products of a warpgroup. The emulator computes a product when the program
// waits for the product's group.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// Computes d += a b, or d = a b if `accumulate` is false, with m = 64, k = 16 and bf16 operands.
// `a` and `b` are K-major matrix descriptors of the operands in shared memory.
void WgmmaShared(float* d, int n, uint64_t a, uint64_t b, bool accumulate,
                 Location location = Location::current());
// Computes the product of WgmmaShared(), but takes the calling warp's 16 rows of the left operand
// from registers, in the layout of mma.sync. They must not change before the wait.
void WgmmaRegisters(float* d, int n, const uint32_t* a, uint64_t b, bool accumulate,
                    Location location = Location::current());
// As WgmmaRegisters(), but `b` is an MN-major descriptor with the swizzle of 128 bytes.
void WgmmaRegistersTransposed(float* d, int n, const uint32_t* a, uint64_t b, bool accumulate,
                              Location location = Location::current());
// Computes d += a b, or d = a b if `accumulate` is false, with m = 64, k = 32 and int8 operands in
// shared memory, which K-major matrix descriptors describe.
void WgmmaInt8Shared(int32_t* d, int n, uint64_t a, uint64_t b, bool accumulate,
                     Location location = Location::current());
void WgmmaCommit();
void WgmmaWait(int pending, Location location = Location::current());

}  // namespace moeserve::emulator
