// Plans of many blocks side by side, so that one copy brings them to the host.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// Bytes that a plan takes, a multiple of 16: as much as its rows and capacity can need.
size_t PackedPlanBytes(const RoutingPlan& plan);

// Copies the arrays of `plans` (device) to `packed` (device), one plan behind the other.
void LaunchPackPlans(std::span<const RoutingPlan> plans, char* packed, cudaStream_t stream);

// The plan of `shape`'s sizes whose packed bytes are at `packed` in host memory; `rows`: of them,
// the first ones, behind which no row has assignments.
RoutingPlan UnpackedPlan(const RoutingPlan& shape, int rows, const char* packed);

}  // namespace moeserve::cuda
