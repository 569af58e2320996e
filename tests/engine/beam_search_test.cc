// Beam search by itself, against its definition and against all sequences.

#include "engine/beam/beam_search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "engine/beam/log_softmax.h"
#include "tests/support/beam_reference.h"

namespace moeserve::testing {
namespace {

using Prefix = std::vector<TokenId>;

constexpr float kNone = -std::numeric_limits<float>::infinity();

// A table of log-probabilities by the tokens before. Whole multiples of 1/8, if `ties`, so that
// different sequences often have equal sums.
class ProbabilityTable {
 public:
  ProbabilityTable(int vocab, uint64_t seed, bool ties) : vocab_(vocab), seed_(seed), ties_(ties) {}

  std::vector<float> operator()(const Prefix& prefix) const {
    uint64_t key = seed_;
    for (const TokenId t : prefix) key = key * 1000003 + static_cast<uint64_t>(t) + 1;
    std::mt19937_64 random(key);
    std::vector<float> logits, row(static_cast<size_t>(vocab_));
    std::normal_distribution<float> normal(0.0f, 2.0f);
    for (int t = 0; t < vocab_; ++t) logits.push_back(normal(random));
    if (random() % 4 == 0) logits[random() % static_cast<size_t>(vocab_)] = kNone;
    LogSoftmax(logits, row);
    if (ties_) {
      for (float& v : row) v = std::isinf(v) ? v : std::round(v * 2.0f) / 2.0f;
    }
    return row;
  }

