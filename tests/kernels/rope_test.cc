// The frequencies of rotary positions against the formulas of the methods that scale them.

#include "kernels/base/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numbers>

#include "base/kinds.h"

namespace moeserve {
namespace {

RopeSettings With(const RopeScaling& scaling) {
  return {.head_dim = 64,
          .dimensions = 64,
          .theta = 10000.0,
          .scaling = std::make_shared<const RopeScaling>(scaling)};
}

const std::vector<double> kPlain = RopeFrequencies({.head_dim = 64, .dimensions = 64});

// The parameters are those of a context of 256 tokens that grows to 1,024, so that all methods have
// pairs that turn often and pairs that turn rarely.
RopeScaling Scaling(RopeScalingKind kind) {
  RopeScaling s{.kind = kind, .factor = 4.0, .original_positions = 256.0};
  if (kind == RopeScalingKind::kFactors) s.factors.assign(32, 4.0);
  if (kind == RopeScalingKind::kLong) {
    s.factors.assign(32, 2.0);
    s.long_factors.assign(32, 4.0);
  }
  return s;
}

TEST(RopeTest, FrequenciesFallFromOne) {
  ASSERT_EQ(kPlain.size(), 32u);
  EXPECT_EQ(kPlain[0], 1.0);
  for (size_t i = 1; i < kPlain.size(); ++i) {
    EXPECT_NEAR(kPlain[i], std::pow(10000.0, -static_cast<double>(i) / 32), 1e-15);
  }
}

// Every method keeps a frequency, divides it by the factor, or takes a value between the two.
TEST(RopeTest, ScaledFrequenciesLieBetweenBothEnds) {
  for (const RopeScalingKind kind : AllKinds<RopeScalingKind>()) {
    const std::vector<double> scaled = RopeFrequencies(With(Scaling(kind)));
    ASSERT_EQ(scaled.size(), kPlain.size());
    for (size_t i = 0; i < scaled.size(); ++i) {
      EXPECT_LE(scaled[i], kPlain[i] * (1 + 1e-12)) << KindName(kind) << ' ' << i;
      EXPECT_GE(scaled[i], kPlain[i] / 4.0 * (1 - 1e-12)) << KindName(kind) << ' ' << i;
    }
  }
}

TEST(RopeTest, Llama3AndYarnKeepFastPairsAndSlowDownSlowOnes) {
  for (const RopeScalingKind kind : {RopeScalingKind::kLlama3, RopeScalingKind::kYarn}) {
    const std::vector<double> scaled = RopeFrequencies(With(Scaling(kind)));
    EXPECT_EQ(scaled.front(), kPlain.front()) << KindName(kind);
    EXPECT_NEAR(scaled.back(), kPlain.back() / 4.0, 1e-15) << KindName(kind);
    int between = 0;
    for (size_t i = 0; i < scaled.size(); ++i) {
      const double ratio = scaled[i] / kPlain[i];
      between += ratio < 1.0 - 1e-9 && ratio > 0.25 + 1e-9;
      if (i > 0) {
        EXPECT_LE(ratio, scaled[i - 1] / kPlain[i - 1] + 1e-12) << KindName(kind);
      }
    }
    EXPECT_GT(between, 0) << KindName(kind);
  }
}

TEST(RopeTest, OnlyLongRopeTellsLongSequencesApart) {
  for (const RopeScalingKind kind : AllKinds<RopeScalingKind>()) {
    const RopeSettings settings = With(Scaling(kind));
    const std::vector<double> of_short = RopeFrequencies(settings);
    const std::vector<double> of_long = RopeFrequencies(settings, true);
    const bool has_long = kind == RopeScalingKind::kLong;
    EXPECT_EQ(settings.has_long(), has_long);
    ASSERT_EQ(of_long.size(), of_short.size());
    for (size_t i = 0; i < of_long.size(); ++i) {
      EXPECT_EQ(of_long[i], has_long ? of_short[i] / 2.0 : of_short[i]) << KindName(kind);
    }
  }
}

// At the limits of Llama 3.1's method the blend equals one of the ends.
TEST(RopeTest, Llama3IsContinuous) {
  for (const double rotations : {1.0, 4.0}) {
    double before = 0.0;
    for (const double change : {-1e-9, 1e-9}) {
      // The second of two pairs has this number of rotations over the original context.
      const double frequency = (rotations + change) * 2.0 * std::numbers::pi / 256.0;
      RopeSettings settings = With(Scaling(RopeScalingKind::kLlama3));
      settings.dimensions = 4;
      settings.theta = 1.0 / (frequency * frequency);
      const double scaled = RopeFrequencies(settings)[1] / frequency;
      if (change > 0) {
        EXPECT_NEAR(scaled, before, 1e-6) << rotations;
      }
      before = scaled;
    }
  }
}

TEST(RopeTest, AnglesAreTheSameForEqualSettings) {
  for (const RopeScalingKind kind : AllKinds<RopeScalingKind>()) {
    RopeScaling other = Scaling(kind);
    EXPECT_TRUE(SameAngles(With(Scaling(kind)), With(other)));
    other.magnitude = 1.5;
    EXPECT_FALSE(SameAngles(With(Scaling(kind)), With(other)));
  }
  RopeSettings a = With(Scaling(RopeScalingKind::kYarn)), b = a;
  b.theta = 5000.0;
  EXPECT_FALSE(SameAngles(a, b));
  b = a;
  b.scaling = nullptr;
  EXPECT_FALSE(SameAngles(a, b));
  b = a;
  b.interleaved = !a.interleaved;  // changes the pairs, not the angles
  EXPECT_TRUE(SameAngles(a, b));
}

RopeSettings Xpos(bool keys) {
  return {.head_dim = 64, .dimensions = 64, .xpos_base = 512.0, .keys = keys};
}

TEST(RopeTest, XposRatesAreThoseOfThePaper) {
  EXPECT_TRUE(XposRates({.head_dim = 64, .dimensions = 64}).empty());
  const std::vector<double> queries = XposRates(Xpos(false)), keys = XposRates(Xpos(true));
  ASSERT_EQ(queries.size(), 32u);
  ASSERT_EQ(keys.size(), 32u);
  for (size_t i = 0; i < queries.size(); ++i) {
    const double zeta = (2.0 * static_cast<double>(i) / 64 + 0.4) / 1.4;
    EXPECT_NEAR(std::exp(1000.0 * queries[i]), std::pow(zeta, 1000.0 / 512.0), 1e-12) << i;
    EXPECT_EQ(keys[i], -queries[i]) << i;
  }
  EXPECT_NEAR(std::exp(512.0 * queries[0]), kXposSmallest, 1e-12);
}

TEST(RopeTest, QueriesAndKeysShareTablesWithoutXposOnly) {
  EXPECT_FALSE(SameAngles(Xpos(false), Xpos(true)));
  EXPECT_TRUE(SameAngles(Xpos(true), Xpos(true)));
  RopeSettings a = Xpos(false), b = Xpos(false);
  b.xpos_base = 256.0;
  EXPECT_FALSE(SameAngles(a, b));
  a.xpos_base = b.xpos_base = 0.0;
  EXPECT_FALSE(SameAngles(a, Xpos(false)));
  b.keys = true;
  EXPECT_TRUE(SameAngles(a, b));
}

}  // namespace
}  // namespace moeserve
