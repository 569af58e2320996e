#include "server/metrics/prometheus.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/check.h"
#include "base/error_text.h"

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

// Returns the parts of `text` between separators, without leading and trailing blanks.
std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    std::string_view part = text.substr(0, end);
    while (!part.empty() && (part.front() == ' ' || part.front() == '\t')) part.remove_prefix(1);
    while (!part.empty() && (part.back() == ' ' || part.back() == '\t')) part.remove_suffix(1);
    parts.push_back(part);
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool EqualsIgnoringCase(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; });
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
  snapshot.counts.reserve(bounds_.size() + 1);
  for (size_t i = 0; i <= bounds_.size(); ++i) {
    snapshot.counts.push_back(counts_[i].load(std::memory_order_relaxed));
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

std::string BucketBound(double bound) {
  if (!std::isfinite(bound)) return PrometheusNumber(bound);
  const double size = std::abs(bound);
  char buffer[40];
  if (size != 0.0 && (size >= 1e6 || size < 1e-4)) {
    const auto end =
        std::to_chars(buffer, buffer + sizeof(buffer), bound, std::chars_format::scientific).ptr;
    return std::string(buffer, end);
  }
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), bound, std::chars_format::fixed).ptr;
  std::string text(buffer, end);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

ExpositionFormat ChooseExposition(std::string_view accept) {
  constexpr std::string_view kOpenMetrics = "application/openmetrics-text";
  double open_metrics = 0.0;
  double text = 0.0;
  for (const std::string_view range : Split(accept, ',')) {
    const std::vector<std::string_view> parts = Split(range, ';');
    double quality = 1.0;
    for (size_t i = 1; i < parts.size(); ++i) {
      if (!parts[i].starts_with("q=") && !parts[i].starts_with("Q=")) continue;
      const std::string_view number = parts[i].substr(2);
      const auto read = std::from_chars(number.data(), number.data() + number.size(), quality);
      // A quality of NaN would compare neither larger nor smaller than the other format's quality.
      if (read.ec != std::errc() || !(quality >= 0.0)) quality = 0.0;
    }
    if (EqualsIgnoringCase(parts[0], kOpenMetrics)) open_metrics = std::max(open_metrics, quality);
    if (EqualsIgnoringCase(parts[0], "text/plain")) text = std::max(text, quality);
  }
  return open_metrics > 0.0 && open_metrics >= text ? ExpositionFormat::kOpenMetrics
                                                    : ExpositionFormat::kText;
}

std::string_view ContentType(ExpositionFormat format) {
  return format == ExpositionFormat::kOpenMetrics
             ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
             : "text/plain; version=0.0.4; charset=utf-8";
}

void PrometheusText::Family(std::string_view name, std::string_view type, std::string_view help) {
  if (name.starts_with("process_")) {
    ForeignFamily(name, type, help);
  } else {
    ForeignFamily(Concat("moeserve_", name), type, help);
  }
}

void PrometheusText::ForeignFamily(std::string_view name, std::string_view type,
                                   std::string_view help) {
  family_ = name;
  const auto [at, is_new] = families_.try_emplace(family_, texts_.size());
  current_ = at->second;
  if (!is_new) return;
  std::string& out = texts_.emplace_back();
  const bool open_metrics = format_ == ExpositionFormat::kOpenMetrics;
  // In OpenMetrics, the suffix "_total" belongs to a counter's sample, not to the name of its
  // family.
  if (open_metrics && type == "counter" && name.ends_with("_total")) {
    name.remove_suffix(std::string_view("_total").size());
  }
  out += "# HELP ";
  out += name;
  out += ' ';
  AppendEscaped(out, help, open_metrics);
  out += "\n# TYPE ";
  out += name;
  out += ' ';
  out += type;
  out += '\n';
}

void PrometheusText::Line(std::string_view suffix, std::initializer_list<Label> labels,
                          const Label* extra, std::string_view value) {
  std::string& out = texts_[current_];
  out += family_;
  out += suffix;
  bool first = true;
  const auto add = [&](const Label& label) {
    out += first ? '{' : ',';
    first = false;
    out += label.first;
    out += "=\"";
    AppendEscaped(out, label.second, true);
    out += '"';
  };
  if (!model_.empty()) add({"model", model_});
  if (!stack_.empty()) add({"stack", stack_});
  for (const Label& label : labels) add(label);
  if (extra != nullptr) add(*extra);
  if (!first) out += '}';
  out += ' ';
  out += value;
  out += '\n';
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
  HistogramSamples(labels, histogram.bounds(), snapshot.counts, snapshot.sum);
}

void PrometheusText::HistogramSamples(std::initializer_list<Label> labels,
                                      const BucketCounts& counts) {
  HistogramSamples(labels, counts.bounds(), counts.counts(), counts.sum());
}

void PrometheusText::HistogramSamples(std::initializer_list<Label> labels,
                                      std::span<const double> bounds,
                                      std::span<const uint64_t> counts, double sum) {
  MOESERVE_CHECK(counts.size() == bounds.size() + 1, "a count for each bound and one beyond");
  uint64_t cumulative = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    cumulative += counts[i];
    const std::string bound = i < bounds.size() ? BucketBound(bounds[i]) : "+Inf";
    const Label le{"le", bound};
    Line("_bucket", labels, &le, std::to_string(cumulative));
  }
  Line("_sum", labels, nullptr, PrometheusNumber(sum));
  Line("_count", labels, nullptr, std::to_string(cumulative));
}

void PrometheusText::Single(std::string_view name, std::string_view type, std::string_view help,
                            double value) {
  Family(name, type, help);
  Sample({}, value);
}

std::string PrometheusText::Take() {
  std::string out;
  for (const std::string& text : texts_) out += text;
  if (format_ == ExpositionFormat::kOpenMetrics) out += "# EOF\n";
  return out;
}

}  // namespace moeserve::server
