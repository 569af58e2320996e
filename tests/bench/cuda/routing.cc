// Measures the router and the routing plan: scores, selection, gates and sorting by expert.

#include <algorithm>
#include <cmath>

#include "tests/bench/cuda/banks.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {
namespace {

constexpr uint64_t kInputSeed = 78;

class RoutingRun {
 public:
  RoutingRun(Bench& bench, const ExpertShape& shape, int rows, int cluster_blocks)
      : bench_(bench), shape_(shape), rows_(rows), cluster_blocks_(cluster_blocks) {}

  Result<Measured> Run() {
    const int experts = shape_.experts();
    count_ = bench_.tiny() ? 2 : 32;
    MOESERVE_ASSIGN_OR_RETURN(
        input_, bench_.Random(DType::kBF16, int64_t{rows_} * shape_.width, kInputSeed, 1.0f));
    MOESERVE_ASSIGN_OR_RETURN(plan_memory_,
                              cuda::PlanMemory::Create(rows_, shape_.k_max(), experts));
    MOESERVE_ASSIGN_OR_RETURN(scratch_, cuda::RouteScratch::Create(rows_, shape_.k_max(), experts,
                                                                   std::max(experts, 64)));
    routers_.resize(static_cast<size_t>(count_));
    float p = 0.0f;
    if (shape_.top_p) {
      const auto count = [this](float share) -> Result<int64_t> {
        MOESERVE_ASSIGN_OR_RETURN(routers_[0], RandomRouter(shape_, 41, share));
        Enqueue(0);
        MOESERVE_ASSIGN_OR_RETURN(
            const std::vector<int32_t> offsets,
            bench_.Download<int32_t>(plan_.expert_offsets, shape_.experts() + 1));
        return offsets.back();
      };
      MOESERVE_ASSIGN_OR_RETURN(p, SharePerRow(shape_, rows_, count));
    }
    for (int i = 0; i < count_; ++i) {
      MOESERVE_ASSIGN_OR_RETURN(routers_[i],
                                RandomRouter(shape_, 41 + 3 * static_cast<uint64_t>(i), p));
      Enqueue(i);
    }
    MOESERVE_RETURN_IF_ERROR(bench_.Synchronize());
    Enqueue(0);
    MOESERVE_RETURN_IF_ERROR(Check());
    Measured m;
    MOESERVE_ASSIGN_OR_RETURN(m.timing, bench_.Time(count_, [this](int i) { Enqueue(i); }));
    const double d = shape_.width, columns = shape_.cosine ? 16 : experts;
    const double weights = 4 * columns * d + (shape_.cosine ? 4.0 * 16 * experts : 0);
    m.work.bytes = 2.0 * rows_ * d + weights + 8.0 * rows_ * shape_.k_max();
    m.work.written = 8.0 * rows_ * shape_.k_max();
    m.work.phases = 2;  // scores; selection and plan
    m.rotated_bytes = weights * count_;
    m.more = {{"rows", rows_},
              {"experts", experts},
              {"k", shape_.k},
              {"f32_flops", 2.0 * rows_ * d * columns}};
    return m;
  }

 private:
  void Enqueue(int i) {
    plan_ = cuda::LaunchRoute(
        {.router = routers_[i].get(),
         .input = {input_.data(), DType::kBF16, rows_, shape_.width, shape_.width},
         .k_max = shape_.k_max(),
         .plan = &plan_memory_,
         .scratch = &scratch_,
         .variant = {.cluster_blocks = cluster_blocks_}},
        bench_.stream());
  }

  // Checks that every row's experts ascend, that the plan is sorted, and that gates are positive
  // and sum to at most 1.
  absl::Status Check() {
    const int experts = shape_.experts();
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<int32_t> offsets,
                              bench_.Download<int32_t>(plan_.expert_offsets, experts + 1));
    const int32_t routes = offsets.back();
    if (offsets[0] != 0 || routes < rows_ || routes > rows_ * shape_.k_max() ||
        (!shape_.top_p && routes != rows_ * shape_.k) ||
        !std::is_sorted(offsets.begin(), offsets.end())) {
      return absl::InternalError("expert offsets of " + std::to_string(routes) + " routes");
    }
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<int32_t> expert,
                              bench_.Download<int32_t>(plan_.expert_of_assignment, routes));
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<int32_t> row,
                              bench_.Download<int32_t>(plan_.row_of_assignment, routes));
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<float> weight,
                              bench_.Download<float>(plan_.weight_of_assignment, routes));
    std::vector<double> gates(static_cast<size_t>(rows_));
    for (int e = 0; e < experts; ++e) {
      for (int a = offsets[e]; a < offsets[e + 1]; ++a) {
        const bool sorted = a == offsets[e] || row[a] > row[a - 1];
        if (expert[a] != e || row[a] < 0 || row[a] >= rows_ || !sorted ||
            !(weight[a] > 0.0f && weight[a] <= 1.0f)) {
          return absl::InternalError("route " + std::to_string(a));
        }
        gates[row[a]] += weight[a];
      }
    }
    for (int r = 0; r < rows_; ++r) {
      const bool fits =
          shape_.top_p ? gates[r] > 0 && gates[r] < 1.0001 : std::abs(gates[r] - 1.0) < 1e-4;
      if (!fits) return absl::InternalError("gates of row " + std::to_string(r));
    }
    return absl::OkStatus();
  }

  Bench& bench_;
  const ExpertShape& shape_;
  const int rows_;
  const int cluster_blocks_;  // 0: no cluster
  int count_ = 0;
  cuda::DeviceMemory input_;
  cuda::PlanMemory plan_memory_;
  cuda::RouteScratch scratch_;
  std::vector<std::unique_ptr<cuda::CudaRouter>> routers_;
  RoutingPlan plan_;
};

}  // namespace

void AddRoutingCases(bool tiny, std::vector<Case>& cases) {
  std::vector<std::string> names = {"mixtral", "olmoe",    "hmoe",      "hmoe_topp",
                                    "moa",     "mhmoe_n8", "mhmoe_n64", "mhmoe_n256"};
  std::vector<int> sizes = {1, 16, 64, 256, 1024, 2048, 8192, 32768};
  if (tiny) {
    names = {"tiny_gated", "hmoe_topp", "mhmoe_n8"};
    sizes = {1, 33};
  }
  for (const std::string& name : names) {
    const ExpertShape shape = ExpertShapeOf(name, tiny);
    const auto add = [&](int rows, const std::string& suffix, int priority, int blocks) {
      cases.push_back(
          {"route/" + name + "/R" + std::to_string(rows) + suffix, tiny ? 0 : priority,
           [shape, rows, blocks](Bench& b) { return RoutingRun(b, shape, rows, blocks).Run(); }});
    };
    for (const int rows : sizes) {
      const bool first = rows == 16 || rows == 256 || rows == 1024 || rows == 8192;
      add(rows, "", first ? 0 : 1, 0);
      // Rows and routers that do not fit into a cluster are routed by a grid.
      if (rows > 16 || shape.cosine) continue;
      for (const int blocks : {8, 16}) add(rows, "/cluster" + std::to_string(blocks), 1, blocks);
    }
  }
}

}  // namespace moeserve::bench
