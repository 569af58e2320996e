// The steps that ranks_bench times.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/model/model.h"

namespace moeserve {

// Steps whose sequences have the same tokens; a page belongs to one of them.
struct Work {
  std::vector<std::vector<int32_t>> tables;
  std::vector<Batch> batches = {};
  int64_t tokens = 0;

  // Returns tables of pages for sequences of so many positions.
  static std::vector<std::vector<int32_t>> Tables(int sequences, int positions);
  void AddStep(int sequences, int begin, int tokens_of_sequence);
};

struct Timed {
  double seconds = 0.0;
  std::vector<float> logits;
};

// Runs the steps. `times`: StepOptions::times. `divide_rows` matters for ranks only.
Timed RunSteps(Model& model, KvCacheStorage& cache, const Work& work, bool divide_rows,
               StepTimes* times = nullptr);

// Returns the mean of the two values in the middle; there is at least one value.
double Median(std::vector<double> values);
double Mean(const std::vector<double>& values);

void Add(StepTimes& sum, const StepTimes& times);

}  // namespace moeserve
