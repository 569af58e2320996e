// Files of expert profiles: reading a written file must return the same profile; a damaged file
// must be refused or return a consistent profile.
#include "model_loaders/profiles/profile_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/statistics/measures/agreement.h"
#include "engine/statistics/measures/collapse.h"
#include "engine/statistics/measures/router_losses.h"
#include "engine/statistics/stats_fields.h"
#include "model_loaders/files/safetensors.h"
#include "model_loaders/profiles/npy_writer.h"
#include "tests/support/native_model.h"
#include "tests/support/random.h"

namespace moeserve {
namespace {

using ::moeserve::testing::Random;
using ::moeserve::testing::ReadFile;
using ::moeserve::testing::TempFolder;

// Returns a profile in which every number differs from its neighbours, so that a misplaced field is
// detected.
ExpertProfile Example() {
  ExpertProfile p;
  p.model = "a \"model\"\n\xff";
  p.vocabulary = 5;
  ExpertStats& s = p.stats;
  uint64_t next = 1;
  s.tokens = next++;
  s.recomputed_tokens = next++;
  s.rejected_tokens = next++;
  s.steps = next++;
  for (int phase = 0; phase < kNumPhases; ++phase) {
    for (uint64_t& n : s.expert_rows[phase].buckets) n = next++;
    s.expert_rows[phase].sum = next++;
    for (uint64_t& n : s.active_experts[phase].buckets) n = next++;
    s.active_experts[phase].sum = next++;
  }
  s.always_active_parameters = 12345;
  s.diversity_blocks = 1;
  s.diversity_histogram = {5, 7, 9};
  for (int i = 0; i < 2; ++i) {
    BlockExpertStats b;
    b.layer = 3 + i;
    b.block = i == 0 ? BlockKind::kAttention : BlockKind::kFeedForward;
    b.num_experts = 3 + i;
    b.split_heads = 1 + i;
    b.select = i == 0 ? SelectKind::kTopK : SelectKind::kTopP;
    b.max_selected = 2;
    for (auto* counts : {&b.selections, &b.decode_selections, &b.touching_tokens, &b.visits,
                         &b.recomputed_selections, &b.rejected_selections, &b.router.selections}) {
      counts->resize(static_cast<size_t>(b.num_experts));
      for (uint64_t& n : *counts) n = next++;
    }
    b.distinct_histogram = {next++, next++};
    for (auto* sums : {&b.weight_sums, &b.router.probability_sums}) {
      sums->resize(static_cast<size_t>(b.num_experts));
      for (double& v : *sums) v = 1.0 / static_cast<double>(next++);
    }
    b.router.entropy_sum = 0.1;
    b.router.squared_logsumexp_sum = 1e300;
    for (uint64_t* n : {&b.tokens[0], &b.tokens[1], &b.rows[0], &b.rows[1], &b.nonfinite_rows,
                        &b.recomputed_tokens, &b.recomputed_rows, &b.rejected_tokens,
                        &b.rejected_rows, &b.router.rows}) {
      *n = next++;
    }
    for (int e = 0; e < b.num_experts; ++e) {
      b.expert_parameters.push_back(static_cast<int64_t>(next++));
      b.expert_widths.push_back(static_cast<int>(next++));
    }
    std::vector<uint32_t> counts(5 * static_cast<size_t>(b.num_experts));
    for (uint32_t& n : counts) n = static_cast<uint32_t>(next++);
    p.token_counts.push_back(counts);
    HiddenSample h;
    h.width = 2;
    h.capacity = 3;
    h.seen = 17;
    h.rows = {1, 2, 3, -4, 5, 6.5f};
    h.experts = {0, 2, 1};
    p.hidden.push_back(h);
    s.blocks.push_back(std::move(b));
  }
  RouteSequence routes;
  routes.tokens = {4, 0};
  routes.blocks.push_back({{1, BlockRoutes::kNone}, {0, 2, 2}, {1, 2}});
  routes.blocks.push_back({{0, 3, 2, 1}, {0, 1, 2, 4, 5}, {0, 3, 1, 2, 1}});
  p.routes = routes;
  return p;
}

// Returns the header's JSON and the data of a file.
std::pair<std::string, std::string> ProfileParts(const std::string& bytes) {
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  return {bytes.substr(8, length), bytes.substr(8 + length)};
}

std::string Joined(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + data;
}

// Returns the file with the bytes of one array changed by `change`.
template <typename T, typename F>
std::string WithArray(const std::string& bytes, const std::string& name, const F& change) {
  auto [header, data] = ProfileParts(bytes);
  const auto parsed = ParseSafetensorsHeader(header, data.size());
  EXPECT_TRUE(parsed.ok());
  for (const TensorEntry& t : parsed->tensors) {
    if (t.name != name) continue;
    std::vector<T> values((t.end - t.begin) / sizeof(T));
    std::memcpy(values.data(), data.data() + t.begin, t.end - t.begin);
    change(values);
    std::memcpy(data.data() + t.begin, values.data(), t.end - t.begin);
    return Joined(header, data);
  }
  ADD_FAILURE() << "no array " << name;
  return bytes;
}

TEST(ProfileFile, WhatIsWrittenIsRead) {
  const ExpertProfile p = Example();
  const std::string bytes = EncodeProfile(p);
  const auto read = DecodeProfile(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(EncodeProfile(*read), bytes);
  const BlockExpertStats& a = p.stats.blocks[1];
  const BlockExpertStats& b = read->stats.blocks[1];
  EXPECT_EQ(b.selections, a.selections);
  EXPECT_EQ(b.touching_tokens, a.touching_tokens);
  EXPECT_EQ(b.weight_sums, a.weight_sums);
  EXPECT_EQ(b.router.probability_sums, a.router.probability_sums);
  EXPECT_EQ(b.rows[1], a.rows[1]);
  EXPECT_EQ(b.router.rows, a.router.rows);
  EXPECT_EQ(b.select, SelectKind::kTopP);
  EXPECT_EQ(b.block, BlockKind::kFeedForward);
  EXPECT_EQ(b.expert_widths, a.expert_widths);
  EXPECT_EQ(read->stats.active_experts[1].sum, p.stats.active_experts[1].sum);
  EXPECT_EQ(read->stats.always_active_parameters, 12345);
  EXPECT_EQ(read->token_counts, p.token_counts);
  EXPECT_EQ(read->hidden[0].rows, p.hidden[0].rows);
  EXPECT_EQ(read->hidden[0].seen, 17u);
  EXPECT_EQ(read->hidden[0].capacity, 3);
  EXPECT_EQ(read->routes, p.routes);
}

// A counter that the file lacks would be read as 0.
TEST(ProfileFile, HoldsEveryCounter) {
  const ExpertProfile p = Example();
  const auto read = DecodeProfile(EncodeProfile(p));
  ASSERT_TRUE(read.ok());
  int counters = 0;
  ForEachCounterOfModel(p.stats, read->stats, [&](const auto& expected, const auto& found) {
    EXPECT_EQ(found, expected) << "counter " << counters;
    EXPECT_NE(expected, 0) << "counter " << counters << " shows nothing";
    ++counters;
  });
  EXPECT_GT(counters, 100);
}

TEST(ProfileFile, OptionalPartsMayBeAbsent) {
  ExpertProfile p = Example();
  p.token_counts.clear();
  p.hidden.clear();
  p.routes.reset();
  const auto read = DecodeProfile(EncodeProfile(p));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->token_counts.empty());
  EXPECT_TRUE(read->hidden.empty());
  EXPECT_FALSE(read->routes.has_value());
}

TEST(ProfileFile, AModelWithoutExpertsHasOneToo) {
  ExpertProfile p;
  p.vocabulary = 10;
  p.stats.diversity_histogram = {4};
  p.routes = RouteSequence{{1, 2, 3}, {}};
  const auto read = DecodeProfile(EncodeProfile(p));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->routes->tokens.size(), 3u);
}

TEST(ProfileFile, SaysWhatIsWrong) {
  const std::string good = EncodeProfile(Example());
  const auto expect = [](const std::string& bytes, const std::string& what) {
    const auto read = DecodeProfile(bytes);
    ASSERT_FALSE(read.ok()) << what;
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(read.status().message()).find(what), std::string::npos)
        << read.status().message();
  };
  expect("", "at least 8 bytes");
  expect(std::string(8, '\xff'), "does not fit");
  expect(good.substr(0, good.size() - 1), "");
  expect(WithArray<int64_t>(good, "model.shape", [](auto& v) { v[0] = 0; }), "model.shape");
  expect(WithArray<int64_t>(good, "model.shape", [](auto& v) { v[1] = 1; }), "is unknown");
  expect(WithArray<int64_t>(good, "model.shape", [](auto& v) { v[1] = 3; }), "is missing");
  expect(WithArray<int64_t>(good, "model.shape", [](auto& v) { v[1] = 1 << 30; }), "out of range");
  expect(WithArray<int64_t>(good, "blocks.0.shape", [](auto& v) { v[2] = 4; }), "expected");
  expect(WithArray<int64_t>(good, "blocks.0.shape", [](auto& v) { v[5] = 4; }), "entry 5");
  expect(WithArray<int64_t>(good, "blocks.1.shape", [](auto& v) { v[1] = 3; }), "entry 1");
  expect(WithArray<int64_t>(good, "blocks.1.shape", [](auto& v) { v[3] = 0; }), "entry 3");
  expect(WithArray<double>(good, "blocks.1.weight_sums", [](auto& v) { v[1] = 0.0 / 0.0; }),
         "not finite");
  expect(WithArray<float>(good, "blocks.1.hidden.rows", [](auto& v) { v[1] = 1.0f / 0.0f; }),
         "not finite");
  expect(WithArray<int32_t>(good, "blocks.1.hidden.experts", [](auto& v) { v[1] = 4; }), "hidden");
  expect(WithArray<int32_t>(good, "blocks.1.hidden.experts", [](auto& v) { v[1] = -1; }), "hidden");
  expect(WithArray<uint64_t>(good, "blocks.1.hidden.counters", [](auto& v) { v[0] = 2; }),
         "leave 3 rows");
  expect(WithArray<uint64_t>(good, "blocks.1.routes.offsets", [](auto& v) { v[1] = 3; }), "ascend");
  expect(WithArray<uint64_t>(good, "blocks.1.routes.offsets", [](auto& v) { v[4] = 6; }), "ascend");
  expect(WithArray<uint16_t>(good, "blocks.1.routes.experts", [](auto& v) { v[0] = 4; }),
         "routes.experts");
  expect(WithArray<uint16_t>(good, "blocks.1.routes.top1", [](auto& v) { v[0] = 4; }),
         "routes.top1");
  expect(WithArray<int32_t>(good, "routes.tokens", [](auto& v) { v[0] = 5; }), "vocabulary");
  auto [header, data] = ProfileParts(good);
  const size_t version = header.find("\"version\":\"1\"");
  ASSERT_NE(version, std::string::npos);
  header[version + 11] = '2';
  expect(Joined(header, data), "version");
}

