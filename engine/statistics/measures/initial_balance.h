// The balance loss with the temperature that training started from (X-MoE, eq. 9).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/spec/spec.h"
#include "engine/statistics/step_observer.h"

namespace moeserve {

// tau_0 of X-MoE, section 4.1.
inline constexpr double kInitialTemperature = 0.3;          // of softmax gates
inline constexpr double kInitialSigmoidTemperature = 0.07;  // of sigmoid gates

struct InitialBalance {
  double initial = 0.0;      // tau_0
  double temperature = 0.0;  // the learned tau
  // E sum_e T_e P_e, where T_e is the share of the rows that chose e and P_e is the mean of
  // exp(s_e / tau_0) / sum_j exp(s_j / tau_0), with the cosines s. 0 without rows.
  double loss = 0.0;
};

// Sums up the probabilities while the model runs. The engine thread adds rows; other threads may
// read after a request has ended.
class InitialBalanceObserver final : public StepObserver {
 public:
  // `temperatures`: tau of each routed block, nullopt without a learned one. `initial` is tau_0 of
  // all blocks; if absent, that of the paper.
  InitialBalanceObserver(const ModelSpec& spec, std::vector<std::optional<double>> temperatures,
                         std::optional<double> initial);

  ReportContents contents() const override { return {.plans = true, .scores = true}; }
  void OnStep(const Batch& batch, const StepReport& report) override;

  // Returns the loss of a routed block; nullopt if its router has no learned temperature.
  std::optional<InitialBalance> Of(size_t block) const;

 private:
  struct Sums {
    std::optional<double> temperature;
    double initial = 0.0;
    uint64_t rows = 0;
    std::vector<uint64_t> selections;   // [E]
    std::vector<double> probabilities;  // [E]
  };
  std::vector<Sums> blocks_;
};

}  // namespace moeserve
