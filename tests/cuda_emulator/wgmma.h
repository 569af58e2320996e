// wgmma: matrix products of a warpgroup, done when their group is waited for.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// d += a b (d = a b unless `accumulate`) for m64 n`n` k16 bf16, both operands by K-major matrix
// descriptors in shared memory.
void WgmmaShared(float* d, int n, uint64_t a, uint64_t b, bool accumulate,
                 Location location = Location::current());
// With the calling warp's 16 rows of a in registers, laid out as for mma.sync.
void WgmmaRegisters(float* d, int n, const uint32_t* a, uint64_t b, bool accumulate,
                    Location location = Location::current());
void WgmmaCommit();
void WgmmaWait(int pending, Location location = Location::current());

}  // namespace moeserve::emulator
