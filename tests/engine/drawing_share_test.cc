// Which sequences rest so that those whose tokens take long to choose do not slow the others.
#include "engine/schedule/drawing_share.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace moeserve::testing {
namespace {

constexpr double kForward = 0.001;

class Sequences {
 public:
  // Adds a decoding sequence whose tokens take `seconds` each to choose.
  Sequence& Add(double seconds) {
    Request request;
    request.prompt = {1, 2, 3};
    auto sequence = std::make_unique<Sequence>(std::move(request), nullptr, nullptr,
                                               std::span<const TokenId>());
    sequence->memory.computed = 3;
    sequence->tokens.push_back(4);
    running_.push_back(std::move(sequence));
    seconds_.push_back(seconds);
    ran_.push_back(0);
    return *running_.back();
  }

  // Returns the seconds that the tokens of a step took to choose.
  double Step() {
    share_.Choose(running_);
    double drawn = 0.0;
    for (size_t i = 0; i < running_.size(); ++i) {
      if (running_[i]->resting) continue;
      ++ran_[i];
      drawn += seconds_[i];
      share_.Drew(*running_[i], seconds_[i]);
    }
    share_.EndStep(kForward);
    return drawn;
  }

  double Steps(int count) {
    double drawn = 0.0;
    for (int i = 0; i < count; ++i) drawn += Step();
    return drawn;
  }

  int ran(size_t i) const { return ran_[i]; }
  void RemoveFirst() {
    running_.erase(running_.begin());
    seconds_.erase(seconds_.begin());
    ran_.erase(ran_.begin());
  }

 private:
  DrawingShare share_;
  std::vector<SequencePtr> running_;
  std::vector<double> seconds_;
  std::vector<int> ran_;
};

TEST(DrawingShare, HeavySequencesTakeAQuarterOfTheTimeAndTakeTurns) {
  Sequences sequences;
  sequences.Add(0.0);
  for (int i = 0; i < 5; ++i) sequences.Add(0.01);
  sequences.Steps(500);  // the first step, in which all ran, has been made up for
  const int before = sequences.ran(0);
  const double drawn = sequences.Steps(4000);
  EXPECT_EQ(sequences.ran(0), before + 4000) << "the others never rest";
  EXPECT_NEAR(drawn, 0.25 * 4000 * kForward, 0.02);
  for (size_t i = 2; i <= 5; ++i) EXPECT_NEAR(sequences.ran(i), sequences.ran(1), 1);
}

TEST(DrawingShare, LightSequencesNeverRest) {
  Sequences sequences;
  for (int i = 0; i < 50; ++i) sequences.Add(0.001);
  sequences.Add(0.0);
  sequences.Steps(100);
  for (size_t i = 0; i <= 50; ++i) EXPECT_EQ(sequences.ran(i), 100);
}

TEST(DrawingShare, NobodyRestsWithoutOthers) {
  Sequences sequences;
  sequences.Add(0.01);
  sequences.Add(0.02);
  sequences.Steps(100);
  EXPECT_EQ(sequences.ran(0), 100);
  EXPECT_EQ(sequences.ran(1), 100);
}

TEST(DrawingShare, WhatDelayedNobodyNeedNotBeMadeUpFor) {
  Sequences sequences;
  sequences.Add(0.05);
  sequences.Steps(1000);
  sequences.Add(0.0);
  sequences.Step();
  EXPECT_EQ(sequences.ran(0), 1001);
  sequences.Steps(100);
  EXPECT_EQ(sequences.ran(0), 1001) << "0.05 s take 200 steps to make up for";
  sequences.Steps(101);
  EXPECT_EQ(sequences.ran(0), 1002);
}

TEST(DrawingShare, OthersGoOnWhenAHeavyOneIsGone) {
  Sequences sequences;
  Sequence& first = sequences.Add(0.01);
  sequences.Add(0.0);
  sequences.Steps(2);
  EXPECT_TRUE(first.resting);
  sequences.RemoveFirst();
  sequences.Add(0.0);
  sequences.Steps(10);
  EXPECT_EQ(sequences.ran(1), 10);
}

}  // namespace
}  // namespace moeserve::testing
