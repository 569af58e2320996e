// Biases of distances for tests of attention.
#pragma once

#include <algorithm>
#include <vector>

namespace moeserve::testing {

// Returns biases [heads * distances] by distance (AttentionArgs::bias). Neighbours differ, and the
// last one of a head, which all larger distances have, differs from 0.
inline std::vector<float> DistanceBiases(int heads, int distances) {
  std::vector<float> biases;
  for (int i = 0; i < heads * distances; ++i) {
    biases.push_back(0.5f * static_cast<float>(i * 7 % 11) - 3.0f);
  }
  return biases;
}

// Returns the biases of a head for the keys [first, last] of a query at position `last`, as
// OracleAttention() takes them; empty if `distances` is 0.
inline std::vector<double> BiasesOfKeys(int heads, int distances, int head, int first, int last) {
  std::vector<double> biases;
  if (distances == 0) return biases;
  const std::vector<float> all = DistanceBiases(heads, distances);
  for (int p = first; p <= last; ++p) {
    biases.push_back(
        all[static_cast<size_t>(head * distances + std::min(last - p, distances - 1))]);
  }
  return biases;
}

}  // namespace moeserve::testing
