#include "tests/cuda_emulator/scheduler.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "base/check.h"

namespace moeserve::emulator {

namespace names {
uint3 threadIdx{};
uint3 blockIdx{};
dim3 blockDim;
dim3 gridDim;
}  // namespace names
Thread* current = nullptr;

namespace {

struct Barrier {
  int expected = 0;  // 0: all threads that have not exited
  int arrived = 0;
  int sum = 0;
  std::vector<Thread*> waiting;
};

struct WarpgroupState {
  const char* name = nullptr;
  int detail = 0;
  int arrived = 0;
  void (*compute)(void* const*, int) = nullptr;
  void* deposits[kWarpgroupSize] = {};
};

struct Scheduler {
  std::vector<std::unique_ptr<Thread>> threads;  // reused by all blocks
  Warp warps[kMaxThreads / kWarpSize];
  WarpgroupState warpgroups[kMaxThreads / kWarpgroupSize];
  Barrier barriers[kNumBarriers];
  std::vector<std::pair<const void*, Thread*>> waiting_on_key;
  const Launch* launch = nullptr;
  FiberContext* host = nullptr;
  int block_threads = 0;
  int live = 0;
  void* shared = nullptr;
  // Ring buffer of runnable threads.
  Thread* ready[kMaxThreads] = {};
  uint32_t ready_head = 0;
  uint32_t ready_count = 0;
  Order order;
  uint64_t random = 1;
  uint64_t idle_yields = 0;  // polls since a thread last made progress
  std::vector<void (*)()> block_end_callbacks;
};

Scheduler& S() {
  static Scheduler* const scheduler = new Scheduler;
  return *scheduler;
}

std::optional<Order> g_order;

uint64_t NextRandom(Scheduler& s) {
  s.random ^= s.random << 13;
  s.random ^= s.random >> 7;
  s.random ^= s.random << 17;
  return s.random;
}

void MakeReady(Scheduler& s, Thread* t) {
  s.ready[(s.ready_head + s.ready_count) % kMaxThreads] = t;
  ++s.ready_count;
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
  const Thread* last = nullptr;
  for (int i = 0; i < s.block_threads; ++i) {
    const Thread& t = *s.threads[i];
    if (t.exited) continue;
    // Prints only the first of consecutive threads that wait for the same thing at the same source
    // line.
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
    if (++printed == 40) break;
  }
  std::fflush(stderr);
  std::abort();
}

Thread* TakeReady(Scheduler& s) {
  if (s.ready_count == 0) Deadlock(s);
  if (s.order.kind == Order::kRandom && s.ready_count > 1) {
    std::swap(s.ready[s.ready_head],
              s.ready[(s.ready_head + NextRandom(s) % s.ready_count) % kMaxThreads]);
  }
  --s.ready_count;
  if (s.order.kind == Order::kEager) return s.ready[(s.ready_head + s.ready_count) % kMaxThreads];
  Thread* t = s.ready[s.ready_head];
  s.ready_head = (s.ready_head + 1) % kMaxThreads;
  return t;
}

// Switches from the running thread to the next runnable thread. The suspended thread continues
// after another thread has passed it to MakeReady().
void Suspend(Scheduler& s) {
  Thread* self = current;
  Thread* next = TakeReady(s);
  if (next == self) return;
  current = next;
  threadIdx = next->index;
  SwitchFiber(&self->fiber, &next->fiber);
}

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

int Needed(const Scheduler& s, const Barrier& b) { return b.expected == 0 ? s.live : b.expected; }

void ExitThread() {
  Scheduler& s = S();
  Thread* self = current;
  self->exited = true;
  --s.live;
  s.idle_yields = 0;
  Warp& warp = *self->warp;
  warp.live &= ~(1u << self->lane);
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
  for (Barrier& b : s.barriers) {
    if (b.expected == 0 && b.arrived > 0 && b.arrived >= s.live) CompleteBarrier(s, b);
  }
  Suspend(s);
}

// The main function of a fiber. A fiber runs one thread of each block, one block after the other.
void ThreadMain() {
  FiberStarted();
  for (;;) {
    const Launch* launch = S().launch;
    launch->run(launch->arguments);
    ExitThread();
  }
}

void RunBlock(Scheduler& s, const Launch& launch, uint64_t block) {
  blockIdx.x = static_cast<unsigned>(block % launch.grid.x);
  blockIdx.y = static_cast<unsigned>(block / launch.grid.x % launch.grid.y);
  blockIdx.z = static_cast<unsigned>(block / launch.grid.x / launch.grid.y);
  if (launch.shared_bytes > 0) std::memset(s.shared, 0xff, launch.shared_bytes);
  s.live = s.block_threads;
  s.ready_head = s.ready_count = 0;
  s.idle_yields = 0;
  for (int w = 0; w * kWarpSize < s.block_threads; ++w) {
    const int lanes = std::min(kWarpSize, s.block_threads - w * kWarpSize);
    s.warps[w].live = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
    s.warps[w].collectives.clear();
  }
  for (int i = 0; i < s.block_threads; ++i) {
    Thread* t = s.threads[s.order.kind == Order::kReverse ? s.block_threads - 1 - i : i].get();
    t->exited = false;
    t->waited_for_grids = false;
    t->waits_for = nullptr;
    t->copies = 0;
    t->open_copies.clear();
    t->copy_groups.clear();
    t->open_matrix_work.clear();
    t->matrix_groups.clear();
    MakeReady(s, t);
  }
  FiberContext host;
  s.host = &host;
  current = TakeReady(s);
  threadIdx = current->index;
  SwitchFiber(&host, &current->fiber);
  for (int i = 0; launch.overlaps && i < s.block_threads; ++i) {
    current = s.threads[i].get();
    if (!current->waited_for_grids) {
      Fail(Location::current(),
           "a thread of a kernel that may start before the one before it has "
           "ended did not call GridDependencyWait()");
    }
  }
  for (const Barrier& b : s.barriers) {
    if (b.arrived > 0)
      Fail(Location::current(),
           "a block ended with an arrival at a named barrier "
           "that nobody waited for");
  }
  for (void (*callback)() : s.block_end_callbacks) callback();
  current = nullptr;
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
  Scheduler& s = S();
  MOESERVE_CHECK(current == nullptr, "a kernel cannot launch another in the emulator");
  s.launch = &launch;
  s.order = GetOrder();
  s.random = s.order.seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
  for (int i = 0; i < 4; ++i) NextRandom(s);
  s.block_threads = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  gridDim = launch.grid;
  blockDim = launch.block;
  while (s.threads.size() < static_cast<size_t>(s.block_threads)) {
    auto t = std::make_unique<Thread>();
    t->linear = static_cast<int>(s.threads.size());
    t->lane = t->linear % kWarpSize;
    t->warp = &s.warps[t->linear / kWarpSize];
    t->warp->threads[t->lane] = t.get();
    CreateFiber(&t->fiber, s.threads.size(), ThreadMain);
    s.threads.push_back(std::move(t));
  }
  for (int i = 0; i < s.block_threads; ++i) {
    const unsigned n = static_cast<unsigned>(i);
    s.threads[i]->index = {n % launch.block.x, n / launch.block.x % launch.block.y,
                           n / launch.block.x / launch.block.y};
  }
  s.shared = nullptr;
  if (launch.shared_bytes > 0) {
    MOESERVE_CHECK(posix_memalign(&s.shared, 1024, launch.shared_bytes) == 0, "shared memory");
  }
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (s.order.kind == Order::kRandom) {
    std::vector<uint64_t> sequence(blocks);
    for (uint64_t i = 0; i < blocks; ++i) {
      sequence[i] = i;
      std::swap(sequence[i], sequence[NextRandom(s) % (i + 1)]);
    }
    for (const uint64_t block : sequence) RunBlock(s, launch, block);
  } else {
    for (uint64_t i = 0; i < blocks; ++i) {
      RunBlock(s, launch, s.order.kind == Order::kReverse ? blocks - 1 - i : i);
    }
  }
  std::free(s.shared);
  s.shared = nullptr;
  s.launch = nullptr;
}

void GridDependencyWait() { current->waited_for_grids = true; }

void* SharedBase() { return S().shared; }
size_t SharedBytes() { return S().launch->shared_bytes; }

void WarpCollective(uint32_t mask, const char* name, int detail, void* deposit,
                    void (*compute)(void* const* deposits, uint32_t arrived, int detail),
                    Location location) {
  Scheduler& s = S();
  Thread* self = current;
  Warp& warp = *self->warp;
  const uint32_t bit = 1u << self->lane;
  if ((mask & bit) == 0) {
    Fail(location, "%s: the calling lane %d is not in the mask 0x%x", name, self->lane, mask);
  }
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
  Scheduler& s = S();
  Thread* self = current;
  const int group = self->linear / kWarpgroupSize;
  WarpgroupState& g = s.warpgroups[group];
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
    Thread* t = s.threads[group * kWarpgroupSize + offset].get();
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
  Barrier& b = s.barriers[id];
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
  Scheduler& s = S();
  Thread* self = current;
  Barrier& b = ArriveAt(s, id, threads, value, location);
  b.waiting.push_back(self);
  if (b.arrived >= Needed(s, b)) {
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
  Scheduler& s = S();
  Barrier& b = ArriveAt(s, id, threads, 0, location);
  if (b.arrived >= Needed(s, b)) CompleteBarrier(s, b);
}

void YieldThread() {
  Scheduler& s = S();
  if (++s.idle_yields > kMaxIdleYields) Deadlock(s);
  current->waits_for = "polling";
  MakeReady(s, current);
  Suspend(s);
}

void WaitFor(const void* key, const char* what, Location location) {
  Scheduler& s = S();
  s.waiting_on_key.emplace_back(key, current);
  current->waits_for = what;
  current->wait_detail = static_cast<const char*>(key) - static_cast<const char*>(SharedBase());
  current->location = location;
  Suspend(s);
}

void WakeAll(const void* key) {
  Scheduler& s = S();
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

void OnBlockEnd(void (*callback)()) { S().block_end_callbacks.push_back(callback); }

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
