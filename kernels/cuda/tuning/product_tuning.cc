#include "kernels/cuda/tuning/product_tuning.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <utility>

#include "base/error_text.h"
#include "base/kinds.h"
#include "kernels/cuda/quantized/linear_fp8.h"
#include "kernels/cuda/quantized/linear_grouped.h"
#include "kernels/cuda/quantized/linear_int4.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "kernels/cuda/quantized/linear_mxfp4.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/cuda/tuning/graph_device.h"

namespace moeserve::cuda {
namespace {

const CudaLinearBank& BankOf(const LinearArgs& args) {
  return static_cast<const CudaLinearBank&>(*args.bank);
}
std::vector<LinearTile> TilesThatFit(const LinearArgs& args) {
  const CudaLinearBank& bank = BankOf(args);
  if (bank.is_int8()) return Int8TilesThatFit(args);
  if (bank.is_int4()) return Int4TilesThatFit();
  if (bank.is_grouped()) return GroupedTilesThatFit();
  if (bank.is_mxfp4()) return Mxfp4TilesThatFit(args);
  if (bank.is_fp8()) return Fp8TilesThatFit(args);
  return LinearTilesThatFit(args);
}
LinearTile DefaultTile(const LinearArgs& args) {
  const CudaLinearBank& bank = BankOf(args);
  if (bank.is_int8()) return DefaultInt8Tile(args);
  if (bank.is_int4()) return DefaultInt4Tile(args);
  if (bank.is_grouped()) return DefaultGroupedTile(args);
  if (bank.is_mxfp4()) return DefaultMxfp4Tile(args);
  if (bank.is_fp8()) return DefaultFp8Tile(args);
  return DefaultLinearTile(args);
}
// `rounded` is memory for the rows of products with integers.
void LaunchProduct(const LinearArgs& args, LinearTile tile, const Int8Rows& rounded,
                   cudaStream_t stream) {
  const CudaLinearBank& bank = BankOf(args);
  if (bank.is_int8()) return LaunchLinearInt8(args, tile, rounded, stream);
  if (bank.is_int4()) return LaunchLinearInt4(args, tile, rounded, stream);
  if (bank.is_grouped()) return LaunchLinearGrouped(args, tile, rounded, stream);
  if (bank.is_mxfp4()) return LaunchLinearMxfp4(args, tile, stream);
  if (bank.is_fp8()) return LaunchLinearFp8(args, tile, stream);
  LaunchLinear(args, tile, stream);
}

constexpr int kDense = 0, kSegments = 1, kRouted = 2, kGathered = 3;

Choices::Names TileNames() { return {std::begin(kLinearTileNames), std::end(kLinearTileNames)}; }

// Returns whether a tile may be the fastest for about so many rows per expert. Tiles with far fewer
// rows read the weights many times; those with far more compute rows that do not exist.
bool IsPlausible(LinearTile tile, double rows) {
  switch (tile) {
    case LinearTile::kRows8:
    case LinearTile::kStream8x16:
    case LinearTile::kStream8x64:
      return rows <= 24;
    case LinearTile::kRows16:
      return rows > 4 && rows <= 48;
    case LinearTile::kStream32x16:
    case LinearTile::kStream32x64:
      return rows > 4 && rows <= 128;
    case LinearTile::kRows32:
      return rows > 8 && rows <= 96;
    case LinearTile::kRows64:
      return rows > 16 && rows <= 512;
    case LinearTile::kWarpgroup256Pair:
    case LinearTile::kWarpgroup192x192Pair:
      return rows > 128;
    default:
      return rows > 32;
  }
}

// Returns `routes` different experts for each of `rows` rows, ascending within a row.
GivenRoutes UniformRoutes(int64_t rows, int routes, int experts) {
  GivenRoutes given;
  std::mt19937 random(static_cast<uint32_t>(rows));
  std::vector<int32_t> all(static_cast<size_t>(experts));
  for (int e = 0; e < experts; ++e) all[e] = e;
  given.offsets.push_back(0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int i = 0; i < routes; ++i) {
      std::swap(all[i], all[i + random() % static_cast<uint32_t>(experts - i)]);
    }
    given.experts.insert(given.experts.end(), all.begin(), all.begin() + routes);
    std::sort(given.experts.end() - routes, given.experts.end());
    given.offsets.push_back(static_cast<int32_t>(given.experts.size()));
  }
  given.weights.assign(given.experts.size(), 1.0f / static_cast<float>(routes));
  return given;
}

// Returns whether products may be measured with rows of any expert.
bool HasAllExperts(const LinearBank* linear) {
  const auto& bank = static_cast<const CudaLinearBank&>(*linear);
  return !bank.may_lack_experts() && bank.memory() != BankMemory::kHost;
}

// Returns the candidate of a pair of products: 0 for two kernels, or the number of the tile, which
// is not kAuto.
int CandidateOf(std::optional<FusedTile> tile) { return tile ? static_cast<int>(*tile) : 0; }

// Returns the names of all candidates of a pair of products.
Choices::Names PairNames() {
  Choices::Names names = {"products"};
  for (const FusedTile tile : {FusedTile::kMma, FusedTile::kWarpgroup}) {
    names.push_back(Concat("fused ", kFusedTileNames[static_cast<size_t>(tile)]));
  }
  return names;
}

}  // namespace