 private:
  const int vocab_;
  const uint64_t seed_;
  const bool ties_;
};

struct ClassAnswer {
  std::vector<ReferenceHypothesis> hypotheses;
  int steps = 0;
};

// Runs the class as the engine does, but keeps only tokens.
ClassAnswer RunClass(const ReferenceSearch& by) {
  BeamSearch search(by.params, by.ends, by.limit);
  std::vector<Prefix> beams = {{}};
  std::vector<std::pair<int, Prefix>> ended;
  ClassAnswer answer;
  for (bool over = false; !over;) {
    ++answer.steps;
    for (size_t b = 0; b < beams.size(); ++b) {
      search.Extend(static_cast<int>(b), by.logprobs(beams[b]));
    }
    const auto extended = [&](const BeamCandidate& c) {
      Prefix tokens = beams[static_cast<size_t>(c.beam)];
      tokens.push_back(c.token);
      return tokens;
    };
    const BeamStep step =
        search.Advance([&](const BeamCandidate& c) { return by.text_ends(extended(c)); });
    for (const auto& [number, c] : step.finished) ended.emplace_back(number, extended(c));
    std::vector<Prefix> next;
    for (const BeamCandidate& c : step.running) next.push_back(extended(c));
    beams = next;
    over = step.over;
  }
  for (const FinishedBeam& f : search.finished()) {
    for (const auto& [number, tokens] : ended) {
      if (number == f.number) answer.hypotheses.push_back({tokens, f.sum, f.score});
    }
  }
  return answer;
}

void ExpectSearch(ReferenceSearch by) {
  const std::vector<ReferenceHypothesis> expected = by.Run();
  const ClassAnswer found = RunClass(by);
  EXPECT_EQ(found.hypotheses, expected);
  EXPECT_EQ(found.steps, by.steps);
}

TEST(BeamSearchTest, IsItsDefinition) {
  int seed = 0;
  for (const bool ties : {false, true}) {
    for (const int vocab : {2, 5, 70, 300}) {
      for (const int beams : {1, 2, 3, 7}) {
        for (const auto early :
             {EarlyStopping::kFalse, EarlyStopping::kTrue, EarlyStopping::kNever}) {
          for (const double penalty : {1.0, 0.0, -1.0, 2.0, 0.3, -10.0, 10.0}) {
            for (const int ends : {0, 1, 3}) {
              SCOPED_TRACE(::testing::Message()
                           << "ties " << ties << " vocab " << vocab << " beams " << beams
                           << " early " << static_cast<int>(early) << " penalty " << penalty
                           << " ends " << ends);
              ReferenceSearch by;
              by.params = {beams, penalty, early};
              for (int e = 0; e < std::min(ends, vocab); ++e) by.ends.push_back((e * 7) % vocab);
              by.limit = 1 + seed % 7;
              by.logprobs = ProbabilityTable(vocab, static_cast<uint64_t>(++seed), ties);
              if (seed % 3 == 0) {
                by.text_ends = [](const Prefix& tokens) {
                  return tokens.size() > 1 && (tokens.back() + tokens[tokens.size() - 2]) % 3 == 1;
                };
              }
              ExpectSearch(by);
            }
          }
        }
      }
    }
  }
}

// With more beams than there are prefixes, nothing is lost: the hypotheses are all sequences.
TEST(BeamSearchTest, WideSearchesAreExhaustive) {
  constexpr int kVocab = 4, kLimit = 3;
  for (const double penalty : {1.0, 0.0, -2.0, 3.0}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      ReferenceSearch by;
      by.params = {kMaxBeams, penalty, EarlyStopping::kNever};
      by.ends = {2};
      by.limit = kLimit;
      by.logprobs = ProbabilityTable(kVocab, seed, false);
      std::vector<ReferenceHypothesis> all;
      const std::function<void(const Prefix&, double)> visit = [&](const Prefix& prefix,
                                                                   double sum) {
        const std::vector<float> row = by.logprobs(prefix);
        for (TokenId t = 0; t < kVocab; ++t) {
          if (std::isinf(row[static_cast<size_t>(t)])) continue;
          Prefix tokens = prefix;
          tokens.push_back(t);
          const double next = sum + static_cast<double>(row[static_cast<size_t>(t)]);
          if (t == 2 || tokens.size() == kLimit) {
            all.push_back({tokens, next, next / std::pow(tokens.size(), penalty)});
          } else {
            visit(tokens, next);
          }
        }
      };
      visit({}, 0.0);
      std::sort(all.begin(), all.end(),
                [](const auto& a, const auto& b) { return a.score > b.score; });
      ASSERT_GT(all.size(), 15u);
      EXPECT_EQ(RunClass(by).hypotheses, all) << "penalty " << penalty << " seed " << seed;
    }
  }
}

// The three values of early_stopping stop at different steps, so the comparison above would notice
// if they were mixed up.
TEST(BeamSearchTest, EarlyStoppingMatters) {
  int shorter = 0, longer = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    ReferenceSearch by;
    by.ends = {0};
    by.limit = 12;
    by.logprobs = ProbabilityTable(6, seed, false);
    std::vector<int> steps;
    for (const auto early : {EarlyStopping::kTrue, EarlyStopping::kFalse, EarlyStopping::kNever}) {
      by.params = {3, 1.0, early};
      steps.push_back(RunClass(by).steps);
    }
    EXPECT_LE(steps[0], steps[1]);
    EXPECT_LE(steps[1], steps[2]);
    shorter += steps[0] < steps[1] ? 1 : 0;
    longer += steps[1] < steps[2] ? 1 : 0;
  }
  EXPECT_GT(shorter, 5);
  EXPECT_GT(longer, 5);
}

TEST(BeamSearchTest, EqualCandidatesAreOrderedByBeamAndToken) {
  BeamSearch search({.num_beams = 3}, {}, 5);
  const auto never = [](const BeamCandidate&) { return false; };
  search.Extend(0, std::vector<float>{-2.0f, -1.0f, -2.0f, -1.0f, -1.0f, -1.0f});
  EXPECT_EQ(search.Advance(never).running,
            (std::vector<BeamCandidate>{{0, 1, -1.0}, {0, 3, -1.0}, {0, 4, -1.0}}));
  search.Extend(0, std::vector<float>{-3.0f, -2.0f});
  search.Extend(1, std::vector<float>{-2.0f, -2.0f});
  search.Extend(2, std::vector<float>{-1.0f, -9.0f});
  EXPECT_EQ(search.Advance(never).running,
            (std::vector<BeamCandidate>{{2, 0, -2.0}, {0, 1, -3.0}, {1, 0, -3.0}}));
}

