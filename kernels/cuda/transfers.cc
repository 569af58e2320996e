// Copies between host and device memory outside of steps.

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/bandwidth.h"
#include "kernels/cuda/routing/pack_plans.h"

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

CudaBackend::ExchangeCall& CudaBackend::CallFor(const ExchangeArgs& args) {
  const auto bytes = [](const RowsView& rows) {
    return static_cast<size_t>(rows.rows * rows.cols) * SizeOf(rows.dtype);
  };
  ExchangeCall& call = exchanges_[{args.exchange, bytes(args.send), bytes(args.receive)}];
  if (call.exchange != nullptr) return call;
  // The first step of a shape is not recorded, so nothing is allocated during a capture.
  call.exchange = args.exchange;
  call.sent_bytes = bytes(args.send);
  call.received_bytes = bytes(args.receive);
  Result<PinnedMemory> sent = PinnedMemory::Allocate(std::max<size_t>(call.sent_bytes, 1));
  CheckStatus(sent.status(), "memory for an exchange");
  Result<PinnedMemory> received = PinnedMemory::Allocate(std::max<size_t>(call.received_bytes, 1));
  CheckStatus(received.status(), "memory for an exchange");
  call.sent = std::move(sent).value();
  call.received = std::move(received).value();
  return call;
}

void CudaBackend::Exchange(const ExchangeArgs& args) {
  ExchangeCall& call = CallFor(args);
  const auto copy = [&](void* to, size_t to_stride, const void* from, size_t from_stride,
                        const RowsView& rows, cudaMemcpyKind kind) {
    if (rows.rows == 0 || rows.cols == 0) return;
    CheckCall(cudaMemcpy2DAsync(to, to_stride, from, from_stride,
                                static_cast<size_t>(rows.cols) * SizeOf(rows.dtype),
                                static_cast<size_t>(rows.rows), kind, stream_.get()),
              "copy rows of an exchange");
  };
  const auto width = [](const RowsView& rows) {
    return static_cast<size_t>(rows.cols) * SizeOf(rows.dtype);
  };
  const auto stride = [](const RowsView& rows) {
    return static_cast<size_t>(rows.stride) * SizeOf(rows.dtype);
  };
  copy(call.sent.data(), width(args.send), args.send.data, stride(args.send), args.send,
       cudaMemcpyDeviceToHost);
  CheckCall(cudaLaunchHostFunc(
                stream_.get(),
                [](void* argument) {
                  const auto& c = *static_cast<const ExchangeCall*>(argument);
                  c.exchange->Run({c.sent.as<std::byte>(), c.sent_bytes},
                                  {c.received.as<std::byte>(), c.received_bytes});
                },
                &call),
            "exchange rows on the host");
  copy(args.receive.data, stride(args.receive), call.received.data(), width(args.receive),
       args.receive, cudaMemcpyHostToDevice);
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

void CudaBackend::CopyPlans() {
  std::vector<RoutingPlan> plans;
  std::vector<PlanSlot*> slots;
  size_t bytes = 0;
  for (PlanSlot& slot : slots_) {
    if (slot.copied || slot.plan.expert_offsets == nullptr) continue;
    slots.push_back(&slot);
    plans.push_back(slot.plan);
    bytes += PackedPlanBytes(slot.plan);
  }
  if (packed_.bytes() < bytes) {
    packed_ = {};
    packed_ = AllocateForStep(bytes + bytes / 2, "memory for copies of plans");
  }
  LaunchPackPlans(plans, packed_.as<char>(), stream_.get());
  char* staging = Staging(bytes);
  CheckCall(cudaMemcpyAsync(staging, packed_.data(), bytes, cudaMemcpyDeviceToHost, stream_.get()),
            "copy plans");
  Synchronize();
  for (PlanSlot* slot : slots) {
    const size_t size = PackedPlanBytes(slot->plan);
    slot->host.assign(staging, staging + size);
    slot->copied = true;
    staging += size;
  }
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
  MOESERVE_CHECK(slot.plan.expert_offsets != nullptr, "a plan of this step");
  if (!slot.copied) CopyPlans();
  // Padding rows come last and have no assignments.
  int64_t rows = slot.plan.rows;
  const int64_t tokens = static_cast<int64_t>(inputs_.token_ids.size());
  if (shape_.rows.tokens > tokens) rows = rows / shape_.rows.tokens * tokens;
  return UnpackedPlan(slot.plan, static_cast<int>(rows), slot.host.data());
}

Result<double> CudaBackend::MeasureReadBandwidth(int64_t bytes, int rounds) {
  return cuda::MeasureReadBandwidth(bytes, rounds, stream_.get());
}

}  // namespace moeserve::cuda
