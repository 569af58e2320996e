// Representation collapse of the rows that a router sees (X-MoE, eq. 11).
#pragma once

#include <cstdint>

#include "base/status.h"
#include "engine/statistics/hidden_samples.h"

namespace moeserve {

struct Collapse {
  double value = 0.0;  // smaller: more collapsed
  int classes = 0;     // experts that are the first choice of some row
  int rank = 0;        // of the between-class covariance
  int64_t rows = 0;
};

// Eigenvalues of the between-class covariance below this share of the largest count as 0.
inline constexpr double kCollapseCutoff = 1e-10;
// Time grows with the cube of the classes.
inline constexpr int kMaxCollapseClasses = 1024;

// Work of RepresentationCollapse() at most, in steps of a nanosecond or so.
double CollapseWork(const HiddenSample& sample);

// Tr(Sigma_W pinv(Sigma_B)). The class of a row is the expert of its largest weight; with class
// means m_c and the mean m of all n rows, Sigma_W = (1/n) sum_c sum_{i in c} (x_i - m_c)(x_i -
// m_c)^T and Sigma_B = (1/C) sum_c (m_c - m)(m_c - m)^T over the C classes that have rows.
// FailedPrecondition: fewer than two classes, or class means that do not differ; InvalidArgument:
// more than kMaxCollapseClasses.
Result<Collapse> RepresentationCollapse(const HiddenSample& sample);

}  // namespace moeserve
