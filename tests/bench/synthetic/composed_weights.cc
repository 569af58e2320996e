#include "tests/bench/synthetic/composed_weights.h"

#include <memory>
#include <utility>

#include "kernels/base/host_tensor.h"

namespace moeserve::testing {
namespace {

// Appends a row of `size` bytes with its blocks in another order.
void AppendRow(const char* row, size_t size, const std::vector<int64_t>& blocks,
               std::vector<char>& out) {
  if (blocks.empty()) {
    out.insert(out.end(), row, row + size);
    return;
  }
  const size_t block = size / blocks.size();
  for (const int64_t b : blocks) {
    const char* const first = row + static_cast<size_t>(b) * block;
    out.insert(out.end(), first, first + block);
  }
}

std::vector<ComposedTensor::Rows> RowsOf(const ComposedTensor& tensor) {
  if (!tensor.rows.empty()) return tensor.rows;
  std::vector<ComposedTensor::Rows> rows;
  for (size_t i = 0; i < tensor.sources.size(); ++i) {
    rows.push_back({i, 0, tensor.sources[i].shape[0]});
  }
  return rows;
}

}  // namespace

void ComposedWeights::Add(std::string name, ComposedTensor tensor) {
  tensors_.insert_or_assign(std::move(name), std::move(tensor));
}

Result<HostTensor> ComposedWeights::Get(std::string_view name, const std::vector<int64_t>& shape) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return weights_.Get(name, shape);
  const ComposedTensor& tensor = found->second;
  std::vector<HostTensor> sources;
  for (const ComposedTensor::Source& source : tensor.sources) {
    MOESERVE_ASSIGN_OR_RETURN(HostTensor values, weights_.Get(source.name, source.shape));
    sources.push_back(std::move(values));
    if (sources.back().dtype != sources[0].dtype) {
      return absl::InternalError(source.name + ": another type than " + tensor.sources[0].name);
    }
  }
  const DType dtype = sources[0].dtype;
  std::vector<char> bytes;
  for (const ComposedTensor::Rows& rows : RowsOf(tensor)) {
    const HostTensor& source = sources[rows.source];
    const size_t row = static_cast<size_t>(source.size() / source.shape[0]) * SizeOf(dtype);
    const char* const first = static_cast<const char*>(source.data) + rows.first * row;
    for (int64_t i = 0; i < rows.count; ++i) {
      AppendRow(first + i * row, row, tensor.column_blocks, bytes);
    }
  }
  HostTensor made;
  made.shape = shape;
  made.dtype = dtype;
  if (bytes.size() != static_cast<size_t>(made.size()) * SizeOf(dtype)) {
    return absl::InternalError(std::string(name) + ": another size than its sources");
  }
  if (tensor.value) {
    made.data = bytes.data();
    auto values = std::make_shared<std::vector<float>>(Widened(made));
    for (float& v : *values) v = tensor.value(v);
    made.dtype = DType::kF32;
    made.data = values->data();
    made.owner = std::move(values);
    return made;
  }
  auto owner = std::make_shared<std::vector<char>>(std::move(bytes));
  made.data = owner->data();
  made.owner = std::move(owner);
  return made;
}

}  // namespace moeserve::testing
