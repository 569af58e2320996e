// The state of the blocks that run: one block, or the blocks of a cluster. Only the emulator's own
// sources include this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tests/cuda_emulator/scheduler.h"

namespace moeserve::emulator {

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

struct Block {
  std::vector<std::unique_ptr<Thread>> threads;  // reused by all blocks with this rank
  Warp warps[kMaxThreads / kWarpSize];
  WarpgroupState warpgroups[kMaxThreads / kWarpgroupSize];
  Barrier barriers[kNumBarriers];
  uint3 index{};
  uint32_t rank = 0;  // in the cluster
  int live = 0;       // threads that have not exited
  void* shared = nullptr;
  // Stores to the memory of other blocks that threads of this block have handed on to each other.
  std::vector<RemoteStorePointer> remote_stores;
  size_t stores_in_barrier = 0;  // the first ones of them, which the cluster's barrier has released
  // For each block of the cluster, the phase of the cluster's barrier that must have ended before
  // this block may exit, because the other block has accessed this block's memory; 0 if none.
  struct Access {
    uint32_t until = 0;
    Location location;
  };
  Access accesses[kMaxClusterBlocks];
  uint32_t phases_waited = 0;  // for the cluster's barrier
  int outgoing_copies = 0;     // copies from this block's memory that are not done
};

struct ClusterBarrier {
  uint32_t phase = 0;  // number of phases that have ended
  int arrived = 0;
  int missing = 0;  // threads that have neither arrived nor exited
  std::vector<Thread*> waiting;
  std::vector<RemoteStorePointer> released;
};

struct Scheduler {
  std::vector<std::unique_ptr<Block>> blocks;  // those of the running cluster come first
  uint32_t cluster_blocks = 1;
  ClusterBarrier cluster;
  std::vector<std::pair<const void*, Thread*>> waiting_on_key;
  const Launch* launch = nullptr;
  FiberContext* host = nullptr;
  int block_threads = 0;
  int live = 0;  // in all blocks of the cluster
  // Ring buffer of runnable threads. Its size is a power of two.
  std::vector<Thread*> ready;
  uint32_t ready_mask = 0;
  uint32_t ready_head = 0;
  uint32_t ready_count = 0;
  Order order;
  uint64_t random = 1;
  uint64_t idle_yields = 0;  // polls since a thread last made progress
  std::vector<void (*)()> cluster_end_callbacks;
};
Scheduler& TheScheduler();

// Makes a suspended thread runnable.
void MakeReady(Scheduler& s, Thread* t);
// Switches from the running thread to the next runnable thread. The suspended thread continues
// after another thread has passed it to MakeReady().
void Suspend(Scheduler& s);

// Called by the scheduler.
void StartClusterState(Scheduler& s);
// Counts an exited thread as one for which the cluster's barrier need not wait.
void ClusterThreadExits(Scheduler& s, const Thread& t);
// Checks that no other block may still access the memory of a block whose last thread exits.
void ClusterBlockExits(Scheduler& s, Block& block);
// Checks that every store to the memory of another block was made visible.
void CheckRemoteStores(Scheduler& s);

}  // namespace moeserve::emulator
