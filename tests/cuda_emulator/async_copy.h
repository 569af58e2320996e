// cp.async: asynchronous copies from global to shared memory, whose data is available only after a
// wait for their group. The emulator copies as late as it may, so that a missing wait is detected.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// Returns the offset of `pointer` in the block's shared memory. Stops the process if `pointer` is
// outside.
uint32_t SharedAddress(const void* pointer, Location location = Location::current());
// Returns a pointer to the shared memory at offset `address`.
void* SharedPointer(uint32_t address, size_t bytes, Location location = Location::current());

// Copies `bytes` (4, 8 or 16) bytes; bytes after the first `source_bytes` become zero.
void CpAsync(void* shared, const void* global, int bytes, int source_bytes,
             Location location = Location::current());
void CpAsyncCommit();
// Waits until all but the latest `pending` groups have been copied.
void CpAsyncWait(int pending);

// mbarrier objects in shared memory. A phase ends when `count` threads have arrived and as many
// bytes have been copied as were expected.
void MbarrierInit(uint64_t* barrier, uint32_t count, Location location = Location::current());
void MbarrierInvalidate(uint64_t* barrier, Location location = Location::current());
// Increases the bytes expected in this phase by `bytes`, then arrives.
void MbarrierArrive(uint64_t* barrier, uint32_t bytes, Location location = Location::current());
void MbarrierExpect(uint64_t* barrier, uint32_t bytes, Location location = Location::current());
// Waits until the phase with this parity has ended.
void MbarrierWait(uint64_t* barrier, uint32_t parity, Location location = Location::current());
// Returns whether the phase with this parity has ended. If not, lets other threads run.
bool MbarrierTest(uint64_t* barrier, uint32_t parity, Location location = Location::current());
// Arrives when all cp.async copies that this thread has issued are complete. The arrival is one of
// `count` (as in the .noinc form).
void CpAsyncMbarrierArrive(uint64_t* barrier, Location location = Location::current());
// Copies `bytes` bytes and counts them at the mbarrier. The copy happens only when a thread waits
// at the mbarrier.
void CpAsyncBulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                 Location location = Location::current());

}  // namespace moeserve::emulator
