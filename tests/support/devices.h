// The devices that tests run on: the CPU, a CUDA device if there is one, and the emulated CUDA
// device.
#pragma once

#include <string>

#include "kernels/cpu/isa/kernel_table.h"

namespace moeserve::testing {

// Registers the device "cuda_emulated", which runs kernels thread by thread on the host, and
// "cuda_cublaslt" and "cuda_emulated_cublaslt", whose dense layers a library computes: cuBLASLt,
// and a plain replacement of it. "cuda_tuned" and "cuda_emulated_tuned" choose their kernels by
// measuring them.
void RegisterEmulatedDevice();

// If the processor has AVX-512 with BF16, registers the instruction set "amx_emulated_bf16", which
// has the kernels for AMX and an emulated matrix unit, and returns these kernels. Else returns
// null.
const cpu::KernelTable* RegisterEmulatedMatrixUnit();

// Returns the device for tests of whole models: the value of the environment variable
// MOESERVE_TEST_DEVICE, or "cpu". If that device cannot be used, all tests of the program are
// skipped with the reason.
std::string TestDevice();

}  // namespace moeserve::testing
