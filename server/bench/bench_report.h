// The results of `moeserve bench` as a table and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/spec/spec.h"
#include "kernels/kv_cache_type.h"
#include "server/bench/bench_cases.h"

namespace moeserve::server {

struct BenchReport {
  std::string model;
  std::string device;           // the backend's description
  std::string instruction_set;  // empty if there is none
  int threads = 0;              // 0: not computed on the host
  ModelOptions types;
  KvCacheType kv_cache = KvCacheType::kF32;
  int64_t weight_bytes = 0;
  CaseSettings settings;
  MachineRates before, after;  // the cases; bounds use the better of both
  std::vector<CaseResult> cases;
};

// Returns the rates, then a line per case: median and range of the rounds, bound and share.
std::string BenchTable(const BenchReport& report);

// {"model", "read_bandwidth", "peaks", "shape", "cases": [{"name", "tokens_per_second", "min",
// "max", "bound_tokens_per_second", "share", ...}], ...}. Rates in bytes and operations per second.
// Keys without a measurement are absent.
nlohmann::json BenchJson(const BenchReport& report, const ModelSpec& spec);

}  // namespace moeserve::server
