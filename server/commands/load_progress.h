// Reports how much of a model's weights has been loaded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/spec/weights.h"

namespace moeserve::server {

// Where progress is reported: on a terminal as one line that is rewritten, or in the log.
enum class ProgressOutput { kTerminal, kLog };

// Returns a line such as "loading: 1.2 GiB of 3.4 GiB, 12 s left".
std::string ProgressText(double loaded, int64_t total_bytes, double seconds);

// Passes tensors on from another source and reports which share of the model's elements they make.
// Nothing is reported if loading takes less than a second, or, with kTerminal, if standard error is
// no terminal. Single-threaded.
class ReportedWeights final : public WeightSource {
 public:
  // `source` must outlive the object; `stored_bytes` is the size of all tensors in the files.
  ReportedWeights(WeightSource& source, const ModelSpec& spec, int64_t stored_bytes,
                  ProgressOutput output);
  // Removes the line from the terminal.
  ~ReportedWeights() override;
  ReportedWeights(const ReportedWeights&) = delete;
  ReportedWeights& operator=(const ReportedWeights&) = delete;

  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override;
  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override;
  Result<std::vector<int32_t>> GetIds(std::string_view name,
                                      const std::vector<int64_t>& shape) override;
  Quantization StoredQuantization() const override { return source_.StoredQuantization(); }
  absl::Status Check() const override { return source_.Check(); }
  DType DominantDType() const override { return source_.DominantDType(); }

 private:
  // Counts a tensor that was passed on, and reports if the last report is old enough.
  void Count(const std::vector<int64_t>& shape);

  WeightSource& source_;
  const int64_t stored_bytes_;
  const ProgressOutput output_;
  double elements_ = 0.0;  // of all tensors of the model
  double passed_ = 0.0;
  double begin_ = 0.0;     // of loading, in seconds
  double reported_ = 0.0;  // time of the last report
  bool shown_ = false;     // whether the terminal shows a line
};

}  // namespace moeserve::server
