#include "server/prometheus.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace moeserve::server {
namespace {

void AppendEscaped(std::string& out, std::string_view text, bool quotes) {
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
}

}  // namespace

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(new std::atomic<uint64_t>[bounds_.size() + 1]()) {}

void Histogram::Observe(double value) {
  const auto it = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  counts_[it - bounds_.begin()].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

Histogram::Snapshot Histogram::Read() const {
  Snapshot snapshot;
  uint64_t total = 0;
  for (size_t i = 0; i <= bounds_.size(); ++i) {
    total += counts_[i].load(std::memory_order_relaxed);
    snapshot.cumulative.push_back(total);
  }
  snapshot.sum = sum_.load(std::memory_order_relaxed);
  return snapshot;
}

std::string PrometheusNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return std::string(buffer, end);
}

void PrometheusText::Family(std::string_view name, std::string_view type, std::string_view help) {
  family_ = "moeserve_";
  // The process metrics have standard names without a prefix.
  if (name.starts_with("process_")) family_.clear();
  family_ += name;
  out_ += "# HELP " + family_ + ' ';
  AppendEscaped(out_, help, false);
  out_ += "\n# TYPE " + family_ + ' ';
  out_ += type;
  out_ += '\n';
}

void PrometheusText::Line(std::string_view suffix, std::initializer_list<Label> labels,
                          const Label* extra, std::string_view value) {
  out_ += family_;
  out_ += suffix;
  bool first = true;
  const auto add = [&](const Label& label) {
    out_ += first ? '{' : ',';
    first = false;
    out_ += label.first;
    out_ += "=\"";
    AppendEscaped(out_, label.second, true);
    out_ += '"';
  };
  for (const Label& label : labels) add(label);
  if (extra != nullptr) add(*extra);
  if (!first) out_ += '}';
  out_ += ' ';
  out_ += value;
  out_ += '\n';
}

void PrometheusText::Sample(std::initializer_list<Label> labels, double value) {
  Line("", labels, nullptr, PrometheusNumber(value));
}

void PrometheusText::Sample(std::initializer_list<Label> labels, uint64_t value) {
  Line("", labels, nullptr, std::to_string(value));
}

void PrometheusText::HistogramSamples(std::initializer_list<Label> labels,
                                      const Histogram& histogram) {
  const Histogram::Snapshot snapshot = histogram.Read();
  const size_t count = histogram.bounds().size();
  for (size_t i = 0; i <= count; ++i) {
    const std::string bound = i < count ? PrometheusNumber(histogram.bounds()[i]) : "+Inf";
    const Label le{"le", bound};
    Line("_bucket", labels, &le, std::to_string(snapshot.cumulative[i]));
  }
  Line("_sum", labels, nullptr, PrometheusNumber(snapshot.sum));
  Line("_count", labels, nullptr, std::to_string(snapshot.cumulative.back()));
}

void PrometheusText::Single(std::string_view name, std::string_view type, std::string_view help,
                            double value) {
  Family(name, type, help);
  Sample({}, value);
}

}  // namespace moeserve::server
