// Chooses the kernels of products of bf16 rows by measuring them with the layers of a loaded model.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/fused/fused_expert.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/tuning/choices.h"
#include "kernels/cuda/tuning/tuner.h"

namespace moeserve::cuda {

struct ProductTuningSettings {
  // Time after which no further measurement begins.
  std::chrono::steady_clock::duration limit = std::chrono::seconds(5);
  int rows_factor = 4;  // from one number of rows to the next that is measured
};

// Makes a device that measures operations whose results are in `output`.
using TuneDeviceFactory =
    std::function<std::unique_ptr<TuneDevice>(cudaStream_t stream, void* output, size_t bytes)>;

// First, the products of a step are recorded, the largest one that can occur; then Measure()
// chooses kernels for all numbers of rows up to those of the step; later products look their
// kernels up.
//
// Only one thread at a time may use an object.
class ProductTuning {
 public:
  // `choices` must outlive the object.
  explicit ProductTuning(Choices* choices) : choices_(choices) {}

  // While the object records, Tile() and Fused() also remember the product.
  void Record(bool records) { records_ = records; }

  // Returns the tile that was chosen for the product, or kAuto.
  LinearTile Tile(const LinearArgs& args);
  // Returns the kernel that computes both products of these experts, or nothing if two kernels
  // do; FusedTileThatPays() if nothing was measured. Requires FusedExpertFits(). While the object
  // records, it returns nothing, so that both products are recorded.
  std::optional<FusedTile> Fused(const FusedExpertArgs& args);

  // Measures the recorded products that have no choice yet, and forgets the recorded ones. Waits
  // for the device. If memory for the measurements is missing, they end early. Returns messages
  // about kernels whose results were wrong, which are never chosen.
  Result<std::vector<std::string>> Measure(const ProductTuningSettings& settings,
                                           const TuneDeviceFactory& devices, cudaStream_t stream);
  // Returns the number of measurements of the last Measure(), and of those that it left out because
  // its time was over.
  int measured() const { return measured_; }
  int left_out() const { return left_out_; }

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
  Status MeasureProduct(const Recorded& recorded, const ProductTuningSettings& settings,
                        const TuneDeviceFactory& devices, cudaStream_t stream);
  Status MeasurePair(const SiteKey& key, const std::vector<Pair>& pairs,
                     const ProductTuningSettings& settings, const TuneDeviceFactory& devices,
                     cudaStream_t stream);
  Status MeasureCase(int site, int64_t rows, const TuneCase& tune_case, const std::vector<int>& ids,
                     TuneDevice& device);
  bool TimeIsOver(const ProductTuningSettings& settings) const;

  Choices* choices_;
  bool records_ = false;
  std::map<SiteKey, int> sites_;
  std::map<SiteKey, Recorded> recorded_;
  std::map<SiteKey, std::vector<Pair>> pairs_;
  std::vector<std::string> messages_;
  std::chrono::steady_clock::time_point begin_;
  int measured_ = 0, left_out_ = 0;
};

}  // namespace moeserve::cuda
