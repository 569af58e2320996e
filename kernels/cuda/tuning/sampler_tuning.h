// Chooses the number of blocks by which the sampler draws a token (rows/sampler.h), by measuring
// all numbers.
#pragma once

#include <map>

#include "kernels/cuda/rows/sampler.h"
#include "kernels/cuda/tuning/kernel_tuning.h"

namespace moeserve::cuda {

// The vocabulary and the number of rows decide. What is measured draws from the smallest set of
// tokens that has most of the probability (top-p); the settings of the requests of a step vary.
class SamplerTuning : public KernelTuning {
 public:
  explicit SamplerTuning(Choices* choices) : KernelTuning("samplers", choices) {}

  // Returns the number of blocks per row that was chosen for the launch, or 0. Does not read the
  // launch's memory.
  int Blocks(const SampleLaunch& launch);

 private:
  int SiteOf(int vocabulary);
  Status MeasureVocabulary(int vocabulary, int most_rows, const TuningSettings& settings,
                           const TuneDeviceFactory& devices, cudaStream_t stream);
  Status MeasureRecorded(const TuningSettings& settings, const TuneDeviceFactory& devices,
                         cudaStream_t stream) override;
  void ForgetRecorded() override { recorded_.clear(); }

  std::map<int, int> sites_;     // of a vocabulary
  std::map<int, int> recorded_;  // the most rows of a vocabulary
};

}  // namespace moeserve::cuda
