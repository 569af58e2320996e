// Replaces <cuda_runtime.h> when CUDA sources are compiled for the emulated device. Provides the
// same names. Every thread of a block is a fiber on the calling host thread.
#pragma once

#include "tests/cuda_emulator/async_copy.h"
#include "tests/cuda_emulator/cluster.h"
#include "tests/cuda_emulator/intrinsics.h"
#include "tests/cuda_emulator/matrix.h"
#include "tests/cuda_emulator/runtime_api.h"
#include "tests/cuda_emulator/scheduler.h"
#include "tests/cuda_emulator/types.h"
#include "tests/cuda_emulator/warp.h"
#include "tests/cuda_emulator/wgmma.h"

// CUDA's names are global. The emulator's other names stay in its namespace.
using namespace moeserve::emulator::names;  // NOLINT
