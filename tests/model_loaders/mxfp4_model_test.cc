// Models whose files have weights of MXFP4: a backend that stores them so computes the same bits as
// with weights widened to bf16.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

// Compares the logits of two models for the prompts, in steps of one token and of a whole prompt.
void ExpectSameBits(ModelRunner& a, ModelRunner& b, const FamilyAnswers& answers) {
  for (int p = 0; p < answers.prompts; ++p) {
    for (const int chunk : {1, answers.length}) {
      const std::vector<float> actual = a.Run(answers.Prompt(p), chunk);
      const std::vector<float> expected = b.Run(answers.Prompt(p), chunk);
      ASSERT_EQ(actual.size(), expected.size());
      ASSERT_EQ(std::memcmp(actual.data(), expected.data(), expected.size() * sizeof(float)), 0)
          << "prompt " << p << ", " << chunk << " tokens in a step";
    }
  }
}

TEST(Mxfp4Model, HasTheBitsOfBf16Weights) {
  const std::string family = "tests/golden/families/gpt-oss-mxfp4";
  const auto answers = ReadFamilyAnswers(SourcePath(family));
  ASSERT_TRUE(answers.ok()) << answers.status();
  for (const std::string& path :
       {family, std::string("tests/golden/gguf/models/gpt-oss-mxfp4-bf16.gguf")}) {
    SCOPED_TRACE(path);
    const auto kept = ModelRunner::Load(SourcePath(path), {.compute = DType::kBF16});
    const auto widened =
        ModelRunner::Load(SourcePath(path), {.compute = DType::kBF16, .mxfp4 = false});
    ASSERT_TRUE(kept.ok()) << kept.status();
    ASSERT_TRUE(widened.ok()) << widened.status();
    // In each of two layers, six experts have three matrices of 96 x 32, which take blocks of 64 x
    // 64; the gate and the up half are one matrix.
    const int64_t blocks = 2 * 6 * (2 + 2);
    const int64_t saved = (*kept)->backend().stores_mxfp4() ? blocks * (8192 - 2176) : 0;
    EXPECT_EQ((*kept)->backend().weight_bytes() + saved, (*widened)->backend().weight_bytes());
    ExpectSameBits(**kept, **widened, *answers);
    if (HasFatalFailure()) return;
  }
}

TEST(Mxfp4Model, OtherNumbersAreStoredAsBf16) {
  const auto folder = SourcePath("tests/golden/families/gpt-oss");
  const auto answers = ReadFamilyAnswers(folder);
  ASSERT_TRUE(answers.ok()) << answers.status();
  const auto wrong = ModelRunner::Load(folder, {.compute = DType::kBF16, .mxfp4 = true});
  const auto right = ModelRunner::Load(folder, {.compute = DType::kBF16});
  ASSERT_TRUE(wrong.ok()) << wrong.status();
  ASSERT_TRUE(right.ok()) << right.status();
  ExpectSameBits(**wrong, **right, *answers);
}

}  // namespace
}  // namespace moeserve::testing
