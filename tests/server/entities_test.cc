// Named parts of texts, and scores of labels.
#include "server/encode/entities.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "server/encode/label_scores.h"

namespace moeserve::server::testing {
namespace {

const std::vector<std::string> kBioes = {"O",      "B-city", "I-city", "E-city", "S-city",
                                         "B-name", "I-name", "E-name", "S-name"};

// Whether label `b` may follow label `a`; -1 is the begin or the end of a text.
bool MayFollow(int a, int b) {
  const char before = a < 0 ? 'O' : kBioes[static_cast<size_t>(a)][0];
  const char after = b < 0 ? 'O' : kBioes[static_cast<size_t>(b)][0];
  if (before != 'B' && before != 'I') return after == 'O' || after == 'B' || after == 'S';
  return (after == 'I' || after == 'E') &&
         kBioes[static_cast<size_t>(a)].substr(1) == kBioes[static_cast<size_t>(b)].substr(1);
}

double BiasOf(const TransitionBiases& biases, int a, int b) {
  const char before = kBioes[static_cast<size_t>(a)][0];
  const char after = kBioes[static_cast<size_t>(b)][0];
  if (before == 'O') return after == 'O' ? biases.background_stay : biases.background_to_start;
  if (before == 'B' || before == 'I') {
    return after == 'I' ? biases.inside_to_continue : biases.inside_to_end;
  }
  return after == 'O' ? biases.end_to_background : biases.end_to_start;
}

// Tries all sequences of labels.
std::vector<int> BestOfAll(const std::vector<float>& logits, const TransitionBiases& biases) {
  const size_t n = kBioes.size();
  const size_t tokens = logits.size() / n;
  std::vector<int> path(tokens, 0);
  std::vector<int> best;
  double most = -INFINITY;
  const auto search = [&](auto& self, size_t t, double sum) -> void {
    if (t == tokens) {
      if (!MayFollow(path.back(), -1) || !(sum > most)) return;
      most = sum;
      best = path;
      return;
    }
    const std::vector<double> row = LogSoftmax(std::span<const float>(logits).subspan(t * n, n));
    for (int b = 0; b < static_cast<int>(n); ++b) {
      if (!MayFollow(t == 0 ? -1 : path[t - 1], b)) continue;
      path[t] = b;
      const double bias = t == 0 ? 0.0 : BiasOf(biases, path[t - 1], b);
      self(self, t + 1, sum + bias + row[static_cast<size_t>(b)]);
    }
  };
  search(search, 0, 0.0);
  return best;
}

// Returns the entities that a sequence of labels states, as text.
std::string ShowPath(const std::vector<int>& path) {
  std::string text;
  size_t begin = 0;
  for (size_t t = 0; t < path.size(); ++t) {
    const std::string& label = kBioes[static_cast<size_t>(path[t])];
    if (label[0] == 'B' || label[0] == 'S') begin = t;
    if (label[0] != 'E' && label[0] != 'S') continue;
    text += label.substr(2) + " " + std::to_string(begin) + "-" + std::to_string(t + 1) + "; ";
  }
  return text;
}

std::string Show(const std::vector<Entity>& entities) {
  std::string text;
  for (const Entity& e : entities) {
    text += e.name + " " + std::to_string(e.begin) + "-" + std::to_string(e.end) + "; ";
  }
  return text;
}

// Logits that choose `labels`, one for each token.
std::vector<float> LogitsFor(const std::vector<int>& labels, size_t n) {
  std::vector<float> logits(labels.size() * n, 0.0f);
  for (size_t t = 0; t < labels.size(); ++t) logits[t * n + static_cast<size_t>(labels[t])] = 9.0f;
  return logits;
}

TEST(Entities, ViterbiFindsTheBestOfAllSequences) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  int found = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<float> logits(5 * kBioes.size());
    for (float& x : logits) x = normal(random);
    TransitionBiases biases;
    if (round % 2 == 1) {
      biases = {.background_stay = normal(random),
                .background_to_start = normal(random),
                .end_to_background = normal(random),
                .end_to_start = normal(random),
                .inside_to_continue = normal(random),
                .inside_to_end = normal(random)};
    }
    const std::string expected = ShowPath(BestOfAll(logits, biases));
    EXPECT_EQ(Show(FindEntities(logits, {}, kBioes, Aggregation::kViterbi, biases)), expected);
    found += expected.empty() ? 0 : 1;
  }
  EXPECT_GT(found, 30);
}

TEST(Entities, SkippedTokensAreNotThere) {
  // [special] B-city [special] E-city O
  const std::vector<float> logits = LogitsFor({8, 1, 8, 3, 0}, kBioes.size());
  const std::vector<uint8_t> skipped = {1, 0, 1, 0, 0};
  EXPECT_EQ(Show(FindEntities(logits, skipped, kBioes, Aggregation::kViterbi, {})), "city 1-4; ");
}

