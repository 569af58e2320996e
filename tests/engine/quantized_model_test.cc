// A folder that was quantized by QuantizeFolder() must give the same results as its source
// quantized at load.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "model_loaders/quantize/quantize_folder.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr Quantization kTypes[] = {Quantization::kInt8, Quantization::kInt4};

// Returns the logits of 40 tokens.
std::vector<float> Logits(const std::filesystem::path& model, const RunnerOptions& options) {
  auto runner = ModelRunner::Load(model, options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  std::vector<int32_t> tokens;
  for (int i = 0; i < 40; ++i) tokens.push_back((i * 37 + 11) % (*runner)->vocab());
  return (*runner)->Run(tokens, 16);
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  ASSERT_FALSE(a.empty());
  for (const float v : a) ASSERT_TRUE(std::isfinite(v));
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

// `limit`: the largest relative error against the same weights with inputs that are not rounded.
void ExpectFolderAnswersAsItsSource(const std::filesystem::path& source, double limit = 0.1) {
  if (TestDevice() != "cpu") GTEST_SKIP() << "products with integers run on the CPU alone";
  std::vector<float> of_other_type;
  for (const Quantization type : kTypes) {
    SCOPED_TRACE(Name(type));
    TempFolder parent;
    const auto written = QuantizeFolder(source, parent.path() / "model", type);
    ASSERT_TRUE(written.ok()) << written.status();
    const RunnerOptions options{.compute = DType::kBF16, .quantization = type};
    const std::vector<float> at_load = Logits(source, options);
    ExpectSameBits(at_load, Logits(parent.path() / "model", options));
    EXPECT_NE(at_load, of_other_type);
    of_other_type = at_load;
    // With the same weights widened to f32, the result differs only by the rounding of inputs.
    const std::vector<float> widened = Logits(parent.path() / "model", {.compute = DType::kF32});
    double error = 0.0, power = 0.0;
    for (size_t i = 0; i < widened.size(); ++i) {
      error += std::pow(widened[i] - at_load[i], 2);
      power += std::pow(widened[i], 2);
    }
    EXPECT_LT(std::sqrt(error / power), limit);
  }
}

// A model with an untied LM head, odd widths, sub-tokens, attention experts and a shared expert.
// Its rows have several groups of columns.
TEST(QuantizedModel, OfEveryKindOfLayer) {
  nlohmann::json config = TinyConfig();
  config["hidden_size"] = 150;
  config["feed_forward"][0]["routing"]["widths"] = {9, 11, 33, 64, 65, 19, 129, 23};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(Name(dtype));
    TempFolder source;
    WriteNativeModel(source.path(), config, dtype);
    ExpectFolderAnswersAsItsSource(source.path());
  }
}

// Its experts are stacks of sub-layers on rows of a latent width. So inputs are rounded more often,
// and more routes change.
TEST(QuantizedModel, OfDeepLatentExperts) {
  nlohmann::json config = TinyConfig();
  config["hidden_size"] = 150;
  for (nlohmann::json& layer : config["feed_forward"]) {
    layer["expert"].update({{"sublayer", "residual"}, {"depth", 2}});
    layer["routing"].update(
        {{"latent_width", 70}, {"null_experts", {{"copy", 1}, {"constant", 1}}}});
  }
  config["feed_forward"][0]["routing"]["split"]["depth"] = 2;
  TempFolder source;
  WriteNativeModel(source.path(), config, DType::kBF16);
  ExpectFolderAnswersAsItsSource(source.path(), 0.2);
}

TEST(QuantizedModel, OfTheBundledModels) {
  for (const char* name : {"smoe", "moa", "mh-moe"}) {
    SCOPED_TRACE(name);
    ExpectFolderAnswersAsItsSource(SourcePath(std::string("deploy/models/") + name));
  }
}

}  // namespace
}  // namespace moeserve::testing
