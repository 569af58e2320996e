// Creates backends by name. Code outside of kernels/ reaches the concrete backends only through
// this header.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "kernels/backend.h"

namespace moeserve {

struct BackendOptions {
  std::string device = "cpu";    // "cpu", "cuda", or the name of a registered device
  int threads = 0;               // CPU backend: number of threads; 0: one per available core
  std::string cpu_isa = "auto";  // CPU backend: "auto" or the name of a kernel table
                                 // (cpu/isa/isa.h)
  // CUDA backend: what computes dense layers of bf16: "own" for the kernels of this program, or
  // "cublaslt" for NVIDIA's library, which is opened at run time.
  std::string cuda_dense = "own";
};

using BackendFactory = Result<std::unique_ptr<Backend>> (*)(const BackendOptions&);

// Registers a further device under a name; under "cuda", it replaces the CUDA device. Must be
// called before any backend is created.
void RegisterDevice(const std::string& name, BackendFactory factory);

// InvalidArgument: a name is unknown, `threads` is outside of [0, 1024], or cuda_dense is not "own"
// on a CPU. Unavailable: there is no usable CUDA device or no cuBLASLt; the message states the
// cause in one line.
Result<std::unique_ptr<Backend>> CreateBackend(const BackendOptions& options);

}  // namespace moeserve
