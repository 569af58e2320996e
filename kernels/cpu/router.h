// Router tensors in the CPU's layout.
#pragma once

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/kernel_table.h"

namespace moeserve::cpu {

// The contract's 32 lanes take groups of 8 adjacent elements in turn. Permuting each 256 elements
// so that element j of lane l stands at j * 32 + l makes the lanes adjacent; short rows are padded
// with zeros, which leave every partial sum as it is.
int64_t PaddedForRouter(int64_t n);
void PermuteForRouter(const float* in, int64_t n, float* out);

class CpuRouter : public Router {
 public:
  CpuRouter(const RouteSettings& settings, const RouterTensors& tensors, const KernelTable& table);

  const RouteSettings& settings() const { return settings_; }
  // Floats that Scores() needs as scratch.
  size_t scratch_floats() const;
  // Scores of one row `x` [input_width] after bias and temperature, into `scores` [E].
  void Scores(const float* x, float* scratch, float* scores, const KernelTable& table) const;

 private:
  RouteSettings settings_;
  int64_t padded_ = 0;
  std::vector<float> weights_;  // permuted: dot [E, padded]; cosine: projection [dim, padded]
  std::vector<float> experts_;  // cosine: [dim, E rounded up to kPanel], normalised if wanted
  std::vector<float> bias_;     // dot [E]; cosine [dim]; empty: none
  float temperature_ = 1.0f;    // divisor or factor, resolved at load
};

}  // namespace moeserve::cpu
