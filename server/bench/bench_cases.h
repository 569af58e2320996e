// The measurements ("cases") of `moeserve bench`: one prompt, and decoding with several batch
// sizes. Every round measures each case once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/memory/paged_pool.h"
#include "engine/model/model.h"
#include "kernels/base/kv_cache_type.h"
#include "server/bench/bench_work.h"

namespace moeserve::server {

struct CaseSettings {
  std::vector<int> batches = {1};  // batch sizes of the decode cases
  int prompt = 0;                  // tokens in the prompt case; 0: no such case
  int chunk = 512;                 // prompt tokens per step
  int tokens = 64;                 // decode steps per measurement
  int context = 16;                // tokens of each sequence in the cache before decoding
  int rounds = 3;                  // measurements per case
};

// Measured speeds of the machine, in bytes per second and in operations per second for each type of
// arithmetic. 0 means that the backend cannot measure the rate or has no such instructions.
struct MachineRates {
  double read_bandwidth = 0;
  double f32 = 0;
  double bf16 = 0;
  double int8 = 0;

  // Returns the larger value of each rate.
  static MachineRates Best(const MachineRates& a, const MachineRates& b);
  // Returns the rate of the fastest arithmetic that matrix products with these types can use: int8
  // for quantized weights, bf16 for compute type bf16, else f32. Skips a rate of 0 except that of
  // f32.
  double PeakFor(const ModelOptions& types) const;
  // The same for attention: bf16 for a bf16 cache, else f32.
  double AttentionPeak(KvCacheType cache) const;
  // Returns whether no rate is more than a tenth above the same rate of `other`, nor the reverse.
  bool IsNear(const MachineRates& other) const;
};

struct Measurement {
  double tokens_per_second = 0;
  MachineRates before, after;  // of the machine, directly before and after
};

// How far a case's measurements came to their bounds.
struct ShareOfBound {
  int steady = 0;    // measurements during which the machine was steady: `after` is near `before`
  double bound = 0;  // median of their bounds in tokens per second; 0 if unknown
  double share = 0;  // median of their speeds, each divided by its bound
};

struct CaseResult {
  std::string name;                 // "prompt 512", "decode 16"
  std::vector<Measurement> rounds;  // in order of time
  bool decode = false;              // false for the prompt case
  double tokens_per_step = 0;       // tokens that one decode step, or the whole prompt, computes
  double bytes_per_step = 0;  // least bytes that must be read: weights, cached keys and values
  StepOperations operations_per_step;
  // Mean number of distinct experts per routed block and step. Here, a prompt has one step for
  // every CaseSettings::chunk tokens.
  double distinct_experts = 0;

  double Median() const;
  double Min() const;
  double Max() const;
  // Returns the upper bound on tokens per second that these rates set: the smaller of the bounds
  // set by memory bandwidth and by arithmetic. If the arithmetic rate is not measured, returns the
  // bandwidth bound for decoding and 0 (unknown) for prompts.
  double Bound(const MachineRates& rates, const ModelOptions& types, KvCacheType cache) const;
  // Compares each measurement with the bound that the better of the rates around it set. Uses the
  // measurements during which the machine was steady, or all of them if it never was.
  ShareOfBound Share(const ModelOptions& types, KvCacheType cache) const;
};

// Runs all cases in rounds, so that a disturbance of the machine affects all cases alike. One more
// round comes first as warm-up, with at most eight decode steps; the bytes and operations of a step
// are counted in it. `model` and `cache` belong to the same backend. `cache` must have capacity for
// the largest batch, with max(prompt, context + tokens) positions per sequence. `probe` measures
// the machine; it is called before the first and after every measurement, and an error of it is
// returned. `measured`, if set, is called CountMeasurements() times, after each measurement and
// warm-up. `stop`, if set, is asked before every step; once it returns true, the measurement that
// runs is given up, and the cases that have a measurement are returned.
Result<std::vector<CaseResult>> MeasureCases(const CaseSettings& settings, Model& model,
                                             KvCacheStorage& cache,
                                             const std::function<Result<MachineRates>()>& probe,
                                             const std::function<void()>& measured = {},
                                             const std::function<bool()>& stop = {});
int64_t CountMeasurements(const CaseSettings& settings);

}  // namespace moeserve::server
