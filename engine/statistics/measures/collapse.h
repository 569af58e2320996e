// Representation collapse of a router's input rows (X-MoE, eq. 11).
#pragma once

#include <cstdint>

#include "base/status.h"
#include "engine/statistics/hidden_samples.h"

namespace moeserve {

struct Collapse {
  double value = 0.0;  // smaller values mean more collapse
  int classes = 0;     // number of experts that are the first choice of at least one row
  int rank = 0;        // rank of the between-class covariance
  int64_t rows = 0;
};

// Eigenvalues of the between-class covariance below this share of the largest eigenvalue count as
// 0.
inline constexpr double kCollapseCutoff = 1e-10;
// Largest number of classes; the computing time grows with its cube.
inline constexpr int kMaxCollapseClasses = 1024;

// Returns an upper bound on the time of RepresentationCollapse(), roughly in nanoseconds.
double CollapseWork(const HiddenSample& sample);

// Returns Tr(Sigma_W pinv(Sigma_B)). The class of a row is the expert with the row's largest
// weight. With the class means m_c and the mean m of all n rows, Sigma_W = (1/n) sum_c sum_{i in c}
// (x_i - m_c)(x_i - m_c)^T and Sigma_B = (1/C) sum_c (m_c - m)(m_c - m)^T over the C classes that
// have rows. FailedPrecondition if there are fewer than two classes or the class means are equal;
// InvalidArgument if there are more than kMaxCollapseClasses classes.
Result<Collapse> RepresentationCollapse(const HiddenSample& sample);

}  // namespace moeserve
