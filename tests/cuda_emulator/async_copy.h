// cp.async: copies from global to shared memory that are not there before their group is waited
// for. They happen as late as allowed, so that a missing wait shows.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// The offset of `pointer` in the block's shared memory; stops the process if it is not in there.
uint32_t SharedAddress(const void* pointer, Location location = Location::current());
// The same memory by its offset.
void* SharedPointer(uint32_t address, size_t bytes, Location location = Location::current());

// Copies `bytes` (4, 8 or 16) of which the last ones after `source_bytes` are zeros.
void CpAsync(void* shared, const void* global, int bytes, int source_bytes,
             Location location = Location::current());
void CpAsyncCommit();
// Returns when all but the latest `pending` groups have been copied.
void CpAsyncWait(int pending);

}  // namespace moeserve::emulator
