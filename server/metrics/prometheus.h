// Prometheus exposition formats, and a histogram.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine_histograms.h"

namespace moeserve::server {

using Label = std::pair<std::string_view, std::string_view>;

// Counts observations in buckets. Thread-safe; Observe is lock-free.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);  // ascending, without +Inf

  void Observe(double value);

  struct Snapshot {
    std::vector<uint64_t> counts;  // one per bound, then the overflow
    double sum = 0.0;
  };
  Snapshot Read() const;
  const std::vector<double>& bounds() const { return bounds_; }

 private:
  const std::vector<double> bounds_;
  const std::unique_ptr<std::atomic<uint64_t>[]> counts_;
  std::atomic<double> sum_{0.0};
};

enum class ExpositionFormat : uint8_t { kText, kOpenMetrics };  // text 0.0.4, OpenMetrics 1.0.0

// Returns OpenMetrics if the Accept header prefers it to plain text.
ExpositionFormat ChooseExposition(std::string_view accept);
std::string_view ContentType(ExpositionFormat format);

// Writes families one after the other. Names and labels come from the program and are not checked;
// names of counters end in "_total". Both formats have the same samples.
class PrometheusText {
 public:
  explicit PrometheusText(ExpositionFormat format = ExpositionFormat::kText) : format_(format) {}

  // Starts a family; its samples must follow before the next one starts. The name gets the prefix
  // "moeserve_" unless it is one of the standard names "process_*".
  void Family(std::string_view name, std::string_view type, std::string_view help);
  // The same for a name without our prefix.
  void ForeignFamily(std::string_view name, std::string_view type, std::string_view help);

  void Sample(std::initializer_list<Label> labels, double value);
  void Sample(std::initializer_list<Label> labels, uint64_t value);
  void HistogramSamples(std::initializer_list<Label> labels, const Histogram& histogram);
  void HistogramSamples(std::initializer_list<Label> labels, const BucketCounts& counts);
  // `counts`: one per bound, then the overflow; not cumulative.
  void HistogramSamples(std::initializer_list<Label> labels, std::span<const double> bounds,
                        std::span<const uint64_t> counts, double sum);

  // A family of one sample without labels.
  void Single(std::string_view name, std::string_view type, std::string_view help, double value);

  // Returns the whole text. Nothing can be added afterwards.
  std::string Take();

 private:
  void Line(std::string_view suffix, std::initializer_list<Label> labels, const Label* extra,
            std::string_view value);

  const ExpositionFormat format_;
  std::string out_;
  std::string family_;
};

// Formats a number as the shortest exact decimal, NaN, +Inf or -Inf.
std::string PrometheusNumber(double value);
// Formats a bucket's bound as other exporters do ("1.0", "1e+06"): bounds are label values, so
// another spelling would be another series.
std::string BucketBound(double bound);

}  // namespace moeserve::server
