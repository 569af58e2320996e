#include "kernels/cuda/routing/route_variant.h"

#include <algorithm>

#include "kernels/cuda/routing/plan.h"

namespace moeserve::cuda {
namespace {

// More routes than this are sorted by several blocks, as the writes of a plan are scattered. A
// block of kPlanChunk rows may have more.
constexpr int64_t kMostRoutesOfOnePlan = 8192;
// A single tile with all columns is used for few rows up to this size of the weights. It saves the
// blocks' arrivals, but only one multiprocessor reads the weights.
constexpr int64_t kMostBytesOfOneTile = 64 << 10;

int64_t TilesOf(int64_t n, int tile) { return (n + tile - 1) / tile; }

RouteTile ChooseTile(const RouteShape& shape) {
  const bool few_columns = shape.columns <= ShapeOf(RouteTile::k64x8).columns();
  const auto fits = [&](RouteTile tile) {
    return RouteHeaderBytes(tile) + RouteTileBytes(tile, shape.element_bytes) <= shape.shared_limit;
  };
  // Large tiles read the inputs less often. A grid that leaves at most an eighth of the
  // multiprocessors idle is large enough.
  for (const RouteTile tile : {RouteTile::k64x8, RouteTile::k32x16, RouteTile::k16x16,
                               RouteTile::k8x16, RouteTile::k8x8}) {
    const RouteTileShape s = ShapeOf(tile);
    const bool narrow_enough = s.columns() == 8 || !few_columns;
    const bool wide_enough = tile != RouteTile::k64x8 || few_columns;
    if (!fits(tile) || !narrow_enough || !wide_enough) continue;
    const int64_t blocks = TilesOf(shape.rows, s.rows()) * TilesOf(shape.columns, s.columns());
    if (blocks * 8 >= int64_t{shape.multiprocessors} * 7) return tile;
  }
  if (shape.columns * shape.settings.input_width * 4 <= kMostBytesOfOneTile) {
    for (const RouteTile tile : {RouteTile::k8x4, RouteTile::k8x8, RouteTile::k8x16}) {
      if (shape.columns <= ShapeOf(tile).columns() && fits(tile)) return tile;
    }
  }
  return RouteTile::k8x4;
}

bool IsClusterPossible(const RouteShape& shape, int blocks) {
  if (blocks != 8 && blocks != 16) return false;
  return blocks <= shape.most_cluster_blocks && shape.settings.score == ScoreKind::kDot &&
         shape.rows <= kMostClusterRows && shape.columns <= kMostTopExperts &&
         ClusterShapeOf(shape.rows, shape.columns, shape.settings.input_width, shape.element_bytes,
                        blocks)
                 .bytes() <= shape.cluster_limit;
}

bool IsPossible(RouteKernelKind kind, const RouteShape& shape, RouteTile tile) {
  const bool cosine = shape.settings.score == ScoreKind::kCosine;
  switch (kind) {
    case RouteKernelKind::kAuto:
      return false;
    case RouteKernelKind::kTopOfDots:
      return !cosine && !shape.overrides && IsTopRouter(shape.settings);
    case RouteKernelKind::kTopOfCosines:
      return cosine && !shape.overrides && IsTopRouter(shape.settings) &&
             RouteHeaderBytes(tile) + kSelectTopBytes + ExpertTableBytes(shape.settings) <=
                 shape.shared_limit;
    case RouteKernelKind::kAny:
      return true;
  }
  return false;
}

}  // namespace

bool BuildsPlanInOneBlock(int64_t rows, int64_t k_max, int experts, int64_t limit,
                          PlanForm wanted) {
  const bool possible =
      rows <= kOnePlanRows && OnePlanBytes(experts, static_cast<int>(rows)) <= limit;
  switch (wanted) {
    case PlanForm::kAuto:
      break;
    case PlanForm::kSameLaunch:
      return possible;
    case PlanForm::kChunks:
      return false;
  }
  return possible && (rows <= kPlanChunk || rows * k_max <= kMostRoutesOfOnePlan);
}

RouteVariant ChooseRoute(const RouteShape& shape, const RouteVariant& wanted) {
  RouteVariant v = wanted;
  if (v.tile == RouteTile::kAuto ||
      RouteHeaderBytes(v.tile) + RouteTileBytes(v.tile, shape.element_bytes) > shape.shared_limit) {
    v.tile = ChooseTile(shape);
  }
  if (!IsPossible(v.kernel, shape, v.tile)) {
    v.kernel = RouteKernelKind::kAny;
    for (const RouteKernelKind kind :
         {RouteKernelKind::kTopOfDots, RouteKernelKind::kTopOfCosines}) {
      if (IsPossible(kind, shape, v.tile)) v.kernel = kind;
    }
  }
  if (!IsClusterPossible(shape, v.cluster_blocks)) v.cluster_blocks = 0;
  // The header of a cluster's first block is larger, but so is the memory that it may use.
  const bool same = BuildsPlanInOneBlock(shape.rows, shape.k_max, shape.settings.num_experts,
                                         shape.shared_limit - RouteHeaderBytes(v.tile), v.plan);
  v.plan = same ? PlanForm::kSameLaunch : PlanForm::kChunks;
  return v;
}

std::vector<RouteVariant> RouteVariantsThatFit(const RouteShape& shape) {
  std::vector<RouteVariant> variants;
  const auto add = [&](const RouteVariant& wanted) {
    const RouteVariant v = ChooseRoute(shape, wanted);
    if (std::find(variants.begin(), variants.end(), v) == variants.end()) variants.push_back(v);
  };
  add({});
  for (const PlanForm plan : {PlanForm::kSameLaunch, PlanForm::kChunks}) {
    for (const RouteTile tile : kRouteTiles) add({.tile = tile, .plan = plan});
    for (const int blocks : {8, 16}) add({.plan = plan, .cluster_blocks = blocks});
  }
  return variants;
}

}  // namespace moeserve::cuda
