// States of sequences in device memory, and the operations on them.

#include "base/check.h"
#include "base/error_text.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/rows/recurrence.h"
#include "kernels/cuda/rows/short_convolution.h"

namespace moeserve::cuda {
namespace {

class CudaStates : public StateStorage {
 public:
  CudaStates(std::vector<StateShape> shapes, int num_slots, int pending_rows, DeviceMemory memory,
             cudaStream_t stream)
      : StateStorage(std::move(shapes), num_slots, pending_rows),
        memory_(std::move(memory)),
        stream_(stream) {}

  float* Row(int block, int32_t slot, int row) const {
    return memory_.as<float>() + Begin(block, slot) + int64_t{row} * shape(block).cols;
  }
  // Returns the recurrence's part of a slot.
  float* Recurrence(int block, int32_t slot) const {
    return Row(block, slot, 0) + RecurrenceBegin(block);
  }
  int64_t slot_floats(int block) const { return SlotFloats(block); }

  void DoClear(int32_t slot) override {
    for (int b = 0; b < num_blocks(); ++b) {
      Check(cudaMemsetAsync(Row(b, slot, 0), 0, Bytes(b, shape(b).rows), stream_));
      const auto floats = static_cast<size_t>(shape(b).recurrence.state_floats());
      if (floats == 0) continue;
      Check(cudaMemsetAsync(Recurrence(b, slot), 0, floats * sizeof(float), stream_));
    }
  }
  void DoAdvance(int32_t from, int rows, int32_t to) override {
    if (from == to && rows == 0) return;
    for (int b = 0; b < num_blocks(); ++b) {
      // Rows of overlapping ranges are copied one by one, the oldest first.
      const int step = from == to && rows < shape(b).rows ? 1 : shape(b).rows;
      for (int r = 0; r < shape(b).rows; r += step) {
        Check(cudaMemcpyAsync(Row(b, to, r), Row(b, from, rows + r), Bytes(b, step),
                              cudaMemcpyDeviceToDevice, stream_));
      }
      if (shape(b).recurrence.heads == 0) continue;
      LaunchAdvanceRecurrence(shape(b).recurrence, Recurrence(b, from), rows, Recurrence(b, to),
                              stream_);
    }
  }

 private:
  size_t Bytes(int block, int rows) const {
    return static_cast<size_t>(rows) * static_cast<size_t>(shape(block).cols) * sizeof(float);
  }
  static void Check(cudaError_t error) {
    MOESERVE_CHECK(error == cudaSuccess, "a state is set on the device");
  }

  DeviceMemory memory_;
  cudaStream_t stream_;
};

}  // namespace

Result<std::unique_ptr<StateStorage>> CudaBackend::NewStates(std::vector<StateShape> shapes,
                                                             int num_slots, int pending_rows) {
  for (const StateShape& shape : shapes) {
    if (shape.recurrence.key_dim > kMaxRecurrentKeys) {
      return absl::UnimplementedError(Concat("recurrences with keys of ", shape.recurrence.key_dim,
                                             " elements: the CUDA backend computes up to ",
                                             kMaxRecurrentKeys));
    }
  }
  const int64_t bytes = StateStorage::SlotBytes(shapes, pending_rows) * num_slots;
  Result<DeviceMemory> memory = DeviceMemory::Allocate(static_cast<size_t>(bytes));
  if (!memory.ok()) {
    return WithBudget(memory.status(),
                      Concat("states of ", bytes >> 20, " MiB (max-num-seqs, state-snapshots)"));
  }
  return std::unique_ptr<StateStorage>(std::make_unique<CudaStates>(
      std::move(shapes), num_slots, pending_rows, std::move(memory).value(), stream_.get()));
}

void CudaBackend::ShortConvolution(const ShortConvolutionArgs& args) {
  const auto& states = static_cast<const CudaStates&>(*args.states);
  LaunchShortConvolution({.states = states.Row(args.block, 0, 0),
                          .slot_floats = states.slot_floats(args.block),
                          .gated = args.gated,
                          .taps = args.taps,
                          .weight = args.weight,
                          .bias = args.bias,
                          .sequence = step_.sequence,
                          .slot = step_.state_slot,
                          .keep = step_.keep,
                          .snapshot = step_.snapshot,
                          .pending = step_.pending,
                          .input = args.input,
                          .output = args.output},
                         stream_.get());
}

void CudaBackend::Recurrence(const RecurrenceArgs& args) {
  const auto& states = static_cast<const CudaStates&>(*args.states);
  LaunchRecurrence({.args = args,
                    .shape = states.shape(args.block).recurrence,
                    .states = states.Recurrence(args.block, 0),
                    .slot_floats = states.slot_floats(args.block),
                    .sequence = step_.sequence,
                    .slot = step_.state_slot,
                    .keep = step_.keep,
                    .snapshot = step_.snapshot,
                    .pending = step_.pending},
                   stream_.get());
}

}  // namespace moeserve::cuda
