// Implements the streams, events and graphs of the emulated CUDA runtime.

#include <algorithm>
#include <thread>

#include "base/check.h"
#include "tests/cuda_emulator/runtime_state.h"
#include "tests/cuda_emulator/stream_operation.h"

namespace moeserve::emulator::names {

StreamState* FindStream(Runtime& r, cudaStream_t stream) {
  if (stream == nullptr) return &r.default_stream;
  return r.streams.contains(stream) ? stream : nullptr;
}

cudaError_t Enqueue(Runtime& r, StreamState* stream, Work work) {
  if (stream->capture != nullptr) {
    if (!stream->capture_valid) return cudaErrorStreamCaptureInvalidated;
    stream->capture_joined_back = false;
    stream->capture->work.push_back(std::move(work));
    return cudaSuccess;
  }
  StreamState::Operation operation;
  operation.work = std::move(work);
  if (stream == &r.default_stream) {
    // The default stream waits for all blocking streams, so none of them may be capturing.
    for (StreamState* other : r.streams) {
      if (!other->blocking) continue;
      if (other->capture != nullptr) {
        other->capture_valid = false;
        return cudaErrorStreamCaptureImplicit;
      }
      operation.after.push_back({other, other->enqueued});
    }
  } else if (stream->blocking) {
    operation.after.push_back({&r.default_stream, r.default_stream.enqueued});
  }
  stream->queue.push_back(std::move(operation));
  ++stream->enqueued;
  return cudaSuccess;
}

void RunUntil(Runtime& r, StreamState* stream, uint64_t count) {
  MOESERVE_CHECK(!stream->running || stream->done >= count,
                 "a host function of a stream waits for that stream");
  while (stream->done < count) {
    const uint64_t done = stream->done;
    // Other threads may run the stream, too, whenever the runtime is unlocked.
    const std::vector<Point> after = stream->queue.front().after;
    for (const Point& point : after) {
      // A stream that has been destroyed has run all its operations.
      if (FindStream(r, point.stream == &r.default_stream ? nullptr : point.stream) ==
          point.stream) {
        RunUntil(r, point.stream, point.count);
      }
    }
    if (stream->done != done) continue;
    if (!stream->queue.front().IsReady()) {
      r.mutex.unlock();
      std::this_thread::yield();
      r.mutex.lock();
      continue;
    }
    StreamState::Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    operation.work();
    stream->running = false;
    ++stream->done;
  }
}

void RunAll(Runtime& r) {
  RunUntil(r, &r.default_stream, r.default_stream.enqueued);
  for (StreamState* stream : r.streams) RunUntil(r, stream, stream->enqueued);
}

cudaError_t ForbiddenInCapture(Runtime& r, cudaError_t error) {
  if (r.strict_captures == 0) return cudaSuccess;
  for (StreamState* stream : r.streams) {
    if (stream->capture != nullptr) stream->capture_valid = false;
  }
  return error;
}

cudaError_t cudaDeviceSynchronize() {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (const cudaError_t error = ForbiddenInCapture(r, cudaErrorStreamCaptureUnsupported);
      error != cudaSuccess) {
    return Report(error);
  }
  RunAll(r);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  *stream = new StreamState;
  (*stream)->blocking = (flags & cudaStreamNonBlocking) == 0;
  r.streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (stream == nullptr || FindStream(r, stream) == nullptr) {
    return Report(cudaErrorInvalidResourceHandle);
  }
  RunUntil(r, stream, stream->enqueued);
  if (stream->capture_origin) {
    if (stream->capture_is_strict) --r.strict_captures;
    delete stream->capture;
  }
  r.streams.erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  if (s->capture != nullptr) {
    s->capture_valid = false;
    return Report(cudaErrorStreamCaptureUnsupported);
  }
  if (s == &r.default_stream) {
    for (StreamState* other : r.streams) {
      if (other->blocking && other->capture == nullptr) RunUntil(r, other, other->enqueued);
    }
  }
  RunUntil(r, s, s->enqueued);
  return cudaSuccess;
}

// Each query runs one operation of the stream, so that polling loops end.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  if (s->capture != nullptr) {
    s->capture_valid = false;
    return Report(cudaErrorStreamCaptureUnsupported);
  }
  if (s->done >= s->enqueued) return cudaSuccess;
  if (s->queue.front().IsReady()) RunUntil(r, s, s->done + 1);
  return cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  return Report(Enqueue(r, s, [=] { function(argument); }));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  *event = new EventState;
  r.events.insert(*event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (r.events.erase(event) == 0) return Report(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr || !r.events.contains(event)) return Report(cudaErrorInvalidResourceHandle);
  event->recorded = true;
  event->capture = s->capture;
  event->capture_stream = s;
  if (s->capture != nullptr) return cudaSuccess;
  // The event may have been destroyed when the stream reaches this operation.
  const cudaError_t error = Enqueue(r, s, [event] {
    if (TheRuntime().events.contains(event)) event->time = std::chrono::steady_clock::now();
  });
  event->point = {s, s->enqueued};
  return Report(error);
}

