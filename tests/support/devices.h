// Devices of the tests: the CPU, a CUDA device where there is one, and the emulated CUDA device.
#pragma once

#include <string>

namespace moeserve::testing {

// Makes device "cuda_emulated" known, on which kernels run thread by thread on the host.
void RegisterEmulatedDevice();

// Where tests of whole models run: the environment's MOESERVE_TEST_DEVICE, or "cpu". Where that
// device cannot be used, every test of the program is skipped with the reason.
std::string TestDevice();

}  // namespace moeserve::testing
