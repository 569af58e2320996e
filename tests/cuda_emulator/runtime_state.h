// What streams, events and graphs of the emulated runtime consist of; shared by runtime_*.cc.
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

// The point of a stream after its first `count` operations.
struct Point {
  StreamState* stream = nullptr;
  uint64_t count = 0;
};

struct GraphState {
  std::vector<Work> work;  // in an order that every recorded dependency allows
};

struct GraphExecState {
  std::shared_ptr<const std::vector<Work>> work;
};

struct StreamState {
  struct Operation {
    std::vector<Point> after;
    Work work;
  };
  bool blocking = true;  // ordered with the default stream
  std::deque<Operation> queue;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  bool running = false;
  // Capture: streams that wait for an event of a capturing stream join its graph.
  GraphState* capture = nullptr;
  bool capture_origin = false;
  bool capture_is_strict = false;  // unsafe calls are refused while it lasts
  bool capture_valid = true;
  bool capture_joined_back = false;  // a later wait of the origin covers this stream's work
};

struct EventState {
  bool recorded = false;
  Point point;
  GraphState* capture = nullptr;  // recorded in a capture
  StreamState* capture_stream = nullptr;
  std::chrono::steady_clock::time_point time;
};

struct Runtime {
  std::recursive_mutex mutex;
  StreamState default_stream;
  std::set<StreamState*> streams;  // without the default one
  std::set<EventState*> events;
  std::map<const char*, size_t> device_memory;  // begin -> bytes
  std::map<const char*, size_t> pinned_memory;
  size_t device_bytes = 0;
  std::unordered_map<const void*, int> max_dynamic_shared;
  int strict_captures = 0;  // captures under way that forbid unsafe calls
};
Runtime& TheRuntime();

// Remembers the error for cudaGetLastError and returns it.
cudaError_t Report(cudaError_t error);

// Null for a handle that is no stream. A null handle is the default stream.
StreamState* FindStream(Runtime& r, cudaStream_t stream);
// Records while the stream captures, else queues.
cudaError_t Enqueue(Runtime& r, StreamState* stream, Work work);
// Runs what the stream holds up to its first `count` operations, and what they wait for.
void RunUntil(Runtime& r, StreamState* stream, uint64_t count);
void RunAll(Runtime& r);
// An error for calls that no capture may contain, with captures they break marked so.
cudaError_t ForbiddenInCapture(Runtime& r, cudaError_t error);

}  // namespace moeserve::emulator::names
