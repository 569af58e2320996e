// The cases of `moeserve bench`: prompts and decode steps of a model, timed round by round.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/model.h"
#include "engine/schedule/block_manager.h"

namespace moeserve::server {

struct CaseSettings {
  std::vector<int> batches = {1};  // sequences that decode together, one case each
  int prompt = 0;                  // tokens of a prompt case; 0: none
  int chunk = 512;                 // tokens of a prompt that are computed together
  int tokens = 64;                 // decode steps of a case
  int context = 16;                // tokens in the cache before a decode case
  int rounds = 3;                  // the median counts
};

// Speeds of the machine, in bytes and operations per second; 0: not measured.
struct MachineRates {
  double read_bandwidth = 0;
  double f32 = 0;
  double bf16 = 0;
  double int8 = 0;

  // The better of two measurements of each.
  static MachineRates Best(const MachineRates& a, const MachineRates& b);
  // The fastest arithmetic that products of these types can use; 0: not measured.
  double PeakFor(const ModelOptions& types) const;
};

struct CaseResult {
  std::string name;            // "prompt 512", "decode 16"
  std::vector<double> rounds;  // tokens per second, in the order of measuring
  bool decode = false;         // else a prompt
  double tokens_per_step = 0;  // that a step of decoding, or the whole prompt, computes
  double bytes_per_step = 0;   // weights and cached keys and values, read once
  double operations_per_step = 0;
  double distinct_experts = 0;  // per routed block and step

  double Median() const;
  double Min() const;
  double Max() const;
  // Tokens per second at these rates: what the slower of memory and arithmetic allows. Where
  // arithmetic is not measured: memory alone for decoding, 0 (unknown) for prompts.
  double Bound(const MachineRates& rates, const ModelOptions& types) const;
};

// Every round runs each case once, so that a disturbance of the machine meets all alike; a round
// before them warms up. `model` and `cache` belong to one backend; the cache has room for the
// largest batch at max(prompt, context + tokens) positions each.
std::vector<CaseResult> MeasureCases(const CaseSettings& settings, Model& model,
                                     KvCacheStorage& cache);

}  // namespace moeserve::server
