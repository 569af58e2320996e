// Runs the threads of a launch as fibers on the calling host thread, block after block.
//
// A thread runs until it waits for others: at a barrier, in a warp's or warpgroup's collective, or
// for an mbarrier. Where nobody can run, where threads of one collective disagree and where a
// collective has no meaning on hardware, the process stops with a message that names block and
// thread. The order in which runnable threads and blocks run can be permuted to find code that
// depends on it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <source_location>
#include <vector>

#include "tests/cuda_emulator/fiber.h"
#include "tests/cuda_emulator/types.h"

namespace moeserve::emulator {

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupSize = 128;
inline constexpr int kMaxThreads = 1024;  // of a block
inline constexpr int kNumBarriers = 16;

using Location = std::source_location;

// The order of runnable threads and of blocks; the environment's MOESERVE_EMULATOR_ORDER
// (forward, reverse, eager or a number that seeds a permutation) is the default. Eagerly, a warp
// runs ahead of the others until it waits for them, which shows barriers that are missing.
struct Order {
  enum Kind : uint8_t { kForward, kReverse, kRandom, kEager } kind = kForward;
  uint64_t seed = 0;
};
void SetOrder(Order order);
Order GetOrder();

namespace names {
// What the running thread reads.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = kWarpSize;
}  // namespace names

struct Warp;

// A wgmma of one thread, to be done with those of the other threads of the warpgroup.
struct MatrixWork {
  float* d = nullptr;  // n / 2 accumulators
  int n = 0;
  bool a_in_registers = false;
  bool accumulate = false;
  uint32_t a_registers[4] = {};
  uint64_t a_descriptor = 0;
  uint64_t b_descriptor = 0;
  Location location;
};

// A thread of the running block.
struct Thread {
  FiberContext fiber;
  uint3 index{};
  int linear = 0;
  int lane = 0;
  Warp* warp = nullptr;
  bool exited = false;
  bool waited_for_grids = false;  // GridDependencyWait()
  // While it waits: for what, where, and what it brings to a collective.
  const char* waits_for = nullptr;
  int64_t wait_detail = 0;
  Location location;
  void* deposit = nullptr;
  int barrier_count = 0;  // sum over a barrier's threads of what they brought
  // Asynchronous work that this thread has issued and that has not been done, oldest first; a group
  // is what one commit closes. Empty when a block starts.
  struct Copy {
    std::function<void()> work;  // null once done
    uint64_t number = 0;
  };
  uint64_t copies = 0;  // issued
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<MatrixWork> open_matrix_work;
  std::deque<std::vector<MatrixWork>> matrix_groups;
};

struct Warp {
  // A collective that some lanes of `mask` have reached.
  struct Collective {
    uint32_t mask = 0;
    uint32_t arrived = 0;
    const char* name = nullptr;
    int detail = 0;
    void (*compute)(void* const* deposits, uint32_t arrived, int detail) = nullptr;
  };
  Thread* threads[kWarpSize] = {};
  uint32_t live = 0;
  std::vector<Collective> collectives;
};

// The running thread.
extern Thread* current;

struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  void (*run)(void* arguments) = nullptr;  // one thread's share
  void* arguments = nullptr;
  bool overlaps = false;  // every thread has to call GridDependencyWait()
};
// One launch at a time in the process; the caller sees to it.
void RunLaunch(const Launch& launch);

// The running block's dynamic shared memory, 1024-byte aligned; poisoned with 0xff when the block
// starts.
void* SharedBase();
size_t SharedBytes();

// All of `mask` (of the lanes that still run) call this with the same name and detail; the last one
// calls `compute` with what each lane deposited (null for lanes that take no part), then all go on.
void WarpCollective(uint32_t mask, const char* name, int detail, void* deposit,
                    void (*compute)(void* const* deposits, uint32_t arrived, int detail),
                    Location location);
// The same for the 128 threads of the calling thread's warpgroup, all of which must be running.
void WarpgroupCollective(const char* name, int detail, void* deposit,
                         void (*compute)(void* const* deposits, int detail), Location location);

// Barrier `id` for `threads` threads (0: all that have not exited). Returns the sum of `value` over
// them.
int BarrierSync(int id, int threads, int value, int* participants, Location location);
// Counts as arrived and does not wait.
void BarrierArrive(int id, int threads, Location location);

// griddepcontrol.wait. Kernels do not overlap here; what is checked is that all threads call it.
void GridDependencyWait();

// Lets others run; the thread stays runnable. Where nothing but that happens, the process stops.
void YieldThread();
// Waits until WakeAll(key).
void WaitFor(const void* key, const char* what, Location location);
void WakeAll(const void* key);

// Called when a block ends with all its threads, to check and clear what others keep per block.
void OnBlockEnd(void (*callback)());

// Stops the process, naming the running block and thread.
[[noreturn]] void Fail(Location location, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

}  // namespace moeserve::emulator
