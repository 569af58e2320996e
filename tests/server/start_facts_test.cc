// What ranks compare at the start.
#include "server/commands/ranks/start_facts.h"

#include <gtest/gtest.h>

#include <random>

namespace moeserve::server {
namespace {

StartReport Report(std::string host, StartFacts facts) {
  return {.status = absl::OkStatus(), .host = std::move(host), .facts = std::move(facts)};
}

TEST(StartFactsTest, EqualReportsAgree) {
  const std::vector<StartReport> reports(3, Report("a", {{"version", "1"}, {"--dtype", "bf16"}}));
  EXPECT_TRUE(CompareReports(reports).ok());
}

TEST(StartFactsTest, ADifferenceNamesRankHostFieldAndValues) {
  const std::vector<StartReport> reports = {
      Report("one", {{"version", "1"}, {"--dtype", "f32"}}),
      Report("two", {{"version", "1"}, {"--dtype", "f32"}}),
      Report("three", {{"version", "1"}, {"--dtype", "bf16"}})};
  EXPECT_EQ(CompareReports(reports).message(),
            "rank 2 on three: --dtype: expected f32 as rank 0 on one, found bf16");
}

TEST(StartFactsTest, OtherFieldsAreADifference) {
  const std::vector<StartReport> reports = {Report("one", {{"version", "1"}}),
                                            Report("two", {{"version", "1"}, {"new", "2"}})};
  EXPECT_EQ(CompareReports(reports).message(),
            "rank 1 on two: expected the field nothing as rank 0 on one, found new");
}

TEST(StartFactsTest, ABestCommonInstructionSetIsNamed) {
  const std::string field(kInstructionSetFact);
  const std::vector<StartReport> x86 = {Report("one", {{field, "avx512_vnni"}}),
                                        Report("two", {{field, "amx_bf16"}}),
                                        Report("three", {{field, "avx2"}})};
  EXPECT_EQ(CompareReports(x86).message(),
            "rank 1 on two: instruction set: expected avx512_vnni as rank 0 on one, found "
            "amx_bf16; all have --cpu-isa avx2");
  const std::vector<StartReport> arm = {Report("one", {{field, "neon_dot"}}),
                                        Report("two", {{field, "neon_bf16"}})};
  const std::string message(CompareReports(arm).message());
  EXPECT_TRUE(message.ends_with("; all have --cpu-isa neon_dot")) << message;
  const std::vector<StartReport> mixed = {Report("one", {{field, "neon_dot"}}),
                                          Report("two", {{field, "avx2"}})};
  EXPECT_FALSE(CompareReports(mixed).ok());
  EXPECT_EQ(CompareReports(mixed).message().find("--cpu-isa"), absl::string_view::npos);
}

TEST(StartFactsTest, AnErrorComesBeforeADifference) {
  std::vector<StartReport> reports = {Report("one", {{"version", "1"}}), Report("two", {})};
  reports.push_back({.status = absl::NotFoundError("no file"), .host = "three", .facts = {}});
  const absl::Status found = CompareReports(reports);
  EXPECT_TRUE(absl::IsNotFound(found));
  EXPECT_EQ(found.message(), "rank 2 on three: no file");
}

TEST(StartFactsTest, HostileTextsAreEscaped) {
  const std::vector<StartReport> reports = {Report("a\nb", {{"version", "1"}}),
                                            Report("c\x1b", {{"version", "2\n"}})};
  const std::string message(CompareReports(reports).message());
  for (const char c : message) EXPECT_GE(c, ' ') << message;
}

TEST(StartFactsTest, AReportArrivesAsItWasSent) {
  const StartReport sent{.status = absl::InternalError("why"),
                         .host = "host",
                         .facts = {{"a", std::string("\0b", 2)}, {"", ""}}};
  const auto found = ParseStartReport(Serialize(sent));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->status, sent.status);
  EXPECT_EQ(found->host, sent.host);
  EXPECT_EQ(found->facts, sent.facts);
}

TEST(StartFactsTest, DamagedReportsAreRefusedOrParsed) {
  const std::string good = Serialize(Report("host", {{"version", "1"}, {"--dtype", "f32"}}));
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(ParseStartReport(good.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(ParseStartReport(good + "x").ok());
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = good;
    for (int n = 0; n < 3; ++n) bytes[random() % bytes.size()] = static_cast<char>(random());
    (void)ParseStartReport(bytes).ok();  // must not read beyond the bytes
  }
}

}  // namespace
}  // namespace moeserve::server
