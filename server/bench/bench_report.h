// The results of `moeserve bench` as a table and as JSON.
#pragma once

#include <string>
#include <vector>

#include "engine/spec/spec.h"
#include "kernels/base/kv_cache_type.h"
#include "server/base/json.h"
#include "server/bench/bench_cases.h"

namespace moeserve::server {

struct BenchReport {
  std::string model;
  std::string device;           // the backend's description
  std::string instruction_set;  // empty if there is none
  int threads = 0;              // 0 if the device is not the CPU
  ModelOptions types;
  KvCacheType kv_cache = KvCacheType::kF32;
  int64_t weight_bytes = 0;
  CaseSettings settings;
  MachineRates before, after;  // measured before loading and after the cases
  std::vector<CaseResult> cases;
  bool interrupted = false;  // the cases have fewer rounds than the settings say, or are missing
};

// Returns the machine's rates, then one line per case: median and range over the rounds, the bound,
// the share of the bound that was reached, and in how many rounds the machine was steady.
std::string BenchTable(const BenchReport& report);

// Returns {"model", "read_bandwidth", "peaks", "shape", "cases": [{"name", "tokens_per_second",
// "min", "max", "bound_tokens_per_second", "share", "steady_rounds", ...}], ...}. Rates are in
// bytes per second and operations per second, the best of all probes. Keys without a measured value
// are absent.
Json BenchJson(const BenchReport& report, const ModelSpec& spec);

}  // namespace moeserve::server
