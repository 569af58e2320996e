// A step of a few tokens before a model is served.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>

#include "nlohmann/json.hpp"
#include "tests/support/engine_fixture.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr const char* kRouter = "blocks.0.feed_forward.router.projection.weight";

// Writes NaN to the first value of the tensor `name`.
void Poison(const std::filesystem::path& folder, const std::string& name) {
  const std::filesystem::path file = folder / "model.safetensors";
  std::string bytes = ReadFile(file);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  const auto header = nlohmann::json::parse(bytes.substr(sizeof(header_bytes), header_bytes));
  ASSERT_TRUE(header.contains(name)) << name;
  const size_t at = sizeof(header_bytes) + header_bytes + size_t{header[name]["data_offsets"][0]};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(&bytes[at], &nan, sizeof(nan));
  WriteFile(file, bytes);
}

class TrialTest : public ::testing::Test {
 protected:
  Result<std::unique_ptr<TestEngine>> Start(bool try_model) {
    EngineOptions options;
    options.max_model_len = 64;
    options.try_model = try_model;
    return TestEngine::Start(folder_.path(), options);
  }

  TempFolder folder_;
};

TEST_F(TrialTest, LeavesNoTrace) {
  WriteNativeModel(folder_.path(), TinyConfig());
  std::vector<TokenId> expected;
  for (const bool try_model : {false, true}) {
    auto engine = Start(try_model);
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ((*engine)->get().Stats().prompt_tokens, 0u);
    EXPECT_EQ((*engine)->get().ExpertSnapshot().steps, 0u);
    Request request;
    request.id = "1";
    request.prompt = {1, 2, 3};
    request.sampling.temperature = 0.0;
    request.sampling.max_tokens = 8;
    request.sampling.ignore_eos = true;
    const auto sink = (*engine)->Submit(request);
    EXPECT_TRUE(sink->Wait().ok());
    if (!try_model) expected = sink->tokens();
    EXPECT_EQ(sink->tokens(), expected);
  }
}

TEST_F(TrialTest, RefusesModelsWithoutFiniteResults) {
  for (const auto& [tensor, found] :
       {std::pair("norm.weight", "outputs"), std::pair(kRouter, "router scores")}) {
    WriteNativeModel(folder_.path(), TinyConfig());
    Poison(folder_.path(), tensor);
    EXPECT_TRUE(Start(false).ok());
    const absl::Status status = Start(true).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(std::string(status.message()).find(found), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace moeserve::testing
