// Messages to followers: what is sent arrives, and wrong bytes are refused.
#include "engine/ranks/step_message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace moeserve {
namespace {

constexpr StepLimits kLimits{.tokens = 100, .sequences = 10, .pages = 50, .changes = 20};

template <typename T>
std::vector<T> Numbers(std::mt19937& random, size_t count, uint32_t below) {
  std::vector<T> numbers(count);
  for (T& n : numbers) n = static_cast<T>(random() % below);
  return numbers;
}

StepMessage RandomMessage(std::mt19937& random) {
  StepMessage m;
  m.number = random();
  m.kind = static_cast<StepMessage::Kind>(random() % StepMessage::kKinds);
  for (uint32_t i = random() % 5; i > 0; --i) {
    m.changes.push_back({.kind = static_cast<StorageChange::Kind>(random() % StorageChange::kKinds),
                         .storage = random(),
                         .values = {static_cast<int32_t>(random()), -1, 7},
                         .sizes = Numbers<int64_t>(random, random() % 4, 1000)});
  }
  m.cache = random();
  m.states = random() % 2;
  const size_t sequences = 1 + random() % 10, tokens = random() % 100;
  m.tables = 1 + static_cast<int32_t>(random() % 3);
  m.tokens = Numbers<int32_t>(random, tokens, 1000);
  m.positions = Numbers<int32_t>(random, tokens, 1000);
  m.sequence = Numbers<int32_t>(random, tokens, static_cast<uint32_t>(sequences));
  if (random() % 2 == 0) m.long_sequence = Numbers<uint8_t>(random, tokens, 2);
  if (random() % 2 == 0) m.token_types = Numbers<uint8_t>(random, tokens, 2);
  for (size_t i = 0; i < sequences * static_cast<size_t>(m.tables); ++i) {
    const auto length = static_cast<int32_t>(random() % 50);
    m.page_tables.push_back({.base = static_cast<int32_t>(random() % 10) - 1,
                             .length = length,
                             .runs = {{0, length}},
                             .pages = Numbers<int32_t>(random, random() % 50, 1000)});
  }
  if (random() % 2 == 0) m.lengths = Numbers<int32_t>(random, m.page_tables.size(), 1000);
  if (random() % 2 == 0) {
    m.state_slots = Numbers<int32_t>(random, sequences, 10);
    m.keep = m.snapshot = m.pending = Numbers<int32_t>(random, tokens, 10);
  }
  if (random() % 2 == 0) m.source_rows = Numbers<int32_t>(random, tokens, 100);
  m.predicted = random() % 2;
  m.divide_rows = random() % 2;
  m.timeout_ms = random() % 100000;
  for (size_t t = 0; t < tokens; t += 1 + random() % 20) {
    m.logit_rows.push_back(static_cast<int32_t>(t));
  }
  m.placement_version = 1 + random() % 100;
  if (random() % 2 == 0) {
    m.next_version = m.placement_version + 1;
    for (uint32_t i = random() % 4; i > 0; --i) {
      m.moves.push_back({.stack = static_cast<Stack>(random() % 4),
                         .block = static_cast<int32_t>(random() % 50),
                         .expert = static_cast<int32_t>(random() % 50),
                         .holders = random()});
    }
  }
  for (size_t i = 0; random() % 2 == 0 && i < 1; ++i) {
    m.controls.resize(sequences);
    m.controls[0] = RoutingChange{.top_k = 3};
    m.controls[sequences - 1] = RoutingChange{
        .top_p = 0.25,
        .experts = {{.layer = 1, .block = BlockKind::kAttention, .expert = 2, .bias = -1.5},
                    {.layer = 0, .expert = 5, .bias = std::nullopt}}};
  }
  return m;
}

TEST(StepMessageTest, WhatIsSentArrives) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const StepMessage m = RandomMessage(random);
    const std::string bytes = Serialize(m);
    const Result<StepMessage> found = ParseStepMessage(bytes, kLimits);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->number, m.number);
    EXPECT_EQ(found->kind, m.kind);
    EXPECT_EQ(found->changes, m.changes);
    EXPECT_EQ(found->page_tables, m.page_tables);
    EXPECT_EQ(found->tokens, m.tokens);
    EXPECT_EQ(found->pending, m.pending);
    EXPECT_EQ(found->placement_version, m.placement_version);
    EXPECT_EQ(found->next_version, m.next_version);
    EXPECT_EQ(found->moves, m.moves);
    ASSERT_EQ(found->controls.size(), m.controls.size());
    for (size_t i = 0; i < m.controls.size(); ++i) {
      ASSERT_EQ(found->controls[i].has_value(), m.controls[i].has_value());
      if (!m.controls[i].has_value()) continue;
      EXPECT_EQ(found->controls[i]->top_k, m.controls[i]->top_k);
      EXPECT_EQ(found->controls[i]->top_p, m.controls[i]->top_p);
      ASSERT_EQ(found->controls[i]->experts.size(), m.controls[i]->experts.size());
    }
    // All fields, also those that are not compared above.
    EXPECT_EQ(Serialize(*found), bytes);
  }
}

