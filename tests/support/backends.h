// Lists the backends on which the tests of the backend interface run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/registry.h"
#include "tests/support/devices.h"

namespace moeserve::testing {

// Returns the instruction sets of the CPU backend that this processor supports.
inline std::vector<std::string> CpuInstructionSets() {
  std::vector<std::string> names;
  for (const char* isa : {"avx512_bf16", "avx512_vnni", "avx512", "avx2", "plain"}) {
    if (CreateBackend({.device = "cpu", .threads = 1, .cpu_isa = isa}).ok()) names.push_back(isa);
  }
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

}  // namespace moeserve::testing
