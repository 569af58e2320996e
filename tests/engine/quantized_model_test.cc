// A folder that was quantized by QuantizeFolder() must give the same results as its source
// quantized at load.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "model_loaders/write/quantize_folder.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr Quantization kQuantizedTypes[] = {Quantization::kInt8, Quantization::kInt8Channel,
                                            Quantization::kInt4, Quantization::kInt4K};

constexpr size_t kTokens = 40;

// Returns the logits of kTokens tokens.
std::vector<float> Logits(const std::filesystem::path& model, const RunnerOptions& options) {
  auto runner = ModelRunner::Load(model, options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < kTokens; ++i) {
    tokens.push_back(static_cast<int32_t>(i * 37 + 11) % (*runner)->vocab());
  }
  return (*runner)->Run(tokens, 16);
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  ASSERT_FALSE(a.empty());
  for (const float v : a) ASSERT_TRUE(std::isfinite(v));
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

// Returns the relative error of each token's logits, ascending.
std::vector<double> ErrorsOfTokens(const std::vector<float>& logits,
                                   const std::vector<float>& expected) {
  const size_t vocabulary = expected.size() / kTokens;
  std::vector<double> errors;
  for (size_t begin = 0; begin < expected.size(); begin += vocabulary) {
    double error = 0.0, power = 0.0;
    for (size_t i = begin; i < begin + vocabulary; ++i) {
      error += std::pow(logits[i] - expected[i], 2);
      power += std::pow(expected[i], 2);
    }
    errors.push_back(std::sqrt(error / power));
  }
  std::ranges::sort(errors);
  return errors;
}

void ExpectFolderAnswersAsItsSource(const std::filesystem::path& source) {
  const bool cpu = TestDevice() == "cpu";
  std::vector<float> of_other_type;
  for (const Quantization type : kQuantizedTypes) {
    SCOPED_TRACE(Name(type));
    TempFolder parent;
    const auto written = QuantizeFolder(source, parent.path() / "model", type);
    ASSERT_TRUE(written.ok()) << written.status();
    const RunnerOptions options{.compute = DType::kBF16, .quantization = type};
    const std::vector<float> at_load = Logits(source, options);
    ExpectSameBits(at_load, Logits(parent.path() / "model", options));
    EXPECT_NE(at_load, of_other_type);
    of_other_type = at_load;
    // With the same weights widened to f32, the result differs only by the rounding of inputs. It
    // changes the experts of a few tokens, whose errors are large.
    const std::vector<double> errors =
        ErrorsOfTokens(at_load, Logits(parent.path() / "model", {.compute = DType::kF32}));
    EXPECT_LT(errors[kTokens / 2], 0.04);
    EXPECT_LT(errors[kTokens * 3 / 4], 0.06);
    if (cpu) continue;
    // The sums of integers are those of the CPU, so only other operations differ, and rounding to
    // bf16 hides most of their differences.
    RunnerOptions on_cpu = options;
    on_cpu.device = "cpu";
    const std::vector<double> from_cpu = ErrorsOfTokens(at_load, Logits(source, on_cpu));
    std::printf("difference from the CPU: median %.2e, largest %.2e\n", from_cpu[kTokens / 2],
                from_cpu.back());
    EXPECT_LT(from_cpu[kTokens / 2], 0.02);
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

// Its experts are stacks of sub-layers on rows of a latent width.
TEST(QuantizedModel, OfDeepLatentExperts) {
  nlohmann::json config = TinyConfig();
  config["hidden_size"] = 150;
  for (nlohmann::json& layer : config["feed_forward"]) {
    layer["expert"].update({{"sublayer", "residual"}, {"depth", 2}});
    layer["routing"].update(
        {{"latent_width", 70},
         {"null_experts", {{"copy", 1}, {"constant", 1}, {"replaced", {0, 2}}}}});
  }
  config["feed_forward"][0]["routing"]["split"]["depth"] = 2;
  TempFolder source;
  WriteNativeModel(source.path(), config, DType::kBF16);
  ExpectFolderAnswersAsItsSource(source.path());
}

TEST(QuantizedModel, OfTheBundledModels) {
  for (const char* name : {"smoe", "moa", "mh-moe"}) {
    SCOPED_TRACE(name);
    ExpectFolderAnswersAsItsSource(SourcePath(std::string("deploy/models/") + name));
  }
}

// A device that records steps: a longer step needs more memory for rounded rows than recorded ones
// had, and moves it. Runs on the emulated device if the device under test is the CPU.
TEST(QuantizedModel, RecordedStepsSurviveLongerOnes) {
  std::string device = TestDevice();
  if (device == "cpu") {
    RegisterEmulatedDevice();
    device = "cuda_emulated";
  }
  TempFolder folder;
  WriteNativeModel(folder.path(), TinyConfig(), DType::kBF16);
  const RunnerOptions options{
      .compute = DType::kBF16, .quantization = Quantization::kInt8Channel, .device = device};
  auto runner = ModelRunner::Load(folder.path(), options);
  ASSERT_TRUE(runner.ok()) << runner.status();
  std::vector<int32_t> tokens;
  for (int i = 0; i < 12; ++i) tokens.push_back((i * 37 + 11) % (*runner)->vocab());
  const std::vector<int32_t> first(tokens.begin(), tokens.begin() + 6);
  const std::vector<int32_t> rest(tokens.begin() + 6, tokens.end());
  std::vector<float> logits = (*runner)->Run(first, 1);
  const uint64_t replayed = (*runner)->backend().replayed_steps();
  EXPECT_GT(replayed, 0u);
  const std::vector<float> whole = (*runner)->Run(tokens, 12, 0, {}, 1);
  const std::vector<float> last = (*runner)->Run(rest, 1, 6);
  EXPECT_GT((*runner)->backend().replayed_steps(), replayed);
  logits.insert(logits.end(), last.begin(), last.end());
  ExpectSameBits(logits, whole);
}

}  // namespace
}  // namespace moeserve::testing
