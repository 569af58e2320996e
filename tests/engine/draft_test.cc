// Prompt lookup, and the choice of how much of a proposal a step computes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

#include "engine/draft/constraint_memory.h"
#include "engine/draft/draft_depth.h"
#include "engine/draft/prompt_lookup.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

using Tokens = std::vector<TokenId>;

// What LookUp() promises, position by position.
Proposal SlowLookUp(const Tokens& text, int most) {
  Proposal best;
  const int size = static_cast<int>(text.size());
  for (int place = size - 1; place >= kShortestMatch; --place) {
    int matched = 0;
    while (matched < std::min(kLongestMatch, place) &&
           text[static_cast<size_t>(place - 1 - matched)] ==
               text[static_cast<size_t>(size - 1 - matched)]) {
      ++matched;
    }
    if (matched < kShortestMatch || matched <= best.matched) continue;
    Tokens all = text;
    for (int i = 0; i < most; ++i) all.push_back(all[static_cast<size_t>(place + i)]);
    best = {.tokens = Tokens(all.begin() + size, all.end()),
            .matched = matched,
            .distance = size - place};
  }
  return best;
}

TEST(LookUp, TakesTheLongestThenTheLastMatch) {
  // "1 2" occurs before 3 and before 4; "9 1 2" only before 3.
  const Proposal longest = LookUp(Tokens{9, 1, 2, 3, 7, 1, 2, 4, 8, 9, 1, 2}, 2);
  EXPECT_EQ(longest.tokens, (Tokens{3, 7}));
  EXPECT_EQ(longest.matched, 3);
  const Proposal last = LookUp(Tokens{1, 2, 3, 7, 1, 2, 4, 8, 1, 2}, 1);
  EXPECT_EQ(last.tokens, Tokens{4});
  EXPECT_EQ(last.matched, 2);
}

TEST(LookUp, ProposesNothingWithoutTwoEqualTokens) {
  EXPECT_TRUE(LookUp(Tokens{}, 4).tokens.empty());
  EXPECT_TRUE(LookUp(Tokens{1}, 4).tokens.empty());
  EXPECT_TRUE(LookUp(Tokens{1, 2}, 4).tokens.empty());
  EXPECT_TRUE(LookUp(Tokens{1, 2, 3, 4, 2}, 4).tokens.empty());
  EXPECT_TRUE(LookUp(Tokens{1, 2, 3, 1, 2}, 0).tokens.empty());
}

TEST(LookUp, GoesOnWithARepetition) {
  EXPECT_EQ(LookUp(Tokens{5, 1, 2, 1, 2}, 5).tokens, (Tokens{1, 2, 1, 2, 1}));
  const Proposal same = LookUp(Tokens(100, 4), 3);
  EXPECT_EQ(same.tokens, Tokens(3, 4));
  EXPECT_EQ(same.matched, kLongestMatch);
}

TEST(LookUp, EqualsTheDefinitionOnRandomTexts) {
  Random random(3);
  int found = 0;
  for (int i = 0; i < 3000; ++i) {
    Tokens text(static_cast<size_t>(random.Below(400)));
    const int alphabet = 1 + random.Below(30);
    for (TokenId& t : text) t = random.Below(alphabet);
    const int most = random.Below(20);
    const Proposal expected = most == 0 ? Proposal{} : SlowLookUp(text, most);
    const Proposal proposal = LookUp(text, most);
    ASSERT_EQ(proposal.tokens, expected.tokens) << "text " << i;
    ASSERT_EQ(proposal.matched, expected.matched) << "text " << i;
    ASSERT_EQ(proposal.distance, expected.distance) << "text " << i;
    found += proposal.matched > 0;
  }
  EXPECT_GT(found, 1000);
  EXPECT_LT(found, 3000);
}

