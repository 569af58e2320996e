// Measures experts of every shape: the two expert products, the fused expert kernel, and the whole
// routed layer. For attention experts, "layer" means router, query and output projection without
// the attention between them; blocks.cc measures their whole block.

#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/cuda/fused/fused_expert.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/cuda/rows/rows.h"
#include "tests/bench/cuda/banks.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {
namespace {

enum class Kind { kPair, kFused, kLayer };

// Kernels of the products to measure beside the built-in choice. A product that they cannot compute
// has the built-in choice. `fused` is for Kind::kFused.
struct Candidate {
  std::string name;  // the end of the case's name; empty: the built-in choice
  cuda::LinearTile tile = cuda::LinearTile::kAuto;
  cuda::TileOrder order = cuda::TileOrder::kAuto;
  cuda::FusedTile fused = cuda::FusedTile::kAuto;
};

constexpr uint64_t kInputSeed = 77;
constexpr uint64_t kAttendedSeed = 78;
constexpr int kMaxSets = 64;

// The expert weights of several layers.
struct Sets {
  std::vector<std::unique_ptr<RandomBank>> up, down;
};

int SetsFor(const Bench& bench, const ExpertShape& shape, double rows) {
  if (bench.tiny()) return 2;
  const double touched = shape.expected_bytes(rows);
  const double wanted = 4.0 * static_cast<double>(bench.rates().l2_bytes) / touched;
  const double room = static_cast<double>(bench.weight_budget()) / shape.bank_bytes();
  return static_cast<int>(
      std::clamp(std::ceil(wanted), 2.0, std::clamp(room, 2.0, 1.0 * kMaxSets)));
}

Result<std::shared_ptr<Sets>> MakeSets(Bench& bench, const ExpertShape& shape) {
  auto sets = std::make_shared<Sets>();
  for (int i = 0; i < SetsFor(bench, shape, shape.heads); ++i) {
    const uint64_t seed = 1000003ULL * static_cast<uint64_t>(i + 1);
    MOESERVE_ASSIGN_OR_RETURN(
        std::unique_ptr<RandomBank> up,
        RandomBank::Create(
            bench,
            {.in_features = {shape.width}, .out_features = shape.hidden, .gated = shape.gated},
            seed));
    MOESERVE_ASSIGN_OR_RETURN(
        std::unique_ptr<RandomBank> down,
        RandomBank::Create(bench,
                           {.in_features = shape.hidden,
                            .out_features = std::vector<int>(shape.hidden.size(), shape.width)},
                           seed + 500009));
    sets->up.push_back(std::move(up));
    sets->down.push_back(std::move(down));
  }
  return sets;
}

// One benchmark case. It owns the input rows, a routing plan for every set of weights, and the
// memory for all results.
class ExpertRun {
 public:
  ExpertRun(Bench& bench, const ExpertShape& shape, Kind kind, int tokens,
            const Candidate& candidate = {})
      : bench_(bench),
        shape_(shape),
        kind_(kind),
        rows_(tokens * shape.heads),
        candidate_(candidate) {}

  Result<Measured> Run() {
    MOESERVE_RETURN_IF_ERROR(Prepare());
    MOESERVE_RETURN_IF_ERROR(ReadPlans());
    if (kind_ == Kind::kFused &&
        !cuda::FusedExpertFits(sets_->up[0]->bank(), sets_->down[0]->bank())) {
      return absl::UnimplementedError("the fused kernel does not take this shape");
    }
    for (int i = 0; i < count_; ++i) Enqueue(i);
    MOESERVE_RETURN_IF_ERROR(bench_.Synchronize());
    Enqueue(0);
    const bool is_pair = kind_ == Kind::kPair && candidate_.name.empty();
    MOESERVE_RETURN_IF_ERROR(is_pair ? CheckPair() : CheckAgainstPair());
    Measured m;
    MOESERVE_ASSIGN_OR_RETURN(m.timing, bench_.Time(count_, [this](int i) { Enqueue(i); }));
    Account(m);
    return m;
  }

