// Chooses the kernels of products of bf16 rows by measuring them with the layers of a loaded model.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/fused/fused_expert.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/tuning/kernel_tuning.h"

namespace moeserve::cuda {

class ProductTuning : public KernelTuning {
 public:
  explicit ProductTuning(Choices* choices) : KernelTuning("products", choices) {}

  // Returns the tile that was chosen for the product, or kAuto.
  LinearTile Tile(const LinearArgs& args);
  // Returns the kernel that computes both products of these experts, or nothing if two kernels
  // do; FusedTileThatPays() if nothing was measured. Requires FusedExpertFits(). While the object
  // records, it returns nothing, so that both products are recorded.
  std::optional<FusedTile> Fused(const FusedExpertArgs& args);

 private:
  // What distinguishes products besides their number of rows: banks with the same signatures have
  // the same site.
  struct SiteKey {
    std::string up, down;  // signatures; down is empty for a single product
    ActivationKind kind = {};
    bool plain = true;
    DType output = DType::kF32;  // of the only or the second product
    int form = 0;                // 0: dense, 1: segments, 2: routed, 3: routed with gathered rows
    auto operator<=>(const SiteKey&) const = default;
  };
  // The products of one site in the recorded step.
  struct Recorded {
    LinearArgs args;   // of the first one
    int64_t rows = 0;  // of the input or, with a plan, of the plan
    int routes = 0;    // of a row, at most
    int experts = 0;   // of the plan
    std::vector<const LinearBank*> banks;
  };
  struct Pair {
    const LinearBank *up, *down;
  };
  class Operands;

  static SiteKey KeyOf(const LinearArgs& args);
  int SiteOf(const SiteKey& key);
  static SiteKey PairKeyOf(const FusedExpertArgs& args);
  int PairSite(const SiteKey& key);
  Status MeasureProduct(const Recorded& recorded, const TuningSettings& settings,
                        const TuneDeviceFactory& devices, cudaStream_t stream);
  Status MeasurePair(const SiteKey& key, const std::vector<Pair>& pairs,
                     const TuningSettings& settings, const TuneDeviceFactory& devices,
                     cudaStream_t stream);
  Status MeasureRecorded(const TuningSettings& settings, const TuneDeviceFactory& devices,
                         cudaStream_t stream) override;
  void ForgetRecorded() override {
    recorded_.clear();
    pairs_.clear();
  }

  std::map<SiteKey, int> sites_;
  std::map<SiteKey, Recorded> recorded_;
  std::map<SiteKey, std::vector<Pair>> pairs_;
};

}  // namespace moeserve::cuda
