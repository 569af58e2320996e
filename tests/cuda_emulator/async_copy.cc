#include "tests/cuda_emulator/async_copy.h"

#include <array>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/cluster.h"

namespace moeserve::emulator {

uint32_t SharedAddress(const void* pointer, Location location) {
  const auto offset = static_cast<const char*>(pointer) - static_cast<const char*>(SharedBase());
  if (offset < 0 || offset > static_cast<ptrdiff_t>(SharedBytes())) {
    Fail(location, "a pointer into shared memory is %td bytes off its begin (it has %zu bytes)",
         offset, SharedBytes());
  }
  return static_cast<uint32_t>(offset);
}

void* SharedPointer(uint32_t address, size_t bytes, Location location) {
  if (address + bytes > SharedBytes()) {
    Fail(location, "bytes [%u, %zu) of shared memory are used, it has %zu", address,
         address + bytes, SharedBytes());
  }
  return static_cast<char*>(SharedBase()) + address;
}

void CpAsync(void* shared, const void* global, int bytes, int source_bytes, Location location) {
  const uint32_t address = SharedAddress(shared, location);
  SharedPointer(address, static_cast<size_t>(bytes), location);
  const auto size = static_cast<uintptr_t>(bytes);
  if (address % size != 0 || (reinterpret_cast<uintptr_t>(global) % size != 0)) {
    Fail(location, "cp.async of %d bytes: an address is not aligned", bytes);
  }
  if (source_bytes < 0 || source_bytes > bytes) {
    Fail(location, "cp.async of %d bytes from %d", bytes, source_bytes);
  }
  current->open_copies.push_back({[=] {
                                    std::memcpy(shared, global, static_cast<size_t>(source_bytes));
                                    std::memset(static_cast<char*>(shared) + source_bytes, 0,
                                                static_cast<size_t>(bytes - source_bytes));
                                  },
                                  ++current->copies});
}

void CpAsyncCommit() {
  current->copy_groups.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}

namespace {

void Do(std::vector<Thread::Copy>& copies, uint64_t until) {
  for (Thread::Copy& copy : copies) {
    if (!copy.work || copy.number > until) continue;
    copy.work();
    copy.work = nullptr;
  }
}

struct Mbarrier {
  uint32_t count = 0;
  uint32_t pending = 0;  // arrivals that are missing in this phase
  int64_t bytes = 0;     // expected minus copied bytes
  uint64_t phase = 0;    // number of phases that have ended
  int waiting = 0;
  std::vector<std::function<void()>> deferred;
  // Blocks of the cluster, by rank, that have arrived here or copied from or to here, and the
  // stores that precede their arrivals: in this phase, and in the phases that have ended.
  uint32_t arriving = 0;
  uint32_t arrived = 0;
  std::vector<RemoteStorePointer> releasing;
  std::vector<RemoteStorePointer> released;
};

// Returns the block whose shared memory contains the address.
Block& BlockOf(const void* address) {
  Scheduler& s = TheScheduler();
  for (uint32_t i = 0; i < s.cluster_blocks; ++i) {
    const auto offset = static_cast<const char*>(address) - static_cast<char*>(s.blocks[i]->shared);
    if (offset >= 0 && offset < static_cast<ptrdiff_t>(s.launch->shared_bytes)) {
      return *s.blocks[i];
    }
  }
  return *current->block;
}

// Returns the mbarriers of the running blocks, by their addresses in shared memory.
std::unordered_map<uint64_t*, Mbarrier>& Mbarriers() {
  static auto* const barriers = [] {
    OnClusterEnd([] {
      for (const auto& [address, b] : Mbarriers()) {
        if (!b.deferred.empty()) {
          const Block& block = BlockOf(address);
          Fail(Location::current(),
               "a block ended with copies to the mbarrier at 0x%zx of shared "
               "memory under way that nobody waited for",
               static_cast<size_t>(reinterpret_cast<char*>(address) -
                                   static_cast<char*>(block.shared)));
        }
      }
      Mbarriers().clear();
    });
    return new std::unordered_map<uint64_t*, Mbarrier>;
  }();
  return *barriers;
}

// This value is stored in the mbarrier's 8 bytes. If it has changed, code has overwritten the
// mbarrier.
constexpr uint64_t kMark = 0x6d62617272696572;

// Finds an mbarrier in the shared memory of any block of the cluster.
Mbarrier& LookUp(uint64_t* barrier, Location location) {
  const auto it = Mbarriers().find(barrier);
  if (it == Mbarriers().end() || *barrier != kMark) {
    const Block& block = BlockOf(barrier);
    const auto address =
        static_cast<unsigned>(reinterpret_cast<char*>(barrier) - static_cast<char*>(block.shared));
    if (it == Mbarriers().end()) {
      Fail(location, "the mbarrier at 0x%x of shared memory was not initialised", address);
    }
    Fail(location, "the mbarrier at 0x%x was overwritten", address);
  }
  return it->second;
}

Mbarrier& FindMbarrier(uint64_t* barrier, Location location) {
  SharedPointer(SharedAddress(barrier, location), 8, location);
  return LookUp(barrier, location);
}

void EndPhaseIfComplete(uint64_t* barrier, Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.count;
  ++b.phase;
  b.waiting = 0;
  b.arrived |= b.arriving;
  b.arriving = 0;
  if (!b.releasing.empty()) {
    b.released.insert(b.released.end(), b.releasing.begin(), b.releasing.end());
    b.releasing.clear();
  }
  WakeAll(barrier);
}

void RunDeferred(Mbarrier& b) {
  std::vector<std::function<void()>> deferred;
  deferred.swap(b.deferred);
  for (const auto& work : deferred) work();
}

void Defer(Mbarrier& b, std::function<void()> work) {
  b.deferred.push_back(std::move(work));
  if (b.waiting > 0) RunDeferred(b);
}

void Arrive(uint64_t* barrier, Mbarrier& b, Location location) {
  if (b.pending == 0) {
    Fail(location, "an mbarrier got more arrivals in a phase than its count of %u", b.count);
  }
  --b.pending;
  EndPhaseIfComplete(barrier, b);
}

// Called when the running thread knows that a phase has ended.
void Acquire(Mbarrier& b, bool from_cluster) {
  if (b.arrived != 0) {
    EndAccesses(*current->block, b.arrived);
    b.arrived = 0;
  }
  if (from_cluster && !b.released.empty()) AcquireRemoteStores(&b.released);
}

void CheckBulkCopy(const void* to, const void* from, uint32_t bytes, Location location) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 ||
      bytes % 16 != 0 || bytes == 0) {
    Fail(location, "cp.async.bulk of %u bytes: addresses and size must be multiples of 16", bytes);
  }
}