 private:
  absl::Status Prepare() {
    const auto make = [this] { return MakeSets(bench_, shape_); };
    // The top-p and top-k shapes share weights.
    std::string key = "experts/" + shape_.name;
    if (shape_.top_p) key = key.substr(0, key.rfind('_'));
    MOESERVE_ASSIGN_OR_RETURN(sets_, bench_.Keep<Sets>(key, make));
    count_ = std::min(SetsFor(bench_, shape_, rows_), static_cast<int>(sets_->up.size()));
    const int64_t capacity = int64_t{rows_} * shape_.k_max();
    widest_ = (*std::max_element(shape_.hidden.begin(), shape_.hidden.end()) + 15) / 16 * 16;
    MOESERVE_ASSIGN_OR_RETURN(
        input_, bench_.Random(DType::kBF16, int64_t{rows_} * shape_.width, kInputSeed, 1.0f));
    MOESERVE_ASSIGN_OR_RETURN(hidden_, bench_.Poisoned(static_cast<size_t>(capacity * widest_) *
                                                       SizeOf(shape_.hidden_dtype())));
    if (shape_.attention) {
      MOESERVE_ASSIGN_OR_RETURN(
          attended_, bench_.Random(DType::kBF16, capacity * widest_, kAttendedSeed, 1.0f));
    }
    MOESERVE_ASSIGN_OR_RETURN(results_,
                              bench_.Poisoned(static_cast<size_t>(capacity * shape_.width) * 2));
    MOESERVE_ASSIGN_OR_RETURN(output_,
                              bench_.Poisoned(static_cast<size_t>(rows_) * shape_.width * 4));
    MOESERVE_ASSIGN_OR_RETURN(scratch_,
                              cuda::RouteScratch::Create(rows_, shape_.k_max(), shape_.experts(),
                                                         std::max(shape_.experts(), 64)));
    float p = 0.0f;
    plans_.resize(static_cast<size_t>(count_));
    plan_memory_.resize(plans_.size());
    routers_.resize(plans_.size());
    for (cuda::PlanMemory& memory : plan_memory_) {
      MOESERVE_ASSIGN_OR_RETURN(memory,
                                cuda::PlanMemory::Create(rows_, shape_.k_max(), shape_.experts()));
    }
    if (shape_.top_p) {
      const auto count = [this](float share) -> Result<int64_t> {
        MOESERVE_RETURN_IF_ERROR(MakeRouter(0, share));
        Route(0);
        MOESERVE_ASSIGN_OR_RETURN(
            const std::vector<int32_t> offsets,
            bench_.Download<int32_t>(plans_[0].expert_offsets, shape_.experts() + 1));
        return offsets.back();
      };
      MOESERVE_ASSIGN_OR_RETURN(p, SharePerRow(shape_, rows_, count));
    }
    for (int i = 0; i < count_; ++i) {
      MOESERVE_RETURN_IF_ERROR(MakeRouter(i, p));
      Route(i);
    }
    return bench_.Synchronize();
  }

  absl::Status MakeRouter(int set, float p) {
    MOESERVE_ASSIGN_OR_RETURN(routers_[set],
                              RandomRouter(shape_, 31 + 7 * static_cast<uint64_t>(set), p));
    return absl::OkStatus();
  }

  RowsView InputView() const {
    return {input_.data(), DType::kBF16, rows_, shape_.width, shape_.width};
  }
  RowsView ResultView() const {
    return {results_.data(), DType::kBF16, int64_t{rows_} * shape_.k_max(), shape_.width,
            shape_.width};
  }
  RowsView OutputView() const {
    return {output_.data(), DType::kF32, rows_, shape_.width, shape_.width};
  }

  void Route(int set) {
    plans_[set] = cuda::LaunchRoute({.router = routers_[set].get(),
                                     .input = InputView(),
                                     .k_max = shape_.k_max(),
                                     .plan = &plan_memory_[set],
                                     .scratch = &scratch_},
                                    bench_.stream());
  }