// Uses all values that were read, so that a sanitizer detects invalid memory accesses.
void Use(ExpertProfile profile) {
  for (size_t i = 0; i < profile.stats.blocks.size(); ++i) {
    SummarizeRouter(profile.stats.blocks[i]);
    if (!profile.token_counts.empty()) TopTokens(profile.CountsOf(i), 1, 3);
    if (!profile.hidden.empty()) (void)RepresentationCollapse(profile.hidden[i]).status();
    if (profile.routes) {
      const BlockRoutes& routes = profile.routes->blocks[i];
      EXPECT_EQ(RoutingFluctuation(routes, routes).sets, 0.0);
    }
  }
  const ExpertProfile copy = profile;
  EXPECT_TRUE(Merge(profile, copy).ok());
  EXPECT_TRUE(DecodeProfile(EncodeProfile(copy)).ok());
}

TEST(ProfileFile, MutationsAreRefusedOrConsistent) {
  const std::string good = EncodeProfile(Example());
  uint64_t header_size = 0;
  std::memcpy(&header_size, good.data(), 8);
  Random random(1);
  int accepted = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = good;
    for (int edits = 1 + random.Below(3); edits > 0; --edits) {
      // Half of the edits are in the header, where adding or removing a digit keeps the JSON
      // well-formed.
      const bool header = random.Below(2) == 0;
      const size_t at = header ? 8 + random.Next() % header_size
                               : 8 + header_size + random.Next() % (good.size() - 8 - header_size);
      const int kind = random.Below(8);
      if (kind == 0 && at < bytes.size()) bytes.resize(at);
      if (at >= bytes.size()) continue;
      if (header) {
        bytes[at] = "0123456789\"[]{},:-UIF"[random.Below(21)];
      } else {
        const char values[] = {0, 1, 2, 3, 4, 5, 127, -128, -1, 16};
        bytes[at] = values[random.Below(10)];
      }
    }
    const auto read = DecodeProfile(bytes);
    if (!read.ok()) continue;
    ++accepted;
    Use(*read);
  }
  EXPECT_GT(accepted, 100) << "the mutations should reach behind the parser";
}

