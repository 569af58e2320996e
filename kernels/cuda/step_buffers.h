// The inputs of a step, and its per-token results, in device memory.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Device addresses of a step's inputs; they are equal for all steps of one shape.
struct DeviceStep {
  TokenRoutes* routes = nullptr;           // [tokens] set to 0 when the step begins
  uint8_t* failed = nullptr;               // [tokens] set to 0 when the step begins
  const uint8_t* kind = nullptr;           // [tokens] kTokenPrefill and so on; 255 for padding
  const uint8_t* long_sequence = nullptr;  // [tokens] StepInputs::long_sequence; 0 without it
  const uint8_t* token_types = nullptr;    // [tokens] StepInputs::token_types; 0 without it
  const int32_t* token_ids = nullptr;      // [tokens]
  const int32_t* position = nullptr;       // [tokens]
  const int32_t* sequence = nullptr;       // [tokens] -1 for padding
  const int32_t* output_rows = nullptr;    // [outputs]
  const int32_t* source_rows = nullptr;    // [tokens] 0 without StepInputs::source_rows
  // [tokens] the slot of the token's sequence, then the arrays of StepStates; -1 without states
  const int32_t* state_slot = nullptr;
  const int32_t* keep = nullptr;
  const int32_t* snapshot = nullptr;
  const int32_t* pending = nullptr;
  const SampleRow* samples = nullptr;  // [outputs] nothing is drawn if SampleRow::row < 0
  // [StepInputs::page_tables, table_stride] each row has the table's pages and, as its last
  // element, its length; 0 without StepInputs::lengths.
  const int32_t* page_tables = nullptr;
  const RowRange* pool_ranges = nullptr;  // StepInputs::pool_ranges
};

// Per step, one copy uploads all inputs from pinned memory and another downloads the per-token
// results. Only the backend's thread uses this class.
class StepBuffers {
 public:
  // Returns whether the buffers are too small for such a step, so that Reserve() would reallocate
  // them. `pools` is the number of ranges of rows.
  bool MustGrow(int64_t tokens, int64_t tables, int64_t table_stride, int64_t pools) const;
  // Grows the buffers if necessary. The stream must be idle. ResourceExhausted if memory runs out.
  absl::Status Reserve(int64_t tokens, int64_t tables, int64_t table_stride, int64_t pools);

  // Enqueues the upload of `inputs`, padded to `rows`. In device memory the block table of each
  // sequence has `table_stride` entries, at least one more than the length of the longest table.
  DeviceStep Upload(const StepInputs& inputs, const StepRows& rows, int64_t table_stride,
                    cudaStream_t stream);

  // Enqueues the upload of other kinds of the same tokens. The stream must be idle.
  void UploadKind(const DeviceStep& step, std::span<const uint8_t> kind, cudaStream_t stream);

  // Enqueues the download of `failed` and, if `routes` is true, of the routes.
  void Download(const DeviceStep& step, int64_t tokens, bool routes, cudaStream_t stream);
  // The result of the last Download(); valid after the stream has run the copy.
  const uint8_t* failed() const { return failed_; }
  const TokenRoutes* routes() const { return outcome_.as<TokenRoutes>(); }

 private:
  int64_t tokens_ = 0;
  int64_t table_entries_ = 0;  // capacity for the block tables of all sequences and the ranges of
                               // rows together, in 4-byte integers
  PinnedMemory host_;
  DeviceMemory device_;
  PinnedMemory outcome_;
  const uint8_t* failed_ = nullptr;
  Event copied_;
};

}  // namespace moeserve::cuda
