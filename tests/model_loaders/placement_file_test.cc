// Files of placements: what is written can be read, and nothing else.
#include "model_loaders/profiles/placement_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <string>

#include "base/strict_json.h"
#include "engine/weights/place_experts.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

using ::testing::HasSubstr;

ModelSpec SpecOf(const std::string& name) {
  for (const testing::GoldenModel& model : testing::GoldenModels()) {
    if (model.name != name) continue;
    auto checkpoint = LoadCheckpoint(model.model, {.require_tokenizer = false});
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint->spec;
  }
  ADD_FAILURE() << "no model " << name;
  return {};
}

TEST(PlacementFileTest, WhatIsWrittenIsRead) {
  for (const testing::GoldenModel& model : testing::GoldenModels()) {
    SCOPED_TRACE(model.name);
    const auto checkpoint = LoadCheckpoint(model.model, {.require_tokenizer = false});
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const ModelSpec& spec = checkpoint->spec;
    for (const int ranks : {1, 3, 64}) {
      const ExpertPlacement placed =
          PlaceExperts(spec, {.ranks = ranks, .copies_percent = ranks == 1 ? 0 : 50});
      const ExpertPlacement written(ranks, placed.blocks(), 7);
      const std::string text = EncodePlacement(written, spec, "a \"model\"\n\xff");
      const auto read = DecodePlacement(text, spec, ranks);
      ASSERT_TRUE(read.ok()) << read.status() << text;
      EXPECT_EQ(read->blocks(), written.blocks());
      EXPECT_EQ(read->ranks(), ranks);
      EXPECT_EQ(read->version(), 7u);
    }
  }
}

TEST(PlacementFileTest, FilesAreNamedInErrors) {
  const testing::TempFolder folder;
  const ModelSpec spec = SpecOf("hmoe-topp");
  const auto path = folder.path() / "placement.json";
  const ExpertPlacement placement = ExpertPlacement::Balanced(spec, 2);
  ASSERT_TRUE(SavePlacement(path, placement, spec, "hmoe").ok());
  const auto read = LoadPlacement(path, spec, 2);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->blocks(), placement.blocks());
  EXPECT_THAT(LoadPlacement(path, spec, 3).status().ToString(),
              HasSubstr("\"placement.json\": no placement for this model: ranks: expected 3, "
                        "found 2"));
  EXPECT_EQ(LoadPlacement(folder.path() / "none", spec, 3).status().code(),
            absl::StatusCode::kNotFound);
}

class BadPlacementTest : public ::testing::Test {
 protected:
  // Changes a valid file and returns the error.
  template <typename Change>
  std::string ErrorOf(const Change& change) const {
    nlohmann::json json = nlohmann::json::parse(text_);
    change(json);
    const auto read = DecodePlacement(json.dump(), spec_, 2);
    EXPECT_FALSE(read.ok());
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
    return read.status().ToString();
  }

  const ModelSpec spec_ = SpecOf("hmoe-topp");
  const std::string text_ = EncodePlacement(ExpertPlacement::Balanced(spec_, 2), spec_, "hmoe");
};

TEST_F(BadPlacementTest, WhatIsWrongIsNamed) {
  using J = nlohmann::json;
  EXPECT_THAT(ErrorOf([](J& j) { j["format"] = 2; }), HasSubstr("format: expected 1, found 2"));
  EXPECT_THAT(ErrorOf([](J& j) { j["model_digest"] = "abc"; }),
              HasSubstr("that of this model, found \"abc\""));
  EXPECT_THAT(ErrorOf([](J& j) { j["version"] = 0; }), HasSubstr("version: expected at least 1"));
  EXPECT_THAT(ErrorOf([](J& j) { j["version"] = 1e10; }), HasSubstr("version: expected an int"));
  EXPECT_THAT(ErrorOf([](J& j) { j["extra"] = 1; }), HasSubstr("extra"));
  EXPECT_THAT(ErrorOf([](J& j) { j.erase("blocks"); }), HasSubstr("blocks: expected a list"));
  EXPECT_THAT(ErrorOf([](J& j) { j["blocks"] = 3; }), HasSubstr("blocks: expected a list"));
  EXPECT_THAT(ErrorOf([](J& j) { j["blocks"].erase(0); }), HasSubstr("found none"));
  EXPECT_THAT(ErrorOf([](J& j) { j["blocks"].push_back(j["blocks"][0]); }), HasSubstr("again"));
  EXPECT_THAT(ErrorOf([](J& j) { j["blocks"][0] = 1; }), HasSubstr("blocks[0]"));
  EXPECT_THAT(ErrorOf([](J& j) { j["blocks"][0]["layer"] = 77; }),
              HasSubstr("blocks[0].layer: expected a routed block of the model"));
  EXPECT_THAT(ErrorOf([](J& j) { j["blocks"][0]["stack"] = "encoder"; }),
              HasSubstr("expected a routed block of the model"));
  EXPECT_THAT(ErrorOf([](J& j) { j["blocks"][0]["holders"].erase(0); }),
              HasSubstr("blocks[0].holders: expected a list of"));
  EXPECT_THAT(ErrorOf([](J& j) {
                j["blocks"][0]["holders"][1] = {0, 0};
              }),
              HasSubstr("blocks[0].holders[1]: expected a list of different ranks from 0 to 1"));
  for (const J& wrong : {J({2}), J({-1}), J({0.5}), J({"0"}), J(0), J::array(), J({J::array()})}) {
    EXPECT_THAT(ErrorOf([&](J& j) { j["blocks"][0]["holders"][1] = wrong; }),
                HasSubstr("blocks[0].holders[1]: expected a list of different ranks"));
  }
}

// Damaged files are refused, or are placements of this model.
TEST_F(BadPlacementTest, ChangedBytesAreRefusedOrValid) {
  std::mt19937 random(4);
  for (size_t size = 0; size < text_.size() - 2; size += 1 + random() % 7) {
    EXPECT_FALSE(DecodePlacement(text_.substr(0, size), spec_, 2).ok());
  }
  const ExpertSizes sizes = ExpertParameters(spec_);
  for (int round = 0; round < 2000; ++round) {
    std::string text = text_;
    for (uint32_t i = 0; i <= random() % 3; ++i) {
      constexpr std::string_view kBytes = "0123456789[]{},:\"-.eE nul\x80";
      text[random() % text.size()] = kBytes[random() % kBytes.size()];
    }
    const auto read = DecodePlacement(text, spec_, 2);
    if (!read.ok()) continue;
    EXPECT_EQ(read->blocks().size(), sizes.size());
    for (const auto& [block, holders] : read->blocks()) {
      const std::vector<int64_t>& of_block = sizes.at(block);
      ASSERT_EQ(holders.size(), of_block.size());
      for (size_t e = 0; e < holders.size(); ++e) {
        EXPECT_EQ(holders[e] == 0, of_block[e] == 0);
        EXPECT_LT(holders[e], 4u);
      }
    }
  }
}

}  // namespace
}  // namespace moeserve
