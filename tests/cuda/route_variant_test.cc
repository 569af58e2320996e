// The forms of routing that are chosen for a shape.

#include "kernels/cuda/routing/route_variant.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cuda/route_support.h"

namespace moeserve::cuda {
namespace {

RouteShape ShapeFor(int64_t rows, int experts, int width, int dim = 0) {
  RouteShape shape;
  shape.settings.num_experts = experts;
  shape.settings.input_width = width;
  shape.settings.k = 2;
  if (dim > 0) {
    shape.settings.score = Score::kCosine;
    shape.settings.dim = dim;
  }
  shape.rows = rows;
  shape.columns = ProductsOf(shape.settings);
  shape.k_max = 2;
  shape.element_bytes = 2;
  shape.multiprocessors = 132;
  shape.shared_limit = 160 << 10;
  return shape;
}

int64_t BlocksOf(const RouteShape& shape, RouteTile tile) {
  const RouteTileShape t = ShapeOf(tile);
  return (shape.rows + t.rows() - 1) / t.rows() * ((shape.columns + t.columns() - 1) / t.columns());
}

TEST(ChooseRouteTest, TilesOccupyTheDevice) {
  for (const int experts : {4, 8, 16, 64, 256}) {
    for (const int dim : {0, 16, 64}) {
      for (int rows = 1; rows <= 1 << 16; rows *= 2) {
        const RouteShape shape = ShapeFor(rows, experts, 4096, dim);
        const RouteTile tile = ChooseRoute(shape, {}).tile;
        const int64_t blocks = BlocksOf(shape, tile);
        EXPECT_TRUE(blocks * 8 >= 132 * 7 || tile == RouteTile::k8x4)
            << rows << " rows, " << experts << " experts";
      }
    }
  }
  EXPECT_EQ(ChooseRoute(ShapeFor(1024, 8, 4096), {}).tile, RouteTile::k8x8);
  EXPECT_EQ(ChooseRoute(ShapeFor(1 << 16, 8, 4096), {}).tile, RouteTile::k64x8);
  EXPECT_EQ(ChooseRoute(ShapeFor(1024, 256, 512, 16), {}).tile, RouteTile::k8x16);
  EXPECT_EQ(ChooseRoute(ShapeFor(1 << 16, 64, 4096), {}).tile, RouteTile::k32x16);
  // One tile of little weights.
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 256, 512, 16), {}).tile, RouteTile::k8x16);
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 8, 1024), {}).tile, RouteTile::k8x8);
}

TEST(ChooseRouteTest, KernelsAndPlansThatFit) {
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 64, 64), {}).kernel, RouteKernelKind::kTopOfDots);
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 64, 64, 16), {}).kernel, RouteKernelKind::kTopOfCosines);
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 64, 64, 65), {}).kernel, RouteKernelKind::kAny);
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 257, 64), {}).kernel, RouteKernelKind::kAny);
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 64, 64), {.kernel = RouteKernelKind::kTopOfCosines}).kernel,
            RouteKernelKind::kTopOfDots);
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 64, 64), {.kernel = RouteKernelKind::kAny}).kernel,
            RouteKernelKind::kAny);
  RouteShape shape = ShapeFor(1, 64, 64);
  shape.overrides = true;
  EXPECT_EQ(ChooseRoute(shape, {}).kernel, RouteKernelKind::kAny);
  shape = ShapeFor(64, 256, 64, 64);
  shape.shared_limit = 64 << 10;
  EXPECT_EQ(ChooseRoute(shape, {.tile = RouteTile::k8x4}).kernel, RouteKernelKind::kAny);

  EXPECT_EQ(ChooseRoute(ShapeFor(1024, 256, 64), {}).plan, PlanForm::kSameLaunch);
  EXPECT_EQ(ChooseRoute(ShapeFor(1025, 256, 64), {}).plan, PlanForm::kChunks);
  EXPECT_EQ(ChooseRoute(ShapeFor(1024, 4096, 64), {}).plan, PlanForm::kChunks);
  EXPECT_EQ(ChooseRoute(ShapeFor(1, 4096, 64), {}).plan, PlanForm::kSameLaunch);
  shape = ShapeFor(1024, 256, 64);
  shape.k_max = 16;
  EXPECT_EQ(ChooseRoute(shape, {}).plan, PlanForm::kChunks);
  EXPECT_EQ(ChooseRoute(shape, {.plan = PlanForm::kSameLaunch}).plan, PlanForm::kSameLaunch);
}

TEST(ChooseRouteTest, ClustersOnlyWhereTheyAreAskedForAndFit) {
  RouteShape shape = ShapeFor(1, 64, 4096);
  shape.cluster_limit = 227 << 10;
  shape.most_cluster_blocks = 16;
  const auto blocks = [&](int wanted) {
    return ChooseRoute(shape, {.cluster_blocks = wanted}).cluster_blocks;
  };
  EXPECT_EQ(blocks(0), 0);
  EXPECT_EQ(blocks(8), 8);
  EXPECT_EQ(blocks(16), 16);
  EXPECT_EQ(blocks(4), 0);
  shape.rows = 12;  // 16 KiB per column, 8 KiB per row
  EXPECT_EQ(blocks(8), 0);
  EXPECT_EQ(blocks(16), 16);
  shape.rows = 33;
  EXPECT_EQ(blocks(16), 0);
  shape.rows = 1;
  shape.most_cluster_blocks = 8;
  EXPECT_EQ(blocks(16), 0);
  EXPECT_EQ(blocks(8), 8);
  shape.most_cluster_blocks = 0;
  EXPECT_EQ(blocks(8), 0);
  shape = ShapeFor(1, 64, 64, 16);  // a cosine router
  shape.cluster_limit = 227 << 10;
  shape.most_cluster_blocks = 16;
  EXPECT_EQ(blocks(8), 0);
  shape = ShapeFor(1, 257, 64);
  shape.cluster_limit = 227 << 10;
  shape.most_cluster_blocks = 16;
  EXPECT_EQ(blocks(8), 0);
}

TEST(RouteVariantsTest, EachFormOnceAndTheDefaultFirst) {
  for (const int rows : {1, 300, 2000}) {
    RouteShape shape = ShapeFor(rows, 64, 512);
    shape.cluster_limit = 227 << 10;
    shape.most_cluster_blocks = 16;
    const std::vector<RouteVariant> variants = RouteVariantsThatFit(shape);
    EXPECT_EQ(variants[0], ChooseRoute(shape, {}));
    int clusters = 0;
    for (const RouteVariant& v : variants) {
      EXPECT_EQ(std::count(variants.begin(), variants.end(), v), 1);
      EXPECT_EQ(ChooseRoute(shape, v), v);
      clusters += v.cluster_blocks > 0 ? 1 : 0;
    }
    // One row: 6 tiles and 2 clusters, each with 2 forms of the plan.
    EXPECT_EQ(clusters, rows == 1 ? 4 : 0);
    EXPECT_EQ(variants.size(), rows == 1 ? 16u : rows == 300 ? 12u : 6u);
  }
}

}  // namespace
}  // namespace moeserve::cuda
