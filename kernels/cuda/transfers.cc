// What leaves the device and what is brought to it outside of steps.

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/cuda/bandwidth.h"
#include "kernels/cuda/cuda_backend.h"

namespace moeserve::cuda {

char* CudaBackend::Staging(size_t bytes) {
  if (staging_.bytes() < bytes) {
    Synchronize();
    staging_ = {};
    Result<PinnedMemory> memory = PinnedMemory::Allocate(bytes + bytes / 2);
    CheckStatus(memory.status(), "memory for transfers");
    staging_ = std::move(memory).value();
  }
  return staging_.as<char>();
}

void CudaBackend::CopyToHost(const RowsView& input, std::span<float> output) {
  MOESERVE_CHECK(static_cast<int64_t>(output.size()) >= input.rows * input.cols, "host copy");
  if (input.rows == 0 || input.cols == 0) {
    Synchronize();
    return;
  }
  const size_t element = SizeOf(input.dtype);
  const size_t width = static_cast<size_t>(input.cols) * element;
  char* const staging = Staging(width * static_cast<size_t>(input.rows));
  CheckCall(cudaMemcpy2DAsync(
                staging, width, input.data, static_cast<size_t>(input.stride) * element, width,
                static_cast<size_t>(input.rows), cudaMemcpyDeviceToHost, stream_.get()),
            "copy rows");
  Synchronize();
  const int64_t count = input.rows * input.cols;
  if (input.dtype == DType::kF32) {
    std::memcpy(output.data(), staging, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    Bf16 bits;
    std::memcpy(&bits, staging + 2 * i, sizeof(bits));
    output[i] = F32FromBf16(bits);
  }
}

void CudaBackend::CopyFromHost(std::span<const float> input, const RowsView& output) {
  const int64_t count = output.rows * output.cols;
  MOESERVE_CHECK(static_cast<int64_t>(input.size()) >= count, "host rows");
  if (count == 0) return;
  const size_t element = SizeOf(output.dtype);
  const size_t width = static_cast<size_t>(output.cols) * element;
  char* const staging = Staging(width * static_cast<size_t>(output.rows));
  if (output.dtype == DType::kF32) {
    std::memcpy(staging, input.data(), static_cast<size_t>(count) * sizeof(float));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const Bf16 bits = Bf16FromF32(input[i]);
      std::memcpy(staging + 2 * i, &bits, sizeof(bits));
    }
  }
  CheckCall(cudaMemcpy2DAsync(output.data, static_cast<size_t>(output.stride) * element, staging,
                              width, width, static_cast<size_t>(output.rows),
                              cudaMemcpyHostToDevice, stream_.get()),
            "copy rows");
  Synchronize();
}

void CudaBackend::ReadSamples(std::span<SampleResult> results) {
  char* const staging = Staging(results.size_bytes());
  CheckCall(cudaMemcpyAsync(staging, sampled_.data(), results.size_bytes(), cudaMemcpyDeviceToHost,
                            stream_.get()),
            "copy drawn tokens");
  Synchronize();
  std::memcpy(results.data(), staging, results.size_bytes());
}

RoutingPlan CudaBackend::HostPlan(int index) {
  PlanSlot& slot = slots_[index];
  const RoutingPlan& plan = slot.plan;
  // Rows that fill up a step come last and have no assignments.
  int64_t rows = plan.rows;
  const int64_t tokens = static_cast<int64_t>(inputs_.token_ids.size());
  if (shape_.rows.tokens > tokens) rows = rows / shape_.rows.tokens * tokens;
  if (!slot.copied) {
    const auto fetch = [&](auto& to, const auto* from, size_t count) {
      to.resize(count);
      if (count == 0) return;
      CheckCall(cudaMemcpyAsync(to.data(), from, count * sizeof(to[0]), cudaMemcpyDeviceToHost,
                                stream_.get()),
                "copy a plan");
    };
    const size_t experts = static_cast<size_t>(plan.num_experts);
    const size_t capacity = static_cast<size_t>(plan.capacity);
    fetch(slot.expert_offsets, plan.expert_offsets, experts + 1);
    fetch(slot.expert_of_assignment, plan.expert_of_assignment, capacity);
    fetch(slot.row_of_assignment, plan.row_of_assignment, capacity);
    fetch(slot.weight_of_assignment, plan.weight_of_assignment, capacity);
    fetch(slot.row_offsets, plan.row_offsets, static_cast<size_t>(plan.rows) + 1);
    fetch(slot.assignments_of_row, plan.assignments_of_row, capacity);
    fetch(slot.row_nonfinite, plan.row_nonfinite, static_cast<size_t>(plan.rows));
    Synchronize();
    slot.copied = true;
  }
  const int32_t assignments = slot.expert_offsets[plan.num_experts];
  return {.rows = static_cast<int>(rows),
          .num_experts = plan.num_experts,
          .num_assignments = assignments,
          .capacity = assignments,
          .expert_offsets = slot.expert_offsets.data(),
          .expert_of_assignment = slot.expert_of_assignment.data(),
          .row_of_assignment = slot.row_of_assignment.data(),
          .weight_of_assignment = slot.weight_of_assignment.data(),
          .row_offsets = slot.row_offsets.data(),
          .assignments_of_row = slot.assignments_of_row.data(),
          .row_nonfinite = slot.row_nonfinite.data()};
}

Result<double> CudaBackend::MeasureReadBandwidth(int64_t bytes, int rounds) {
  return cuda::MeasureReadBandwidth(bytes, rounds, stream_.get());
}

}  // namespace moeserve::cuda
