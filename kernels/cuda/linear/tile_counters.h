// Counters by which the blocks of a grid share the tiles of a product.
#pragma once

#include <cstdint>

#include "base/mutex.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Counters in device memory, one for each stream, because launches in different streams may run at
// the same time. A launch finds its counter 0 and leaves it 0; launches in one stream follow each
// other. A recorded graph uses the counter of the stream in which it was recorded, so it must not
// run at the same time as other launches of the same bank that were made or recorded in that
// stream.
class TileCounters {
 public:
  static constexpr int kStreams = 8;
  static constexpr int kStride = 32;  // in values: each counter has a cache line of its own

  Status Allocate() {
    constexpr size_t kBytes = kStreams * kStride * sizeof(int32_t);
    MOESERVE_ASSIGN_OR_RETURN(memory_, DeviceMemory::Allocate(kBytes));
    return CudaStatus(cudaMemset(memory_.data(), 0, kBytes), "cudaMemset");
  }

  // Returns the counter of `stream`, or null if kStreams other streams have one. May be called from
  // any thread.
  int32_t* Of(cudaStream_t stream) const {
    MutexLock lock(mutex_);
    int i = 0;
    while (i < used_ && streams_[i] != stream) ++i;
    if (i == kStreams) return nullptr;
    if (i == used_) streams_[used_++] = stream;
    return memory_.as<int32_t>() + i * kStride;
  }

  // All counters, in device memory: [kStreams * kStride].
  const int32_t* data() const { return memory_.as<int32_t>(); }

 private:
  DeviceMemory memory_;
  mutable Mutex mutex_;
  mutable cudaStream_t streams_[kStreams] ABSL_GUARDED_BY(mutex_) = {};
  mutable int used_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace moeserve::cuda