// Makes a thread that waits for `barrier` execute `work`, which writes `bytes` bytes.
void DeferBytes(uint64_t* barrier, uint32_t bytes, Location location, std::function<void()> work) {
  const uint32_t rank = current->block->rank;
  Defer(LookUp(barrier, location), [=, work = std::move(work)] {
    work();
    Mbarrier& b = LookUp(barrier, location);
    b.bytes -= bytes;
    b.arriving |= 1u << rank;
    EndPhaseIfComplete(barrier, b);
  });
}

// Copies to an address in the cluster; `source` is the block that the bytes come from, if any.
void CpAsyncBulkTo(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, Block* source,
                   Location location) {
  Block& block = BlockOfAddress(to, bytes, location);
  if (&BlockOfAddress(barrier, 8, location) != &block) {
    Fail(location, "cp.async.bulk: the mbarrier is not in the block that the bytes are copied to");
  }
  void* pointer = PointerInBlock(block, to);
  CheckBulkCopy(pointer, from, bytes, location);
  RecordAccess(block, location);
  if (source != nullptr) ++source->outgoing_copies;
  DeferBytes(static_cast<uint64_t*>(PointerInBlock(block, barrier)), bytes, location, [=] {
    std::memcpy(pointer, from, bytes);
    if (source != nullptr) --source->outgoing_copies;
  });
}

}  // namespace

void CpAsyncWait(int pending) {
  auto& groups = current->copy_groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    Do(groups.front(), ~uint64_t{0});
    groups.pop_front();
  }
}

void MbarrierInit(uint64_t* barrier, uint32_t count, Location location) {
  const uint32_t address = SharedAddress(barrier, location);
  SharedPointer(address, 8, location);
  if (!current->remote_stores.empty()) ShareRemoteStores();
  if (address % 8 != 0) Fail(location, "an mbarrier is not aligned to 8 bytes");
  if (count == 0 || count >= 1u << 20) Fail(location, "an mbarrier's count of %u", count);
  Mbarrier& b = Mbarriers()[barrier];
  if (b.waiting > 0) Fail(location, "an mbarrier is initialised while threads wait at it");
  b = Mbarrier{};
  b.count = b.pending = count;
  *barrier = kMark;
}

void MbarrierInvalidate(uint64_t* barrier, Location location) {
  const Mbarrier& b = FindMbarrier(barrier, location);
  if (b.waiting > 0 || !b.deferred.empty()) Fail(location, "an mbarrier in use is invalidated");
  Mbarriers().erase(barrier);
}

