// What a config.json is told that no reader recognizes: what its models have that is missing here,
// and what comes nearest to it.

#include "model_loaders/architectures/unknown_family.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/huggingface/wrappers.h"
#include "model_loaders/architectures/registry.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/support.h"

namespace moeserve::testing {
namespace {

using Json = nlohmann::json;

bool IsRead(std::string_view type) {
  return std::ranges::any_of(Architectures(),
                             [&](const Architecture* a) { return a->model_type == type; });
}

std::string Answer(const Json& config) {
  const auto read = ReadConfig(config.dump(), {});
  return read.ok() ? "read" : std::string(read.status().message());
}

TEST(UnknownFamily, TheListHasNoFamilyThatIsRead) {
  std::set<std::string_view> seen;
  for (const UnsupportedFamily& family : UnsupportedFamilies()) {
    EXPECT_FALSE(IsRead(family.model_type)) << family.model_type;
    EXPECT_TRUE(seen.insert(family.model_type).second) << family.model_type;
    const bool wrapper = std::ranges::any_of(
        huggingface::Wrappers(),
        [&](const huggingface::Wrapper& w) { return w.model_type == family.nearest; });
    EXPECT_TRUE(family.nearest.empty() || IsRead(family.nearest) || wrapper) << family.nearest;
  }
}

TEST(UnknownFamily, EachOfTheListIsToldWhatIsMissing) {
  for (const UnsupportedFamily& family : UnsupportedFamilies()) {
    const std::string answer = Answer({{"model_type", family.model_type}});
    EXPECT_EQ(answer.find("config.json: "), 0u) << answer;
    EXPECT_NE(answer.find('"' + std::string(family.model_type) + '"'), std::string::npos) << answer;
    EXPECT_EQ(answer.find('\n'), std::string::npos) << answer;
    EXPECT_LT(answer.size(), 400u) << answer;
    // A wrapper lacks its text_config here.
    if (answer.find("text_config: expected an object") != std::string::npos) continue;
    const std::string part(family.part.empty() ? "has no reader for" : family.part);
    EXPECT_NE(answer.find(part), std::string::npos) << answer;
  }
}

TEST(UnknownFamily, ANameWithAnErrorFindsItsFamily) {
  const std::pair<const char*, const char*> cases[] = {
      {"qwen3moe", "\"qwen3_moe\""},     {"Mixtral", "\"mixtral\""},
      {"glm4moe", "\"glm4_moe\""},       {"deepseek-v3", "\"deepseek_v3\""},
      {"granite_moe", "\"granitemoe\""}, {"olmo_e", "\"olmoe\""},
      {"gptoss", "\"gpt_oss\""},         {"llama3", "\"llama\""}};
  for (const auto& [given, expected] : cases) {
    const std::string answer = Answer({{"model_type", given}});
    EXPECT_NE(answer.find("nearest by name: "), std::string::npos) << answer;
    EXPECT_NE(answer.find(expected), std::string::npos) << answer;
  }
  const std::string answer = Answer({{"model_type", "something-quite-different"}});
  EXPECT_EQ(answer.find("nearest"), std::string::npos) << answer;
  EXPECT_LT(answer.size(), 200u) << answer;
  EXPECT_LT(Answer({{"model_type", std::string(100000, 'q')}}).size(), 600u);
}

TEST(UnknownFamily, TheTextOfAnUnknownWrapperIsNamed) {
  const auto answer = [](const Json& text) {
    return Answer({{"model_type", "new_vl_model"}, {"text_config", text}});
  };
  EXPECT_NE(
      answer({{"model_type", "qwen3_moe"}})
          .find("; its decoder of text is of the type \"qwen3_moe\", which this server reads"),
      std::string::npos);
  EXPECT_NE(answer({{"model_type", "qwen9"}}).find("\"qwen9\", which this server does not read"),
            std::string::npos);
  EXPECT_NE(answer(Json::object()).find("its text_config has no model_type"), std::string::npos);
  for (const Json& odd : {Json(), Json(3), Json("x"), Json::array()}) {
    EXPECT_NE(answer(odd).find("new_vl_model"), std::string::npos) << odd;
  }
}

TEST(UnknownFamily, AWrapperOfAnUnreadDecoderIsToldSo) {
  for (const huggingface::Wrapper& wrapper : huggingface::Wrappers()) {
    EXPECT_NE(Answer({{"model_type", wrapper.model_type}}).find("config.json: text_config: "),
              std::string::npos);
    const std::string_view type = wrapper.text_types.front();
    const std::string answer =
        Answer({{"model_type", wrapper.model_type}, {"text_config", Json::object()}});
    if (IsRead(type)) {
      EXPECT_NE(answer.find("text_config.vocab_size: expected an integer"), std::string::npos)
          << answer;
    } else {
      EXPECT_NE(answer.find("text_config.model_type: expected a decoder of"), std::string::npos)
          << answer;
      EXPECT_NE(answer.find("whose models have "), std::string::npos) << answer;
    }
  }
}

}  // namespace
}  // namespace moeserve::testing