// The device memory of measurements.
class ProductTuning::Operands {
 public:
  explicit Operands(cudaStream_t stream) : stream_(stream) {}

  // Allocates rows for a product. With a plan, `recorded.rows` rows of the plan.
  Status Allocate(const Recorded& recorded) {
    recorded_ = &recorded;
    const LinearArgs& args = recorded.args;
    const int64_t results = args.plan == nullptr ? recorded.rows : recorded.rows * recorded.routes;
    const int64_t inputs = args.plan == nullptr || args.gather ? recorded.rows : results;
    MOESERVE_RETURN_IF_ERROR(AllocateRows(args.input, inputs, input_));
    MOESERVE_RETURN_IF_ERROR(AllocateRows(args.output, results, output_));
    MOESERVE_RETURN_IF_ERROR(FillWithNumbers(input_, stream_));
    MOESERVE_RETURN_IF_ERROR(ReserveRounded(inputs));
    if (args.plan == nullptr) return absl::OkStatus();
    const int most = static_cast<int>(recorded.rows);
    MOESERVE_ASSIGN_OR_RETURN(plan_memory_,
                              PlanMemory::Create(most, recorded.routes, recorded.experts));
    MOESERVE_ASSIGN_OR_RETURN(scratch_,
                              RouteScratch::Create(most, recorded.routes, recorded.experts, 1));
    const size_t routes = static_cast<size_t>(results);
    MOESERVE_ASSIGN_OR_RETURN(
        given_, DeviceMemory::Allocate((static_cast<size_t>(most) + 1 + 2 * routes) * 4));
    return absl::OkStatus();
  }

  // Returns the product with its first `rows` rows, or those of the plan.
  Result<LinearArgs> WithRows(int64_t rows) {
    LinearArgs args = recorded_->args;
    args.input.data = input_.data();
    args.output.data = output_.data();
    int64_t results = rows;
    if (args.plan != nullptr) {
      MOESERVE_RETURN_IF_ERROR(Plan(rows));
      args.plan = &plan_;
      results = rows * recorded_->routes;
    }
    args.output.rows = results;
    args.input.rows = args.plan == nullptr || args.gather ? rows : results;
    return args;
  }

  const DeviceMemory& output() const { return output_; }

  // Launches a product that WithRows() returned, with this bank or an equal one.
  void Launch(const LinearArgs& args, LinearTile tile) const {
    LaunchProduct(args, tile, rounded_, stream_);
  }

 private:
  // Allocates memory for the rounded rows of a product with so many input rows.
  Status ReserveRounded(int64_t inputs) {
    LinearArgs args = recorded_->args;
    if (!BankOf(args).has_integers()) return absl::OkStatus();
    const RoutingPlan plan{.capacity = static_cast<int>(inputs)};  // the recorded one is gone
    if (args.plan != nullptr) args.plan = &plan;
    args.input.rows = inputs;
    return rounded_.Reserve(args);
  }

