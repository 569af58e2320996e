// Eigenvalues of small symmetric matrices.
#pragma once

#include <cstddef>
#include <vector>

namespace moeserve {

struct SymmetricEigen {
  std::vector<double> values;   // [n] eigenvalues, in no particular order
  std::vector<double> vectors;  // [n * n] row k is the unit eigenvector for values[k]
};

// Returns the eigenvalues and eigenvectors of `matrix` [n * n], which must be symmetric and finite.
// Cyclic Jacobi rotations run until the off-diagonal elements are as small as rounding errors; the
// error of the eigenvalues is about 1e-15 times the largest. Takes about 10 n^3 operations.
SymmetricEigen EigenOfSymmetric(std::vector<double> matrix, size_t n);

}  // namespace moeserve
