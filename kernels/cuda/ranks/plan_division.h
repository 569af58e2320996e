// Divides a routing plan among ranks on the device.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// The arrays of a part of a plan, in device memory.
struct PlanPartArrays {
  int32_t* expert_offsets = nullptr;  // filled before the launch
  int32_t* expert_of_assignment = nullptr;
  int32_t* row_of_assignment = nullptr;
  float* weight_of_assignment = nullptr;
  int32_t* row_offsets = nullptr;  // of `joint`: null, those of the plan
  int32_t* assignments_of_row = nullptr;
};

// What is needed if each row's results are added by one rank (PlanOwners::row_begin), in device
// memory. P is the number of ranks.
struct PlanAdders {
  int ranks = 0;                       // P; 0: every rank adds all results
  const int32_t* row_begin = nullptr;  // [P + 1]
  // [E, P] the first assignment of expert e in the plan that rank r adds, or a later one.
  int32_t* first_added = nullptr;
  // [E, P] its place among those that are sorted by the ranks that add them, of own experts.
  const int32_t* place = nullptr;
  int32_t* by_adder = nullptr;  // [own assignments] PlanParts::by_adder
};

struct PlanDivision {
  RoutingPlan plan;  // with num_assignments
  PlanPartArrays joint =
      {};  // expert_offsets: the first assignment of each expert in its new numbers
  PlanPartArrays local = {};
  int32_t* local_numbers = nullptr;  // [num_assignments] scratch
  int rank = 0;
  int places = 0;                  // the experts of `local`
  int begin_row = 0, end_row = 0;  // the rows of `joint`
  PlanAdders adders = {};
};

// Fills `adders.first_added`.
void LaunchFindAdders(const RoutingPlan& plan, const PlanAdders& adders, cudaStream_t stream);

// Fills the arrays but expert_offsets. With adders, first_added was filled before.
void LaunchDividePlan(const PlanDivision& division, cudaStream_t stream);

// Copies rows of `row_bytes` bytes, which are adjacent: row by_adder[i] of `own` becomes row i of
// `packed`, but those from `kept` to `kept_end` become the rows of `results` from `first` on, and
// the rows of `packed` have no gap.
struct PackedResults {
  const char* own = nullptr;
  const int32_t* by_adder = nullptr;
  char* packed = nullptr;
  char* results = nullptr;
  int64_t row_bytes = 0;  // even
  int64_t rows = 0, kept = 0, kept_end = 0, first = 0;
};
void LaunchPackResults(const PackedResults& rows, cudaStream_t stream);

}  // namespace moeserve::cuda
