// Biases of distances for tests of attention.
#pragma once

#include <algorithm>
#include <vector>

namespace moeserve::testing {

// Returns biases by distance for each head (AttentionArgs::bias): [heads * distances], or
// [heads * (2 * distances - 1)] if attention is not causal. Neighbours differ, and those of a head
// that all larger distances have differ from 0.
inline std::vector<float> DistanceBiases(int heads, int distances, bool causal = true) {
  std::vector<float> biases;
  if (distances == 0) return biases;
  for (int i = 0; i < heads * (causal ? distances : 2 * distances - 1); ++i) {
    biases.push_back(0.5f * static_cast<float>(i * 7 % 11) - 3.0f);
  }
  return biases;
}

// Returns the biases of a head for the keys [first, last] of a query at position `own`, as
// OracleAttention() takes them; empty if `distances` is 0.
inline std::vector<double> BiasesOfKeys(int heads, int distances, int head, int first, int last,
                                        int own, bool causal) {
  std::vector<double> biases;
  if (distances == 0) return biases;
  const std::vector<float> all = DistanceBiases(heads, distances, causal);
  const int most = distances - 1;
  for (int p = first; p <= last; ++p) {
    const int n = own - p;
    const int at = causal ? head * distances + std::min(n, most)
                          : head * (2 * most + 1) + std::clamp(n, -most, most) + most;
    biases.push_back(all[static_cast<size_t>(at)]);
  }
  return biases;
}

// Of causal attention, in which the query is at position `last`.
inline std::vector<double> BiasesOfKeys(int heads, int distances, int head, int first, int last) {
  return BiasesOfKeys(heads, distances, head, first, last, last, true);
}

}  // namespace moeserve::testing
