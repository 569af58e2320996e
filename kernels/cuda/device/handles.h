// Owners of CUDA runtime resources. All are movable, may be empty, and release what they own when
// destroyed. The status of a failed call contains the name of the call and the runtime's message.
//
// These classes do not lock: only one thread at a time may use an object.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Converts the result of `call` to a status with the runtime's message: OK, ResourceExhausted if
// memory ran out, otherwise Internal.
Status CudaStatus(cudaError_t error, std::string_view call);

#define MOESERVE_CUDA_RETURN_IF_ERROR(call) \
  MOESERVE_RETURN_IF_ERROR(::moeserve::cuda::CudaStatus((call), #call))

// Owns a handle, which kRelease() destroys.
template <typename T, cudaError_t (*kRelease)(T)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T value) : value_(value) {}
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      Reset();
      value_ = std::exchange(other.value_, nullptr);
    }
    return *this;
  }
  ~Handle() { Reset(); }

  T get() const { return value_; }
  explicit operator bool() const { return value_ != nullptr; }
  // An error of kRelease() is ignored: it was caused by earlier work and is reported when that work
  // is waited for.
  void Reset() {
    if (value_ != nullptr) static_cast<void>(kRelease(std::exchange(value_, nullptr)));
  }

 private:
  T value_ = nullptr;
};

// Uninitialised device memory, 256-byte aligned. Releasing it waits for the device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  static Result<DeviceMemory> Allocate(size_t bytes);

  void* data() const { return handle_.get(); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(handle_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  Handle<void*, cudaFree> handle_;
  size_t bytes_ = 0;
};

// Page-locked host memory. Copies to and from it are asynchronous.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  static Result<PinnedMemory> Allocate(size_t bytes);

  void* data() const { return handle_.get(); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(handle_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  Handle<void*, cudaFreeHost> handle_;
  size_t bytes_ = 0;
};

// A stream that does not synchronise with the default stream.
class Stream {
 public:
  Stream() = default;
  static Result<Stream> Create();

  cudaStream_t get() const { return handle_.get(); }
  // Waits for all enqueued work and returns errors of kernels that ran.
  Status Synchronize() const;

 private:
  Handle<cudaStream_t, cudaStreamDestroy> handle_;
};

class Event {
 public:
  Event() = default;
  // Without timing, recording an event and waiting for it cost less.
  static Result<Event> Create(bool timing);

  cudaEvent_t get() const { return handle_.get(); }
  Status Record(cudaStream_t stream) const;
  Status Synchronize() const;
  // Makes later work on `stream` wait for the work recorded by this event.
  Status MakeWait(cudaStream_t stream) const;
  // Returns the time from `begin` to this event. Both must have been created with timing and must
  // have happened.
  Result<float> MillisecondsSince(const Event& begin) const;

 private:
  Handle<cudaEvent_t, cudaEventDestroy> handle_;
};

// A captured graph of operations; one call enqueues all of them.
class GraphExec {
 public:
  GraphExec() = default;
  // Runs `enqueue`, which returns a Status, while `stream` captures operations instead of running
  // them. Pointers and values of the launches are recorded. `enqueue` must neither allocate nor
  // synchronise. The capture has ended when Capture() returns.
  template <typename F>
  static Result<GraphExec> Capture(cudaStream_t stream, F&& enqueue) {
    MOESERVE_RETURN_IF_ERROR(BeginCapture(stream));
    Status status = std::forward<F>(enqueue)();
    return EndCapture(stream, std::move(status));
  }

  explicit operator bool() const { return static_cast<bool>(handle_); }
  Status Launch(cudaStream_t stream) const;

 private:
  static Status BeginCapture(cudaStream_t stream);
  static Result<GraphExec> EndCapture(cudaStream_t stream, Status status);

  Handle<cudaGraphExec_t, cudaGraphExecDestroy> handle_;
};

}  // namespace moeserve::cuda
