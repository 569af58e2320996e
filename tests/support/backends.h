// The backends that one test body runs for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/registry.h"
#include "tests/support/devices.h"

namespace moeserve::testing {

// Every CPU instruction set that this processor runs, CUDA where there is a device, and the
// emulated one.
inline std::vector<BackendOptions> AvailableBackends(int threads = 2) {
  std::vector<BackendOptions> options;
  for (const char* isa : {"avx512_bf16", "avx512_vnni", "avx512", "avx2", "plain"}) {
    BackendOptions o{.device = "cpu", .threads = threads, .cpu_isa = isa};
    if (CreateBackend(o).ok()) options.push_back(o);
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

}  // namespace moeserve::testing