  static Status AllocateRows(const RowsView& view, int64_t rows, DeviceMemory& memory) {
    const size_t bytes = static_cast<size_t>(rows * view.stride) * SizeOf(view.dtype);
    MOESERVE_ASSIGN_OR_RETURN(memory, DeviceMemory::Allocate((bytes + 15) / 16 * 16));
    return absl::OkStatus();
  }

  Status Plan(int64_t rows) {
    const GivenRoutes given = UniformRoutes(rows, recorded_->routes, recorded_->experts);
    char* const base = given_.as<char>();
    const size_t offsets = given.offsets.size() * 4, routes = given.experts.size() * 4;
    const std::pair<const void*, size_t> parts[] = {{given.offsets.data(), offsets},
                                                    {given.experts.data(), routes},
                                                    {given.weights.data(), routes}};
    size_t at = 0;
    for (const auto& [from, bytes] : parts) {
      MOESERVE_CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(base + at, from, bytes, cudaMemcpyHostToDevice, stream_));
      at += bytes;
    }
    MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
    plan_ = LaunchGivenPlan({.rows = static_cast<int>(rows),
                             .num_experts = recorded_->experts,
                             .k_max = recorded_->routes,
                             .offsets = reinterpret_cast<const int32_t*>(base),
                             .experts = reinterpret_cast<const int32_t*>(base + offsets),
                             .weights = reinterpret_cast<const float*>(base + offsets + routes),
                             .plan = &plan_memory_,
                             .scratch = &scratch_},
                            stream_);
    return absl::OkStatus();
  }

  cudaStream_t stream_;
  const Recorded* recorded_ = nullptr;
  DeviceMemory input_, output_, given_;
  Int8Rows rounded_;
  PlanMemory plan_memory_;
  RouteScratch scratch_;
  RoutingPlan plan_;
};

ProductTuning::SiteKey ProductTuning::KeyOf(const LinearArgs& args) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  return {.up = bank.signature(),
          .down = "",
          .kind = args.activation.kind,
          .plain = IsPlain(args.activation),
          .output = args.output.dtype,
          .form = args.plan != nullptr ? (args.gather ? kGathered : kRouted)
                  : args.segments      ? kSegments
                                       : kDense};
}

int ProductTuning::SiteOf(const SiteKey& key) {
  const auto [at, added] = sites_.try_emplace(key, -1);
  if (added) {
    constexpr std::string_view kForms[] = {"dense", "segments", "routed", "gathered"};
    at->second = choices_->Site(
        Concat("product ", key.up, " ", KindName(key.kind), key.plain ? "" : " limited", " to ",
               Name(key.output), " ", kForms[key.form]),
        TileNames());
  }
  return at->second;
}

ProductTuning::SiteKey ProductTuning::PairKeyOf(const FusedExpertArgs& args) {
  return {.up = static_cast<const CudaLinearBank&>(*args.up).signature(),
          .down = static_cast<const CudaLinearBank&>(*args.down).signature(),
          .kind = args.activation.kind,
          .plain = IsPlain(args.activation),
          .output = args.output.dtype};
}

int ProductTuning::PairSite(const SiteKey& key) {
  const auto [at, added] = sites_.try_emplace(key, -1);
  if (added) {
    at->second =
        choices_->Site(Concat("experts ", key.up, " then ", key.down, " ", KindName(key.kind),
                              key.plain ? "" : " limited", " to ", Name(key.output)),
                       PairNames());
  }
  return at->second;
}

