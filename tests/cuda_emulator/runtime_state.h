// The state of the emulated CUDA runtime: memory, streams, events and graphs. Only runtime_*.cc
// include this file.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "tests/cuda_emulator/runtime_api.h"

namespace moeserve::emulator::names {

using Work = std::function<void()>;

// The point in a stream after its first `count` operations.
struct Point {
  StreamState* stream = nullptr;
  uint64_t count = 0;
};

struct GraphState {
  std::vector<Work> work;  // in an order that satisfies every captured dependency
};

struct GraphExecState {
  std::shared_ptr<const std::vector<Work>> work;
};

struct StreamState {
  struct Operation {
    std::vector<Point> after;
    Work work;
    std::function<bool()> ready = {};  // null: always
    bool IsReady() const { return !ready || ready(); }
  };
  bool blocking = true;  // whether the stream synchronizes with the default stream
  std::deque<Operation> queue;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  bool running = false;
  // The graph that is being captured. A stream that waits for an event of a capturing stream joins
  // its capture.
  GraphState* capture = nullptr;
  bool capture_origin = false;
  bool capture_is_strict = false;  // unsafe calls are refused during the capture
  bool capture_valid = true;
  bool capture_joined_back = false;  // the capture's origin has waited for this stream's work
};

struct EventState {
  bool recorded = false;
  Point point;
  GraphState* capture = nullptr;  // the capture in which the event was recorded; null if none
  StreamState* capture_stream = nullptr;
  std::chrono::steady_clock::time_point time;
};

struct Runtime {
  std::recursive_mutex mutex;
  StreamState default_stream;
  std::set<StreamState*> streams;  // without the default stream
  std::set<EventState*> events;
  std::map<const char*, size_t> device_memory;  // begin -> bytes
  std::map<const char*, size_t> pinned_memory;
  size_t device_bytes = 0;
  std::unordered_map<const void*, int> max_dynamic_shared;
  std::set<const void*> large_clusters;  // functions that may run in clusters of more than 8 blocks
  int multiprocessors = 132;
  int capability = 9;
  int strict_captures = 0;  // number of running captures that forbid unsafe calls
};
Runtime& TheRuntime();

// Stores the error for cudaGetLastError() and returns it.
cudaError_t Report(cudaError_t error);

// Returns null if the handle is not a stream. A null handle means the default stream.
StreamState* FindStream(Runtime& r, cudaStream_t stream);
// Adds the work to the capture if the stream is capturing, else to the stream's queue.
cudaError_t Enqueue(Runtime& r, StreamState* stream, Work work);
// Runs the stream's first `count` operations, and the operations of other streams that they wait
// for. Unlocks the runtime while an operation is not ready.
void RunUntil(Runtime& r, StreamState* stream, uint64_t count);
void RunAll(Runtime& r);
// Calls that are forbidden during captures call this function first. During a strict capture, it
// marks all captures as invalid and returns `error`; otherwise it returns cudaSuccess.
cudaError_t ForbiddenInCapture(Runtime& r, cudaError_t error);

}  // namespace moeserve::emulator::names
