// The tensors of a router in the CPU's layout.
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
  // Returns the choice biases [E]; null if there are none.
  const float* choice_bias() const { return choice_bias_.empty() ? nullptr : choice_bias_.data(); }
  // Returns the size of the scratch memory that Scores() needs, in floats.
  size_t scratch_floats() const;
  // Computes the scores [E] of one row `x` [input_width], after bias and temperature.
  void Scores(const float* x, float* scratch, float* scores, const KernelTable& table) const;

 private:
  RouteSettings settings_;
  std::vector<float> weights_;  // in the layout for contract_dots; dot router: E vectors of
                                // input_width elements; cosine router: dim vectors of input_width
                                // elements
  std::vector<float> experts_;  // cosine router, in the layout for contract_dots: E vectors of dim
                                // elements, normalised if the settings ask for it
  std::vector<float> bias_;     // dot router: [E]; cosine router: [dim]; empty if there is none
  std::vector<float> choice_bias_;
  float temperature_ = 1.0f;  // result of ResolvedTemperature()
};

}  // namespace moeserve::cpu
