// What the creator of a backend chooses.
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
  // CUDA backend: which kernels are measured when a model is loaded, to choose among those with
  // equal results: "off", "quick" (some seconds) or "full" (more numbers of rows).
  std::string cuda_tune = "off";
  // CUDA backend: the file that keeps what was chosen, or an existing folder that has a file for
  // each device and build of the program; empty: none.
  std::string cuda_tune_file = {};
};

using BackendFactory = Result<std::unique_ptr<Backend>> (*)(const BackendOptions&);

}  // namespace moeserve
