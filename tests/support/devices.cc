#include "tests/support/devices.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "kernels/cpu/isa/isa.h"
#include "kernels/registry.h"

// Creates the emulated device. The definition is compiled from the sources of kernels/cuda.
namespace moeserve::cuda_emulated {
Result<std::unique_ptr<Backend>> CreateDevice(const BackendOptions& options);
}  // namespace moeserve::cuda_emulated

namespace moeserve::testing {

#if defined(__x86_64__)
extern const cpu::KernelTable kEmulatedMatrixUnit;  // emulated_tiles.cc
#endif

namespace {

// Options of a CUDA device whose dense layers a library computes.
BackendOptions WithLibrary(BackendOptions options) {
  options.device = "cuda";
  options.cuda_dense = "cublaslt";
  return options;
}
// Options of one whose kernels are chosen by measuring them, which must not change a result.
BackendOptions Tuned(BackendOptions options) {
  options.device = "cuda";
  options.cuda_tune = "quick";
  return options;
}

class NeedsDevice : public ::testing::Environment {
 public:
  void SetUp() override {
    const Result<std::unique_ptr<Backend>> backend = CreateBackend({.device = TestDevice()});
    if (!backend.ok()) GTEST_SKIP() << backend.status().message();
  }
};

[[maybe_unused]] const auto* const needs_device =
    ::testing::AddGlobalTestEnvironment(new NeedsDevice);

}  // namespace

void RegisterEmulatedDevice() {
  static const bool registered = [] {
    RegisterDevice("cuda_emulated", cuda_emulated::CreateDevice);
    RegisterDevice("cuda_emulated_cublaslt", [](const BackendOptions& options) {
      return cuda_emulated::CreateDevice(WithLibrary(options));
    });
    RegisterDevice("cuda_cublaslt", [](const BackendOptions& options) {
      return CreateBackend(WithLibrary(options));
    });
    RegisterDevice("cuda_emulated_tuned", [](const BackendOptions& options) {
      return cuda_emulated::CreateDevice(Tuned(options));
    });
    RegisterDevice("cuda_tuned",
                   [](const BackendOptions& options) { return CreateBackend(Tuned(options)); });
    return true;
  }();
  static_cast<void>(registered);
}

const cpu::KernelTable* RegisterEmulatedMatrixUnit() {
#if defined(__x86_64__)
  if (!cpu::SelectTable("avx512_bf16").ok()) return nullptr;
  cpu::RegisterTable(&kEmulatedMatrixUnit);
  return &kEmulatedMatrixUnit;
#else
  return nullptr;
#endif
}

std::string TestDevice() {
  RegisterEmulatedDevice();
  const char* const device = std::getenv("MOESERVE_TEST_DEVICE");
  return device == nullptr ? "cpu" : device;
}

}  // namespace moeserve::testing
