// Runs the threads of a launch as fibers on the calling host thread, one block or cluster after the
// other. The threads of a cluster's blocks run together.
//
// A thread runs until it must wait for other threads: at a barrier, in a collective of a warp or
// warpgroup, or for an mbarrier. The process stops with a message that names block and thread if no
// thread can run, if the threads of a collective disagree, or if a collective is undefined on
// hardware. The order in which threads and blocks run can be permuted to find code that depends on
// it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <source_location>
#include <vector>

#include "tests/cuda_emulator/fiber.h"
#include "tests/cuda_emulator/types.h"

namespace moeserve::emulator {

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupSize = 128;
inline constexpr int kMaxThreads = 1024;  // per block
inline constexpr int kNumBarriers = 16;
inline constexpr int kMaxClusterBlocks = 16;

using Location = std::source_location;

// The order in which runnable threads and blocks run. The environment variable
// MOESERVE_EMULATOR_ORDER (forward, reverse, eager, or a number that seeds a permutation) sets the
// default. With kEager, a warp runs ahead of the other warps until it must wait for them, which
// detects missing barriers.
struct Order {
  enum Kind : uint8_t { kForward, kReverse, kRandom, kEager } kind = kForward;
  uint64_t seed = 0;
};
void SetOrder(Order order);
Order GetOrder();

namespace names {
// The running thread's built-in variables.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = kWarpSize;
}  // namespace names

struct Block;
struct Warp;

// A store to the shared memory of another block of the cluster (cluster.h).
struct RemoteStore {
  Block* target = nullptr;
  void* to = nullptr;
  uint32_t bytes = 0;
  unsigned char value[16] = {};
  bool done = false;
  Location location;
};
using RemoteStorePointer = std::shared_ptr<RemoteStore>;

// One thread's part of a wgmma, which is computed together with the parts of the warpgroup's other
// threads.
struct MatrixWork {
  float* d = nullptr;           // n / 2 accumulators, or null and
  int32_t* integers = nullptr;  // n / 2 accumulators of a product of integers
  int n = 0;
  bool a_in_registers = false;
  bool b_transposed = false;
  bool accumulate = false;
  uint32_t a_registers[4] = {};
  const uint32_t* a_source = nullptr;  // the registers, which must not change before the wait
  uint64_t a_descriptor = 0;
  uint64_t b_descriptor = 0;
  Location location;
};

// A thread of a running block.
struct Thread {
  FiberContext fiber;
  uint3 index{};
  int linear = 0;
  int lane = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  bool exited = false;
  bool waited_for_grids = false;  // whether it has called GridDependencyWait()
  // These members are valid while the thread waits: what the thread waits for, a number that
  // identifies it (such as the barrier's id), the source location, and the value that the thread
  // passes to a collective.
  const char* waits_for = nullptr;
  int64_t wait_detail = 0;
  Location location;
  void* deposit = nullptr;
  int barrier_count = 0;  // sum of the values that a barrier's threads passed
  // Asynchronous copies that this thread has issued: those not yet committed in open_copies, and
  // the committed groups in copy_groups, oldest first.
  struct Copy {
    std::function<void()> work;  // null once the copy is done
    uint64_t number = 0;
  };
  uint64_t copies = 0;  // number of issued copies
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<MatrixWork> open_matrix_work;
  std::deque<std::vector<MatrixWork>> matrix_groups;
  // Calls of ClusterArrive() and ClusterWait(), and stores to other blocks of the cluster that the
  // thread has not handed on.
  uint32_t cluster_arrivals = 0;
  uint32_t cluster_waits = 0;
  std::vector<RemoteStorePointer> remote_stores;
};

struct Warp {
  // A collective that some lanes in `mask` have reached.
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
  dim3 cluster;  // blocks per cluster, which divide the grid
  size_t shared_bytes = 0;
  void (*run)(void* arguments) = nullptr;  // executes one thread
  void* arguments = nullptr;
  // Whether the kernel may start before the preceding kernel has ended. If true, every thread must
  // call GridDependencyWait().
  bool overlaps = false;
};
// Runs a launch. The caller must ensure that the process runs only one launch at a time.
void RunLaunch(const Launch& launch);

// Returns the running block's dynamic shared memory, aligned to 1024 bytes. It is filled with 0xff
// when the block starts.
void* SharedBase();
size_t SharedBytes();

// A collective of a warp. All running lanes in `mask` must call this function with the same name
// and detail. The last lane to arrive calls `compute` with the value that each lane deposited (null
// for lanes that do not take part); then all lanes continue.
void WarpCollective(uint32_t mask, const char* name, int detail, void* deposit,
                    void (*compute)(void* const* deposits, uint32_t arrived, int detail),
                    Location location);
// A collective of the 128 threads of the calling thread's warpgroup, all of which must still be
// running. Works like WarpCollective().
void WarpgroupCollective(const char* name, int detail, void* deposit,
                         void (*compute)(void* const* deposits, int detail), Location location);

// Waits at barrier `id` for `threads` threads (0: all threads that have not exited). Returns the
// sum of their values.
int BarrierSync(int id, int threads, int value, int* participants, Location location);
// Arrives at the barrier without waiting.
void BarrierArrive(int id, int threads, Location location);

// Emulates griddepcontrol.wait. Kernels do not overlap here; the emulator only checks that all
// threads call this function.
void GridDependencyWait();

// Lets other threads run; the calling thread stays runnable. If all threads only yield, the process
// stops.
void YieldThread();
// Waits until another thread calls WakeAll(key).
void WaitFor(const void* key, const char* what, Location location);
void WakeAll(const void* key);

// Registers a function that is called after all threads of a block or cluster have ended. It checks
// and clears the state of the blocks.
void OnClusterEnd(void (*callback)());

// Stops the process with a message that names the running block and thread.
[[noreturn]] void Fail(Location location, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

}  // namespace moeserve::emulator