// Every message that was cut or changed is refused, also if its checksum is right, or it is still a
// message within the limits.
TEST(StepMessageTest, WrongBytesAreRefused) {
  std::mt19937 random(2);
  for (int round = 0; round < 20; ++round) {
    const std::string bytes = Serialize(RandomMessage(random));
    for (size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(ParseStepMessage(std::string_view(bytes).substr(0, size), kLimits).ok());
    }
    EXPECT_FALSE(ParseStepMessage(bytes + "x", kLimits).ok());
    const std::string fields = bytes.substr(internal::kStepHeaderBytes);
    for (size_t size = 0; size < fields.size(); size += 1 + random() % 3) {
      const auto cut = internal::WithHeader(std::string_view(fields).substr(0, size));
      EXPECT_FALSE(ParseStepMessage(cut, kLimits).ok()) << size;
    }
    for (int change = 0; change < 300; ++change) {
      std::string wrong = fields;
      wrong[random() % wrong.size()] ^= static_cast<char>(1 + random() % 255);
      EXPECT_FALSE(
          ParseStepMessage(bytes.substr(0, internal::kStepHeaderBytes) + wrong, kLimits).ok());
      const auto parsed = ParseStepMessage(internal::WithHeader(wrong), kLimits);
      if (!parsed.ok()) continue;
      EXPECT_LE(std::ssize(parsed->tokens), kLimits.tokens);
      EXPECT_EQ(parsed->positions.size(), parsed->tokens.size());
    }
  }
}

// Rows that only reserve memory belong to no sequence.
TEST(StepMessageTest, RowsMayHaveNoSequence) {
  StepMessage m;
  m.tokens = m.positions = {0, 0};
  m.sequence = {-1, -2};
  m.controls.resize(1);
  const auto found = ParseStepMessage(Serialize(m), kLimits);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->sequence, m.sequence);
  for (const int32_t wrong : {0, -3}) {
    m.sequence = {-1, wrong};
    EXPECT_FALSE(ParseStepMessage(Serialize(m), kLimits).ok()) << wrong;
  }
  m.sequence = {-1, 0};
  m.page_tables = {{1}};
  EXPECT_FALSE(ParseStepMessage(Serialize(m), kLimits).ok());
}

TEST(StepMessageTest, LimitsAndVersionsAreNamed) {
  StepMessage m;
  m.page_tables = {{.length = 1, .runs = {{0, 1}}, .pages = {1}}};
  m.tokens = m.positions = m.sequence = std::vector<int32_t>(101, 0);
  EXPECT_THAT(ParseStepMessage(Serialize(m), kLimits).status().ToString(),
              ::testing::HasSubstr("tokens: expected at most 100 elements"));
  m.tokens = m.positions = m.sequence = {0};
  m.sequence = {1};
  EXPECT_THAT(ParseStepMessage(Serialize(m), kLimits).status().ToString(),
              ::testing::HasSubstr("sequence of a token: expected 0 to 1 exclusive, found 1"));
  m.sequence = {0};
  std::string bytes = Serialize(m);
  EXPECT_TRUE(ParseStepMessage(bytes, kLimits).ok());
  m.page_tables[0].length = 51;
  EXPECT_THAT(ParseStepMessage(Serialize(m), kLimits).status().ToString(),
              ::testing::HasSubstr("length of a page table: expected 0 to 50, found 51"));
  m.page_tables[0].length = 1;
  m.logit_rows = {0, 0};
  m.tokens = m.positions = m.sequence = {0, 0};
  EXPECT_THAT(ParseStepMessage(Serialize(m), kLimits).status().ToString(),
              ::testing::HasSubstr("row of logits: expected 1 to 2 exclusive, found 0"));
  m.logit_rows = {2};
  EXPECT_THAT(ParseStepMessage(Serialize(m), kLimits).status().ToString(),
              ::testing::HasSubstr("row of logits: expected 0 to 2 exclusive, found 2"));
  bytes[4] = 9;
  EXPECT_THAT(ParseStepMessage(bytes, kLimits).status().ToString(),
              ::testing::HasSubstr("expected version 5, found 9"));
}

}  // namespace
}  // namespace moeserve
