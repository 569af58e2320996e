// Writer for Prometheus' exposition formats, and a histogram.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine_histograms.h"

namespace moeserve::server {

using Label = std::pair<std::string_view, std::string_view>;

// Counts observations in buckets. Thread-safe; Observe() is lock-free.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);  // ascending, without +Inf

  void Observe(double value);

  struct Snapshot {
    // One count per bound, then the count above the last bound; not cumulative.
    std::vector<uint64_t> counts;
    double sum = 0.0;
  };
  Snapshot Read() const;
  const std::vector<double>& bounds() const { return bounds_; }

 private:
  const std::vector<double> bounds_;
  const std::unique_ptr<std::atomic<uint64_t>[]> counts_;
  std::atomic<double> sum_{0.0};
};

// Prometheus' text format 0.0.4, and OpenMetrics 1.0.0.
enum class ExpositionFormat : uint8_t { kText, kOpenMetrics };

// Returns kOpenMetrics if the Accept header prefers OpenMetrics to plain text, else kText.
ExpositionFormat ChooseExposition(std::string_view accept);
std::string_view ContentType(ExpositionFormat format);

// Writes families. A family may be started several times, for example once per model; all its
// samples then stand together, below the first description. Names and labels come from the program
// and are not checked. Names of counters must end in "_total". Both formats contain the same
// samples.
class PrometheusText {
 public:
  explicit PrometheusText(ExpositionFormat format = ExpositionFormat::kText) : format_(format) {}

  // Starts a family, or goes on with one that was started before. Samples belong to the family that
  // was started last. Prefixes the name with "moeserve_", unless it is a standard name "process_*".
  void Family(std::string_view name, std::string_view type, std::string_view help);
  // Starts a family as Family() does, but without a prefix.
  void ForeignFamily(std::string_view name, std::string_view type, std::string_view help);

  // Adds the label model="`model`" in front of the labels of all samples that follow, until it is
  // called again. Nothing is added if `model` is empty.
  void SetModel(std::string model) { model_ = std::move(model); }
  // Does the same for the label "stack".
  void SetStack(std::string_view stack) { stack_ = stack; }

  void Sample(std::initializer_list<Label> labels, double value);
  void Sample(std::initializer_list<Label> labels, uint64_t value);
  void HistogramSamples(std::initializer_list<Label> labels, const Histogram& histogram);
  void HistogramSamples(std::initializer_list<Label> labels, const BucketCounts& counts);
  // `counts` has one count per bound, then the count above the last bound; not cumulative.
  void HistogramSamples(std::initializer_list<Label> labels, std::span<const double> bounds,
                        std::span<const uint64_t> counts, double sum);

  // Writes a family that has one sample without labels.
  void Single(std::string_view name, std::string_view type, std::string_view help, double value);

  // Returns the whole text. Nothing can be written afterwards.
  std::string Take();

 private:
  void Line(std::string_view suffix, std::initializer_list<Label> labels, const Label* extra,
            std::string_view value);

  const ExpositionFormat format_;
  std::vector<std::string> texts_;          // [family]: description and samples
  std::map<std::string, size_t> families_;  // index in texts_
  size_t current_ = 0;                      // index in texts_
  std::string family_;
  std::string model_;
  std::string stack_;
};

// Returns the shortest decimal that parses to `value`, or NaN, +Inf or -Inf.
std::string PrometheusNumber(double value);
// Formats a bucket's upper bound as other exporters do ("1.0", "1e+06"). Bounds are label values,
// so another spelling would start another series.
std::string BucketBound(double bound);

}  // namespace moeserve::server
