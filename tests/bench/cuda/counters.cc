// Measures the time that expert statistics add to a step: counting the routing plans of all routed
// blocks.

#include "kernels/cuda/statistics/expert_counters.h"
#include "tests/bench/cuda/banks.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {
namespace {

constexpr uint64_t kInputSeed = 79;
constexpr int kVocabulary = 4096;

class CountingRun {
 public:
  CountingRun(Bench& bench, const ExpertShape& shape, int blocks, int tokens)
      : bench_(bench), shape_(shape), blocks_(blocks), tokens_(tokens) {}

  Result<Measured> Run() {
    const int experts = shape_.experts();
    CountSettings settings{.blocks = {}, .vocabulary = kVocabulary};
    settings.blocks.resize(static_cast<size_t>(blocks_), {.num_experts = experts,
                                                          .most_distinct = shape_.k_max(),
                                                          .in_diversity = true,
                                                          .expert_parameters = std::vector<int64_t>(
                                                              static_cast<size_t>(experts), 1000)});
    MOESERVE_ASSIGN_OR_RETURN(counters_, cuda::ExpertCounters::Create(settings, tokens_));
    const size_t n = static_cast<size_t>(tokens_);
    MOESERVE_ASSIGN_OR_RETURN(kind_, bench_.Upload(std::vector<uint8_t>(n, kTokenDecode)));
    std::vector<int32_t> ids;
    for (int t = 0; t < tokens_; ++t) ids.push_back(t * 37 % kVocabulary);
    MOESERVE_ASSIGN_OR_RETURN(token_ids_, bench_.Upload(ids));
    MOESERVE_ASSIGN_OR_RETURN(routes_, bench_.Upload(std::vector<TokenRoutes>(n)));
    MOESERVE_RETURN_IF_ERROR(Route());
    const int items = bench_.tiny() ? 2 : 32;
    Enqueue();
    MOESERVE_RETURN_IF_ERROR(bench_.Synchronize());
    Measured m;
    MOESERVE_ASSIGN_OR_RETURN(m.timing, bench_.Time(items, [this](int) { Enqueue(); }));
    MOESERVE_RETURN_IF_ERROR(Check());
    const double routes = double(tokens_) * shape_.k_max() * blocks_;
    // The bytes consist of the row, the weight and the entry in the table of token counts per
    // assignment, the counters per expert, and the status and sums per token.
    m.work.bytes = routes * 16 + blocks_ * (52.0 * experts + 5.0 * tokens_) + 21.0 * tokens_;
    m.work.written = 0.5 * m.work.bytes;  // counters are read and written
    m.more = {{"blocks", blocks_}, {"tokens", tokens_}, {"experts", experts}, {"k", shape_.k}};
    return m;
  }

 private:
  // Makes a separate routing plan for every block.
  absl::Status Route() {
    const int experts = shape_.experts();
    MOESERVE_ASSIGN_OR_RETURN(
        const cuda::DeviceMemory input,
        bench_.Random(DType::kBF16, int64_t{tokens_} * shape_.width, kInputSeed, 1.0f));
    MOESERVE_ASSIGN_OR_RETURN(
        cuda::RouteScratch scratch,
        cuda::RouteScratch::Create(tokens_, shape_.k_max(), experts, std::max(experts, 64)));
    for (int b = 0; b < blocks_; ++b) {
      MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<cuda::CudaRouter> router,
                                RandomRouter(shape_, 43 + 3 * static_cast<uint64_t>(b), 0.0f));
      MOESERVE_ASSIGN_OR_RETURN(cuda::PlanMemory memory,
                                cuda::PlanMemory::Create(tokens_, shape_.k_max(), experts));
      memory_.push_back(std::move(memory));
      plans_.push_back(cuda::LaunchRoute(
          {.router = router.get(),
           .input = {input.data(), DType::kBF16, tokens_, shape_.width, shape_.width},
           .k_max = shape_.k_max(),
           .plan = &memory_.back(),
           .scratch = &scratch},
          bench_.stream()));
      MOESERVE_RETURN_IF_ERROR(bench_.Synchronize());
    }
    return absl::OkStatus();
  }

  void Enqueue() {
    counters_.LaunchCount({.tokens = tokens_,
                           .kind = kind_.as<uint8_t>(),
                           .token_ids = token_ids_.as<int32_t>(),
                           .routes = routes_.as<TokenRoutes>()},
                          plans_, bench_.stream());
  }

  // Checks that every step counted every route of every block once.
  absl::Status Check() {
    MOESERVE_ASSIGN_OR_RETURN(const CountsSnapshot counts, counters_.Read(bench_.stream()));
    const uint64_t tokens = counts.model.tokens[kTokenDecode];
    if (counts.model.steps == 0 || tokens != counts.model.steps * static_cast<uint64_t>(tokens_)) {
      return absl::InternalError("tokens of " + std::to_string(counts.model.steps) + " steps");
    }
    for (const BlockCounts& block : counts.blocks) {
      uint64_t selections = 0;
      for (const ExpertCount& e : block.experts) selections += e.selections;
      if (selections != tokens * static_cast<uint64_t>(shape_.k)) {
        return absl::InternalError("selections of a block");
      }
    }
    return absl::OkStatus();
  }

  Bench& bench_;
  const ExpertShape& shape_;
  const int blocks_;
  const int tokens_;
  cuda::ExpertCounters counters_;
  cuda::DeviceMemory kind_, token_ids_, routes_;
  std::vector<cuda::PlanMemory> memory_;
  std::vector<RoutingPlan> plans_;
};

}  // namespace

void AddCountingCases(bool tiny, std::vector<Case>& cases) {
  const ExpertShape shape = ExpertShapeOf(tiny ? "tiny_gated" : "olmoe", tiny);
  const std::vector<int> blocks = tiny ? std::vector<int>{3, 49} : std::vector<int>{1, 12, 48};
  const std::vector<int> sizes = tiny ? std::vector<int>{5} : std::vector<int>{1, 64, 256, 2048};
  for (const int b : blocks) {
    for (const int tokens : sizes) {
      cases.push_back({"count/B" + std::to_string(b) + "/T" + std::to_string(tokens), 0,
                       [shape, b, tokens](Bench& bench) {
                         return CountingRun(bench, shape, b, tokens).Run();
                       }});
    }
  }
}

}  // namespace moeserve::bench
