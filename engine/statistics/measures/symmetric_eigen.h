// Eigenvalues of small symmetric matrices.
#pragma once

#include <cstddef>
#include <vector>

namespace moeserve {

struct SymmetricEigen {
  std::vector<double> values;   // [n] in no order
  std::vector<double> vectors;  // [n * n] row k: the unit eigenvector of values[k]
};

// `matrix` [n * n] is symmetric and finite. Cyclic Jacobi rotations until what is off the diagonal
// is rounding: eigenvalues are right to about 1e-15 of the largest. Time of the order of 10 n^3.
SymmetricEigen EigenOfSymmetric(std::vector<double> matrix, size_t n);

}  // namespace moeserve
