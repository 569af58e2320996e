// Makes the emulated device of tests/cuda_emulator the device "cuda" of the program that links this
// file. Kernels run thread by thread on the host.
#include "kernels/registry.h"

// Compiled from the sources of kernels/cuda.
namespace moeserve::cuda_emulated {
Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions& options);
}  // namespace moeserve::cuda_emulated

namespace {

[[maybe_unused]] const bool registered = [] {
  moeserve::RegisterDevice("cuda", moeserve::cuda_emulated::CreateDevice);
  return true;
}();

}  // namespace