TEST(Entities, SimpleGroups) {
  const std::vector<std::string> labels = {"O", "B-a", "I-a", "B-b", "I-b", "c"};
  const auto show = [&](const std::vector<int>& path) {
    return Show(FindEntities(LogitsFor(path, labels.size()), {}, labels, Aggregation::kSimple, {}));
  };
  EXPECT_EQ(show({1, 2, 0, 1, 1, 2}), "a 0-2; a 3-4; a 4-6; ");
  EXPECT_EQ(show({2, 2, 4, 4, 5, 5}), "a 0-2; b 2-4; c 4-6; ");
  EXPECT_EQ(show({0, 0}), "");
}

TEST(Entities, NoneNamesEachToken) {
  const std::vector<float> logits = LogitsFor({1, 3, 0, 4}, kBioes.size());
  const std::vector<Entity> found = FindEntities(logits, {}, kBioes, Aggregation::kNone, {});
  EXPECT_EQ(Show(found), "B-city 0-1; E-city 1-2; S-city 3-4; ");
  // e^9 of e^9 + 8.
  EXPECT_NEAR(found[0].score, std::exp(9.0) / (std::exp(9.0) + 8.0), 1e-6);
}

TEST(Entities, ScoreIsTheMeanOfProbabilities) {
  std::vector<float> logits = LogitsFor({1, 3}, kBioes.size());
  logits[kBioes.size() + 3] = 2.0f;
  const double sure = std::exp(9.0) / (std::exp(9.0) + 8.0);
  const double less = std::exp(2.0) / (std::exp(2.0) + 8.0);
  const std::vector<Entity> found = FindEntities(logits, {}, kBioes, Aggregation::kViterbi, {});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_NEAR(found[0].score, (sure + less) / 2, 1e-6);
}

TEST(Entities, TextWithoutTokens) {
  EXPECT_TRUE(FindEntities({}, {}, kBioes, Aggregation::kViterbi, {}).empty());
  EXPECT_TRUE(FindEntities({}, {}, kBioes, Aggregation::kSimple, {}).empty());
}

TEST(Entities, BioesLabels) {
  EXPECT_TRUE(AreBioes(kBioes));
  EXPECT_FALSE(AreBioes(std::vector<std::string>{"O", "B-a", "I-a"}));
  EXPECT_FALSE(AreBioes(std::vector<std::string>{"O", "B-a", "E-a", "other"}));
  EXPECT_FALSE(AreBioes(std::vector<std::string>{"B-a", "I-a", "E-a", "S-a"}));
}

TEST(LabelScores, Kinds) {
  std::vector<float> scores = {1.0f, 3.0f};
  ScoreLabels(LabelScores::kSoftmax, scores);
  EXPECT_NEAR(scores[1], 1.0 / (1.0 + std::exp(-2.0)), 1e-7);
  EXPECT_NEAR(scores[0] + scores[1], 1.0, 1e-7);
  scores = {0.0f, -2.0f, 700.0f};
  ScoreLabels(LabelScores::kSigmoid, scores);
  EXPECT_EQ(scores[0], 0.5f);
  EXPECT_NEAR(scores[1], 1.0 / (1.0 + std::exp(2.0)), 1e-7);
  EXPECT_EQ(scores[2], 1.0f);
  scores = {1000.0f, -1000.0f};
  ScoreLabels(LabelScores::kSoftmax, scores);
  EXPECT_EQ(scores, (std::vector<float>{1.0f, 0.0f}));
  scores = {5.0f};
  ScoreLabels(LabelScores::kIdentity, scores);
  EXPECT_EQ(scores[0], 5.0f);
}

TEST(LabelScores, Vectors) {
  std::vector<float> vector = {3.0f, 4.0f};
  EXPECT_NEAR(CosineOf(vector, std::vector<float>{4.0f, 3.0f}), 0.96, 1e-7);
  EXPECT_EQ(CosineOf(vector, vector), 1.0f);
  EXPECT_EQ(CosineOf(vector, std::vector<float>{0.0f, 0.0f}), 0.0f);
  NormalizeVector(vector);
  EXPECT_EQ(vector, (std::vector<float>{0.6f, 0.8f}));
  std::vector<float> zero = {0.0f, 0.0f};
  NormalizeVector(zero);
  EXPECT_EQ(zero, (std::vector<float>{0.0f, 0.0f}));
  EXPECT_TRUE(CheckFinite(vector).ok());
  EXPECT_FALSE(CheckFinite(std::vector<float>{1.0f, NAN}).ok());
  EXPECT_FALSE(CheckFinite(std::vector<float>{-INFINITY}).ok());
}

}  // namespace
}  // namespace moeserve::server::testing
