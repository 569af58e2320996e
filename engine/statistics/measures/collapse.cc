#include "engine/statistics/measures/collapse.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/statistics/measures/symmetric_eigen.h"

namespace moeserve {
namespace {

// The rows of a sample grouped into classes, and the mean of each class.
struct Classes {
  size_t width = 0;
  size_t count = 0;             // C
  std::vector<size_t> label;    // [rows] class of each row
  std::vector<double> means;    // [C, width] class means m_c
  std::vector<double> offsets;  // [C, width] m_c - m, with m the mean of all rows
};

// FailedPrecondition if there are fewer than two classes; InvalidArgument if there are too many.
Result<Classes> Classify(const HiddenSample& sample) {
  std::map<int32_t, size_t> class_of;
  for (const int32_t e : sample.experts) class_of.try_emplace(e, 0);
  Classes out;
  out.width = static_cast<size_t>(sample.width);
  for (auto& [expert, index] : class_of) index = out.count++;
  if (out.count < 2) {
    return absl::FailedPreconditionError(
        "representation collapse needs rows of at least two experts in the sample");
  }
  if (out.count > static_cast<size_t>(kMaxCollapseClasses)) {
    return absl::InvalidArgumentError(Concat("representation collapse is computed for at most ",
                                             kMaxCollapseClasses, " experts, found ", out.count));
  }
  const size_t width = out.width, rows = sample.experts.size();
  out.label.resize(rows);
  out.means.resize(out.count * width);
  out.offsets.resize(out.count * width);
  std::vector<double> size(out.count), mean(width);
  for (size_t i = 0; i < rows; ++i) {
    out.label[i] = class_of.at(sample.experts[i]);
    size[out.label[i]] += 1.0;
    for (size_t j = 0; j < width; ++j) {
      const double x = sample.rows[i * width + j];
      mean[j] += x;
      out.means[out.label[i] * width + j] += x;
    }
  }
  for (double& m : mean) m /= static_cast<double>(rows);
  for (size_t c = 0; c < out.count; ++c) {
    for (size_t j = 0; j < width; ++j) {
      out.means[c * width + j] /= size[c];
      out.offsets[c * width + j] = out.means[c * width + j] - mean[j];
    }
  }
  return out;
}

// Returns the eigenvalues and eigenvectors of M M^T / C, where M [C, width] is the matrix of
// offsets. Sigma_B = M^T M / C has the same nonzero eigenvalues lambda, with the eigenvectors M^T v
// / sqrt(C lambda).
SymmetricEigen EigenOfOffsets(const Classes& c) {
  std::vector<double> gram(c.count * c.count);
  for (size_t a = 0; a < c.count; ++a) {
    for (size_t b = 0; b <= a; ++b) {
      double dot = 0.0;
      for (size_t j = 0; j < c.width; ++j) {
        dot += c.offsets[a * c.width + j] * c.offsets[b * c.width + j];
      }
      gram[a * c.count + b] = gram[b * c.count + a] = dot / static_cast<double>(c.count);
    }
  }
  return EigenOfSymmetric(std::move(gram), c.count);
}

// Returns the within-class variance of the rows along the direction M^T v, where `v` [C] is an
// eigenvector from EigenOfOffsets().
double VarianceWithin(const HiddenSample& sample, const Classes& c, const double* v) {
  std::vector<double> direction(c.width), center(c.count);
  for (size_t a = 0; a < c.count; ++a) {
    for (size_t j = 0; j < c.width; ++j) direction[j] += v[a] * c.offsets[a * c.width + j];
  }
  double norm = 0.0;
  for (const double d : direction) norm += d * d;
  for (double& d : direction) d /= std::sqrt(norm);
  for (size_t a = 0; a < c.count; ++a) {
    for (size_t j = 0; j < c.width; ++j) center[a] += c.means[a * c.width + j] * direction[j];
  }
  const size_t rows = sample.experts.size();
  double within = 0.0;
  for (size_t i = 0; i < rows; ++i) {
    double along = 0.0;
    for (size_t j = 0; j < c.width; ++j) along += sample.rows[i * c.width + j] * direction[j];
    const double off = along - center[c.label[i]];
    within += off * off;
  }
  return within / static_cast<double>(rows);
}

}  // namespace

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
  MOESERVE_ASSIGN_OR_RETURN(const Classes classes, Classify(sample));
  const SymmetricEigen eigen = EigenOfOffsets(classes);
  const double largest = *std::max_element(eigen.values.begin(), eigen.values.end());
  if (!(largest > 0.0)) {
    return absl::FailedPreconditionError(
        "representation collapse is undefined: the experts' mean rows do not differ");
  }
  Collapse out;
  out.classes = static_cast<int>(classes.count);
  out.rows = static_cast<int64_t>(sample.experts.size());
  for (size_t k = 0; k < classes.count; ++k) {
    const double lambda = eigen.values[k];
    if (!(lambda > kCollapseCutoff * largest)) continue;
    ++out.rank;
    const double* const vector = eigen.vectors.data() + k * classes.count;
    out.value += VarianceWithin(sample, classes, vector) / lambda;
  }
  return out;
}

}  // namespace moeserve