TEST(ProfileFile, TruncationsAreRefused) {
  const std::string good = EncodeProfile(Example());
  for (size_t size = 0; size < good.size(); size += 1 + size / 64) {
    EXPECT_FALSE(DecodeProfile(std::string_view(good).substr(0, size)).ok()) << size;
  }
}

TEST(ProfileFile, SavingReplacesAWholeFile) {
  const TempFolder folder;
  const auto path = folder.path() / "a.profile";
  ASSERT_TRUE(SaveProfile(path, Example()).ok());
  ExpertProfile other = Example();
  other.model = "other";
  ASSERT_TRUE(SaveProfile(path, other).ok());
  const auto read = LoadProfile(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->model, "other");
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    ++files;
  }
  EXPECT_EQ(files, 1u);
  EXPECT_FALSE(SaveProfile(folder.path() / "none" / "a", other).ok());
  EXPECT_FALSE(LoadProfile(folder.path() / "none").ok());
}

TEST(WriteWholeFile, LeavesAPipeInItsPlace) {
  const TempFolder folder;
  const auto path = folder.path() / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  EXPECT_TRUE(WriteWholeFile(path, "bytes").ok());
  char bytes[8] = {};
  EXPECT_EQ(read(reader, bytes, sizeof(bytes)), 5);
  EXPECT_EQ(std::string(bytes), "bytes");
  EXPECT_TRUE(std::filesystem::is_fifo(path));
  close(reader);
}

