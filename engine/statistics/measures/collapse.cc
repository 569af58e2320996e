#include "engine/statistics/measures/collapse.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "engine/statistics/measures/symmetric_eigen.h"

namespace moeserve {

double CollapseWork(const HiddenSample& sample) {
  std::vector<int32_t> classes = sample.experts;
  std::sort(classes.begin(), classes.end());
  const double count =
      static_cast<double>(std::unique(classes.begin(), classes.end()) - classes.begin());
  const double width = static_cast<double>(sample.width);
  return count * width * (static_cast<double>(sample.size()) + 2.0 * count) +
         20.0 * count * count * count;
}

Result<Collapse> RepresentationCollapse(const HiddenSample& sample) {
  const size_t width = static_cast<size_t>(sample.width);
  const size_t rows = sample.experts.size();
  std::map<int32_t, size_t> class_of;
  for (const int32_t e : sample.experts) class_of.try_emplace(e, 0);
  size_t classes = 0;
  for (auto& [expert, index] : class_of) index = classes++;
  if (classes < 2) {
    return absl::FailedPreconditionError(
        "representation collapse needs rows of at least two experts in the sample");
  }
  if (classes > static_cast<size_t>(kMaxCollapseClasses)) {
    return absl::InvalidArgumentError("representation collapse is computed for at most " +
                                      std::to_string(kMaxCollapseClasses) + " experts, found " +
                                      std::to_string(classes));
  }

  std::vector<size_t> label(rows);
  std::vector<double> size(classes), mean(width), means(classes * width);
  for (size_t i = 0; i < rows; ++i) {
    label[i] = class_of.at(sample.experts[i]);
    size[label[i]] += 1.0;
    for (size_t j = 0; j < width; ++j) {
      const double x = sample.rows[i * width + j];
      mean[j] += x;
      means[label[i] * width + j] += x;
    }
  }
  for (double& m : mean) m /= static_cast<double>(rows);
  std::vector<double> offsets(classes * width);  // m_c - m
  for (size_t c = 0; c < classes; ++c) {
    for (size_t j = 0; j < width; ++j) {
      means[c * width + j] /= size[c];
      offsets[c * width + j] = means[c * width + j] - mean[j];
    }
  }

  // With M the matrix of offsets [C, width], Sigma_B = M^T M / C has the eigenvalues of M M^T / C,
  // and the eigenvectors M^T v / sqrt(C lambda).
  std::vector<double> gram(classes * classes);
  for (size_t a = 0; a < classes; ++a) {
    for (size_t b = 0; b <= a; ++b) {
      double dot = 0.0;
      for (size_t j = 0; j < width; ++j) dot += offsets[a * width + j] * offsets[b * width + j];
      gram[a * classes + b] = gram[b * classes + a] = dot / static_cast<double>(classes);
    }
  }
  const SymmetricEigen eigen = EigenOfSymmetric(std::move(gram), classes);
  const double largest = *std::max_element(eigen.values.begin(), eigen.values.end());
  if (!(largest > 0.0)) {
    return absl::FailedPreconditionError(
        "representation collapse is undefined: the experts' mean rows do not differ");
  }

  Collapse out;
  out.classes = static_cast<int>(classes);
  out.rows = static_cast<int64_t>(rows);
  std::vector<double> direction(width), center(classes);
  for (size_t k = 0; k < classes; ++k) {
    const double lambda = eigen.values[k];
    if (!(lambda > kCollapseCutoff * largest)) continue;
    ++out.rank;
    std::fill(direction.begin(), direction.end(), 0.0);
    for (size_t c = 0; c < classes; ++c) {
      const double v = eigen.vectors[k * classes + c];
      for (size_t j = 0; j < width; ++j) direction[j] += v * offsets[c * width + j];
    }
    double norm = 0.0;
    for (const double d : direction) norm += d * d;
    for (double& d : direction) d /= std::sqrt(norm);
    for (size_t c = 0; c < classes; ++c) {
      center[c] = 0.0;
      for (size_t j = 0; j < width; ++j) center[c] += means[c * width + j] * direction[j];
    }
    double within = 0.0;
    for (size_t i = 0; i < rows; ++i) {
      double along = 0.0;
      for (size_t j = 0; j < width; ++j) along += sample.rows[i * width + j] * direction[j];
      const double off = along - center[label[i]];
      within += off * off;
    }
    out.value += within / static_cast<double>(rows) / lambda;
  }
  return out;
}

}  // namespace moeserve