LinearTile ProductTuning::Tile(const LinearArgs& args) {
  if (args.input.dtype != DType::kBF16) return LinearTile::kAuto;
  const SiteKey key = KeyOf(args);
  const int site = SiteOf(key);
  // Rows of absent experts cannot be multiplied, so products of such banks are not measured; what
  // was measured with all experts is used for them. The same holds for experts that come and go.
  if (records_ && HasAllExperts(args.bank) && !TilesThatFit(args).empty()) {
    Recorded& r = recorded_[key];
    const int64_t rows = args.plan != nullptr ? args.plan->rows : args.input.rows;
    if (rows > r.rows) {
      r.args = args;
      r.rows = rows;
      if (args.plan != nullptr) {
        r.routes = std::min(args.plan->MostOfRow(), args.plan->num_experts);
        r.experts = args.plan->num_experts;
      }
    }
    if (std::find(r.banks.begin(), r.banks.end(), args.bank) == r.banks.end()) {
      r.banks.push_back(args.bank);
    }
  }
  const std::optional<int> chosen = choices_->Find(site, ExpectedRows(args));
  return chosen ? static_cast<LinearTile>(*chosen) : LinearTile::kAuto;
}

std::optional<FusedTile> ProductTuning::Fused(const FusedExpertArgs& args) {
  const SiteKey key = PairKeyOf(args);
  const int site = PairSite(key);
  if (records_) {
    std::vector<Pair>& pairs = pairs_[key];  // may stay empty
    const auto same = [&](const Pair& p) { return p.up == args.up; };
    const bool all_here = HasAllExperts(args.up) && HasAllExperts(args.down);
    if (all_here && std::none_of(pairs.begin(), pairs.end(), same)) {
      pairs.push_back({args.up, args.down});
    }
    return std::nullopt;
  }
  const LinearArgs down{
      .bank = args.down, .plan = args.plan, .input = args.input, .output = args.output};
  const std::optional<int> chosen = choices_->Find(site, ExpectedRows(down));
  if (!chosen) return FusedTileThatPays(args);
  if (*chosen == CandidateOf(std::nullopt)) return std::nullopt;
  return static_cast<FusedTile>(*chosen);
}

Status ProductTuning::MeasureProduct(const Recorded& recorded, const TuningSettings& settings,
                                     const TuneDeviceFactory& devices, cudaStream_t stream) {
  const int site = SiteOf(KeyOf(recorded.args));
  const bool routed = recorded.args.plan != nullptr;
  const bool segments = !routed && recorded.args.segments;
  const int experts = routed || segments ? recorded.args.bank->num_experts() : 1;
  Operands operands(stream);
  std::unique_ptr<TuneDevice> device;
  for (const int64_t rows : NumbersOfRows(recorded.rows, settings.rows_factor)) {
    // What ExpectedRows() returns for such a product.
    const int64_t results = rows * (routed ? recorded.routes : segments ? experts : 1);
    if (!IsWanted(site, results, settings)) continue;
    if (device == nullptr) {
      MOESERVE_RETURN_IF_ERROR(operands.Allocate(recorded));
      device = devices(stream, operands.output().data(), operands.output().bytes());
    }
    MOESERVE_ASSIGN_OR_RETURN(const LinearArgs args, operands.WithRows(rows));
    const LinearTile usual = DefaultTile(args);
    std::vector<LinearTile> tiles = {usual};
    const double per_expert = static_cast<double>(results) / experts;
    for (const LinearTile tile : TilesThatFit(args)) {
      if (tile != usual && IsPlausible(tile, std::max(per_expert, 1.0))) tiles.push_back(tile);
    }
    TuneCase tune_case{.name = Concat("products of ", results, " rows"), .candidates = {}};
    std::vector<int> ids;
    for (const LinearTile tile : tiles) {
      ids.push_back(static_cast<int>(tile));
      tune_case.candidates.push_back(
          {.name = std::string(kLinearTileNames[ids.back()]),
           .enqueue = [&recorded, &operands, args, tile](int turn) {
             LinearArgs own = args;
             own.bank = recorded.banks[static_cast<size_t>(turn) % recorded.banks.size()];
             operands.Launch(own, tile);
           }});
    }
    MOESERVE_RETURN_IF_ERROR(MeasureCase(site, results, tune_case, ids, *device));
  }
  return absl::OkStatus();
}