void MbarrierExpect(uint64_t* barrier, uint32_t bytes, Location location) {
  FindMbarrier(barrier, location).bytes += bytes;
}

void MbarrierArrive(uint64_t* barrier, uint32_t bytes, Location location) {
  if (!current->remote_stores.empty()) ShareRemoteStores();
  Mbarrier& b = FindMbarrier(barrier, location);
  b.bytes += bytes;
  Arrive(barrier, b, location);
}

void MbarrierArriveCluster(uint32_t address, bool releases, Location location) {
  Block& block = BlockOfAddress(address, 8, location);
  RecordAccess(block, location);
  auto* barrier = static_cast<uint64_t*>(PointerInBlock(block, address));
  Mbarrier& b = LookUp(barrier, location);
  if (releases) ReleaseRemoteStores(&b.releasing);
  b.arriving |= 1u << current->block->rank;
  Arrive(barrier, b, location);
}

void MbarrierWait(uint64_t* barrier, uint32_t parity, bool from_cluster, Location location) {
  for (;;) {
    Mbarrier& b = FindMbarrier(barrier, location);
    if ((b.phase & 1u) != parity) return Acquire(b, from_cluster);
    if (!b.deferred.empty()) {
      RunDeferred(b);
      continue;
    }
    ++b.waiting;
    WaitFor(barrier, "an mbarrier's phase", location);
  }
}

bool MbarrierTest(uint64_t* barrier, uint32_t parity, bool from_cluster, Location location) {
  Mbarrier& b = FindMbarrier(barrier, location);
  if ((b.phase & 1u) == parity) RunDeferred(b);
  if ((b.phase & 1u) == parity) {
    YieldThread();
    return false;
  }
  Acquire(b, from_cluster);
  return true;
}

void CpAsyncMbarrierArrive(uint64_t* barrier, Location location) {
  Thread* thread = current;
  Defer(FindMbarrier(barrier, location), [=, until = thread->copies] {
    for (auto& group : thread->copy_groups) Do(group, until);
    Do(thread->open_copies, until);
    Arrive(barrier, FindMbarrier(barrier, location), location);
  });
}

void CpAsyncBulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                 Location location) {
  SharedPointer(SharedAddress(shared, location), bytes, location);
  SharedPointer(SharedAddress(barrier, location), 8, location);
  CheckBulkCopy(shared, global, bytes, location);
  DeferBytes(barrier, bytes, location, [=] { std::memcpy(shared, global, bytes); });
}

void CpAsyncBulkMulticast(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                          uint32_t mask, Location location) {
  const uint32_t to = SharedAddress(shared, location), at = SharedAddress(barrier, location);
  CheckBulkCopy(shared, global, bytes, location);
  if (mask == 0 || mask >> ClusterBlocks() != 0) {
    Fail(location, "cp.async.bulk: the mask 0x%x of blocks in a cluster of %u", mask,
         ClusterBlocks());
  }
  for (uint32_t rank = 0; rank < ClusterBlocks(); ++rank) {
    if (((mask >> rank) & 1u) == 0) continue;
    CpAsyncBulkTo(MapToRank(to, rank, location), global, bytes, MapToRank(at, rank, location),
                  nullptr, location);
  }
}

void CpAsyncBulkCluster(uint32_t to, const void* shared, uint32_t bytes, uint32_t barrier,
                        Location location) {
  SharedPointer(SharedAddress(shared, location), bytes, location);
  CpAsyncBulkTo(to, shared, bytes, barrier, current->block, location);
}

void StoreAsync(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier,
                Location location) {
  Block& block = BlockOfAddress(to, bytes, location);
  if (&BlockOfAddress(barrier, 8, location) != &block) {
    Fail(location, "st.async: the mbarrier is not in the block that the bytes are stored in");
  }
  if (to % bytes != 0) Fail(location, "st.async: the address 0x%x is not aligned", to);
  RecordAccess(block, location);
  std::array<unsigned char, 16> copy;
  std::memcpy(copy.data(), value, bytes);
  void* pointer = PointerInBlock(block, to);
  DeferBytes(static_cast<uint64_t*>(PointerInBlock(block, barrier)), bytes, location,
             [=] { std::memcpy(pointer, copy.data(), bytes); });
}

void PrefetchBulk(const void* global, uint32_t bytes, Location location) {
  CheckBulkCopy(global, global, bytes, location);
  // Lets a sanitizer check the range.
  const auto* p = static_cast<const volatile char*>(global);
  static_cast<void>(p[0]);
  static_cast<void>(p[bytes - 1]);
}

}  // namespace moeserve::emulator
