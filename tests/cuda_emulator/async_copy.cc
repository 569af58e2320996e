#include "tests/cuda_emulator/async_copy.h"

#include <cstring>
#include <unordered_map>

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
};

// Returns the mbarriers of the running block, by their addresses in shared memory.
std::unordered_map<uint64_t*, Mbarrier>& Mbarriers() {
  static auto* const barriers = [] {
    OnBlockEnd([] {
      for (const auto& [address, b] : Mbarriers()) {
        if (!b.deferred.empty()) {
          Fail(Location::current(),
               "a block ended with copies to the mbarrier at 0x%zx of shared "
               "memory under way that nobody waited for",
               static_cast<size_t>(reinterpret_cast<char*>(address) -
                                   static_cast<char*>(SharedBase())));
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

Mbarrier& FindMbarrier(uint64_t* barrier, Location location) {
  const uint32_t address = SharedAddress(barrier, location);
  SharedPointer(address, 8, location);
  const auto it = Mbarriers().find(barrier);
  if (it == Mbarriers().end()) {
    Fail(location, "the mbarrier at 0x%x of shared memory was not initialised", address);
  }
  if (*barrier != kMark) Fail(location, "the mbarrier at 0x%x was overwritten", address);
  return it->second;
}

void EndPhaseIfComplete(uint64_t* barrier, Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.count;
  ++b.phase;
  b.waiting = 0;
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
  Mbarrier& b = FindMbarrier(barrier, location);
  b.bytes += bytes;
  Arrive(barrier, b, location);
}

void MbarrierWait(uint64_t* barrier, uint32_t parity, Location location) {
  for (;;) {
    Mbarrier& b = FindMbarrier(barrier, location);
    if ((b.phase & 1u) != parity) return;
    if (!b.deferred.empty()) {
      RunDeferred(b);
      continue;
    }
    ++b.waiting;
    WaitFor(barrier, "an mbarrier's phase", location);
  }
}

bool MbarrierTest(uint64_t* barrier, uint32_t parity, Location location) {
  Mbarrier& b = FindMbarrier(barrier, location);
  if ((b.phase & 1u) != parity) return true;
  RunDeferred(b);
  if ((b.phase & 1u) != parity) return true;
  YieldThread();
  return false;
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
  const uint32_t address = SharedAddress(shared, location);
  SharedPointer(address, bytes, location);
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 ||
      bytes == 0) {
    Fail(location, "cp.async.bulk of %u bytes: addresses and size must be multiples of 16", bytes);
  }
  Defer(FindMbarrier(barrier, location), [=] {
    std::memcpy(shared, global, bytes);
    Mbarrier& b = FindMbarrier(barrier, location);
    b.bytes -= bytes;
    EndPhaseIfComplete(barrier, b);
  });
}

}  // namespace moeserve::emulator
