// Router tensors in the CPU's layout.
#pragma once

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::cpu {

class CpuRouter : public Router {
 public:
  CpuRouter(const RouteSettings& settings, const RouterTensors& tensors);

  const RouteSettings& settings() const { return settings_; }
  // Floats that Scores() needs as scratch.
  size_t scratch_floats() const;
  // Scores of one row `x` [input_width] after bias and temperature, into `scores` [E].
  void Scores(const float* x, float* scratch, float* scores, const KernelTable& table) const;

 private:
  RouteSettings settings_;
  std::vector<float> weights_;  // for contract_dots: dot [E] of input_width; cosine: [dim] of it
  std::vector<float> experts_;  // cosine, for contract_dots: [E] of dim, normalised if wanted
  std::vector<float> bias_;     // dot [E]; cosine [dim]; empty: none
  float temperature_ = 1.0f;    // ResolvedTemperature()
};

}  // namespace moeserve::cpu
