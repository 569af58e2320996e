// Makes the emulated device of tests/cuda_emulator the device "cuda" of the program that links this
// file. Kernels run thread by thread on the host.
#include "kernels/registry.h"

// Compiled from the sources of kernels/cuda.
namespace moeserve::cuda_emulated {
Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions& options);
Result<bool> StreamIsIdle(void* stream);
}  // namespace moeserve::cuda_emulated

namespace {

[[maybe_unused]] const bool registered = [] {
  moeserve::RegisterDevice(
      "cuda",
      [](const moeserve::BackendOptions& options) {
        // Times of the emulated device mean nothing, and it would measure for hours.
        moeserve::BackendOptions untuned = options;
        untuned.cuda_tune = "off";
        return moeserve::cuda_emulated::CreateDevice(untuned);
      },
      moeserve::cuda_emulated::StreamIsIdle);
  return true;
}();

}  // namespace
