// Every family of checkpoint folders against the log-probabilities of its own implementation.
// tests/reference/families/make_family_goldens.py wrote the models and the answers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "engine/spec/spec.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/safetensors.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/support.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

struct FamilyCase {
  std::string name;
  fs::path folder;
};
void PrintTo(const FamilyCase& c, std::ostream* out) { *out << c.name; }

std::vector<FamilyCase> Cases() {
  std::vector<FamilyCase> cases;
  for (const auto& entry : fs::directory_iterator(SourcePath("tests/golden/families"))) {
    cases.push_back({entry.path().filename().string(), entry.path()});
  }
  std::sort(cases.begin(), cases.end(),
            [](const FamilyCase& a, const FamilyCase& b) { return a.name < b.name; });
  return cases;
}

struct Answers {
  int prompts = 0;
  int length = 0;
  int vocab = 0;
  int continuation = 0;
  std::vector<int32_t> tokens;  // [prompts, length]
  std::vector<float> logprobs;  // [prompts, length, vocab]
  std::vector<int32_t> greedy;  // [prompts, continuation]
  std::vector<float> margin;    // [prompts, continuation]

  std::vector<int32_t> Prompt(int p) const {
    return {tokens.begin() + p * length, tokens.begin() + (p + 1) * length};
  }
};

template <typename T>
std::vector<T> Values(const SafetensorsFile& file, const char* name) {
  const TensorEntry* entry = file.Find(name);
  EXPECT_NE(entry, nullptr) << name;
  if (entry == nullptr) return {};
  const std::string_view bytes = file.Bytes(*entry);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

Answers ReadAnswers(const fs::path& folder) {
  Answers a;
  const auto file = SafetensorsFile::Open(folder / "golden.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  if (!file.ok()) return a;
  const TensorEntry* logprobs = (*file)->Find("logprobs");
  a.prompts = static_cast<int>(logprobs->shape[0]);
  a.length = static_cast<int>(logprobs->shape[1]);
  a.vocab = static_cast<int>(logprobs->shape[2]);
  a.continuation = static_cast<int>((*file)->Find("greedy")->shape[1]);
  a.tokens = Values<int32_t>(**file, "tokens");
  a.logprobs = Values<float>(**file, "logprobs");
  a.greedy = Values<int32_t>(**file, "greedy");
  a.margin = Values<float>(**file, "margin");
  return a;
}

class FamilyTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override { answers_ = ReadAnswers(GetParam().folder); }

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

  Answers answers_;
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
  for (const FamilyCase& c : Cases()) {
    const auto text = ReadTextFile(c.folder / "config.json", 1 << 20);
    ASSERT_TRUE(text.ok()) << text.status();
    tested.insert(nlohmann::json::parse(*text)["model_type"].get<std::string>());
  }
  for (const Architecture* architecture : Architectures()) {
    const std::string type(architecture->model_type);
    // The native format has its own tests. Dynamic_MoE is not part of transformers.
    if (type == "routed_decoder" || type == "llama with top_p_threshold") continue;
    EXPECT_TRUE(tested.contains(type)) << type;
  }
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

// Every key is removed and replaced by odd values, one at a time. The reader must answer with a
// valid model or with an error that names config.json.
TEST_P(FamilyTest, OddConfigurationsAreRefusedOrRead) {
  const auto text = ReadTextFile(GetParam().folder / "config.json", 1 << 20);
  ASSERT_TRUE(text.ok()) << text.status();
  const auto json = nlohmann::json::parse(*text);
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
  for (const auto& [key, unused] : json.items()) {
    nlohmann::json changed = json;
    changed.erase(key);
    read(changed, "without " + key);
    for (const nlohmann::json& value : OddValues()) {
      changed[key] = value;
      read(changed, key + " = " + value.dump());
    }
  }
  EXPECT_GT(refused, 50);
  nlohmann::json changed = json;
  changed["an_unknown_option"] = 1;
  const auto config = ReadConfig(changed.dump(), {});
  EXPECT_TRUE(Mentions(config.status(), {"config.json: an_unknown_option: expected one of the keys",
                                         "found an unknown key"}));
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyTest, ::testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace moeserve::testing