namespace {

bool PointIsReached(Runtime& r, const Point& point) {
  const bool alive = point.stream == &r.default_stream || r.streams.contains(point.stream);
  return !alive || point.stream->done >= point.count;
}

}  // namespace

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (!r.events.contains(event)) return Report(cudaErrorInvalidResourceHandle);
  if (!event->recorded) return cudaSuccess;
  if (event->capture != nullptr) return Report(cudaErrorCapturedEvent);
  if (!PointIsReached(r, event->point)) RunUntil(r, event->point.stream, event->point.count);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (!r.events.contains(event)) return Report(cudaErrorInvalidResourceHandle);
  if (!event->recorded) return cudaSuccess;
  if (event->capture != nullptr) return Report(cudaErrorCapturedEvent);
  if (PointIsReached(r, event->point)) return cudaSuccess;
  RunUntil(r, event->point.stream, event->point.stream->done + 1);
  return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  if (!r.events.contains(begin) || !r.events.contains(end) || !begin->recorded || !end->recorded ||
      begin->capture != nullptr || end->capture != nullptr) {
    return Report(cudaErrorInvalidResourceHandle);
  }
  if (!PointIsReached(r, begin->point) || !PointIsReached(r, end->point)) {
    return cudaErrorNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr || !r.events.contains(event)) return Report(cudaErrorInvalidResourceHandle);
  if (!event->recorded) return cudaSuccess;
  if (event->capture != nullptr) {
    if (s->capture == nullptr) {
      if (s == &r.default_stream) return Report(cudaErrorStreamCaptureImplicit);
      s->capture = event->capture;  // joins the capture
      s->capture_origin = false;
      s->capture_valid = true;
      s->capture_joined_back = false;
      return cudaSuccess;
    }
    if (s->capture != event->capture) return Report(cudaErrorStreamCaptureMerge);
    if (r.streams.contains(event->capture_stream)) {
      event->capture_stream->capture_joined_back = true;
    }
    return cudaSuccess;
  }
  if (s->capture != nullptr) {
    // Work from before the capture cannot be part of it.
    s->capture_valid = false;
    return Report(cudaErrorStreamCaptureIsolation);
  }
  const Point point = event->point;
  const cudaError_t error = Enqueue(r, s, [] {});
  if (error == cudaSuccess) s->queue.back().after.push_back(point);
  return Report(error);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  if (s == &r.default_stream) return Report(cudaErrorStreamCaptureUnsupported);
  if (s->capture != nullptr) return Report(cudaErrorInvalidValue);
  s->capture = new GraphState;
  s->capture_origin = true;
  s->capture_valid = true;
  // Real CUDA's other modes allow some unsafe calls. Here, all modes except the relaxed one refuse
  // them.
  s->capture_is_strict = mode != cudaStreamCaptureModeRelaxed;
  if (s->capture_is_strict) ++r.strict_captures;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  *graph = nullptr;
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  if (s->capture == nullptr) return Report(cudaErrorInvalidValue);
  if (!s->capture_origin) return Report(cudaErrorStreamCaptureUnmatched);
  GraphState* captured = s->capture;
  bool valid = true, joined = true;
  for (StreamState* other : r.streams) {
    if (other->capture != captured) continue;
    valid = valid && other->capture_valid;
    joined = joined && (other == s || other->capture_joined_back);
    other->capture = nullptr;
    other->capture_origin = false;
  }
  for (EventState* event : r.events) {
    if (event->capture == captured) *event = EventState{};
  }
  if (s->capture_is_strict) --r.strict_captures;
  if (!valid || !joined) {
    delete captured;
    return Report(valid ? cudaErrorStreamCaptureUnjoined : cudaErrorStreamCaptureInvalidated);
  }
  *graph = captured;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr) return Report(cudaErrorInvalidResourceHandle);
  *status = s->capture == nullptr ? cudaStreamCaptureStatusNone
            : s->capture_valid    ? cudaStreamCaptureStatusActive
                                  : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (graph == nullptr) return Report(cudaErrorInvalidValue);
  *exec = new GraphExecState{std::make_shared<const std::vector<Work>>(graph->work)};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  Runtime& r = TheRuntime();
  std::lock_guard lock(r.mutex);
  StreamState* s = FindStream(r, stream);
  if (s == nullptr || exec == nullptr) return Report(cudaErrorInvalidResourceHandle);
  // Copy the work, because the executable graph may be destroyed while the launch is queued.
  return Report(Enqueue(r, s, [work = exec->work] {
    for (const Work& w : *work) w();
  }));
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void* nodes, size_t* count) {
  if (graph == nullptr || nodes != nullptr) return Report(cudaErrorInvalidValue);
  *count = graph->work.size();
  return cudaSuccess;
}

}  // namespace moeserve::emulator::names

namespace moeserve::emulator {

bool EnqueueWhenReady(void* stream, std::function<bool()> ready, std::function<void()> work) {
  names::Runtime& r = names::TheRuntime();
  std::lock_guard lock(r.mutex);
  names::StreamState* const s = names::FindStream(r, static_cast<names::StreamState*>(stream));
  if (s == nullptr || s->capture != nullptr) return false;
  if (names::Enqueue(r, s, std::move(work)) != names::cudaSuccess) return false;
  s->queue.back().ready = std::move(ready);
  return true;
}

}  // namespace moeserve::emulator
