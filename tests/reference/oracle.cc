#include "tests/reference/oracle.h"

#include <cmath>

namespace moeserve::testing {

std::vector<double> OracleLinear(const std::vector<double>& x, const Matrix& w,
                                 const std::vector<double>& b) {
  std::vector<double> y;
  for (size_t o = 0; o < w.size(); ++o) {
    double sum = b.empty() ? 0.0 : b[o];
    for (size_t i = 0; i < x.size(); ++i) sum += x[i] * w[o][i];
    y.push_back(sum);
  }
  return y;
}

double OracleActivation(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kNone:
      return x;
    case ActivationKind::kSilu:
      return x / (1.0 + std::exp(-x));
    case ActivationKind::kGelu:
      return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
    case ActivationKind::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case ActivationKind::kRelu:
      return x < 0.0 ? 0.0 : x;
    case ActivationKind::kTanh:
      return std::tanh(x);
    case ActivationKind::kRelu2:
      return x < 0.0 ? 0.0 : x * x;
  }
  return x;
}

std::vector<double> OracleNorm(const std::vector<double>& x, bool layer, double eps,
                               const std::vector<double>& scale, const std::vector<double>& shift) {
  const double n = static_cast<double>(x.size());
  double mean = 0.0, square = 0.0;
  if (layer) {
    for (double v : x) mean += v / n;
  }
  for (double v : x) square += (v - mean) * (v - mean) / n;
  std::vector<double> y;
  for (size_t i = 0; i < x.size(); ++i) {
    y.push_back((x[i] - mean) / std::sqrt(square + eps) * scale[i] +
                (shift.empty() ? 0.0 : shift[i]));
  }
  return y;
}

double OracleGated(const Activation& a, double gate, double up) {
  if (a.limit > 0) {
    if (!a.limit_after) gate = std::min(gate, double{a.limit});
    up = std::clamp(up, -double{a.limit}, double{a.limit});
  }
  double activated = a.slope == 1.0f ? OracleActivation(a.kind, gate)
                                     : gate / (1.0 + std::exp(-double{a.slope} * gate));
  if (a.limit > 0 && a.limit_after) activated = std::min(activated, double{a.limit});
  return activated * (up + a.up_offset);
}

std::vector<double> OracleAttention(const std::vector<double>& q, const Matrix& keys,
                                    const Matrix& values, double scale, double soft_cap,
                                    std::optional<double> sink, const std::vector<double>& bias) {
  std::vector<double> score;
  double highest = sink.value_or(-INFINITY);
  for (const std::vector<double>& k : keys) {
    double s = 0.0;
    for (size_t d = 0; d < q.size(); ++d) s += q[d] * k[d];
    s *= scale;
    if (!bias.empty()) s += bias[score.size()];
    score.push_back(soft_cap > 0 ? soft_cap * std::tanh(s / soft_cap) : s);
    highest = std::max(highest, score.back());
  }
  double total = sink.has_value() ? std::exp(*sink - highest) : 0.0;
  for (double& s : score) total += s = std::exp(s - highest);
  std::vector<double> out(values.front().size(), 0.0);
  for (size_t j = 0; j < values.size(); ++j) {
    for (size_t d = 0; d < out.size(); ++d) out[d] += score[j] / total * values[j][d];
  }
  return out;
}

}  // namespace moeserve::testing
