// Double-precision oracles of the kernels, written to be obviously right.
#pragma once

#include <vector>

#include "kernels/backend.h"

namespace moeserve::testing {

using Matrix = std::vector<std::vector<double>>;  // [rows][cols]

// x W^T + b. `w` [out][in], `b` [out] or empty.
std::vector<double> OracleLinear(const std::vector<double>& x, const Matrix& w,
                                 const std::vector<double>& b);

double OracleActivation(ActivationKind kind, double x);

// RMS norm, or layer norm with shift.
std::vector<double> OracleNorm(const std::vector<double>& x, bool layer, double eps,
                               const std::vector<double>& scale, const std::vector<double>& shift);

// softmax(scale * q.k) over keys, then the weighted sum of values. keys, values: [positions][dim].
std::vector<double> OracleAttention(const std::vector<double>& q, const Matrix& keys,
                                    const Matrix& values, double scale);

}  // namespace moeserve::testing