Status ProductTuning::MeasurePair(const SiteKey& key, const std::vector<Pair>& pairs,
                                  const TuningSettings& settings, const TuneDeviceFactory& devices,
                                  cudaStream_t stream) {
  if (pairs.empty()) return absl::OkStatus();
  const auto product_of = [&](const LinearBank* bank) -> const Recorded* {
    for (const auto& [key, r] : recorded_) {
      if (std::find(r.banks.begin(), r.banks.end(), bank) != r.banks.end()) return &r;
    }
    return nullptr;
  };
  const Recorded* const up = product_of(pairs[0].up);
  const Recorded* const down = product_of(pairs[0].down);
  if (up == nullptr || down == nullptr || up->args.plan == nullptr) return absl::OkStatus();
  const int site = PairSite(key);
  Operands first(stream), second(stream);
  std::unique_ptr<TuneDevice> device;
  for (const int64_t rows : NumbersOfRows(up->rows, settings.rows_factor)) {
    const int64_t results = rows * up->routes;
    if (!IsWanted(site, results, settings)) continue;
    if (device == nullptr) {
      MOESERVE_RETURN_IF_ERROR(first.Allocate(*up));
      MOESERVE_RETURN_IF_ERROR(second.Allocate(*down));
      device = devices(stream, second.output().data(), second.output().bytes());
    }
    MOESERVE_ASSIGN_OR_RETURN(const LinearArgs up_args, first.WithRows(rows));
    MOESERVE_ASSIGN_OR_RETURN(LinearArgs down_args, second.WithRows(rows));
    down_args.input = up_args.output;
    down_args.plan = up_args.plan;
    const auto products = [this, &pairs, up_args, down_args, stream](int turn) {
      const Pair& pair = pairs[static_cast<size_t>(turn) % pairs.size()];
      LinearArgs up_own = up_args, down_own = down_args;
      up_own.bank = pair.up;
      down_own.bank = pair.down;
      LaunchLinear(up_own, Tile(up_own), stream);
      LaunchLinear(down_own, Tile(down_own), stream);
    };
    const FusedExpertArgs args{.up = pairs[0].up,
                               .down = pairs[0].down,
                               .plan = up_args.plan,
                               .gather = up_args.gather,
                               .input = up_args.input,
                               .output = down_args.output,
                               .activation = up_args.activation};
    const Choices::Names names = PairNames();
    TuneCase tune_case{.name = Concat("experts of ", results, " rows"), .candidates = {}};
    std::vector<int> ids = {CandidateOf(std::nullopt)};
    for (const FusedTile tile : FusedTilesThatFit(args)) ids.push_back(CandidateOf(tile));
    // The default is the first one.
    std::swap(ids[0], *std::find(ids.begin(), ids.end(), CandidateOf(FusedTileThatPays(args))));
    for (const int id : ids) {
      const auto fused = [&pairs, args, id, stream](int turn) {
        const Pair& pair = pairs[static_cast<size_t>(turn) % pairs.size()];
        FusedExpertArgs own = args;
        own.up = pair.up;
        own.down = pair.down;
        LaunchFusedExpert(own, static_cast<FusedTile>(id), stream);
      };
      TuneCandidate candidate{.name = names[static_cast<size_t>(id)], .enqueue = fused};
      if (id == CandidateOf(std::nullopt)) candidate.enqueue = products;
      tune_case.candidates.push_back(std::move(candidate));
    }
    MOESERVE_RETURN_IF_ERROR(MeasureCase(site, results, tune_case, ids, *device));
  }
  return absl::OkStatus();
}

Status ProductTuning::MeasureRecorded(const TuningSettings& settings,
                                      const TuneDeviceFactory& devices, cudaStream_t stream) {
  for (const auto& [key, recorded] : recorded_) {
    MOESERVE_RETURN_IF_ERROR(MeasureProduct(recorded, settings, devices, stream));
  }
  for (const auto& [key, pairs] : pairs_) {
    MOESERVE_RETURN_IF_ERROR(MeasurePair(key, pairs, settings, devices, stream));
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cuda
