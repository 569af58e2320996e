#include "kernels/cuda/step_buffers.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace moeserve::cuda {
namespace {

// Bytes per token: TokenRoutes, a SampleRow, four bytes (failed, kind, long sequence, type) and
// nine 4-byte integers. The block tables and the ranges of rows follow after all tokens.
constexpr int64_t kByteArrays = 4;
constexpr int64_t kTokenBytes =
    static_cast<int64_t>(sizeof(TokenRoutes) + sizeof(SampleRow)) + kByteArrays + 9 * 4;
constexpr int64_t kAlignment = 16;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A range of rows is two integers.
int64_t EntriesOf(int64_t tables, int64_t table_stride, int64_t pools) {
  static_assert(sizeof(RowRange) == 2 * sizeof(int32_t));
  return tables * table_stride + 2 * pools;
}

int64_t RoundUpToPower(int64_t n) {
  int64_t power = 16;
  while (power < n) power *= 2;
  return power;
}

}  // namespace

bool StepBuffers::MustGrow(int64_t tokens, int64_t tables, int64_t table_stride,
                           int64_t pools) const {
  return tokens > tokens_ || EntriesOf(tables, table_stride, pools) > table_entries_;
}

absl::Status StepBuffers::Reserve(int64_t tokens, int64_t tables, int64_t table_stride,
                                  int64_t pools) {
  if (!MustGrow(tokens, tables, table_stride, pools)) return absl::OkStatus();
  tokens_ = std::max(tokens_, RoundUpToPower(tokens));
  table_entries_ = std::max(table_entries_, RoundUpToPower(EntriesOf(tables, table_stride, pools)));
  const size_t bytes =
      static_cast<size_t>(kTokenBytes * tokens_ + kByteArrays * kAlignment + table_entries_ * 4);
  host_ = {};
  device_ = {};
  outcome_ = {};
  MOESERVE_ASSIGN_OR_RETURN(host_, PinnedMemory::Allocate(bytes));
  MOESERVE_ASSIGN_OR_RETURN(device_, DeviceMemory::Allocate(bytes));
  MOESERVE_ASSIGN_OR_RETURN(
      outcome_, PinnedMemory::Allocate(static_cast<size_t>(tokens_) * (sizeof(TokenRoutes) + 1)));
  if (copied_.get() == nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(copied_, Event::Create(false));
  }
  return absl::OkStatus();
}

