#include "server/commands/load_progress.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "base/message.h"
#include "server/base/logging.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

constexpr double kSecondsBetweenLines = 0.5;
constexpr double kSecondsBetweenLogLines = 5.0;
constexpr double kShortLoading = 1.0;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Elements(const std::vector<int64_t>& shape) {
  double elements = 1.0;
  for (const int64_t dim : shape) elements *= static_cast<double>(dim);
  return elements;
}

}  // namespace

std::string ProgressText(double loaded, int64_t total_bytes, double seconds) {
  loaded = std::clamp(loaded, 0.0, 1.0);
  const auto bytes = static_cast<int64_t>(loaded * static_cast<double>(total_bytes));
  std::string text = Concat("loading: ", ShowBytes(bytes), " of ", ShowBytes(total_bytes));
  if (loaded > 0.0) {
    const double left = seconds * (1.0 - loaded) / loaded;
    text.append(Concat(", ", static_cast<int64_t>(std::ceil(left)), " s left"));
  }
  return text;
}

ReportedWeights::ReportedWeights(WeightSource& source, const ModelSpec& spec, int64_t stored_bytes,
                                 ProgressOutput output)
    : source_(source), stored_bytes_(stored_bytes), output_(output), begin_(Now()) {
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    elements_ += Elements(tensor.shape);
  }
  reported_ = begin_ + kShortLoading;
}

ReportedWeights::~ReportedWeights() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

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

Result<std::vector<int32_t>> ReportedWeights::GetIds(std::string_view name,
                                                     const std::vector<int64_t>& shape) {
  Result<std::vector<int32_t>> ids = source_.GetIds(name, shape);
  Count(shape);
  return ids;
}

void ReportedWeights::Count(const std::vector<int64_t>& shape) {
  passed_ += Elements(shape);
  const bool log = output_ == ProgressOutput::kLog;
  const double now = Now();
  if (now < reported_ + (log ? kSecondsBetweenLogLines : kSecondsBetweenLines)) return;
  reported_ = now;
  const std::string text = ProgressText(passed_ / elements_, stored_bytes_, now - begin_);
  if (log) {
    LogInfo("load", text);
  } else if (isatty(STDERR_FILENO) == 1) {
    std::fprintf(stderr, "\r%s\x1b[K", text.c_str());
    std::fflush(stderr);
    shown_ = true;
  }
}

}  // namespace moeserve::server
