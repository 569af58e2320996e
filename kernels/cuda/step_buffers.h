// The inputs of a step in device memory.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Device addresses of a step's inputs, the same for every step of one shape.
struct DeviceStep {
  TokenRoutes* routes = nullptr;          // [tokens] 0 when the step begins
  uint8_t* failed = nullptr;              // [tokens] 0 when the step begins
  const uint8_t* kind = nullptr;          // [tokens] 255: padding
  const int32_t* token_ids = nullptr;     // [tokens]
  const int32_t* position = nullptr;      // [tokens]
  const int32_t* sequence = nullptr;      // [tokens] -1: padding
  const int32_t* output_rows = nullptr;   // [outputs]
  const SampleRow* samples = nullptr;     // [outputs] row < 0: nothing to draw
  const int32_t* block_tables = nullptr;  // [sequences, table_stride]
};

// One copy per step uploads all inputs from pinned memory, another downloads the per-token results.
// Used by the backend's thread.
class StepBuffers {
 public:
  // Whether the buffers are too small for such a step, so that Reserve() would move them.
  bool MustGrow(int64_t tokens, int64_t sequences, int64_t table_stride) const;
  // The stream must be idle. ResourceExhausted.
  absl::Status Reserve(int64_t tokens, int64_t sequences, int64_t table_stride);

  // Enqueues the upload of `inputs`, padded to `rows`. Block tables are `table_stride` entries
  // apart, at least the length of the longest.
  DeviceStep Upload(const StepInputs& inputs, const StepRows& rows, int64_t table_stride,
                    cudaStream_t stream);

  // Enqueues the download of `failed` and, if `routes`, of the routes.
  void Download(const DeviceStep& step, int64_t tokens, bool routes, cudaStream_t stream);
  // The result of the last Download(), valid once the stream has run it.
  const uint8_t* failed() const { return failed_; }
  const TokenRoutes* routes() const { return outcome_.as<TokenRoutes>(); }

 private:
  int64_t tokens_ = 0;
  int64_t table_entries_ = 0;  // of all block tables
  PinnedMemory host_;
  DeviceMemory device_;
  PinnedMemory outcome_;
  const uint8_t* failed_ = nullptr;
  Event copied_;
};

}  // namespace moeserve::cuda
