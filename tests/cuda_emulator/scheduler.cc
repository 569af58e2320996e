#include "tests/cuda_emulator/scheduler.h"

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "base/check.h"
#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/cluster.h"

namespace moeserve::emulator {

namespace names {
uint3 threadIdx{};
uint3 blockIdx{};
dim3 blockDim;
dim3 gridDim;
}  // namespace names
Thread* current = nullptr;

Scheduler& TheScheduler() {
  static Scheduler* const scheduler = new Scheduler;
  return *scheduler;
}

void MakeReady(Scheduler& s, Thread* t) {
  s.ready[(s.ready_head + s.ready_count) & s.ready_mask] = t;
  ++s.ready_count;
}

namespace {

std::optional<Order> g_order;

uint64_t NextRandom(Scheduler& s) {
  s.random ^= s.random << 13;
  s.random ^= s.random >> 7;
  s.random ^= s.random << 17;
  return s.random;
}

void PrintThread(const Thread& t) {
  std::fprintf(stderr, "thread (%u,%u,%u)", t.index.x, t.index.y, t.index.z);
}

// If no thread makes progress during this many polls, a polling thread is reported as stuck.
constexpr uint64_t kMaxIdleYields = 1'000'000;

[[noreturn]] void Deadlock(Scheduler& s) {
  std::fprintf(stderr,
               "CUDA emulator: deadlock in block (%u,%u,%u) of a grid (%u,%u,%u): none of "
               "the %d threads that have not exited gets any further\n",
               blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z, s.live);
  int printed = 0;
  for (uint32_t i = 0; i < s.cluster_blocks; ++i) {
    const Block& block = *s.blocks[i];
    if (s.cluster_blocks > 1) std::fprintf(stderr, " block of rank %u in the cluster:\n", i);
    const Thread* last = nullptr;
    for (int j = 0; j < s.block_threads && printed < 40; ++j) {
      const Thread& t = *block.threads[j];
      if (t.exited) continue;
      // Prints only the first of consecutive threads that wait for the same thing at the same
      // source line.
      if (last != nullptr && last->waits_for == t.waits_for && last->wait_detail == t.wait_detail &&
          last->location.line() == t.location.line()) {
        continue;
      }
      last = &t;
      std::fprintf(stderr, "  from ");
      PrintThread(t);
      std::fprintf(stderr, " on: waits in %s [0x%llx] at %s:%u\n", t.waits_for ? t.waits_for : "?",
                   static_cast<unsigned long long>(t.wait_detail), t.location.file_name(),
                   t.location.line());
      ++printed;
    }
  }
  std::fflush(stderr);
  std::abort();
}

Thread* TakeReady(Scheduler& s) {
  if (s.ready_count == 0) Deadlock(s);
  if (s.order.kind == Order::kRandom && s.ready_count > 1) {
    std::swap(s.ready[s.ready_head],
              s.ready[(s.ready_head + NextRandom(s) % s.ready_count) & s.ready_mask]);
  }
  --s.ready_count;
  if (s.order.kind == Order::kEager) return s.ready[(s.ready_head + s.ready_count) & s.ready_mask];
  Thread* t = s.ready[s.ready_head];
  s.ready_head = (s.ready_head + 1) & s.ready_mask;
  return t;
}

void MakeCurrent(Thread* t) {
  current = t;
  threadIdx = t->index;
  blockIdx = t->block->index;
}

}  // namespace

void Suspend(Scheduler& s) {
  Thread* self = current;
  Thread* next = TakeReady(s);
  if (next == self) return;
  MakeCurrent(next);
  SwitchFiber(&self->fiber, &next->fiber);
}

namespace {

void CompleteCollective(Scheduler& s, Warp& warp, size_t slot) {
  s.idle_yields = 0;
  const Warp::Collective c = warp.collectives[slot];
  warp.collectives.erase(warp.collectives.begin() + static_cast<ptrdiff_t>(slot));
  void* deposits[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    deposits[lane] = (c.arrived >> lane) & 1u ? warp.threads[lane]->deposit : nullptr;
  }
  if (c.compute != nullptr) c.compute(deposits, c.arrived, c.detail);
  const bool reverse = s.order.kind == Order::kReverse;
  for (int i = 0; i < kWarpSize; ++i) {
    const int lane = reverse ? kWarpSize - 1 - i : i;
    if (((c.arrived >> lane) & 1u) == 0) continue;
    Thread* t = warp.threads[lane];
    if (t != current) MakeReady(s, t);
  }
}

bool CollectiveIsComplete(const Warp& warp, const Warp::Collective& c) {
  const uint32_t needed = c.mask & warp.live;
  return (c.arrived & needed) == needed;
}

void CompleteBarrier(Scheduler& s, Barrier& b) {
  s.idle_yields = 0;
  std::vector<Thread*> waiting;
  waiting.swap(b.waiting);
  const int sum = b.sum;
  const int arrived = b.arrived;
  b.expected = b.arrived = b.sum = 0;
  if (s.order.kind == Order::kReverse) std::reverse(waiting.begin(), waiting.end());
  for (Thread* t : waiting) {
    t->barrier_count = sum;
    t->wait_detail = arrived;
    if (t != current) MakeReady(s, t);
  }
  waiting.clear();
  if (b.waiting.capacity() == 0) b.waiting.swap(waiting);
}

int Needed(const Block& block, const Barrier& b) {
  return b.expected == 0 ? block.live : b.expected;
}

void ExitThread() {
  Scheduler& s = TheScheduler();
  Thread* self = current;
  Block& block = *self->block;
  self->exited = true;
  --block.live;
  --s.live;
  s.idle_yields = 0;
  Warp& warp = *self->warp;
  warp.live &= ~(1u << self->lane);
  if (block.live == 0 && s.cluster_blocks > 1) ClusterBlockExits(s, block);
  if (s.live == 0) {
    SwitchFiber(&self->fiber, s.host);
    return;
  }
  for (size_t i = 0; i < warp.collectives.size();) {
    if (CollectiveIsComplete(warp, warp.collectives[i])) {
      CompleteCollective(s, warp, i);
    } else {
      ++i;
    }
  }
  for (Barrier& b : block.barriers) {
    if (b.expected == 0 && b.arrived > 0 && b.arrived >= block.live) CompleteBarrier(s, b);
  }
  ClusterThreadExits(s, *self);
  Suspend(s);
}

// The main function of a fiber. A fiber runs one thread of each block, one block after the other.
void ThreadMain() {
  FiberStarted();
  for (;;) {
    const Launch* launch = TheScheduler().launch;
    launch->run(launch->arguments);
    ExitThread();
  }
}

// Sets the index of the block `rank` of the cluster with this number.
void SetBlockIndex(Block& block, const Launch& launch, uint64_t cluster, unsigned rank) {
  const dim3& size = launch.cluster;
  const unsigned x = launch.grid.x / size.x, y = launch.grid.y / size.y;
  block.rank = rank;
  block.index = {static_cast<unsigned>(cluster % x) * size.x + rank % size.x,
                 static_cast<unsigned>(cluster / x % y) * size.y + rank / size.x % size.y,
                 static_cast<unsigned>(cluster / x / y) * size.z + rank / size.x / size.y};
}

void StartBlock(Scheduler& s, const Launch& launch, Block& block) {
  if (launch.shared_bytes > 0) std::memset(block.shared, 0xff, launch.shared_bytes);
  block.live = s.block_threads;
  for (int w = 0; w * kWarpSize < s.block_threads; ++w) {
    const int lanes = std::min(kWarpSize, s.block_threads - w * kWarpSize);
    block.warps[w].live = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
    block.warps[w].collectives.clear();
  }
  for (int i = 0; i < s.block_threads; ++i) {
    Thread* t = block.threads[s.order.kind == Order::kReverse ? s.block_threads - 1 - i : i].get();
    t->exited = false;
    t->waited_for_grids = false;
    t->waits_for = nullptr;
    t->copies = 0;
    t->open_copies.clear();
    t->copy_groups.clear();
    t->open_matrix_work.clear();
    t->matrix_groups.clear();
    t->cluster_arrivals = t->cluster_waits = 0;
    t->remote_stores.clear();
    MakeReady(s, t);
  }
}

void CheckEndOfBlock(Scheduler& s, const Launch& launch, Block& block) {
  for (int i = 0; launch.overlaps && i < s.block_threads; ++i) {
    MakeCurrent(block.threads[i].get());
    if (!current->waited_for_grids) {
      Fail(Location::current(),
           "a thread of a kernel that may start before the one before it has "
           "ended did not call GridDependencyWait()");
    }
  }
  for (const Barrier& b : block.barriers) {
    if (b.arrived > 0)
      Fail(Location::current(),
           "a block ended with an arrival at a named barrier "
           "that nobody waited for");
  }
}

// Runs the blocks of a cluster; outside of clusters, a single block.
void RunCluster(Scheduler& s, const Launch& launch, uint64_t cluster) {
  s.live = s.block_threads * static_cast<int>(s.cluster_blocks);
  s.ready_head = s.ready_count = 0;
  s.idle_yields = 0;
  StartClusterState(s);
  for (uint32_t i = 0; i < s.cluster_blocks; ++i) {
    const uint32_t rank = s.order.kind == Order::kReverse ? s.cluster_blocks - 1 - i : i;
    SetBlockIndex(*s.blocks[rank], launch, cluster, rank);
    StartBlock(s, launch, *s.blocks[rank]);
  }
  FiberContext host;
  s.host = &host;
  MakeCurrent(TakeReady(s));
  SwitchFiber(&host, &current->fiber);
  for (uint32_t i = 0; i < s.cluster_blocks; ++i) CheckEndOfBlock(s, launch, *s.blocks[i]);
  if (s.cluster_blocks > 1) CheckRemoteStores(s);
  for (void (*callback)() : s.cluster_end_callbacks) callback();
  current = nullptr;
}

// Creates the threads of a block if they do not exist, and sets their indices.
void PrepareBlock(Scheduler& s, const Launch& launch, uint32_t rank) {
  if (s.blocks.size() <= rank) s.blocks.push_back(std::make_unique<Block>());
  Block& block = *s.blocks[rank];
  while (block.threads.size() < static_cast<size_t>(s.block_threads)) {
    auto t = std::make_unique<Thread>();
    t->linear = static_cast<int>(block.threads.size());
    t->lane = t->linear % kWarpSize;
    t->warp = &block.warps[t->linear / kWarpSize];
    t->warp->threads[t->lane] = t.get();
    t->block = &block;
    CreateFiber(&t->fiber, block.threads.size(), ThreadMain);
    block.threads.push_back(std::move(t));
  }
  for (int i = 0; i < s.block_threads; ++i) {
    const unsigned n = static_cast<unsigned>(i);
    block.threads[i]->index = {n % launch.block.x, n / launch.block.x % launch.block.y,
                               n / launch.block.x / launch.block.y};
  }
  block.shared = nullptr;
  if (launch.shared_bytes > 0) {
    MOESERVE_CHECK(posix_memalign(&block.shared, 1024, launch.shared_bytes) == 0, "shared memory");
  }
}

}  // namespace

void SetOrder(Order order) { g_order = order; }

Order GetOrder() {
  if (!g_order.has_value()) {
    Order order;
    const char* text = std::getenv("MOESERVE_EMULATOR_ORDER");
    const std::string value = text == nullptr ? "forward" : text;
    if (value == "reverse") {
      order.kind = Order::kReverse;
    } else if (value == "eager") {
      order.kind = Order::kEager;
    } else if (value != "forward") {
      char* end = nullptr;
      order.kind = Order::kRandom;
      order.seed = std::strtoull(value.c_str(), &end, 10);
      MOESERVE_CHECK(end != value.c_str() && *end == 0,
                     "MOESERVE_EMULATOR_ORDER is forward, reverse, eager or a number");
    }
    g_order = order;
  }
  return *g_order;
}

void RunLaunch(const Launch& launch) {
  Scheduler& s = TheScheduler();
  MOESERVE_CHECK(current == nullptr, "a kernel cannot launch another in the emulator");
  s.launch = &launch;
  s.order = GetOrder();
  s.random = s.order.seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
  for (int i = 0; i < 4; ++i) NextRandom(s);
  s.block_threads = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  s.cluster_blocks = launch.cluster.x * launch.cluster.y * launch.cluster.z;
  gridDim = launch.grid;
  blockDim = launch.block;
  for (uint32_t rank = 0; rank < s.cluster_blocks; ++rank) PrepareBlock(s, launch, rank);
  const uint32_t ready = std::bit_ceil(s.cluster_blocks * static_cast<uint32_t>(s.block_threads));
  if (s.ready.size() < ready) s.ready.resize(ready);
  s.ready_mask = static_cast<uint32_t>(s.ready.size()) - 1;
  const uint64_t clusters =
      uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z / s.cluster_blocks;
  if (s.order.kind == Order::kRandom) {
    std::vector<uint64_t> sequence(clusters);
    for (uint64_t i = 0; i < clusters; ++i) {
      sequence[i] = i;
      std::swap(sequence[i], sequence[NextRandom(s) % (i + 1)]);
    }
    for (const uint64_t cluster : sequence) RunCluster(s, launch, cluster);
  } else {
    for (uint64_t i = 0; i < clusters; ++i) {
      RunCluster(s, launch, s.order.kind == Order::kReverse ? clusters - 1 - i : i);
    }
  }
  for (uint32_t rank = 0; rank < s.cluster_blocks; ++rank) {
    std::free(s.blocks[rank]->shared);
    s.blocks[rank]->shared = nullptr;
  }
  s.launch = nullptr;
}

void GridDependencyWait() { current->waited_for_grids = true; }

void* SharedBase() { return current->block->shared; }
size_t SharedBytes() { return TheScheduler().launch->shared_bytes; }

void WarpCollective(uint32_t mask, const char* name, int detail, void* deposit,
                    void (*compute)(void* const* deposits, uint32_t arrived, int detail),
                    Location location) {
  Scheduler& s = TheScheduler();
  Thread* self = current;
  Warp& warp = *self->warp;
  const uint32_t bit = 1u << self->lane;
  if ((mask & bit) == 0) {
    Fail(location, "%s: the calling lane %d is not in the mask 0x%x", name, self->lane, mask);
  }
  if (!self->remote_stores.empty()) ShareRemoteStores();
  self->deposit = deposit;
  size_t slot = 0;
  while (slot < warp.collectives.size() && warp.collectives[slot].mask != mask) ++slot;
  if (slot == warp.collectives.size()) {
    warp.collectives.push_back({mask, 0, name, detail, compute});
  }
  Warp::Collective& c = warp.collectives[slot];
  if (c.name != name || c.detail != detail) {
    Fail(location,
         "lanes of one warp disagree: lane %d calls %s (%d), other lanes of mask 0x%x wait in %s "
         "(%d)",
         self->lane, name, detail, mask, c.name, c.detail);
  }
  c.arrived |= bit;
  if (CollectiveIsComplete(warp, c)) {
    CompleteCollective(s, warp, slot);
    return;
  }
  self->waits_for = name;
  self->wait_detail = mask;
  self->location = location;
  Suspend(s);
}

void WarpgroupCollective(const char* name, int detail, void* deposit,
                         void (*compute)(void* const* deposits, int detail), Location location) {
  Scheduler& s = TheScheduler();
  Thread* self = current;
  if (!self->remote_stores.empty()) ShareRemoteStores();
  Block& block = *self->block;
  const int group = self->linear / kWarpgroupSize;
  WarpgroupState& g = block.warpgroups[group];
  if ((group + 1) * kWarpgroupSize > s.block_threads) {
    Fail(location, "%s: the warpgroup of the calling thread is not whole", name);
  }
  if (g.arrived > 0 && (g.name != name || g.detail != detail)) {
    Fail(location, "threads of one warpgroup disagree: one calls %s (%d), others wait in %s (%d)",
         name, detail, g.name, g.detail);
  }
  g.name = name;
  g.detail = detail;
  g.deposits[self->linear % kWarpgroupSize] = deposit;
  if (++g.arrived < kWarpgroupSize) {
    self->waits_for = name;
    self->wait_detail = detail;
    self->location = location;
    Suspend(s);
    return;
  }
  g.arrived = 0;
  s.idle_yields = 0;
  compute(g.deposits, detail);
  const bool reverse = s.order.kind == Order::kReverse;
  for (int i = 0; i < kWarpgroupSize; ++i) {
    const int offset = reverse ? kWarpgroupSize - 1 - i : i;
    Thread* t = block.threads[group * kWarpgroupSize + offset].get();
    if (t != self) MakeReady(s, t);
  }
}

namespace {

Barrier& ArriveAt(Scheduler& s, int id, int threads, int value, Location location) {
  if (id < 0 || id >= kNumBarriers) Fail(location, "barrier %d: there are 0 to 15", id);
  if (threads % kWarpSize != 0 || threads > s.block_threads + kWarpSize - 1) {
    Fail(location, "barrier %d: %d threads is no multiple of 32 or more than the block has", id,
         threads);
  }
  if (!current->remote_stores.empty()) ShareRemoteStores();
  Barrier& b = current->block->barriers[id];
  if (b.arrived > 0 && b.expected != threads) {
    Fail(location, "barrier %d: one thread expects %d threads, another %d (0: all)", id, threads,
         b.expected);
  }
  b.expected = threads;
  ++b.arrived;
  b.sum += value;
  return b;
}

}  // namespace

int BarrierSync(int id, int threads, int value, int* participants, Location location) {
  Scheduler& s = TheScheduler();
  Thread* self = current;
  Barrier& b = ArriveAt(s, id, threads, value, location);
  b.waiting.push_back(self);
  if (b.arrived >= Needed(*current->block, b)) {
    CompleteBarrier(s, b);
  } else {
    self->waits_for = "a barrier";
    self->wait_detail = id;
    self->location = location;
    Suspend(s);
  }
  if (participants != nullptr) *participants = static_cast<int>(self->wait_detail);
  return self->barrier_count;
}

void BarrierArrive(int id, int threads, Location location) {
  Scheduler& s = TheScheduler();
  Barrier& b = ArriveAt(s, id, threads, 0, location);
  if (b.arrived >= Needed(*current->block, b)) CompleteBarrier(s, b);
}

void YieldThread() {
  Scheduler& s = TheScheduler();
  if (++s.idle_yields > kMaxIdleYields) Deadlock(s);
  current->waits_for = "polling";
  if (s.order.kind == Order::kEager) {
    // The thread made ready last runs first, so a thread that polls goes behind all others.
    s.ready_head = (s.ready_head - 1) & s.ready_mask;
    s.ready[s.ready_head] = current;
    ++s.ready_count;
  } else {
    MakeReady(s, current);
  }
  Suspend(s);
}

void WaitFor(const void* key, const char* what, Location location) {
  Scheduler& s = TheScheduler();
  s.waiting_on_key.emplace_back(key, current);
  current->waits_for = what;
  current->wait_detail = static_cast<const char*>(key) - static_cast<const char*>(SharedBase());
  current->location = location;
  Suspend(s);
}

void WakeAll(const void* key) {
  Scheduler& s = TheScheduler();
  s.idle_yields = 0;
  std::vector<Thread*> woken;
  size_t kept = 0;
  for (const auto& [k, t] : s.waiting_on_key) {
    if (k == key) {
      woken.push_back(t);
    } else {
      s.waiting_on_key[kept++] = {k, t};
    }
  }
  s.waiting_on_key.resize(kept);
  if (s.order.kind == Order::kReverse) std::reverse(woken.begin(), woken.end());
  for (Thread* t : woken) MakeReady(s, t);
}

void OnClusterEnd(void (*callback)()) { TheScheduler().cluster_end_callbacks.push_back(callback); }

void Fail(Location location, const char* format, ...) {
  std::fprintf(stderr, "CUDA emulator: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (current != nullptr) {
    std::fprintf(stderr, " [block (%u,%u,%u), ", blockIdx.x, blockIdx.y, blockIdx.z);
    PrintThread(*current);
    std::fprintf(stderr, "]");
  }
  std::fprintf(stderr, " at %s:%u\n", location.file_name(), location.line());
  std::fflush(stderr);
  std::abort();
}

}  // namespace moeserve::emulator
