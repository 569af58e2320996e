// Chooses the kernels of attention by measuring them with the shapes of a loaded model: those for
// tiles of tokens, and those for single tokens.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/tuning/kernel_tuning.h"

namespace moeserve::cuda {

// For tiles, only the number of tokens in them decides: the host does not know the contexts of a
// step that is captured. What is measured is one prompt without earlier context. For single tokens,
// their number and the bound of the contexts for which a step is captured decide.
//
// The sinks and biases of the recorded launches must still exist when they are measured.
class AttentionTuning : public KernelTuning {
 public:
  explicit AttentionTuning(Choices* choices) : KernelTuning("kernels of attention", choices) {}

  // Returns the kernel that was chosen for the launch's tiles, or kAuto.
  AttentionTiles Tiles(const AttentionLaunch& launch);

  // Returns the kernel that was chosen for the launch's single tokens, or kAuto. Does not read the
  // launch's `work`.
  AttentionSplits Splits(const AttentionLaunch& launch);

 private:
  // What distinguishes launches besides their tokens and contexts.
  struct SiteKey {
    int heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
    int rows = 0, rows_by_shape = 0;  // of a token
    int window = 0;
    bool chunks = false, causal = true, cap = false, sinks = false, bias = false;
    bool int8 = false, latent = false;  // the cache
    auto operator<=>(const SiteKey&) const = default;
  };
  // Single tokens have a site for each bound of contexts.
  struct SinglesKey {
    SiteKey key;
    int context = 0;
    auto operator<=>(const SinglesKey&) const = default;
  };
  class Operands;

  static SiteKey KeyOf(const AttentionLaunch& launch);
  static std::string Describe(const SiteKey& key);
  int SiteOf(const SiteKey& key);
  int SinglesSiteOf(const SinglesKey& key);
  // `recorded` is a launch of as many tokens as possible.
  Status MeasureTiles(const AttentionLaunch& recorded, const TuningSettings& settings,
                      const TuneDeviceFactory& devices, cudaStream_t stream);
  Status MeasureSingles(const AttentionLaunch& recorded, const TuningSettings& settings,
                        const TuneDeviceFactory& devices, cudaStream_t stream);
  Status MeasureRecorded(const TuningSettings& settings, const TuneDeviceFactory& devices,
                         cudaStream_t stream) override;
  void ForgetRecorded() override {
    recorded_.clear();
    recorded_singles_.clear();
  }

  std::map<SiteKey, int> sites_;
  std::map<SinglesKey, int> singles_sites_;
  std::map<SiteKey, AttentionLaunch> recorded_, recorded_singles_;
};

}  // namespace moeserve::cuda
