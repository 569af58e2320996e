// Chooses the forms of routing (routing/route_variant.h) by measuring them with the routers of a
// loaded model.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/routing/router.h"
#include "kernels/cuda/tuning/kernel_tuning.h"

namespace moeserve::cuda {

// The number of rows decides. Routers of equal settings share their choices. Routers with a table
// and launches with overrides keep the default: the former have little to compute, the latter are
// rare.
class RouteTuning : public KernelTuning {
 public:
  explicit RouteTuning(Choices* choices) : KernelTuning("routers", choices) {}

  // Returns the form that was chosen for the launch, or an empty one. Reads neither the launch's
  // `variant` nor its memory.
  RouteVariant Variant(const RouteLaunch& launch);

 private:
  // What distinguishes launches besides their rows.
  struct SiteKey {
    int experts = 0, width = 0, dim = 0, k = 0, k_max = 0, groups = 0, best_groups = 0;
    ScoreKind score = {};
    GateKind gate = {};
    SelectKind select = {};
    RowNorm row_norm = {};
    bool changes_row = false, choice_bias = false, bf16 = false;
    auto operator<=>(const SiteKey&) const = default;
  };
  struct Recorded {
    RouteLaunch launch;  // of the most rows
    std::vector<const CudaRouter*> routers;
  };
  class Operands;

  static SiteKey KeyOf(const RouteLaunch& launch);
  int SiteOf(const SiteKey& key);
  Status MeasureSite(const Recorded& recorded, const TuningSettings& settings,
                     const TuneDeviceFactory& devices, cudaStream_t stream);
  Status MeasureRecorded(const TuningSettings& settings, const TuneDeviceFactory& devices,
                         cudaStream_t stream) override;
  void ForgetRecorded() override { recorded_.clear(); }

  std::map<SiteKey, int> sites_;
  std::map<SiteKey, Recorded> recorded_;
};

}  // namespace moeserve::cuda
