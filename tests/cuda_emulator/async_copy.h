// Emulates cp.async: asynchronous copies from global to shared memory, whose data is available only
// after a wait for their group. The emulator executes a copy as late as CUDA permits, so that code
// without the wait reads wrong data.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

// Returns the offset of `pointer` in the block's shared memory. Stops the process if `pointer` is
// outside.
uint32_t SharedAddress(const void* pointer, Location location = Location::current());
// Returns a pointer to the shared memory at offset `address`.
void* SharedPointer(uint32_t address, size_t bytes, Location location = Location::current());

// Copies `source_bytes` bytes and fills the rest of the `bytes` (4, 8 or 16) bytes in shared memory
// with zeros.
void CpAsync(void* shared, const void* global, int bytes, int source_bytes,
             Location location = Location::current());
void CpAsyncCommit();
// Waits until all but the latest `pending` groups have been copied.
void CpAsyncWait(int pending);

// These functions emulate mbarrier objects in shared memory. A phase of an mbarrier ends when
// `count` threads have arrived and all expected bytes have been copied.
void MbarrierInit(uint64_t* barrier, uint32_t count, Location location = Location::current());
void MbarrierInvalidate(uint64_t* barrier, Location location = Location::current());
// Increases the bytes expected in this phase by `bytes`, then arrives.
void MbarrierArrive(uint64_t* barrier, uint32_t bytes, Location location = Location::current());
void MbarrierExpect(uint64_t* barrier, uint32_t bytes, Location location = Location::current());
// Waits until the phase with this parity has ended. With `from_cluster`, the thread then sees the
// stores of other blocks of the cluster that precede the arrivals.
void MbarrierWait(uint64_t* barrier, uint32_t parity, bool from_cluster = false,
                  Location location = Location::current());
// Returns whether the phase with this parity has ended. If not, lets other threads run.
bool MbarrierTest(uint64_t* barrier, uint32_t parity, bool from_cluster = false,
                  Location location = Location::current());
// Arrives at an mbarrier of any block of the cluster, at an address of MapToRank() (cluster.h).
// With `releases`, the block's earlier stores to other blocks precede the arrival.
void MbarrierArriveCluster(uint32_t address, bool releases = true,
                           Location location = Location::current());
// Makes the mbarrier receive an arrival when all cp.async copies that this thread has issued are
// complete. The arrival counts towards `count` (the .noinc form of the instruction).
void CpAsyncMbarrierArrive(uint64_t* barrier, Location location = Location::current());
// Copies `bytes` bytes and subtracts them from the mbarrier's expected bytes. The emulator executes
// the copy only when a thread waits for the mbarrier.
void CpAsyncBulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                 Location location = Location::current());
// Does the same in each block of the cluster whose bit is set in `mask`, with the buffer and the
// mbarrier at the same offsets.
void CpAsyncBulkMulticast(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                          uint32_t mask, Location location = Location::current());
// Copies from the running block's shared memory to that of a block of the cluster, which also has
// the mbarrier. The source must stay unchanged until a thread has waited for the mbarrier.
void CpAsyncBulkCluster(uint32_t to, const void* shared, uint32_t bytes, uint32_t barrier,
                        Location location = Location::current());
// Stores 4, 8 or 16 bytes in the shared memory of a block of the cluster and subtracts them from
// the expected bytes of an mbarrier there. Executed as late as a copy.
void StoreAsync(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier,
                Location location = Location::current());
// Checks the range of a prefetch into the second-level cache.
void PrefetchBulk(const void* global, uint32_t bytes, Location location = Location::current());

}  // namespace moeserve::emulator
