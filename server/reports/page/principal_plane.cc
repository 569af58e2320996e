#include "server/reports/page/principal_plane.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace moeserve::server {
namespace {

constexpr int kIterations = 30;
constexpr size_t kMostRows = 4096;  // the directions follow from so many rows

using Vector = std::vector<double>;

double Dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Returns the length of `v` and makes it 1, if it is not 0.
double Normalize(Vector& v) {
  const double length = std::sqrt(Dot(v, v));
  for (double& x : v) x = length > 0.0 ? x / length : 0.0;
  return length;
}

void Remove(const Vector& direction, Vector& from) {
  const double part = Dot(direction, from);
  for (size_t i = 0; i < from.size(); ++i) from[i] -= part * direction[i];
}

// Returns the direction in which `rows` (with mean 0) vary most, orthogonal to `other`, by the
// power method, and sets `variance` to the sum of squares along it.
Vector MainDirection(const std::vector<Vector>& rows, const Vector* other, double& variance) {
  const size_t width = rows.front().size();
  Vector direction(width);
  // Any direction that is not orthogonal to the result will do.
  for (size_t i = 0; i < width; ++i) direction[i] = 1.0 + 0.37 * static_cast<double>(i * 7919 % 31);
  for (int k = 0; k < kIterations; ++k) {
    if (other != nullptr) Remove(*other, direction);
    Normalize(direction);
    Vector next(width);
    for (const Vector& row : rows) {
      const double part = Dot(row, direction);
      for (size_t i = 0; i < width; ++i) next[i] += part * row[i];
    }
    direction = std::move(next);
  }
  if (other != nullptr) Remove(*other, direction);
  Normalize(direction);
  variance = 0.0;
  for (const Vector& row : rows) variance += std::pow(Dot(row, direction), 2);
  return direction;
}

}  // namespace

PrincipalPlane PlaneOf(const HiddenSample& sample, size_t points) {
  PrincipalPlane out;
  const auto n = static_cast<size_t>(sample.size());
  const auto width = static_cast<size_t>(sample.width);
  if (n < 3 || width < 2) return out;
  const size_t used = std::min(n, kMostRows);
  std::vector<Vector> rows;
  std::vector<int> experts;
  Vector mean(width);
  for (size_t i = 0; i < used; ++i) {
    const size_t r = i * n / used;
    const float* row = sample.rows.data() + r * width;
    rows.emplace_back(row, row + width);
    experts.push_back(sample.experts[r]);
    for (size_t c = 0; c < width; ++c) mean[c] += rows.back()[c] / static_cast<double>(used);
  }
  double all = 0.0;
  for (Vector& row : rows) {
    for (size_t c = 0; c < width; ++c) row[c] -= mean[c];
    all += Dot(row, row);
  }
  if (!(all > 0.0)) return out;
  double first_variance = 0.0, second_variance = 0.0;
  const Vector first = MainDirection(rows, nullptr, first_variance);
  const Vector second = MainDirection(rows, &first, second_variance);
  out.explained = (first_variance + second_variance) / all;
  const size_t shown = std::min(points, used);
  for (size_t i = 0; i < shown; ++i) {
    const size_t r = i * used / shown;
    out.x.push_back(Dot(rows[r], first));
    out.y.push_back(Dot(rows[r], second));
    out.experts.push_back(experts[r]);
  }
  return out;
}

}  // namespace moeserve::server
