#include "tests/cuda_emulator/cluster.h"

#include <algorithm>
#include <cstring>

#include "tests/cuda_emulator/block.h"

namespace moeserve::emulator {
namespace {

constexpr int kRankShift = 24;
constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;

void Execute(RemoteStore& store) {
  if (store.done) return;
  std::memcpy(store.to, store.value, store.bytes);
  store.done = true;
}

void RemoveDone(std::vector<RemoteStorePointer>* stores) {
  std::erase_if(*stores, [](const RemoteStorePointer& store) { return store->done; });
}

// Hands the running thread's stores to other blocks on to the threads of its block.
Block& Share() {
  if (!current->remote_stores.empty()) ShareRemoteStores();
  return *current->block;
}

void CompleteClusterBarrier(Scheduler& s) {
  ClusterBarrier& b = s.cluster;
  s.idle_yields = 0;
  if (!b.released.empty()) {
    for (const RemoteStorePointer& store : b.released) Execute(*store);
    b.released.clear();
    for (uint32_t i = 0; i < s.cluster_blocks; ++i) {
      RemoveDone(&s.blocks[i]->remote_stores);
      s.blocks[i]->stores_in_barrier = 0;
    }
  }
  ++b.phase;
  b.arrived = 0;
  b.missing = s.live;
  std::vector<Thread*> waiting;
  waiting.swap(b.waiting);
  if (s.order.kind == Order::kReverse) std::reverse(waiting.begin(), waiting.end());
  for (Thread* t : waiting) MakeReady(s, t);
}

void CheckAlignment(uint32_t address, uint32_t bytes, Location location) {
  if (address % bytes != 0) {
    Fail(location, "the address 0x%x in a cluster is not aligned to %u bytes", address, bytes);
  }
}

}  // namespace

void StartClusterState(Scheduler& s) {
  ClusterBarrier& b = s.cluster;
  b.phase = 0;
  b.arrived = 0;
  b.missing = s.live;
  b.waiting.clear();
  b.released.clear();
  for (uint32_t i = 0; i < s.cluster_blocks; ++i) {
    Block& block = *s.blocks[i];
    block.phases_waited = 0;
    block.outgoing_copies = 0;
    block.remote_stores.clear();
    block.stores_in_barrier = 0;
    for (Block::Access& access : block.accesses) access.until = 0;
  }
}

void ClusterThreadExits(Scheduler& s, const Thread& t) {
  ClusterBarrier& b = s.cluster;
  if (t.cluster_arrivals > b.phase) return;
  --b.missing;
  if (b.missing == 0 && b.arrived > 0) CompleteClusterBarrier(s);
}

void ClusterBlockExits(Scheduler& s, Block& block) {
  for (uint32_t rank = 0; rank < s.cluster_blocks; ++rank) {
    const Block::Access& access = block.accesses[rank];
    if (access.until > block.phases_waited) {
      Fail(access.location,
           "the block of rank %u exits, but the block of rank %u may still access its shared "
           "memory: it has not waited for a barrier after this access",
           block.rank, rank);
    }
  }
  if (block.outgoing_copies > 0) {
    Fail(Location::current(),
         "the block of rank %u exits, but copies from its shared memory are under way", block.rank);
  }
}

void CheckRemoteStores(Scheduler& s) {
  const auto check = [](const std::vector<RemoteStorePointer>& stores) {
    for (const RemoteStorePointer& store : stores) {
      if (store->done) continue;
      Fail(store->location,
           "a store to the shared memory of the block of rank %u did not become visible there: no "
           "barrier of the cluster and no mbarrier came after it",
           store->target->rank);
    }
  };
  for (uint32_t i = 0; i < s.cluster_blocks; ++i) {
    check(s.blocks[i]->remote_stores);
    for (int t = 0; t < s.block_threads; ++t) check(s.blocks[i]->threads[t]->remote_stores);
  }
}

uint32_t ClusterRank() { return current->block->rank; }
uint32_t ClusterBlocks() { return TheScheduler().cluster_blocks; }

void ClusterArrive(Location location) {
  Scheduler& s = TheScheduler();
  Thread* self = current;
  if (self->cluster_arrivals != self->cluster_waits) {
    Fail(location, "a thread arrives twice at the barrier of its cluster without a wait");
  }
  ++self->cluster_arrivals;
  Block& block = Share();
  if (block.stores_in_barrier < block.remote_stores.size()) {
    s.cluster.released.insert(
        s.cluster.released.end(),
        block.remote_stores.begin() + static_cast<ptrdiff_t>(block.stores_in_barrier),
        block.remote_stores.end());
    block.stores_in_barrier = block.remote_stores.size();
  }
  ++s.cluster.arrived;
  if (--s.cluster.missing == 0) CompleteClusterBarrier(s);
}

void ClusterWait(Location location) {
  Scheduler& s = TheScheduler();
  Thread* self = current;
  if (self->cluster_arrivals == self->cluster_waits) {
    Fail(location, "a thread waits for the barrier of its cluster without having arrived");
  }
  ++self->cluster_waits;
  if (s.cluster.phase < self->cluster_waits) {
    s.cluster.waiting.push_back(self);
    self->waits_for = "the barrier of the cluster";
    self->wait_detail = self->cluster_waits;
    self->location = location;
    Suspend(s);
  }
  Block& block = *self->block;
  block.phases_waited = std::max(block.phases_waited, self->cluster_waits);
}

uint32_t MapToRank(uint32_t address, uint32_t rank, Location location) {
  const uint32_t blocks = ClusterBlocks();
  if (rank >= blocks) {
    Fail(location, "mapa: the rank %u of a cluster of %u blocks", rank, blocks);
  }
  return (address & kOffsetMask) | (rank + 1) << kRankShift;
}

Block& BlockOfAddress(uint32_t address, size_t bytes, Location location) {
  Scheduler& s = TheScheduler();
  const uint32_t rank = address >> kRankShift;
  if (rank > s.cluster_blocks) Fail(location, "0x%x is no address in a cluster", address);
  if ((address & kOffsetMask) + bytes > s.launch->shared_bytes) {
    Fail(location, "bytes [%u, %zu) of another block's shared memory are used, it has %zu",
         address & kOffsetMask, (address & kOffsetMask) + bytes, s.launch->shared_bytes);
  }
  return rank == 0 ? *current->block : *s.blocks[rank - 1];
}

void* PointerInBlock(const Block& block, uint32_t address) {
  return static_cast<char*>(block.shared) + (address & kOffsetMask);
}

void RecordAccess(Block& block, Location location) {
  if (&block == current->block) return;
  Scheduler& s = TheScheduler();
  if (block.live == 0) {
    Fail(location, "the shared memory of the block of rank %u is accessed, which has exited",
         block.rank);
  }
  if (s.cluster.phase == 0) {
    Fail(location,
         "the shared memory of the block of rank %u is accessed before a barrier of the cluster: "
         "the block may not have started",
         block.rank);
  }
  Block::Access& access = block.accesses[current->block->rank];
  const uint32_t until = current->cluster_arrivals + 1;
  if (until > access.until) access = {until, location};
}

void EndAccesses(Block& block, uint32_t ranks) {
  for (int rank = 0; ranks != 0; ++rank, ranks >>= 1) {
    if ((ranks & 1u) != 0) block.accesses[rank].until = 0;
  }
}

void ClusterLoad(void* value, uint32_t address, uint32_t bytes, Location location) {
  Block& block = BlockOfAddress(address, bytes, location);
  CheckAlignment(address, bytes, location);
  RecordAccess(block, location);
  char* from = static_cast<char*>(PointerInBlock(block, address));
  // A thread sees its own stores.
  for (const RemoteStorePointer& store : current->remote_stores) {
    char* to = static_cast<char*>(store->to);
    if (to < from + bytes && from < to + store->bytes) Execute(*store);
  }
  std::memcpy(value, from, bytes);
}

void ClusterStore(uint32_t address, const void* value, uint32_t bytes, Location location) {
  Block& block = BlockOfAddress(address, bytes, location);
  CheckAlignment(address, bytes, location);
  RecordAccess(block, location);
  void* to = PointerInBlock(block, address);
  if (&block == current->block) {
    std::memcpy(to, value, bytes);
    return;
  }
  auto store = std::make_shared<RemoteStore>();
  store->target = &block;
  store->to = to;
  store->bytes = bytes;
  std::memcpy(store->value, value, bytes);
  store->location = location;
  current->remote_stores.push_back(std::move(store));
}

void ShareRemoteStores() {
  auto& own = current->remote_stores;
  auto& shared = current->block->remote_stores;
  shared.insert(shared.end(), own.begin(), own.end());
  own.clear();
}

void ReleaseRemoteStores(std::vector<RemoteStorePointer>* released) {
  Block& block = Share();
  if (block.stores_in_barrier == 0) RemoveDone(&block.remote_stores);
  for (const RemoteStorePointer& store : block.remote_stores) {
    if (!store->done) released->push_back(store);
  }
}

void AcquireRemoteStores(std::vector<RemoteStorePointer>* released) {
  Block& block = *current->block;
  for (const RemoteStorePointer& store : *released) {
    if (store->target == &block) Execute(*store);
  }
  RemoveDone(released);
  block.remote_stores.insert(block.remote_stores.end(), released->begin(), released->end());
  released->clear();
}

}  // namespace moeserve::emulator