  LinearArgs UpArgs(int set) const {
    return {.bank = &sets_->up[set]->bank(),
            .plan = &plans_[set],
            .gather = true,
            .input = InputView(),
            .output = {hidden_.data(), shape_.hidden_dtype(), int64_t{rows_} * shape_.k_max(),
                       widest_, widest_},
            .activation = shape_.activation,
            .pad_output = true};
  }
  LinearArgs DownArgs(int set) const {
    RowsView hidden = UpArgs(set).output;
    if (shape_.attention) {
      hidden.data = attended_.data();
      hidden.dtype = DType::kBF16;
    }
    return {.bank = &sets_->down[set]->bank(),
            .plan = &plans_[set],
            .input = hidden,
            .output = ResultView()};
  }

  // Whether the product is computed by the kernel of `candidate`.
  static bool Uses(const LinearArgs& args, const Candidate& candidate) {
    const std::vector<cuda::LinearTile> tiles = cuda::LinearTilesThatFit(args);
    return std::find(tiles.begin(), tiles.end(), candidate.tile) != tiles.end();
  }

  void Pair(int set, const Candidate& candidate) {
    for (const LinearArgs& args : {UpArgs(set), DownArgs(set)}) {
      if (Uses(args, candidate)) {
        cuda::LaunchLinear(args, candidate.tile, bench_.stream(), candidate.order);
      } else {
        cuda::LaunchLinear(args, bench_.stream());
      }
    }
  }

  cuda::FusedExpertArgs FusedArgs(int set) const {
    return {.up = &sets_->up[set]->bank(),
            .down = &sets_->down[set]->bank(),
            .plan = &plans_[set],
            .gather = true,
            .input = InputView(),
            .output = ResultView(),
            .activation = shape_.activation};
  }

  // The fused kernel that the engine's layer would use, if any.
  std::optional<cuda::FusedTile> LayerTile() const { return cuda::FusedTileThatPays(FusedArgs(0)); }
  bool LayerFuses() const { return LayerTile().has_value(); }

  void Fused(int set) {
    const cuda::FusedTile tile =
        kind_ == Kind::kLayer ? LayerTile().value_or(cuda::FusedTile::kAuto) : candidate_.fused;
    cuda::LaunchFusedExpert(FusedArgs(set), tile, bench_.stream());
  }

  void Enqueue(int set) {
    if (kind_ == Kind::kLayer) Route(set);
    if (kind_ == Kind::kFused || (kind_ == Kind::kLayer && LayerFuses())) {
      Fused(set);
    } else {
      Pair(set, candidate_);
    }
    if (kind_ != Kind::kLayer) return;
    cuda::LaunchCombine({.plan = &plans_[set], .results = ResultView(), .output = OutputView()},
                        bench_.stream());
  }

