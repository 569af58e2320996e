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

// mbarrier objects of shared memory. A phase ends when as many arrivals as `count` have come and as
// many bytes have been copied as were expected.
void MbarrierInit(uint64_t* barrier, uint32_t count, Location location = Location::current());
void MbarrierInvalidate(uint64_t* barrier, Location location = Location::current());
// Expects `bytes` more in this phase, then arrives.
void MbarrierArrive(uint64_t* barrier, uint32_t bytes, Location location = Location::current());
void MbarrierExpect(uint64_t* barrier, uint32_t bytes, Location location = Location::current());
// Waits for the end of the phase with this parity.
void MbarrierWait(uint64_t* barrier, uint32_t parity, Location location = Location::current());
// Whether that phase has ended; lets others run if not.
bool MbarrierTest(uint64_t* barrier, uint32_t parity, Location location = Location::current());
// Arrives when all cp.async copies that this thread has issued are there; uses up one arrival of
// the count (the .noinc form).
void CpAsyncMbarrierArrive(uint64_t* barrier, Location location = Location::current());
// Copies `bytes` and then counts them at the barrier; not before somebody waits there.
void CpAsyncBulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                 Location location = Location::current());

}  // namespace moeserve::emulator
