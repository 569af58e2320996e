// Counts the work of the emulated device, for tests.
#pragma once

#include <cstdint>

namespace moeserve::emulator {

// Returns the number of kernels that have run, also those of graphs.
uint64_t KernelsRun();

}  // namespace moeserve::emulator
