// Emulates wgmma: matrix products of a warpgroup, which are computed when their group is waited
// for.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// Computes d += a b (d = a b unless `accumulate`) with shape m64, n`n`, k16 and bf16 operands,
// which K-major matrix descriptors locate in shared memory.
void WgmmaShared(float* d, int n, uint64_t a, uint64_t b, bool accumulate,
                 Location location = Location::current());
// Computes the same product with the calling warp's 16 rows of a in registers, in the layout of
// mma.sync.
void WgmmaRegisters(float* d, int n, const uint32_t* a, uint64_t b, bool accumulate,
                    Location location = Location::current());
void WgmmaCommit();
void WgmmaWait(int pending, Location location = Location::current());

}  // namespace moeserve::emulator
