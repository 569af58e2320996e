// Creates backends by name; the only header through which others reach the concrete ones.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "kernels/backend.h"

namespace moeserve {

struct BackendOptions {
  std::string device = "cpu";    // "cpu", "cuda", or one that was registered
  int threads = 0;               // cpu: 0 = one per available core
  std::string cpu_isa = "auto";  // "auto" or the name of a kernel table (cpu/isa.h)
};

using BackendFactory = Result<std::unique_ptr<Backend>> (*)(const BackendOptions&);

// Registers a further device under a name. Call before any backend is created.
void RegisterDevice(const std::string& name, BackendFactory factory);

// InvalidArgument: unknown device or instruction set, threads out of [0, 1024].
// Unavailable: no CUDA device, with the cause in one line.
Result<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options);

}  // namespace moeserve