TEST(BeamSearchTest, EndsBehindTheFirstCandidatesAreDropped) {
  BeamSearch search({.num_beams = 2}, {0}, 5);
  search.Extend(0, std::vector<float>{-3.0f, -1.0f, -2.0f, -4.0f});
  const BeamStep step = search.Advance([](const BeamCandidate&) { return false; });
  EXPECT_TRUE(step.finished.empty());
  EXPECT_EQ(step.running, (std::vector<BeamCandidate>{{0, 1, -1.0}, {0, 2, -2.0}}));
  EXPECT_FALSE(step.over);
  search.Extend(0, std::vector<float>{-0.5f, -9.0f});
  search.Extend(1, std::vector<float>{kNone, kNone});
  const BeamStep second = search.Advance([](const BeamCandidate&) { return false; });
  EXPECT_EQ(second.running, (std::vector<BeamCandidate>{{0, 1, -10.0}}));
  ASSERT_EQ(search.finished().size(), 1u);
  EXPECT_EQ(search.finished()[0].score, -0.75);
}

TEST(BeamSearchTest, ASearchWithoutCandidatesIsOver) {
  BeamSearch search({.num_beams = 2}, {0}, 5);
  search.Extend(0, std::vector<float>{kNone, kNone});
  EXPECT_TRUE(search.Advance([](const BeamCandidate&) { return false; }).over);
  EXPECT_TRUE(search.finished().empty());
}

TEST(BeamSearchTest, PreviewAndRestartChangeNothing) {
  const auto never = [](const BeamCandidate&) { return false; };
  BeamSearch search({.num_beams = 2}, {0}, 5);
  search.Extend(0, std::vector<float>{-1.0f, -9.0f, -9.0f});
  search.Restart();
  search.Extend(0, std::vector<float>{-3.0f, -1.0f, -2.0f});
  EXPECT_EQ(search.Preview(never), (std::vector<BeamCandidate>{{0, 1, -1.0}, {0, 2, -2.0}}));
  EXPECT_EQ(search.length(), 0);
  EXPECT_EQ(search.Advance(never).running,
            (std::vector<BeamCandidate>{{0, 1, -1.0}, {0, 2, -2.0}}));
}

TEST(BeamSearchTest, CloseEndsTheRunningBeams) {
  BeamSearch search({.num_beams = 2, .length_penalty = 2.0}, {0}, 50);
  const auto never = [](const BeamCandidate&) { return false; };
  search.Extend(0, std::vector<float>{-1.0f, -2.0f, -3.0f});
  ASSERT_EQ(search.Advance(never).finished.size(), 1u);
  search.Extend(0, std::vector<float>{-9.0f, -2.0f, -1.0f});
  search.Extend(1, std::vector<float>{-9.0f, -7.0f, -8.0f});
  ASSERT_EQ(search.Advance(never).running.size(), 2u);
  // Sums -3 and -4 of two tokens: scores -0.75 and -1; the finished one has -1.
  EXPECT_EQ(search.Close(), (std::vector<int>{1, -1}));
  ASSERT_EQ(search.finished().size(), 2u);
  EXPECT_EQ(search.finished()[0], (FinishedBeam{1, -0.75, -3.0}));
  EXPECT_EQ(search.finished()[1], (FinishedBeam{0, -1.0, -1.0}));
}

TEST(LogSoftmaxTest, IsTheLogarithmOfTheSoftmax) {
  std::mt19937 random(7);
  for (const int vocab : {1, 2, 15, 16, 17, 255, 256, 257, 5000}) {
    for (const float spread : {0.0f, 1.0f, 30.0f}) {
      std::vector<float> logits, found(static_cast<size_t>(vocab));
      std::normal_distribution<float> normal(3.0f, spread);
      for (int i = 0; i < vocab; ++i) logits.push_back(spread == 0.0f ? 3.0f : normal(random));
      if (vocab > 2) logits[1] = kNone;
      LogSoftmax(logits, found);
      double sum = 0.0;
      const double highest = *std::max_element(logits.begin(), logits.end());
      for (const float l : logits) sum += std::exp(static_cast<double>(l) - highest);
      for (size_t i = 0; i < logits.size(); ++i) {
        const double expected = static_cast<double>(logits[i]) - highest - std::log(sum);
        if (std::isinf(expected)) {
          EXPECT_EQ(found[i], kNone);
        } else {
          EXPECT_NEAR(found[i], expected, 1e-6 + 1e-7 * std::abs(expected));
        }
      }
    }
  }
}

}  // namespace
}  // namespace moeserve::testing
