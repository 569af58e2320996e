#include "server/commands/progress/load_progress.h"

#include <utility>

namespace moeserve::server {
namespace {

double Elements(const std::vector<int64_t>& shape) {
  double elements = 1.0;
  for (const int64_t dim : shape) elements *= static_cast<double>(dim);
  return elements;
}

double AllElements(const ModelSpec& spec) {
  double elements = 0.0;
  for (const TensorRequirement& tensor : RequiredTensors(spec)) elements += Elements(tensor.shape);
  return elements;
}

}  // namespace

ReportedWeights::ReportedWeights(WeightSource& source, const ModelSpec& spec, int64_t stored_bytes,
                                 ProgressOutput output, std::string what)
    : source_(source),
      bytes_per_element_(static_cast<double>(stored_bytes) / AllElements(spec)),
      progress_(std::move(what), kByteUnit, static_cast<double>(stored_bytes), output) {}

Result<HostTensor> ReportedWeights::Get(std::string_view name, const std::vector<int64_t>& shape) {
  Result<HostTensor> tensor = source_.Get(name, shape);
  Count(shape);
  return tensor;
}

Result<std::optional<QuantizedMatrix>> ReportedWeights::GetQuantized(
    std::string_view name, const std::vector<int64_t>& shape, Quantization type) {
  Result<std::optional<QuantizedMatrix>> matrix = source_.GetQuantized(name, shape, type);
  // Otherwise Get() follows for the same tensor.
  if (matrix.ok() && matrix->has_value()) Count(shape);
  return matrix;
}

Result<std::optional<Fp8Matrix>> ReportedWeights::GetFp8(std::string_view name,
                                                         const std::vector<int64_t>& shape) {
  Result<std::optional<Fp8Matrix>> matrix = source_.GetFp8(name, shape);
  if (matrix.ok() && matrix->has_value()) Count(shape);
  return matrix;
}

Result<std::vector<int32_t>> ReportedWeights::GetIds(std::string_view name,
                                                     const std::vector<int64_t>& shape) {
  Result<std::vector<int32_t>> ids = source_.GetIds(name, shape);
  Count(shape);
  return ids;
}

void ReportedWeights::Count(const std::vector<int64_t>& shape) {
  progress_.Add(Elements(shape) * bytes_per_element_);
}

}  // namespace moeserve::server
