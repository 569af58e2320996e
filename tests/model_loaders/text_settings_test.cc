// The files beside a model that say how texts are prepared and labels are combined.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/sentence_transformers.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

class TextSettingsTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_.path() / name) << text;
  }
  Result<TextSettings> Read() {
    ModelSpec spec;
    std::unique_ptr<WeightSource> weights;
    return ApplySentenceTransformers(folder_.path(), spec, weights);
  }
  void ExpectFault(const std::string& part) {
    const Result<TextSettings> settings = Read();
    ASSERT_FALSE(settings.ok());
    EXPECT_NE(std::string(settings.status().message()).find(part), std::string::npos)
        << settings.status();
  }

  TempFolder folder_;
};

TEST_F(TextSettingsTest, EmptyWithoutFiles) {
  const Result<TextSettings> settings = Read();
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_TRUE(settings->dimensions.empty());
  EXPECT_EQ(settings->transitions.background_stay, 0.0);
}

TEST_F(TextSettingsTest, SizesOfVectors) {
  Write("config.json", R"({"matryoshka_dimensions": [768, 256], "other": 1})");
  EXPECT_EQ(Read()->dimensions, (std::vector<int>{768, 256}));
  for (const char* wrong : {R"({"matryoshka_dimensions": 5})", R"({"matryoshka_dimensions": [0]})",
                            R"({"matryoshka_dimensions": ["a"]})"}) {
    Write("config.json", wrong);
    ExpectFault("config.json: matryoshka_dimensions: expected a list");
  }
}

TEST_F(TextSettingsTest, BiasesOfTransitions) {
  Write("viterbi_calibration.json", R"({"operating_points": {"default": {"biases": {
    "transition_bias_background_stay": 0.5, "transition_bias_background_to_start": -1,
    "transition_bias_inside_to_end": 2.25}}, "strict": {}}})");
  const Result<TextSettings> settings = Read();
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->transitions.background_stay, 0.5);
  EXPECT_EQ(settings->transitions.background_to_start, -1.0);
  EXPECT_EQ(settings->transitions.inside_to_end, 2.25);
  EXPECT_EQ(settings->transitions.end_to_start, 0.0);
  Write("viterbi_calibration.json", R"({"biases": {}})");
  ExpectFault("viterbi_calibration.json: operating_points.default.biases");
  Write("viterbi_calibration.json",
        R"({"operating_points": {"default": {"biases": {"unheard_of": 1}}}})");
  ExpectFault("unheard_of");
  Write("viterbi_calibration.json",
        R"({"operating_points": {"default": {"biases": {"end_to_start": "a"}}}})");
  ExpectFault("end_to_start: expected a number");
}

// Keys of a head are listed as not needed only by models without it.
TEST(ModernBertKeys, AreIgnoredWhereNothingUsesThem) {
  const auto notes = [](const std::string& name) {
    const auto checkpoint =
        LoadCheckpoint(SourcePath("tests/golden/encoders/" + name), {.require_tokenizer = false});
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    std::string all;
    for (const std::string& note : checkpoint->notes) all += note + '\n';
    return all;
  };
  const std::string head = notes("modernbert-masked-lm");
  EXPECT_NE(head.find("sparse_prediction"), std::string::npos) << head;
  for (const char* key : {"classifier_activation", "classifier_bias", "decoder_bias"}) {
    EXPECT_EQ(head.find(key), std::string::npos) << head;
    EXPECT_NE(notes("modernbert-vectors").find(key), std::string::npos);
  }
}

}  // namespace
}  // namespace moeserve::testing
