// Reference implementations of the kernels in double precision, as simple as possible.
#pragma once

#include <optional>
#include <vector>

#include "kernels/backend.h"

namespace moeserve::testing {

using Matrix = std::vector<std::vector<double>>;  // [rows][cols]

// Returns x W^T + b. `w` is [out][in], `b` is [out] or empty.
std::vector<double> OracleLinear(const std::vector<double>& x, const Matrix& w,
                                 const std::vector<double>& b);

double OracleActivation(ActivationKind kind, double x);

// Returns the RMS norm, or, if `layer`, the layer norm with shift.
std::vector<double> OracleNorm(const std::vector<double>& x, bool layer, double eps,
                               const std::vector<double>& scale, const std::vector<double>& shift);

// Returns the hidden unit of a gated layer with outputs `gate` and `up`.
double OracleGated(const Activation& activation, double gate, double up);

// Returns the sum of the values weighted by softmax(scale * q.k) over all keys. keys and values:
// [positions][dim]. With soft_cap > 0, each score s becomes soft_cap * tanh(s / soft_cap). `sink`
// is one more score of the softmax. `bias` [positions] is added to the scaled scores; may be empty.
std::vector<double> OracleAttention(const std::vector<double>& q, const Matrix& keys,
                                    const Matrix& values, double scale, double soft_cap = 0.0,
                                    std::optional<double> sink = std::nullopt,
                                    const std::vector<double>& bias = {});

}  // namespace moeserve::testing
