#include <algorithm>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/routing/pack_plans.h"

namespace moeserve::cuda {
namespace {

constexpr int kThreads = 256;
// The largest number of plans that fits into the parameters of a launch.
constexpr int kMostPlans = 32;
constexpr int kArrays = 6;  // number of arrays of 4-byte words in a plan

struct PackArgs {
  struct Plan {
    const void* words[kArrays];
    const uint8_t* bytes;
    int rows, experts, capacity;
    int64_t offset;  // of the plan's first word in `packed`, in bytes
  };
  Plan plans[kMostPlans];
  char* packed;
};
static_assert(sizeof(PackArgs) <= 4096);

// Returns the number of words of array `array`, counted in the order of packing.
__host__ __device__ int64_t Words(int array, int rows, int experts, int capacity) {
  if (array == 0) return experts + 1;
  return array == 4 ? rows + 1 : capacity;
}

__global__ void __launch_bounds__(kThreads) PackKernel(PackArgs a) {
  const PackArgs::Plan& plan = a.plans[blockIdx.y];
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  int32_t* to = reinterpret_cast<int32_t*>(a.packed + plan.offset);
  for (int array = 0; array < kArrays; ++array) {
    const int32_t* from = static_cast<const int32_t*>(plan.words[array]);
    const int64_t words = Words(array, plan.rows, plan.experts, plan.capacity);
    for (int64_t i = first; i < words; i += stride) to[i] = from[i];
    to += words;
  }
  uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
  for (int64_t i = first; i < plan.rows; i += stride) bytes[i] = plan.bytes[i];
}

int64_t AllWords(const RoutingPlan& plan) {
  int64_t words = 0;
  for (int array = 0; array < kArrays; ++array) {
    words += Words(array, plan.rows, plan.num_experts, plan.capacity);
  }
  return words;
}

}  // namespace

size_t PackedPlanBytes(const RoutingPlan& plan) {
  return static_cast<size_t>((AllWords(plan) * 4 + plan.rows + 15) / 16 * 16);
}

void LaunchPackPlans(std::span<const RoutingPlan> plans, char* packed, cudaStream_t stream) {
  int64_t offset = 0;
  while (!plans.empty()) {
    const size_t count = std::min<size_t>(plans.size(), kMostPlans);
    PackArgs args{};
    args.packed = packed;
    int64_t longest = 1;
    for (size_t i = 0; i < count; ++i) {
      const RoutingPlan& p = plans[i];
      args.plans[i] = {.words = {p.expert_offsets, p.expert_of_assignment, p.row_of_assignment,
                                 p.weight_of_assignment, p.row_offsets, p.assignments_of_row},
                       .bytes = p.row_nonfinite,
                       .rows = p.rows,
                       .experts = p.num_experts,
                       .capacity = p.capacity,
                       .offset = offset};
      offset += static_cast<int64_t>(PackedPlanBytes(p));
      longest = std::max({longest, int64_t{p.capacity}, int64_t{p.num_experts}});
    }
    const int64_t blocks = std::min<int64_t>((longest + kThreads - 1) / kThreads, 16);
    Launch(PackKernel,
           {.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)),
            .block = kThreads,
            .stream = stream},
           args);
    plans = plans.subspan(count);
  }
}

RoutingPlan UnpackedPlan(const RoutingPlan& shape, int rows, const char* packed) {
  const int32_t* arrays[kArrays];
  const int32_t* at = reinterpret_cast<const int32_t*>(packed);
  for (int array = 0; array < kArrays; ++array) {
    arrays[array] = at;
    at += Words(array, shape.rows, shape.num_experts, shape.capacity);
  }
  const int32_t assignments = arrays[0][shape.num_experts];
  return {.rows = rows,
          .num_experts = shape.num_experts,
          .num_assignments = assignments,
          .capacity = assignments,
          .expert_offsets = arrays[0],
          .expert_of_assignment = arrays[1],
          .row_of_assignment = arrays[2],
          .weight_of_assignment = reinterpret_cast<const float*>(arrays[3]),
          .row_offsets = arrays[4],
          .assignments_of_row = arrays[5],
          .row_nonfinite = reinterpret_cast<const uint8_t*>(at)};
}

}  // namespace moeserve::cuda