  absl::Status ReadPlans() {
    for (int i = 0; i < count_; ++i) {
      MOESERVE_ASSIGN_OR_RETURN(
          const std::vector<int32_t> offsets,
          bench_.Download<int32_t>(plans_[i].expert_offsets, shape_.experts() + 1));
      offsets_.push_back(offsets);
      if (offsets.back() <= 0 || offsets.back() > int64_t{rows_} * shape_.k_max() ||
          (!shape_.top_p && offsets.back() != rows_ * shape_.k)) {
        return absl::InternalError("a plan of " + std::to_string(offsets.back()) + " routes");
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(
        row_of_, bench_.Download<int32_t>(plans_[0].row_of_assignment, offsets_[0].back()));
    return absl::OkStatus();
  }

  // Checks some hidden units of some assignments, computed from the input, and some results,
  // computed from the device's hidden units.
  absl::Status CheckPair() {
    std::vector<int> hit;
    for (int e = 0; e < shape_.experts(); ++e) {
      if (offsets_[0][e + 1] > offsets_[0][e]) hit.push_back(e);
    }
    const size_t count = std::min<size_t>(hit.size(), 8);
    for (size_t i = 0; i < count; ++i) {
      const int e = hit[i * hit.size() / count];
      // The expert's first or last assignment.
      const int a = offsets_[0][e + (i % 2)] - static_cast<int>(i % 2);
      const int f = shape_.hidden[e];
      std::vector<float> x;
      for (int i = 0; i < shape_.width; ++i) {
        x.push_back(
            RandomRounded(kInputSeed, int64_t{row_of_[a]} * shape_.width + i, 1.0f, DType::kBF16));
      }
      MOESERVE_ASSIGN_OR_RETURN(
          const std::vector<float> hidden,
          bench_.DownloadRow(hidden_.data(), shape_.hidden_dtype(), int64_t{a} * widest_, f));
      std::vector<float> down_input = hidden;
      if (shape_.attention) {
        MOESERVE_ASSIGN_OR_RETURN(down_input, bench_.DownloadRow(attended_.data(), DType::kBF16,
                                                                 int64_t{a} * widest_, f));
      }
      MOESERVE_ASSIGN_OR_RETURN(const std::vector<float> result,
                                bench_.DownloadRow(results_.data(), DType::kBF16,
                                                   int64_t{a} * shape_.width, shape_.width));
      for (const int u : {0, f / 3, f - 1}) {
        double expected = OracleActivation(
            shape_.activation,
            sets_->up[0]->Product(
                e, shape_.gated ? LinearBank::Half::kGate : LinearBank::Half::kMain, u, x));
        if (shape_.gated) {
          expected *= sets_->up[0]->Product(e, LinearBank::Half::kMain, u, x);
        }
        MOESERVE_RETURN_IF_ERROR(
            CheckValue(hidden[u], expected, Spread(hidden),
                       "hidden unit " + std::to_string(u) + " of route " + std::to_string(a)));
      }
      for (const int c : {0, shape_.width / 2 + 1, shape_.width - 1}) {
        MOESERVE_RETURN_IF_ERROR(CheckValue(
            result[c], sets_->down[0]->Product(e, LinearBank::Half::kMain, c, down_input),
            Spread(result), "column " + std::to_string(c) + " of route " + std::to_string(a)));
      }
    }
    return absl::OkStatus();
  }

  static double Spread(const std::vector<float>& values) {
    double sum = 0;
    for (const float v : values) sum += static_cast<double>(v) * v;
    return std::sqrt(sum / static_cast<double>(values.size()));
  }

  // Checks that the candidate, the fused kernel or the layer has the same results as the two
  // separate products by the built-in choice, and then checks the results of these products.
  absl::Status CheckAgainstPair() {
    const int64_t count = int64_t{offsets_[0].back()} * shape_.width;
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<Bf16> results,
                              bench_.Download<Bf16>(results_.data(), count));
    if (kind_ == Kind::kLayer) MOESERVE_RETURN_IF_ERROR(CheckCombine());
    MOESERVE_RETURN_IF_ERROR(
        cuda::CudaStatus(cudaMemsetAsync(results_.data(), 0xff, results_.bytes(), bench_.stream()),
                         "cudaMemsetAsync"));
    Pair(0, {});
    MOESERVE_RETURN_IF_ERROR(CheckPair());
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<Bf16> pair,
                              bench_.Download<Bf16>(results_.data(), count));
    if (results != pair) {
      return absl::InternalError("results differ from those of the pair of products");
    }
    return absl::OkStatus();
  }

