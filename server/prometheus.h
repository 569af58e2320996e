// The Prometheus text format and the instruments that feed it.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moeserve::server {

using Label = std::pair<std::string_view, std::string_view>;

// Counts observations by size. Observe is lock-free and thread-safe.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);  // ascending, without +Inf

  void Observe(double value);

  struct Snapshot {
    std::vector<uint64_t> cumulative;  // one per bound, then +Inf
    double sum = 0.0;
  };
  Snapshot Read() const;
  const std::vector<double>& bounds() const { return bounds_; }

 private:
  const std::vector<double> bounds_;
  const std::unique_ptr<std::atomic<uint64_t>[]> counts_;
  std::atomic<double> sum_{0.0};
};

// Writes families one after the other. Names and labels are constants of ours and not checked.
class PrometheusText {
 public:
  // Starts a family; its samples must follow before the next one starts.
  void Family(std::string_view name, std::string_view type, std::string_view help);
  void Sample(std::initializer_list<Label> labels, double value);
  void Sample(std::initializer_list<Label> labels, uint64_t value);
  void HistogramSamples(std::initializer_list<Label> labels, const Histogram& histogram);

  // A family of one sample without labels.
  void Single(std::string_view name, std::string_view type, std::string_view help, double value);

  std::string Take() { return std::move(out_); }

 private:
  void Line(std::string_view suffix, std::initializer_list<Label> labels, const Label* extra,
            std::string_view value);

  std::string out_;
  std::string family_;
};

// A number as the format writes it: shortest exact decimal, NaN, +Inf, -Inf.
std::string PrometheusNumber(double value);

}  // namespace moeserve::server
