// Reports how much of a model's weights has been loaded.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/spec/weights.h"
#include "server/commands/progress/progress.h"

namespace moeserve::server {

// Passes tensors on from another source and reports which share of the model's elements they make.
// Single-threaded.
class ReportedWeights final : public WeightSource {
 public:
  // `source` must outlive the object; `stored_bytes` is the size of all tensors in the files.
  // `what` is the work that the report names.
  ReportedWeights(WeightSource& source, const ModelSpec& spec, int64_t stored_bytes,
                  ProgressOutput output, std::string what = "loading");

  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override;
  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override;
  Result<std::optional<Fp8Matrix>> GetFp8(std::string_view name,
                                          const std::vector<int64_t>& shape) override;
  Result<std::vector<int32_t>> GetIds(std::string_view name,
                                      const std::vector<int64_t>& shape) override;
  Quantization StoredQuantization() const override { return source_.StoredQuantization(); }
  absl::Status Check() const override { return source_.Check(); }
  DType DominantDType() const override { return source_.DominantDType(); }

  // All weights have been loaded.
  void Finish() { progress_.Finish(); }

 private:
  // Counts a tensor that was passed on.
  void Count(const std::vector<int64_t>& shape);

  WeightSource& source_;
  double bytes_per_element_ = 0.0;  // a mean, because tensors can have several types
  Progress progress_;
};

}  // namespace moeserve::server
