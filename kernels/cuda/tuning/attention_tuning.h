// Chooses the kernels of attention by measuring them with the shapes of a loaded model: those for
// tiles of tokens, and those for single tokens.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/tuning/choices.h"
#include "kernels/cuda/tuning/product_tuning.h"

namespace moeserve::cuda {

// First, the attention of a step is recorded, the largest one that can occur; then Measure()
// chooses kernels for all numbers of tokens up to those of the step; later launches look their
// kernels up. For tiles, only the number of tokens in them decides: the host does not know the
// contexts of a step that is captured. What is measured is one prompt without earlier context. For
// single tokens, their number and the bound of the contexts for which a step is captured decide.
//
// Only one thread at a time may use an object.
class AttentionTuning {
 public:
  // `choices` must outlive the object.
  explicit AttentionTuning(Choices* choices) : choices_(choices) {}

  // While the object records, Tiles() and Splits() also remember the launch.
  void Record(bool records) { records_ = records; }

  // Returns the kernel that was chosen for the launch's tiles, or kAuto.
  AttentionTiles Tiles(const AttentionLaunch& launch);

  // Returns the kernel that was chosen for the launch's single tokens, or kAuto. Does not read the
  // launch's `work`.
  AttentionSplits Splits(const AttentionLaunch& launch);

  // As ProductTuning::Measure(). The sinks and biases of the recorded launches must still exist.
  Result<std::vector<std::string>> Measure(const ProductTuningSettings& settings,
                                           const TuneDeviceFactory& devices, cudaStream_t stream);
  int measured() const { return measured_; }
  int left_out() const { return left_out_; }

 private:
  // What distinguishes launches besides their tokens and contexts.
  struct SiteKey {
    int heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
    int rows = 0, rows_by_shape = 0;  // of a token
    int window = 0;
    bool chunks = false, causal = true, cap = false, sinks = false, bias = false;
    bool int8 = false;  // the cache
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
  Status MeasureTiles(const AttentionLaunch& recorded, const ProductTuningSettings& settings,
                      const TuneDeviceFactory& devices, cudaStream_t stream);
  Status MeasureSingles(const AttentionLaunch& recorded, const ProductTuningSettings& settings,
                        const TuneDeviceFactory& devices, cudaStream_t stream);
  // Measures the candidates and keeps the choice, the index of one of `ids`.
  Status MeasureCase(int site, int64_t tokens, const TuneCase& tune_case,
                     const std::vector<int>& ids, TuneDevice& device);

  Choices* choices_;
  bool records_ = false;
  std::map<SiteKey, int> sites_;
  std::map<SinglesKey, int> singles_sites_;
  std::map<SiteKey, AttentionLaunch> recorded_, recorded_singles_;
  std::vector<std::string> messages_;
  std::chrono::steady_clock::time_point begin_;
  int measured_ = 0, left_out_ = 0;
};

}  // namespace moeserve::cuda
