// Every family of checkpoint folders against the log-probabilities of its own implementation.
// tests/reference/families/make_family_goldens.py wrote the models and the answers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "engine/spec/spec.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/huggingface/wrappers.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/tensor_check.h"
#include "model_loaders/files/mapped_file.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/support.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

class FamilyTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override {
    auto answers = ReadFamilyAnswers(GetParam().folder);
    ASSERT_TRUE(answers.ok()) << answers.status();
    answers_ = *std::move(answers);
  }

  // Returns the largest difference from the expected log-probabilities of all tokens of the
  // vocabulary after all tokens of the prompts.
  double WorstDifference(ModelRunner& runner) {
    double worst = 0.0;
    for (int p = 0; p < answers_.prompts; ++p) {
      const std::vector<float> logits = runner.Run(answers_.Prompt(p), answers_.length);
      for (int i = 0; i < answers_.length; ++i) {
        const float* row = logits.data() + int64_t{i} * answers_.vocab;
        const float* expected =
            answers_.logprobs.data() + (int64_t{p} * answers_.length + i) * answers_.vocab;
        for (int t = 0; t < answers_.vocab; ++t) {
          const double error = std::abs(LogSoftmaxAt(row, answers_.vocab, t) - expected[t]);
          if (!(error <= worst)) worst = error;
        }
      }
    }
    return worst;
  }

  FamilyAnswers answers_;
};

TEST_P(FamilyTest, LogprobsInF32) {
  auto runner = ModelRunner::Load(GetParam().folder);
  ASSERT_TRUE(runner.ok()) << runner.status();
  ASSERT_EQ((*runner)->vocab(), answers_.vocab);
  const double worst = WorstDifference(**runner);
  std::printf("%s: largest difference %.2e\n", GetParam().name.c_str(), worst);
  EXPECT_LE(worst, 1e-4);
}

// Continues the prompts through the cache, one token per step, up to the first near tie.
TEST_P(FamilyTest, GreedyTokensInF32) {
  auto runner = ModelRunner::Load(GetParam().folder);
  ASSERT_TRUE(runner.ok()) << runner.status();
  for (int p = 0; p < answers_.prompts; ++p) {
    std::vector<float> logits = (*runner)->Run(answers_.Prompt(p), answers_.length);
    for (int i = 0; i < answers_.continuation; ++i) {
      const size_t at = static_cast<size_t>(p * answers_.continuation + i);
      if (answers_.margin[at] < 2e-4) break;
      const float* row = logits.data() + logits.size() - static_cast<size_t>(answers_.vocab);
      const int token = static_cast<int>(std::max_element(row, row + answers_.vocab) - row);
      ASSERT_EQ(token, answers_.greedy[at]) << "prompt " << p << ", step " << i;
      logits = (*runner)->Run({token}, 1, answers_.length + i);
    }
  }
}

// A family that is not tested against its own implementation must not be added to the program.
TEST(Families, HaveGoldens) {
  std::set<std::string> tested;
  std::vector<std::filesystem::path> folders;
  for (const FamilyCase& c : FamilyCases()) folders.push_back(c.folder);
  // Those of encoders, alone and beside a decoder, are for the tests of the engine.
  for (const char* kind : {"tests/golden/encoders", "tests/golden/pairs"}) {
    for (const auto& entry : std::filesystem::directory_iterator(SourcePath(kind))) {
      if (std::filesystem::exists(entry.path() / "config.json")) folders.push_back(entry.path());
    }
  }
  for (const std::filesystem::path& folder : folders) {
    const auto text = ReadTextFile(folder / "config.json", 1 << 20);
    ASSERT_TRUE(text.ok()) << text.status();
    const auto json = nlohmann::json::parse(*text);
    tested.insert(json.contains("top_p_threshold") ? "llama with top_p_threshold"
                                                   : json["model_type"].get<std::string>());
    if (json.contains("text_config")) {
      tested.insert(json["text_config"]["model_type"].get<std::string>());
    }
  }
  for (const huggingface::Wrapper& wrapper : huggingface::Wrappers()) {
    for (const Architecture* architecture : Architectures()) {
      if (architecture->model_type != wrapper.text_types.front()) continue;
      EXPECT_TRUE(tested.contains(std::string(wrapper.model_type))) << wrapper.model_type;
    }
  }
  for (const Architecture* architecture : Architectures()) {
    const std::string type(architecture->model_type);
    if (type == "routed_decoder") continue;  // the native format has its own tests
    EXPECT_TRUE(tested.contains(type)) << type;
  }
}