DeviceStep StepBuffers::Upload(const StepInputs& inputs, const StepRows& rows, int64_t table_stride,
                               cudaStream_t stream) {
  // The previous step's copy reads the same pinned memory, so it must have finished.
  MOESERVE_CHECK(cudaEventSynchronize(copied_.get()) == cudaSuccess, "the step before was copied");
  const int64_t given = static_cast<int64_t>(inputs.token_ids.size());
  char* const host = host_.as<char>();
  // The arrays that a step writes come first, so that a single copy downloads them.
  const int64_t failed_at = rows.tokens * static_cast<int64_t>(sizeof(TokenRoutes));
  const int64_t kind_at = failed_at + Aligned(rows.tokens);
  const int64_t long_at = kind_at + Aligned(rows.tokens);
  const int64_t types_at = long_at + Aligned(rows.tokens);
  const int64_t words_at = types_at + Aligned(rows.tokens);
  std::memset(host, 0, static_cast<size_t>(kind_at));
  char* const kind = host + kind_at;
  std::memset(kind, kTokenPadding, static_cast<size_t>(rows.tokens));
  std::copy(inputs.kind.begin(), inputs.kind.end(), kind);
  std::memset(host + long_at, 0, static_cast<size_t>(words_at - long_at));
  std::copy(inputs.long_sequence.begin(), inputs.long_sequence.end(),
            reinterpret_cast<uint8_t*>(host + long_at));
  std::copy(inputs.token_types.begin(), inputs.token_types.end(),
            reinterpret_cast<uint8_t*>(host + types_at));
  int32_t* const token_ids = reinterpret_cast<int32_t*>(host + words_at);
  int32_t* const position = token_ids + rows.tokens;
  int32_t* const sequence = position + rows.tokens;
  int32_t* const output_rows = sequence + rows.tokens;
  int32_t* const state_slot = output_rows + rows.tokens;
  int32_t* const keep = state_slot + rows.tokens;
  int32_t* const snapshot = keep + rows.tokens;
  int32_t* const pending = snapshot + rows.tokens;
  // `samples` is aligned to the 8 bytes that SampleRow requires for any number of tokens, because
  // the eight arrays before it take 32 bytes per token.
  SampleRow* const samples = reinterpret_cast<SampleRow*>(pending + rows.tokens);
  int32_t* const source_rows = reinterpret_cast<int32_t*>(samples + rows.outputs);
  int32_t* const tables = source_rows + rows.tokens;
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
  std::fill(source_rows, tables, 0);
  std::copy(inputs.source_rows.begin(), inputs.source_rows.end(), source_rows);
  std::fill(state_slot, pending + rows.tokens, -1);
  for (size_t t = 0; t < inputs.states.keep.size(); ++t) {
    const int32_t sequence_of_token = inputs.sequence[t];
    if (sequence_of_token < 0) continue;
    state_slot[t] = inputs.states.slot[static_cast<size_t>(sequence_of_token)];
  }
  std::copy(inputs.states.keep.begin(), inputs.states.keep.end(), keep);
  std::copy(inputs.states.snapshot.begin(), inputs.states.snapshot.end(), snapshot);
  std::copy(inputs.states.pending.begin(), inputs.states.pending.end(), pending);
  std::copy(inputs.samples.begin(), inputs.samples.end(), samples);
  for (int64_t i = static_cast<int64_t>(inputs.samples.size()); i < rows.outputs; ++i) {
    samples[i] = {};
    samples[i].row = -1;
  }
  int32_t* table = tables;
  for (size_t i = 0; i < inputs.page_tables.size(); ++i, table += table_stride) {
    const std::span<const int32_t> blocks = inputs.page_tables[i];
    std::copy(blocks.begin(), blocks.end(), table);
    std::fill(table + blocks.size(), table + table_stride, 0);
    if (!inputs.lengths.empty()) table[table_stride - 1] = inputs.lengths[i];
  }
  RowRange* const ranges = reinterpret_cast<RowRange*>(table);
  std::copy(inputs.pool_ranges.begin(), inputs.pool_ranges.end(), ranges);
  const size_t bytes =
      static_cast<size_t>(reinterpret_cast<char*>(ranges + inputs.pool_ranges.size()) - host);
  char* const device = device_.as<char>();
  MOESERVE_CHECK(
      cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream) == cudaSuccess,
      "a step's inputs reach the device");
  MOESERVE_CHECK(cudaEventRecord(copied_.get(), stream) == cudaSuccess, "record an event");
  const auto on_device = [&](const int32_t* array) {
    return reinterpret_cast<const int32_t*>(device + (reinterpret_cast<const char*>(array) - host));
  };
  return {.routes = reinterpret_cast<TokenRoutes*>(device),
          .failed = reinterpret_cast<uint8_t*>(device + failed_at),
          .kind = reinterpret_cast<const uint8_t*>(device + kind_at),
          .long_sequence = reinterpret_cast<const uint8_t*>(device + long_at),
          .token_types = reinterpret_cast<const uint8_t*>(device + types_at),
          .token_ids = on_device(token_ids),
          .position = on_device(position),
          .sequence = on_device(sequence),
          .output_rows = on_device(output_rows),
          .source_rows = on_device(source_rows),
          .state_slot = on_device(state_slot),
          .keep = on_device(keep),
          .snapshot = on_device(snapshot),
          .pending = on_device(pending),
          .samples = reinterpret_cast<const SampleRow*>(
              on_device(reinterpret_cast<const int32_t*>(samples))),
          .page_tables = on_device(tables),
          .pool_ranges = reinterpret_cast<const RowRange*>(on_device(table))};
}

void StepBuffers::UploadKind(const DeviceStep& step, std::span<const uint8_t> kind,
                             cudaStream_t stream) {
  const ptrdiff_t at = reinterpret_cast<const char*>(step.kind) - device_.as<char>();
  std::copy(kind.begin(), kind.end(), reinterpret_cast<uint8_t*>(host_.as<char>() + at));
  MOESERVE_CHECK(cudaMemcpyAsync(device_.as<char>() + at, host_.as<char>() + at, kind.size(),
                                 cudaMemcpyHostToDevice, stream) == cudaSuccess,
                 "the kinds of a step's tokens reach the device");
  MOESERVE_CHECK(cudaEventRecord(copied_.get(), stream) == cudaSuccess, "record an event");
}

void StepBuffers::Download(const DeviceStep& step, int64_t tokens, bool routes,
                           cudaStream_t stream) {
  const char* const device = reinterpret_cast<const char*>(step.routes);
  const size_t skipped =
      routes ? 0 : static_cast<size_t>(reinterpret_cast<const char*>(step.failed) - device);
  const size_t end = static_cast<size_t>(reinterpret_cast<const char*>(step.failed) - device) +
                     static_cast<size_t>(tokens);
  MOESERVE_CHECK(cudaMemcpyAsync(outcome_.as<char>() + skipped, device + skipped, end - skipped,
                                 cudaMemcpyDeviceToHost, stream) == cudaSuccess,
                 "what became of a step's tokens reaches the host");
  failed_ = outcome_.as<uint8_t>() + (reinterpret_cast<const char*>(step.failed) - device);
}

}  // namespace moeserve::cuda
