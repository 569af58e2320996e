#include "engine/statistics/measures/symmetric_eigen.h"

#include <cmath>
#include <utility>

namespace moeserve {

SymmetricEigen EigenOfSymmetric(std::vector<double> a, size_t n) {
  SymmetricEigen out;
  std::vector<double>& v = out.vectors;
  v.assign(n * n, 0.0);
  for (size_t i = 0; i < n; ++i) v[i * n + i] = 1.0;
  double total = 0.0;
  for (const double x : a) total += x * x;
  constexpr int kMaxSweeps = 60;
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    double off = 0.0;
    for (size_t p = 0; p < n; ++p) {
      for (size_t q = p + 1; q < n; ++q) off += a[p * n + q] * a[p * n + q];
    }
    if (off <= 1e-34 * total) break;
    for (size_t p = 0; p < n; ++p) {
      for (size_t q = p + 1; q < n; ++q) {
        const double apq = a[p * n + q];
        if (apq == 0.0) continue;
        const double theta = (a[q * n + q] - a[p * n + p]) / (2.0 * apq);
        const double t = std::copysign(1.0, theta) / (std::abs(theta) + std::hypot(theta, 1.0));
        const double c = 1.0 / std::hypot(t, 1.0), s = t * c;
        for (size_t k = 0; k < n; ++k) {
          const double kp = a[k * n + p], kq = a[k * n + q];
          a[k * n + p] = c * kp - s * kq;
          a[k * n + q] = s * kp + c * kq;
        }
        for (size_t k = 0; k < n; ++k) {
          const double pk = a[p * n + k], qk = a[q * n + k];
          a[p * n + k] = c * pk - s * qk;
          a[q * n + k] = s * pk + c * qk;
        }
        a[p * n + q] = a[q * n + p] = 0.0;
        for (size_t k = 0; k < n; ++k) {
          const double pk = v[p * n + k], qk = v[q * n + k];
          v[p * n + k] = c * pk - s * qk;
          v[q * n + k] = s * pk + c * qk;
        }
      }
    }
  }
  out.values.resize(n);
  for (size_t i = 0; i < n; ++i) out.values[i] = a[i * n + i];
  return out;
}

}  // namespace moeserve