TEST(NpyWriter, WritesRowsAndTheirNumber) {
  const TempFolder folder;
  const auto path = folder.path() / "a.npy";
  auto writer = NpyWriter::Create(path, NpyType<uint16_t>(), 3);
  ASSERT_TRUE(writer.ok()) << writer.status();
  (*writer)->Append(std::span<const uint16_t>(std::vector<uint16_t>{1, 2, 3}));
  (*writer)->Append(std::span<const uint16_t>(std::vector<uint16_t>{4, 5, 6, 7, 8, 9}));
  ASSERT_TRUE((*writer)->Finish().ok());
  const std::string bytes = ReadFile(path);
  ASSERT_EQ(bytes.size(), 128u + 18u);
  EXPECT_EQ(bytes.substr(0, 10), std::string("\x93NUMPY\x01\x00\x76\x00", 10));
  EXPECT_NE(bytes.find("{'descr': '<u2', 'fortran_order': False, 'shape': (3, 3), }"),
            std::string::npos);
  EXPECT_EQ(bytes[127], '\n');
  EXPECT_EQ(bytes[128 + 16], 9);
  EXPECT_FALSE(NpyWriter::Create(folder.path() / "none" / "a.npy", NpyType<float>(), 0).ok());
}

TEST(NpyWriter, AVectorHasOneDimension) {
  const TempFolder folder;
  auto writer = NpyWriter::Create(folder.path() / "a.npy", NpyType<float>(), 0);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  EXPECT_NE(ReadFile(folder.path() / "a.npy").find("'shape': (0,)"), std::string::npos);
}

}  // namespace
}  // namespace moeserve
