// The tensors of a router in the CPU's layout.
#pragma once

#include <memory>
#include <span>
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
  // Returns the factors of the experts' weights [E]; null if there are none.
  const float* expert_scale() const {
    return expert_scale_.empty() ? nullptr : expert_scale_.data();
  }
  // Returns the experts [k] that the table lists for a token; null if there is no table.
  const int32_t* TableRow(int32_t token) const {
    return table_.empty() ? nullptr : table_.data() + int64_t{token} * settings_.k;
  }
  // Computes the row `out` [input_width] that has the scores of the row `x`; needed only if
  // ChangesRow() is true. `out` may be `x`.
  void ChangeRow(const float* x, float* out, const KernelTable& table) const;
  // The most rows that Scores() takes.
  static constexpr int kMaxRows = 4;
  // Returns the size of the scratch memory that Scores() needs, in floats.
  size_t scratch_floats() const;
  // Computes the scores[r] [E] of each row x[r] [input_width], which ChangeRow() has changed, after
  // bias and temperature.
  void Scores(std::span<const float* const> x, float* scratch, float* const* scores,
              const KernelTable& table) const;

 private:
  RouteSettings settings_;
  std::vector<float> weights_;  // in the layout for contract_dots; dot router: E vectors of
                                // input_width elements; cosine router: dim vectors of input_width
                                // elements
  std::vector<float> experts_;  // cosine router, in the layout for contract_dots: E vectors of dim
                                // elements, normalised if the settings ask for it
  std::vector<float> bias_;     // dot router: [E]; cosine router: [dim]; empty if there is none
  std::vector<float> choice_bias_;
  std::vector<float> row_weight_;
  std::vector<float> expert_scale_;
  std::vector<int32_t> table_;
  float temperature_ = 1.0f;  // result of ResolvedTemperature()
};

}  // namespace moeserve::cpu
