#include "server/bench/load_test/completion_stream.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/random.h"

namespace moeserve::server {
namespace {

std::vector<std::string> Events(SseReader& reader, std::string_view bytes) {
  std::vector<std::string> events;
  EXPECT_TRUE(reader.Feed(bytes, [&](std::string_view data) { events.emplace_back(data); }));
  return events;
}

TEST(SseReaderTest, ReadsAllSpellings) {
  SseReader reader;
  EXPECT_EQ(Events(reader,
                   ": comment\n\n"
                   "data: one\n\n"
                   "data:two\r\n\r\n"
                   "data:  three\r\r"
                   "event: x\nid: 1\ndata: four\ndata: more\n\n"
                   "data\n\n"
                   "database: no\n\n"
                   "data: unfinished\n"),
            (std::vector<std::string>{"one", "two", " three", "four\nmore", ""}));
  EXPECT_EQ(Events(reader, "\n"), std::vector<std::string>{"unfinished"});
}

TEST(SseReaderTest, EveryWayToSplitGivesTheSameEvents) {
  const std::string bytes =
      ": hello\r\n\r\ndata: a\r\n\r\ndata: b\ndata: c\n\ndata: d\r\rdata: e\r\n\ndata: "
      "f\n\r\ndata: g\r\ndata: h\r\n\r\n";
  SseReader whole;
  const auto expected = Events(whole, bytes);
  EXPECT_EQ(expected, (std::vector<std::string>{"a", "b\nc", "d", "e", "f", "g\nh"}));
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {
      SseReader reader;
      std::vector<std::string> events = Events(reader, bytes.substr(0, first));
      for (const auto& [from, to] : {std::pair(first, second), std::pair(second, bytes.size())}) {
        const auto more = Events(reader, bytes.substr(from, to - from));
        events.insert(events.end(), more.begin(), more.end());
      }
      ASSERT_EQ(events, expected) << first << ' ' << second;
    }
  }
}

TEST(SseReaderTest, AnEventWithoutEndIsRefused) {
  SseReader reader;
  const std::string block(1 << 20, 'x');
  size_t fed = 0;
  while (reader.Feed(block, [](std::string_view) {})) {
    fed += block.size();
    ASSERT_LE(fed, SseReader::kMaxEventBytes);
  }
  SseReader lines;
  fed = 0;
  const std::string line = "data: " + std::string(1 << 16, 'x') + "\n";
  while (lines.Feed(line, [](std::string_view) {})) {
    fed += line.size();
    ASSERT_LE(fed, 2 * SseReader::kMaxEventBytes);
  }
}

std::string Piece(const std::string& text, const std::string& finish = "null") {
  return "data: {\"choices\":[{\"index\":0,\"text\":\"" + text + "\",\"finish_reason\":" + finish +
         "}]}\n\n";
}

const char kUsage[] =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":5}}\n\n";
const char kDone[] = "data: [DONE]\n\n";

TEST(CompletionStreamTest, CountsPiecesAndReadsUsage) {
  CompletionStream stream;
  stream.Feed(Piece("a") + Piece("b"));
  EXPECT_EQ(stream.new_arrivals(), 2);
  // A piece without text is a token whose character is not complete yet.
  stream.Feed(Piece(""));
  EXPECT_EQ(stream.new_arrivals(), 1);
  // A last piece without text is not counted.
  stream.Feed(Piece("", "\"length\""));
  EXPECT_EQ(stream.new_arrivals(), 0);
  EXPECT_FALSE(stream.done());
  stream.Feed(std::string(kUsage) + kDone);
  EXPECT_TRUE(stream.done());
  EXPECT_EQ(stream.arrivals(), 3);
  EXPECT_EQ(stream.prompt_tokens(), 12);
  EXPECT_EQ(stream.output_tokens(), 5);
  EXPECT_FALSE(stream.duplicate());
  EXPECT_EQ(stream.error(), "");

  CompletionStream ids;
  ids.Feed(
      "data: {\"choices\":[{\"text\":\"\",\"token_ids\":[7],\"finish_reason\":\"length\"}]}\n\n");
  EXPECT_EQ(ids.arrivals(), 1);
}

TEST(CompletionStreamTest, SeesWhatMustNotBeThere) {
  const auto duplicate = [](const std::string& bytes) {
    CompletionStream stream;
    stream.Feed(bytes);
    return stream.duplicate();
  };
  EXPECT_FALSE(duplicate(Piece("a", "\"stop\"") + kUsage + kDone));
  EXPECT_TRUE(duplicate(Piece("a", "\"stop\"") + kDone + kDone));
  EXPECT_TRUE(duplicate(std::string(kDone) + Piece("a")));
  EXPECT_TRUE(duplicate(Piece("a", "\"stop\"") + Piece("b", "\"stop\"")));
  EXPECT_TRUE(duplicate(Piece("a", "\"stop\"") + Piece("b")));
}

TEST(CompletionStreamTest, ErrorsKeepTheirCode) {
  CompletionStream stream;
  stream.Feed(Piece("a") + "data: {\"error\":{\"code\":\"internal_error\"}}\n\n");
  EXPECT_EQ(stream.error(), "stream error internal_error");
  EXPECT_FALSE(stream.done());
  CompletionStream malformed;
  malformed.Feed("data: {nonsense\n\n");
  EXPECT_EQ(malformed.error(), "malformed event");
  EXPECT_EQ(ErrorCode("{\"error\":{\"code\":\"queue_full\",\"type\":\"t\"}}"), "queue_full");
  EXPECT_EQ(ErrorCode("{\"error\":{\"code\":null,\"type\":\"t\"}}"), "t");
  EXPECT_EQ(ErrorCode("{\"error\":{\"code\":7}}"), "error");
  EXPECT_EQ(ErrorCode("{\"error\":\"text\"}"), "error");
  EXPECT_EQ(ErrorCode("<html>"), "error");
  EXPECT_EQ(ErrorCode("[]"), "error");
  EXPECT_LT(ErrorCode("{\"error\":{\"code\":\"" + std::string(5000, '\n') + "\"}}").size(), 300u);
}

TEST(CompletionStreamTest, AnyBytesAreSurvived) {
  moeserve::testing::Random random(3);
  const std::string base = Piece("a") + Piece("b", "\"stop\"") + kUsage + kDone;
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = base;
    for (int k = 1 + random.Below(4); k > 0; --k) {
      const size_t at = random.Below(static_cast<int>(bytes.size()));
      switch (random.Below(3)) {
        case 0:
          bytes[at] = static_cast<char>(random.Next());
          break;
        case 1:
          bytes.erase(at, 1 + random.Below(20));
          break;
        default:
          bytes.insert(at, bytes.substr(random.Below(static_cast<int>(bytes.size())), 20));
      }
      if (bytes.empty()) break;
    }
    CompletionStream stream;
    const size_t cut = random.Below(static_cast<int>(bytes.size()) + 1);
    stream.Feed(std::string_view(bytes).substr(0, cut));
    stream.Feed(std::string_view(bytes).substr(cut));
    EXPECT_GE(stream.arrivals(), 0);
    EXPECT_LE(stream.output_tokens().value_or(0), 1LL << 31);
  }
}

}  // namespace
}  // namespace moeserve::server