// Returns `count` different tokens from `first` on.
Tokens Ascending(TokenId first, int count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// A text of which `same` tokens were copied, with its alignment.
struct Copy {
  explicit Copy(int same) : text(Ascending(100, 80)) {
    for (int i = 0; i < same; ++i) Add(100 + i);
  }
  Proposal Add(TokenId token) {
    text.push_back(token);
    return LookUp(text, 3, alignment);
  }
  Tokens text;
  Alignment alignment;
};

TEST(Alignment, OneTokenContinuesACopyAfterAChange) {
  for (const TokenId next : {110, 111, 114, 105, 126, 130, 95}) {
    SCOPED_TRACE(next);
    for (const int changed : {0, 1, 3}) {
      Copy copy(10);  // the token 110 would follow
      for (int i = 0; i < changed; ++i) {
        EXPECT_TRUE(copy.Add(1 + i).tokens.empty()) << "a new token follows nothing";
      }
      // Only tokens up to kMostShift away from those that would follow without the change.
      const int64_t shift = std::abs(int64_t{next} - (110 + changed));
      const Proposal proposal = copy.Add(next);
      if (next < 100 || shift > kMostShift) {
        EXPECT_TRUE(proposal.tokens.empty());
      } else if (changed == 0 && next == 110) {
        EXPECT_EQ(proposal.matched, 11);
      } else {
        EXPECT_EQ(proposal.matched, 1);
        EXPECT_EQ(proposal.tokens, Ascending(next + 1, 3));
      }
    }
  }
}

TEST(Alignment, TakesTheNearestPlace) {
  // After "1 2 3 4 5", the original has 50 at shifts -1, 1 and 3; 60 at shift 3; 70 at 2 and -2.
  const Tokens original = {8, 70, 50, 1, 2, 3, 4, 5, 6, 70, 50, 9, 50, 60, 7, 11};
  Tokens text = original;
  for (const TokenId t : {1, 2, 3, 4, 5}) text.push_back(t);
  Alignment alignment;
  EXPECT_EQ(LookUp(text, 1, alignment).tokens, Tokens{6});
  const auto next = [&](TokenId token) {
    Tokens longer = text;
    longer.push_back(token);
    Alignment copy = alignment;
    return LookUp(longer, 1, copy).tokens;
  };
  EXPECT_EQ(next(50), Tokens{9});
  EXPECT_EQ(next(60), Tokens{7});
  EXPECT_EQ(next(70), Tokens{50});
  EXPECT_EQ(next(12), Tokens{});
}

TEST(Alignment, EndsAfterSomeTokens) {
  Copy copy(8);
  for (int i = 0; i < kAlignedTokens - 1; ++i) EXPECT_TRUE(copy.Add(1 + i).tokens.empty());
  Copy later = copy;
  EXPECT_EQ(copy.Add(108 + kAlignedTokens - 1).matched, 1);
  EXPECT_TRUE(later.Add(99).tokens.empty());
  EXPECT_TRUE(later.Add(108 + kAlignedTokens).tokens.empty());
}

TEST(Alignment, NeedsAMatchOfFourTokens) {
  Copy copy(kAligningMatch - 1);
  copy.Add(1);
  EXPECT_TRUE(copy.Add(104).tokens.empty());
  Copy longer(kAligningMatch);
  longer.Add(1);
  EXPECT_EQ(longer.Add(105).matched, 1);
}

// The function changes nothing where LookUp() without an alignment finds something, and what it
// finds besides is in the text.
TEST(Alignment, OnlyAddsProposals) {
  Random random(5);
  int added = 0;
  for (int i = 0; i < 300; ++i) {
    const int alphabet = 5 + random.Below(60);
    Tokens text(static_cast<size_t>(1 + random.Below(60)));
    for (TokenId& t : text) t = random.Below(alphabet);
    const Tokens original = text;
    Alignment alignment;
    for (size_t k = 0; k < 60; ++k) {
      const bool same = k < original.size() && random.Below(6) > 0;
      text.push_back(same ? original[k] : random.Below(alphabet));
      const Proposal without = LookUp(text, 4), with = LookUp(text, 4, alignment);
      if (without.matched > 0 || with.tokens.empty()) {
        ASSERT_EQ(with.tokens, without.tokens);
        ASSERT_EQ(with.matched, without.matched);
        continue;
      }
      ++added;
      ASSERT_EQ(with.matched, 1);
      ASSERT_EQ(with.tokens.size(), 4u);
      const auto place = text.size() - static_cast<size_t>(with.distance);
      ASSERT_EQ(text[place - 1], text.back());
      ASSERT_EQ(text[place], with.tokens[0]);
    }
  }
  EXPECT_GT(added, 200);
}

TEST(AcceptanceRecord, FollowsWhatWasSeenLast) {
  AcceptanceRecord record;
  EXPECT_DOUBLE_EQ(record.Share(2, 0.3), 0.3);
  for (int i = 0; i < 60; ++i) record.Add(5, true);
  EXPECT_GT(record.Share(5, 0.3), 0.75);
  EXPECT_DOUBLE_EQ(record.Share(2, 0.3), 0.3) << "shorter matches are judged by themselves";
  for (int i = 0; i < 120; ++i) record.Add(5, false);
  EXPECT_LT(record.Share(5, 0.3), 0.15);
}

TEST(AcceptanceRecord, OneWrongTokenChangesLittle) {
  AcceptanceRecord record;
  for (int i = 0; i < 99; ++i) record.Add(8, i % 20 != 19);
  const double before = record.Share(8, 0.95);
  record.Add(8, false);
  EXPECT_LT(record.Share(8, 0.95), before);
  EXPECT_GT(record.Share(8, 0.95), before - 0.04);
}

TEST(AcceptanceRecord, KeepsTheKindsOfProposalsApart) {
  AcceptanceRecord record;
  for (const int matched : {kByConstraint, kByModel, 1, 2, 3, 4, 8}) {
    EXPECT_EQ(record.Share(matched, 0.5), 0.5) << matched;
    record.Add(matched, true);
    EXPECT_GT(record.Share(matched, 0.5), 0.5) << matched;
  }
}

// Allows the tokens 0 to 9 for ever, unless `last` of them is a number of tokens after which the
// text ends. Its state is the number of tokens modulo 4.
class Cycle : public CompiledConstraint {
 public:
  explicit Cycle(int last = -1) : last_(last) {}
  std::unique_ptr<ConstraintState> NewState() const override {
    return std::make_unique<State>(last_);
  }
  size_t memory_bytes() const override { return 0; }

 private:
  class State : public ConstraintState {
   public:
    explicit State(int last) : last_(last) {}
    void AllowedTokens(std::span<uint32_t> mask, int64_t) override { mask[0] = 1023; }
    bool Accept(TokenId token) override {
      if (token > 9) return false;
      ++count_;
      return true;
    }
    int64_t work() const override { return 0; }
    bool overworked() const override { return false; }
    bool complete() const override { return count_ == last_; }
    bool can_continue() const override { return count_ != last_; }
    uint64_t StateHash() const override { return static_cast<uint64_t>(count_ % 4); }
    std::unique_ptr<ConstraintState> Clone() const override {
      return std::make_unique<State>(*this);
    }

   private:
    int last_;
    int count_ = 0;
  };
  int last_;
};

TEST(ConstraintMemory, ProposesWhatFollowedTheState) {
  ConstraintMemory memory;
  const Cycle constraint, other;
  const auto state = constraint.NewState();
  EXPECT_TRUE(memory.Propose(&constraint, "", *state, 8).tokens.empty());
  const std::vector<ConstraintStep> steps = {{0, 5}, {1, 6}, {2, 7}};
  memory.Learn(&constraint, "", steps);
  const Proposal proposal = memory.Propose(&constraint, "", *state, 8);
  EXPECT_EQ(proposal.tokens, (Tokens{5, 6, 7})) << "nothing is known about state 3";
  EXPECT_EQ(proposal.MatchedBefore(2), kByConstraint);
  EXPECT_EQ(memory.Propose(&constraint, "", *state, 2).tokens, (Tokens{5, 6}));
  EXPECT_EQ(state->StateHash(), 0u) << "the state itself does not change";
  EXPECT_TRUE(memory.Propose(&other, "", *state, 8).tokens.empty());
  EXPECT_TRUE(memory.Propose(&constraint, "salt", *state, 8).tokens.empty()) << "another user";
}

TEST(ConstraintMemory, StopsBeforeTheEndAndAtTokensThatAreNotAllowed) {
  ConstraintMemory memory;
  const Cycle ends(3), constraint;
  const std::vector<ConstraintStep> steps = {{0, 5}, {1, 6}, {2, 7}}, wrong = {{0, 5}, {1, 12}};
  memory.Learn(&ends, "", steps);
  EXPECT_EQ(memory.Propose(&ends, "", *ends.NewState(), 8).tokens, (Tokens{5, 6}));
  memory.Learn(&constraint, "", wrong);
  EXPECT_EQ(memory.Propose(&constraint, "", *constraint.NewState(), 8).tokens, Tokens{5});
}

TEST(ConstraintMemory, NoLongerProposesWhatVaries) {
  ConstraintMemory memory;
  const Cycle constraint;
  const auto state = constraint.NewState();
  const auto follows = [&](TokenId token) {
    const ConstraintStep step{0, token};
    memory.Learn(&constraint, "", {&step, 1});
  };
  const auto proposed = [&] { return memory.Propose(&constraint, "", *state, 1).tokens; };
  follows(1);
  EXPECT_EQ(proposed(), Tokens{1});
  follows(2);
  EXPECT_TRUE(proposed().empty());
  for (TokenId token : {3, 4, 5, 6, 7, 8}) follows(token);
  EXPECT_TRUE(proposed().empty());
  for (int i = 0; i < 6; ++i) follows(9);
  EXPECT_EQ(proposed(), Tokens{9});
}

TEST(ConstraintMemory, HasALimit) {
  ConstraintMemory memory;
  std::vector<Cycle> constraints(100);
  const ConstraintStep step{0, 4};
  for (const Cycle& c : constraints) memory.Learn(&c, "", {&step, 1});
  const auto knows = [&](const Cycle& c) {
    return !memory.Propose(&c, "", *c.NewState(), 1).tokens.empty();
  };
  EXPECT_FALSE(knows(constraints.front()));
  EXPECT_TRUE(knows(constraints.back()));
  std::vector<ConstraintStep> many;
  for (uint64_t i = 100; i < 10'000; ++i) many.push_back({i, 4});
  many.push_back({0, 4});
  const Cycle full;
  memory.Learn(&full, "", many);
  EXPECT_FALSE(knows(full)) << "there was no room for state 0";
}

// A model with 64 experts of which a token selects 4: most of a step of one row is not experts.
ReadShare Share() {
  ExpertStats stats;
  stats.always_active_parameters = 900;
  BlockExpertStats block;
  block.num_experts = 64;
  block.max_selected = 4;
  block.expert_parameters.assign(64, 25);
  stats.blocks = {block};
  return ReadShare(stats, 0);
}

TEST(ReadShare, CountsTheExpertsThatRowsAreExpectedToTouch) {
  const ReadShare share = Share();
  EXPECT_DOUBLE_EQ(share(1), 1.0);
  EXPECT_NEAR(share(2), (900 + 1600 * (1 - std::pow(15.0 / 16.0, 2))) / 1000.0, 1e-12);
  EXPECT_NEAR(share(100000), 2.5, 1e-9);
}

// Returns how many tokens are chosen of one proposal of `length` tokens whose record says that the
// share `right` of ten tokens was right.
int Chosen(const DraftDepth& depth, int length, double right, int rows = 1, int most = 100) {
  Proposal proposal{.tokens = Tokens(static_cast<size_t>(length)), .matched = 8};
  AcceptanceRecord record;
  double sum = 0.0;
  for (int i = 0; i < 100; ++i) {
    const bool add = (i + 1) * right - sum >= 1.0;
    sum += add;
    record.Add(8, add);
  }
  DraftDepth::Candidate c{.proposal = &proposal, .record = &record};
  depth.Choose(rows, most, {&c, 1});
  return c.chosen;
}

TEST(DraftDepth, ChoosesNothingBeforeATimeIsKnown) {
  EXPECT_EQ(Chosen(DraftDepth(Share()), 10, 1.0), 0);
}

TEST(DraftDepth, ComputesMoreIfMoreIsRightAndIfItCostsLess) {
  DraftDepth cheap(Share()), dear(Share());
  for (int rows : {1, 17}) {
    cheap.ObserveStep(rows, 1.0 + 0.001 * rows);
    dear.ObserveStep(rows, 1.0 * rows);
  }
  EXPECT_EQ(Chosen(cheap, 10, 1.0), 10);
  EXPECT_GT(Chosen(cheap, 10, 0.6), 0);
  EXPECT_EQ(Chosen(dear, 10, 1.0), 0) << "rows that cost as much as a step are not worth it";
  // Something between, and less if fewer are right.
  DraftDepth middle(Share());
  middle.ObserveStep(1, 1.0);
  middle.ObserveStep(17, 4.0);
  const int often = Chosen(middle, 16, 0.9), rarely = Chosen(middle, 16, 0.5);
  EXPECT_GT(often, rarely);
  EXPECT_EQ(Chosen(middle, 16, 0.0), 0);
}

TEST(DraftDepth, KeepsTheLimits) {
  DraftDepth depth(Share());
  for (int rows : {1, 8, DraftDepth::kMostRows}) depth.ObserveStep(rows, 1.0);
  EXPECT_EQ(Chosen(depth, 10, 1.0, 1, 3), 3);
  EXPECT_EQ(Chosen(depth, 200, 1.0, 8, 1000), DraftDepth::kMostRows - 8);
  EXPECT_EQ(Chosen(depth, 10, 1.0, DraftDepth::kMostRows, 100), 0);
  EXPECT_EQ(Chosen(depth, 10, 1.0, 0, 100), 0);
}

TEST(DraftDepth, SharesRowsBetweenSequences) {
  DraftDepth depth(Share());
  depth.ObserveStep(2, 1.0);
  depth.ObserveStep(DraftDepth::kMostRows, 1.2);
  Proposal proposal{.tokens = Tokens(20), .matched = 8};
  AcceptanceRecord good, bad;
  for (int i = 0; i < 100; ++i) {
    good.Add(8, true);
    bad.Add(8, i % 2 == 0);
  }
  DraftDepth::Candidate both[] = {{.proposal = &proposal, .record = &bad},
                                  {.proposal = &proposal, .record = &good}};
  depth.Choose(2, 6, both);
  EXPECT_EQ(both[0].chosen + both[1].chosen, 6);
  EXPECT_GT(both[1].chosen, both[0].chosen);
}

TEST(DraftDepth, AsksADraftModelIfThatIsFaster) {
  DraftDepth depth(Share());
  const std::vector<double> likely = {0.9}, unlikely = {0.1}, sure = {1.0}, two = {0.9, 0.9};
  EXPECT_EQ(depth.ChooseModelDepth(1, likely, 8, 0.0), 0) << "no time is known";
  depth.ObserveStep(1, 1.0);
  depth.ObserveStep(9, 1.4);
  const int quick = depth.ChooseModelDepth(1, likely, 8, 0.05);
  const int slow = depth.ChooseModelDepth(1, likely, 8, 0.3);
  EXPECT_GT(quick, slow);
  EXPECT_GT(slow, 0);
  EXPECT_EQ(depth.ChooseModelDepth(1, sure, 3, 0.05), 3);
  EXPECT_EQ(depth.ChooseModelDepth(1, unlikely, 8, 0.1), 0);
  EXPECT_EQ(depth.ChooseModelDepth(1, sure, 8, 1.0), 0) << "as slow as the model itself";
  // Two sequences share the time of a token of the draft model.
  depth.ObserveStep(2, 1.0);
  depth.ObserveStep(18, 1.4);
  EXPECT_GT(depth.ChooseModelDepth(2, two, 8, 0.3), slow);
  EXPECT_EQ(depth.ChooseModelDepth(DraftDepth::kMostRows, likely, 8, 0.0), 0);
}

TEST(DraftDepth, EstimatesTimesThatWereNotObserved) {
  DraftDepth depth(Share());
  EXPECT_EQ(depth.Seconds(3), 0.0);
  depth.ObserveStep(1, 2.0);
  EXPECT_DOUBLE_EQ(depth.Seconds(3), 2.0 * Share()(3));
  depth.ObserveStep(5, 6.0);
  EXPECT_DOUBLE_EQ(depth.Seconds(3), 4.0);
  for (int i = 0; i < 200; ++i) depth.ObserveStep(5, 3.0);
  EXPECT_NEAR(depth.Seconds(5), 3.0, 1e-6);
  depth.ObserveStep(5, 1e9);
  EXPECT_LT(depth.Seconds(5), 4.0) << "an outlier counts as three times the expected time";
}

TEST(DraftDepth, TriesANumberOfRowsAgainThatWasSlowOnce) {
  DraftDepth depth(Share());
  depth.ObserveStep(1, 1.0);
  for (int rows = 2; rows <= 17; ++rows) depth.ObserveStep(rows, 20.0);  // the machine was busy
  int steps = 0;
  for (; steps < 1000 && Chosen(depth, 16, 1.0) < 16; ++steps) {
    const int rows = 1 + Chosen(depth, 16, 1.0);
    depth.ObserveStep(rows, 1.0 + 0.01 * rows);
  }
  EXPECT_GT(steps, 100) << "a known time is not measured again at once";
  EXPECT_LT(steps, 400);
  EXPECT_LT(depth.Seconds(17), 3.0);
}

}  // namespace
}  // namespace moeserve::testing