TEST(Families, NotesTellWhatIsIgnored) {
  std::string notes;
  for (const FamilyCase& c : FamilyCases()) {
    if (c.name != "mixtral") continue;
    const auto checkpoint = LoadCheckpoint(c.folder, {.require_tokenizer = false});
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    for (const std::string& note : checkpoint->notes) notes += note + "\n";
  }
  EXPECT_NE(notes.find("config.json: these keys do not change the model's answers: "),
            std::string::npos)
      << notes;
  EXPECT_NE(notes.find("router_jitter_noise"), std::string::npos) << notes;
  EXPECT_EQ(notes.find("model_type"), std::string::npos) << notes;
}

TEST(Families, NamesThatDifferInNumbersMakeOneLine) {
  EXPECT_EQ(
      GroupedNames({"layers.0.inv_freq", "layers.11.inv_freq", "lm_head.weight", "a.w1.b"}),
      (std::vector<std::string>{"a.w1.b", "layers.*.inv_freq (2 tensors)", "lm_head.weight"}));
  EXPECT_TRUE(GroupedNames({}).empty());
}

// Values that a hostile or damaged config.json may have anywhere.
std::vector<nlohmann::json> OddValues() {
  using Json = nlohmann::json;
  return {nullptr,
          true,
          false,
          0,
          -1,
          1,
          3,
          2147483647,
          int64_t{1} << 40,
          1e308,
          -1e-300,
          0.5,
          "",
          "silu",
          Json::array(),
          Json::array({1, "x", nullptr}),
          Json::array({-1e9, 5}),
          Json::object(),
          Json{{"rope_type", "yarn"}, {"factor", 0}, {"original_max_position_embeddings", -1}},
          Json{{"rope_type", 5}},
          Json{{"full_attention", 3}}};
}

nlohmann::json ConfigOf(const FamilyCase& c) {
  const auto text = ReadTextFile(c.folder / "config.json", 1 << 20);
  EXPECT_TRUE(text.ok()) << text.status();
  return nlohmann::json::parse(text.ok() ? *text : "{}");
}

// Returns the keys of a config.json, and those of a wrapper's decoder, as JSON pointers.
std::set<std::string> KeysOf(const nlohmann::json& json) {
  std::set<std::string> keys;
  for (const auto& [key, unused] : json.items()) keys.insert("/" + key);
  if (!json.contains("text_config")) return keys;
  for (const auto& [key, unused] : json["text_config"].items()) keys.insert("/text_config/" + key);
  return keys;
}

// Returns the keys of a folder's config.json that no earlier folder with the same reader has.
std::set<std::string> NewKeys(const FamilyCase& folder) {
  const auto reader = [](const nlohmann::json& json) {
    return json["model_type"].get<std::string>() + (json.contains("top_p_threshold") ? "+" : "");
  };
  const nlohmann::json own = ConfigOf(folder);
  std::set<std::string> keys = KeysOf(own);
  for (const FamilyCase& c : FamilyCases()) {
    if (c.name == folder.name) break;
    const nlohmann::json json = ConfigOf(c);
    if (reader(json) != reader(own)) continue;
    for (const std::string& key : KeysOf(json)) keys.erase(key);
  }
  return keys;
}

// Every key is removed and replaced by odd values, one at a time, once for each reader. The reader
// must answer with a valid model or with an error that names config.json.
TEST_P(FamilyTest, OddConfigurationsAreRefusedOrRead) {
  const nlohmann::json json = ConfigOf(GetParam());
  const std::set<std::string> keys = NewKeys(GetParam());
  int refused = 0;
  const auto read = [&](const nlohmann::json& changed, const std::string& what) {
    const auto config = ReadConfig(changed.dump(), {});
    if (config.ok()) {
      EXPECT_TRUE(Validate((*config)->spec).ok()) << what;
      return;
    }
    ++refused;
    EXPECT_EQ(config.status().message().find("config.json: "), 0u)
        << what << ": " << config.status();
  };
  for (const std::string& key : keys) {
    const nlohmann::json::json_pointer place(key);
    nlohmann::json changed = json;
    changed[place.parent_pointer()].erase(place.back());
    read(changed, "without " + key);
    for (const nlohmann::json& value : OddValues()) {
      changed = json;
      changed[place] = value;
      read(changed, key + " = " + value.dump());
    }
  }
  if (keys.contains("/model_type")) {  // the first folder of the reader
    EXPECT_GT(refused, 50);
  }
  nlohmann::json changed = json;
  changed["an_unknown_option"] = 1;
  const auto config = ReadConfig(changed.dump(), {});
  EXPECT_TRUE(Mentions(config.status(), {"config.json: an_unknown_option: expected no such key",
                                         "changes the model's answers; found 1"}));
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyTest, ::testing::ValuesIn(FamilyCases()),
                         [](const auto& info) { return TestName(info.param); });

}  // namespace
}  // namespace moeserve::testing
