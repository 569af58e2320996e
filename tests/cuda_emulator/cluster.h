// Emulates clusters: the barrier of a cluster, and accesses to the shared memory of its blocks.
//
// An address in a cluster has the offset in a block's shared memory in its lower 24 bits and, in
// the upper 8 bits, the block's rank plus 1, or 0 for the executing block.
//
// A store to another block is executed as late as CUDA permits: when its target has waited for a
// barrier of the cluster, or with cluster scope for an mbarrier, that the storing thread has
// arrived at afterwards. A thread that has synchronized with the storing thread may arrive in its
// place. Code without these barriers reads wrong data. The emulator reports stores that never
// become visible, accesses before a first barrier of the cluster (the other block may not have
// started) and blocks that exit although another block may still access their memory.
#pragma once

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

uint32_t ClusterRank();
uint32_t ClusterBlocks();

void ClusterArrive(Location location = Location::current());
void ClusterWait(Location location = Location::current());

// Returns the address, in the memory of the block `rank`, that corresponds to the address in shared
// memory of any block of the cluster.
uint32_t MapToRank(uint32_t address, uint32_t rank, Location location = Location::current());

// Access `bytes` (4, 8 or 16) bytes at an address in the cluster, aligned to their size.
void ClusterLoad(void* value, uint32_t address, uint32_t bytes,
                 Location location = Location::current());
void ClusterStore(uint32_t address, const void* value, uint32_t bytes,
                  Location location = Location::current());

// Returns the block that an address is in and checks the bounds of its memory.
Block& BlockOfAddress(uint32_t address, size_t bytes, Location location);
// Returns a pointer to an address in the memory of `block`.
void* PointerInBlock(const Block& block, uint32_t address);
// Records that the running thread accesses the memory of `block`.
void RecordAccess(Block& block, Location location);
// Records that all accesses by the blocks in the mask happened before what `block` does from now
// on.
void EndAccesses(Block& block, uint32_t ranks);

// Hands the running thread's stores to other blocks on to the threads of its block.
void ShareRemoteStores();
// Adds to `released` the stores that precede an arrival of the running thread.
void ReleaseRemoteStores(std::vector<RemoteStorePointer>* released);
// Executes the released stores to the running thread's block. Its threads pass on the others.
void AcquireRemoteStores(std::vector<RemoteStorePointer>* released);

}  // namespace moeserve::emulator