  absl::Status CheckCombine() {
    const int row = rows_ / 2;
    MOESERVE_ASSIGN_OR_RETURN(const std::vector<int32_t> span,
                              bench_.Download<int32_t>(plans_[0].row_offsets + row, 2));
    MOESERVE_ASSIGN_OR_RETURN(
        const std::vector<int32_t> assignments,
        bench_.Download<int32_t>(plans_[0].assignments_of_row + span[0], span[1] - span[0]));
    std::vector<double> sum(static_cast<size_t>(shape_.width));
    for (const int32_t a : assignments) {
      MOESERVE_ASSIGN_OR_RETURN(const std::vector<float> weight,
                                bench_.Download<float>(plans_[0].weight_of_assignment + a, 1));
      MOESERVE_ASSIGN_OR_RETURN(const std::vector<float> y,
                                bench_.DownloadRow(results_.data(), DType::kBF16,
                                                   int64_t{a} * shape_.width, shape_.width));
      for (int c = 0; c < shape_.width; ++c) sum[c] += static_cast<double>(weight[0]) * y[c];
    }
    MOESERVE_ASSIGN_OR_RETURN(
        const std::vector<float> output,
        bench_.DownloadRow(output_.data(), DType::kF32, int64_t{row} * shape_.width, shape_.width));
    for (int c = 0; c < shape_.width; ++c) {
      MOESERVE_RETURN_IF_ERROR(
          CheckValue(output[c], sum[c], Spread(output), "combined column " + std::to_string(c)));
    }
    return absl::OkStatus();
  }

  void Account(Measured& m) const {
    double weights = 0, flops = 0, hidden = 0, routes = 0, hit = 0;
    const double matrices = shape_.gated ? 3 : 2;
    for (const std::vector<int32_t>& offsets : offsets_) {
      for (int e = 0; e < shape_.experts(); ++e) {
        const double rows = offsets[e + 1] - offsets[e];
        const double units = shape_.hidden[e];
        if (rows > 0) weights += matrices * shape_.width * units * 2;
        hit += rows > 0;
        flops += 2 * matrices * shape_.width * units * rows;
        hidden += rows * units;
        routes += rows;
      }
    }
    const double n = count_;
    weights /= n, flops /= n, hidden /= n, routes /= n, hit /= n;
    const double d = shape_.width;
    // Every kind reads the input rows and writes the results.
    m.work.bytes = weights + 2.0 * rows_ * d + 2 * routes * d;
    m.work.written = 2 * routes * d;
    // The bound of a layer is that of the best kernels that there are, whichever of them run. Only
    // fused experts save writing and reading the hidden units.
    const bool fused = kind_ == Kind::kFused || (kind_ == Kind::kLayer && LayerFuses());
    const bool may_fuse = kind_ == Kind::kLayer &&
                          cuda::FusedExpertFits(sets_->up[0]->bank(), sets_->down[0]->bank());
    const bool bound_is_fused = kind_ == Kind::kFused || may_fuse;
    const double hidden_bytes = static_cast<double>(SizeOf(shape_.hidden_dtype())) * hidden;
    if (!bound_is_fused) {
      m.work.bytes += hidden_bytes + 2 * hidden;
      m.work.written += hidden_bytes;
    }
    m.work.phases = kind_ == Kind::kFused ? 1 : 2;
    m.work.flops = flops;
    if (kind_ == Kind::kLayer) {
      m.work.bytes += 2 * routes * d + 4.0 * rows_ * d;  // combine
      m.work.bytes += 2.0 * rows_ * d + 4 * d * shape_.experts();
      m.work.written += 4.0 * rows_ * d;
      m.work.phases = 3;  // router, first product, second product with the weighted sum
    }
    m.rotated_bytes = weights * n;
    m.more = {{"rows", rows_},      {"routes", routes},
              {"experts_hit", hit}, {"weight_mb", weights / 1e6},
              {"fused", fused},     {"bound_is_fused", bound_is_fused}};
    if (kind_ == Kind::kPair && !candidate_.name.empty()) {
      m.more["up_as_named"] = Uses(UpArgs(0), candidate_);
      m.more["down_as_named"] = Uses(DownArgs(0), candidate_);
    }
  }

