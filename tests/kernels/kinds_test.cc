// Enums with a table of traits, and the gate functions that statistics use.

#include "base/kinds.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "kernels/base/activation.h"
#include "kernels/base/pooling.h"
#include "kernels/base/quantization.h"
#include "kernels/base/routing.h"

namespace moeserve {
namespace {

template <typename Kind>
class KindsTest : public ::testing::Test {};

using Kinds = ::testing::Types<RowNorm, ScoreKind, TemperatureKind, GateKind, SelectKind,
                               TopPCompare, ActivationKind, Quantization, PoolKind>;
TYPED_TEST_SUITE(KindsTest, Kinds);

TYPED_TEST(KindsTest, NamesAreDistinctAndFindTheirKind) {
  std::set<std::string> names;
  for (const TypeParam kind : AllKinds<TypeParam>()) {
    const std::string name(KindName(kind));
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(KindNamed<TypeParam>(name), kind) << name;
  }
  EXPECT_GE(names.size(), 2u);
  EXPECT_EQ(KindNamed<TypeParam>("no such kind"), std::nullopt);
  EXPECT_EQ(KindNamed<TypeParam>(""), std::nullopt);
}

TEST(KindNamesTest, CanLeaveOutTheFirst) {
  EXPECT_EQ(KindNames(Quantization::kInt8),
            (std::vector<std::string>{"int8", "int8-channel", "int4", "int4-k"}));
  EXPECT_EQ(KindNamed("none", ActivationKind::kSilu), std::nullopt);
  EXPECT_EQ(KindNamed("none", ActivationKind::kNone), ActivationKind::kNone);
}

TEST(GateTest, DoubleAgreesWithFloat) {
  constexpr float kMaximum = 2.5f;
  for (const GateKind gate : AllKinds<GateKind>()) {
    for (float score = -20.0f; score <= kMaximum; score += 0.375f) {  // score - kMaximum is exact
      const double exact = GateValueInDouble(gate, score, kMaximum);
      EXPECT_NEAR(GateValue(gate, score, kMaximum), exact, 1e-6 * exact)
          << KindName(gate) << " of " << score;
    }
  }
}

// Selection by GateValue() relies on these rules.
TEST(GateTest, ValuesFollowTheOrderOfScoresAndMaskedExpertsHaveNone) {
  constexpr float kMaximum = 2.5f;
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  for (const GateKind gate : AllKinds<GateKind>()) {
    EXPECT_EQ(GateValue(gate, kMasked, kMaximum), 0.0f) << KindName(gate);
    EXPECT_EQ(GateValueInDouble(gate, kMasked, kMaximum), 0.0) << KindName(gate);
    float last = 0.0f;
    double last_in_double = 0.0;
    for (float score = -120.0f; score <= kMaximum; score += 0.125f) {
      const float value = GateValue(gate, score, kMaximum);
      const double in_double = GateValueInDouble(gate, score, kMaximum);
      EXPECT_GE(value, last) << KindName(gate) << " of " << score;
      EXPECT_GE(in_double, last_in_double) << KindName(gate) << " of " << score;
      last = value;
      last_in_double = in_double;
    }
    EXPECT_GT(last, 0.0f) << KindName(gate);
  }
}

TEST(GateTest, ManyScoresHaveTheBitsOfOne) {
  constexpr int kCount = 37;  // several full vectors and a remainder
  float scores[kCount], values[kCount];
  for (int i = 0; i < kCount; ++i) scores[i] = 3.0f - 0.41f * static_cast<float>(i);
  for (const GateKind gate : AllKinds<GateKind>()) {
    GateValues(gate, scores, kCount, scores[0], values);
    for (int i = 0; i < kCount; ++i) {
      EXPECT_EQ(BitsFromF32(values[i]), BitsFromF32(GateValue(gate, scores[i], scores[0])))
          << KindName(gate) << " of " << scores[i];
    }
  }
}

}  // namespace
}  // namespace moeserve
