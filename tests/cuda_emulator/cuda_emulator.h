// Stands in for <cuda_runtime.h> where CUDA sources are compiled for the emulated device: the same
// names, with every thread of a block a fiber on the calling host thread.
#pragma once

#include "tests/cuda_emulator/async_copy.h"
#include "tests/cuda_emulator/intrinsics.h"
#include "tests/cuda_emulator/matrix.h"
#include "tests/cuda_emulator/runtime_api.h"
#include "tests/cuda_emulator/scheduler.h"
#include "tests/cuda_emulator/types.h"
#include "tests/cuda_emulator/warp.h"
#include "tests/cuda_emulator/wgmma.h"

// CUDA's names are global; the emulator's own stay where they are.
using namespace moeserve::emulator::names;  // NOLINT
