// Lists the backends on which the tests of the backend interface run.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/registry.h"
#include "tests/reference/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"

namespace moeserve::testing {

// Returns the instruction sets of the CPU backend that this processor supports. If AMX is not among
// them, an emulated matrix unit takes its place.
inline std::vector<std::string> CpuInstructionSets() {
  std::vector<std::string> names;
  for (const char* isa : {"amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon_bf16",
                          "neon_i8mm", "neon_dot", "neon", "plain"}) {
    if (CreateBackend({.device = "cpu", .threads = 1, .cpu_isa = isa}).ok()) names.push_back(isa);
  }
  const cpu::KernelTable* const emulated = RegisterEmulatedMatrixUnit();
  if (emulated != nullptr && names.front() != "amx_bf16") names.push_back(emulated->name);
  return names;
}

// Returns the CPU backend with every instruction set that this processor supports, CUDA if there is
// a device, and the emulated CUDA device.
inline std::vector<BackendOptions> AvailableBackends(int threads = 2) {
  std::vector<BackendOptions> options;
  for (const std::string& isa : CpuInstructionSets()) {
    options.push_back({.device = "cpu", .threads = threads, .cpu_isa = isa});
  }
  BackendOptions cuda{.device = "cuda"};
  if (CreateBackend(cuda).ok()) options.push_back(cuda);
  RegisterEmulatedDevice();
  options.push_back({.device = "cuda_emulated"});
  return options;
}

inline std::string BackendName(const BackendOptions& o) {
  return o.device == "cpu" ? "cpu_" + o.cpu_isa : o.device;
}

// Returns whether attention over this cache rounds queries and weights to bf16, which CPUs with
// products of bf16 pairs do.
inline bool RoundsAttention(const BackendOptions& o, KvCacheType type) {
  return o.device == "cpu" && o.cpu_isa.ends_with("_bf16") && type == KvCacheType::kBF16;
}

// Returns the queries that such an attention multiplies, or all as they are.
inline std::vector<float> MultipliedQueries(const BackendOptions& o, KvCacheType type,
                                            std::vector<float> queries) {
  if (RoundsAttention(o, type)) {
    for (float& q : queries) q = F32FromBf16(Bf16FromF32(q));
  }
  return queries;
}

inline Matrix Magnitudes(Matrix m) {
  for (std::vector<double>& row : m) {
    for (double& v : row) v = std::abs(v);
  }
  return m;
}

// Succeeds if the results of attention are near enough. `expected` are exact, and `magnitudes` are
// the exact results for the magnitudes of the values. Rounding a weight to bf16 changes it by at
// most 2^-8 of itself; without rounding, `tolerance` is that of RowNear().
inline ::testing::AssertionResult AttentionNear(const BackendOptions& o, KvCacheType type,
                                                const std::vector<double>& actual,
                                                const std::vector<double>& expected,
                                                const std::vector<double>& magnitudes,
                                                double tolerance) {
  if (!RoundsAttention(o, type)) return RowNear(actual, expected, tolerance);
  if (actual.size() != expected.size()) return ::testing::AssertionFailure() << "sizes differ";
  for (size_t i = 0; i < actual.size(); ++i) {
    const double bound = 0x1.02p-8 * magnitudes[i] + 1e-30;
    if (std::abs(actual[i] - expected[i]) <= bound) continue;
    return ::testing::AssertionFailure() << "element " << i << ": " << actual[i] << " instead of "
                                         << expected[i] << ", where the error may be " << bound;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace moeserve::testing
