#include "kernels/cuda/step_buffers.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"

namespace moeserve::cuda {
namespace {

// Four arrays of a value per token, what to draw of each output, then the block tables.
constexpr int64_t kArrays = 4;
constexpr int64_t kSampleValues = sizeof(SampleRow) / sizeof(int32_t);

int64_t RoundUpToPower(int64_t n) {
  int64_t power = 16;
  while (power < n) power *= 2;
  return power;
}

}  // namespace

bool StepBuffers::MustGrow(int64_t tokens, int64_t sequences, int64_t longest_table) const {
  return tokens > tokens_ || sequences > sequences_ || longest_table > table_stride_;
}

absl::Status StepBuffers::Reserve(int64_t tokens, int64_t sequences, int64_t longest_table) {
  if (!MustGrow(tokens, sequences, longest_table)) return absl::OkStatus();
  tokens_ = std::max(tokens_, RoundUpToPower(tokens));
  sequences_ = std::max(sequences_, RoundUpToPower(sequences));
  table_stride_ = std::max(table_stride_, RoundUpToPower(longest_table));
  const size_t bytes =
      static_cast<size_t>((kArrays + kSampleValues) * tokens_ + sequences_ * table_stride_) *
      sizeof(int32_t);
  host_ = {};
  device_ = {};
  MOESERVE_ASSIGN_OR_RETURN(host_, PinnedMemory::Allocate(bytes));
  MOESERVE_ASSIGN_OR_RETURN(device_, DeviceMemory::Allocate(bytes));
  if (copied_.get() == nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(copied_, Event::Create(false));
  }
  return absl::OkStatus();
}

DeviceStep StepBuffers::Upload(const StepInputs& inputs, const StepRows& rows,
                               cudaStream_t stream) {
  // The copy before reads the same memory.
  MOESERVE_CHECK(cudaEventSynchronize(copied_.get()) == cudaSuccess, "the step before was copied");
  const int64_t given = static_cast<int64_t>(inputs.token_ids.size());
  int32_t* const host = host_.as<int32_t>();
  int32_t* const token_ids = host;
  int32_t* const position = token_ids + rows.tokens;
  int32_t* const sequence = position + rows.tokens;
  int32_t* const output_rows = sequence + rows.tokens;
  // Four arrays of whole 4-byte values keep the 8 bytes that a SampleRow is aligned to where the
  // number of tokens is even or not: 16 bytes a token.
  SampleRow* const samples = reinterpret_cast<SampleRow*>(output_rows + rows.tokens);
  int32_t* const tables = reinterpret_cast<int32_t*>(samples + rows.outputs);
  std::copy(inputs.token_ids.begin(), inputs.token_ids.end(), token_ids);
  std::copy(inputs.position.begin(), inputs.position.end(), position);
  std::copy(inputs.sequence.begin(), inputs.sequence.end(), sequence);
  std::fill(token_ids + given, token_ids + rows.tokens, 0);
  std::fill(position + given, position + rows.tokens, 0);
  std::fill(sequence + given, sequence + rows.tokens, -1);
  MOESERVE_CHECK(rows.outputs <= rows.tokens, "an output row per token at most");
  const int64_t outputs = static_cast<int64_t>(inputs.output_rows.size());
  std::copy(inputs.output_rows.begin(), inputs.output_rows.end(), output_rows);
  std::fill(output_rows + outputs, output_rows + rows.tokens, 0);
  std::copy(inputs.samples.begin(), inputs.samples.end(), samples);
  for (int64_t i = static_cast<int64_t>(inputs.samples.size()); i < rows.outputs; ++i) {
    samples[i] = {};
    samples[i].row = -1;
  }
  int32_t* table = tables;
  for (const std::span<const int32_t> blocks : inputs.block_tables) {
    std::copy(blocks.begin(), blocks.end(), table);
    std::fill(table + blocks.size(), table + table_stride_, 0);
    table += table_stride_;
  }
  const size_t bytes = static_cast<size_t>(table - host) * sizeof(int32_t);
  int32_t* const device = device_.as<int32_t>();
  MOESERVE_CHECK(
      cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess,
      "a step's inputs reach the device");
  MOESERVE_CHECK(cudaEventRecord(copied_.get(), stream) == cudaSuccess, "record an event");
  return {device,
          device + (position - host),
          device + (sequence - host),
          device + (output_rows - host),
          reinterpret_cast<const SampleRow*>(device + kArrays * rows.tokens),
          device + (tables - host)};
}

}  // namespace moeserve::cuda