  Bench& bench_;
  const ExpertShape& shape_;
  const Kind kind_;
  const int rows_;
  const Candidate candidate_;
  int count_ = 0;
  int64_t widest_ = 0;
  std::shared_ptr<Sets> sets_;
  cuda::DeviceMemory input_, hidden_, results_, output_;
  cuda::DeviceMemory attended_;  // input of the second product of attention experts
  cuda::RouteScratch scratch_;
  std::vector<cuda::PlanMemory> plan_memory_;
  std::vector<std::unique_ptr<cuda::CudaRouter>> routers_;
  std::vector<RoutingPlan> plans_;
  std::vector<std::vector<int32_t>> offsets_;  // [set][E + 1]
  std::vector<int32_t> row_of_;                // row of each assignment in set 0
};

void Add(const ExpertShape& shape, Kind kind, int tokens, int priority, std::vector<Case>& cases,
         const Candidate& candidate = {}) {
  const char* family = !candidate.name.empty() ? "tiles"
                       : kind == Kind::kPair   ? "experts"
                       : kind == Kind::kFused  ? "fused"
                                               : "moe";
  cases.push_back(
      {std::string(family) + "/" + shape.name + "/T" + std::to_string(tokens) + candidate.name,
       priority, [shape, kind, tokens, candidate](Bench& bench) {
         return ExpertRun(bench, shape, kind, tokens, candidate).Run();
       }});
}

// What the built-in choice never takes, beside what it takes, for many rows per expert.
void AddCandidates(const ExpertShape& shape, int tokens, std::vector<Case>& cases) {
  using cuda::LinearTile;
  const auto add = [&](const Candidate& c) { Add(shape, Kind::kPair, tokens, 0, cases, c); };
  add({.name = "/warpgroup256", .tile = LinearTile::kWarpgroup256});
  add({.name = "/warpgroup256fixed",
       .tile = LinearTile::kWarpgroup256,
       .order = cuda::TileOrder::kFixed});
  add({.name = "/warpgroup192x192", .tile = LinearTile::kWarpgroup192x192});
  add({.name = "/warpgroup256pair", .tile = LinearTile::kWarpgroup256Pair});
  add({.name = "/warpgroup192x192pair", .tile = LinearTile::kWarpgroup192x192Pair});
  const auto is_short = [](int inputs) { return inputs <= 512; };
  if (is_short(shape.width) || std::all_of(shape.hidden.begin(), shape.hidden.end(), is_short)) {
    add({.name = "/stationary", .tile = LinearTile::kStationary});
  }
  if (shape.heads == 1) return;
  for (const cuda::FusedTile tile : {cuda::FusedTile::kMma, cuda::FusedTile::kWarpgroup}) {
    Add(shape, Kind::kFused, tokens, 0, cases,
        {.name = "/fused_" + std::string(cuda::kFusedTileNames[static_cast<size_t>(tile)]),
         .fused = tile});
  }
}

}  // namespace

void AddExpertCases(bool tiny, std::vector<Case>& cases) {
  for (const ExpertShape& shape : ExpertShapes(tiny)) {
    if (tiny) {
      for (const int tokens : {1, 5}) {
        for (const Kind kind : {Kind::kPair, Kind::kLayer}) Add(shape, kind, tokens, 0, cases);
      }
      if (shape.heads > 1) Add(shape, Kind::kFused, 5, 0, cases);
      AddCandidates(shape, 5, cases);
      continue;
    }
    for (const int tokens : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}) {
      const bool first = tokens == 1 || tokens == 16 || tokens == 64 || tokens == 256 ||
                         tokens == 1024 || tokens == 4096;
      Add(shape, Kind::kPair, tokens, first ? 0 : 1, cases);
      Add(shape, Kind::kLayer, tokens, first ? 0 : 1, cases);
      if (shape.heads > 1 && tokens >= 256) Add(shape, Kind::kFused, tokens, first ? 0 : 1, cases);
      if (tokens == 1024 || tokens == 4096) AddCandidates(shape, tokens, cases);
    }
  }
}

}  // namespace moeserve::bench
