// Packs the routing plans of many MoE blocks, so that one copy downloads all of them.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Returns the bytes of a packed plan, a multiple of 16. The size depends on the plan's rows,
// experts and capacity.
size_t PackedPlanBytes(const RoutingPlan& plan);

// Copies the arrays of `plans` (in device memory) to `packed` (in device memory), one plan after
// the other.
void LaunchPackPlans(std::span<const RoutingPlan> plans, char* packed, cudaStream_t stream);

// Returns the plan whose packed arrays are at `packed` in host memory and have the sizes of
// `shape`, reduced to its first `rows` rows. Later rows must have no assignments.
RoutingPlan UnpackedPlan(const RoutingPlan& shape, int rows, const char* packed);

}  // namespace moeserve::cuda
