// Packs the plans of many routed blocks, so that one copy downloads them.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Bytes of a packed plan, a multiple of 16: an upper bound for its rows and capacity.
size_t PackedPlanBytes(const RoutingPlan& plan);

// Copies the arrays of `plans` (device) to `packed` (device), one plan behind the other.
void LaunchPackPlans(std::span<const RoutingPlan> plans, char* packed, cudaStream_t stream);

// The plan with the sizes of `shape` whose packed bytes are at `packed` in host memory, cut to its
// first `rows` rows; later rows have no assignments.
RoutingPlan UnpackedPlan(const RoutingPlan& shape, int rows, const char* packed);

}  // namespace moeserve::cuda
