// Models whose files have matrices of FP8, computed from these numbers and their scales.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

// The numbers and scales of stored matrices are those that Get() multiplies.
TEST(Fp8Model, StoredNumbersAreThoseOfTheWidenedMatrix) {
  // With rectangles of 128 x 128, and of 12 x 12, whose rows need more scales than one for 128
  // columns.
  for (const bool kept : {true, false}) {
    const std::string name = kept ? "llama-fp8-shards" : "qwen3-moe-fp8";
    const auto checkpoint =
        LoadCheckpoint(SourcePath("tests/golden/families/" + name), {.require_tokenizer = false});
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    int matrices = 0;
    for (const TensorRequirement& t : RequiredTensors(checkpoint->spec)) {
      const auto fp8 = checkpoint->weights->GetFp8(t.name, t.shape);
      ASSERT_TRUE(fp8.ok()) << fp8.status();
      if (!fp8->has_value()) continue;
      ++matrices;
      const Fp8Matrix& m = **fp8;
      ASSERT_EQ(m.rows, t.shape[0]);
      ASSERT_EQ(m.columns, t.shape[1]);
      ASSERT_EQ(static_cast<int64_t>(m.scales.size()), m.rows * m.groups());
      const auto widened = checkpoint->weights->Get(t.name, t.shape);
      ASSERT_TRUE(widened.ok()) << widened.status();
      for (int64_t i = 0; i < m.rows * m.columns; ++i) {
        const int64_t r = i / m.columns, c = i % m.columns;
        const float value = Fp8AsF32(m.values[r * m.row_stride + c]);
        ASSERT_EQ(ElementAsF32(*widened, i), value * m.scales[r * m.groups() + c / 128])
            << t.name << ' ' << r << ' ' << c;
      }
    }
    // Two layers have seven matrices each.
    EXPECT_EQ(matrices, kept ? 14 : 0);
  }
}

// Matrices of FP8 differ from those rounded to bf16 by this rounding alone; a row's results do not
// depend on the other rows of its step.
TEST(Fp8Model, KeptMatricesAreNearThoseRoundedToBf16) {
  struct Kept {
    std::string family;
    bool rounds;  // the files have smaller rectangles of scales than can be kept
    // Blocks of 64 outputs of what is kept: in the layers' attention, and in their experts or
    // feed-forward layer.
    int attention, experts;
  };
  for (const auto& [family, rounds, attention, experts] :
       {// q, k and v take two blocks, o one; one of two layers has six experts.
        Kept{"qwen3-moe-fp8", true, 2 * (2 + 1), 2 * 6},
        // Queries (1 + 2), latent vector, o, and two matrices for each of four heads.
        Kept{"deepseek-v3-biases-fp8", true, 3 * (3 + 1 + 1 + 2 * 4), 3 * 2 * 8},
        Kept{"llama-fp8-shards", false, 2 * (1 + 1), 2 * (2 + 1)}}) {
    SCOPED_TRACE(family);
    const auto folder = SourcePath("tests/golden/families/" + family);
    const auto answers = ReadFamilyAnswers(folder);
    ASSERT_TRUE(answers.ok()) << answers.status();
    const auto load = [&](bool keep) {
      return ModelRunner::Load(folder,
                               {.compute = DType::kBF16, .keep_fp8 = keep, .round_to_fp8 = rounds});
    };
    const auto kept = load(true), widened = load(false);
    ASSERT_TRUE(kept.ok()) << kept.status();
    ASSERT_TRUE(widened.ok()) << widened.status();
    const bool stores = (*kept)->backend().stores_fp8();
    // No matrix has more than 64 inputs, which take a pair of blocks as FP8, one block as bf16.
    const int64_t more = stores ? (attention + experts) * (2 * 4224 - 8192) : 0;
    EXPECT_EQ((*kept)->backend().weight_bytes(), (*widened)->backend().weight_bytes() + more);
    float largest = 0.0f;
    for (int p = 0; p < answers->prompts; ++p) {
      const std::vector<float> whole = (*kept)->Run(answers->Prompt(p), answers->length);
      const std::vector<float> single = (*kept)->Run(answers->Prompt(p), 1);
      const std::vector<float> other = (*widened)->Run(answers->Prompt(p), answers->length);
      ASSERT_EQ(whole.size(), single.size());
      ASSERT_EQ(whole.size(), other.size());
      ASSERT_EQ(std::memcmp(whole.data(), single.data(), whole.size() * sizeof(float)), 0);
      for (size_t i = 0; i < whole.size(); ++i) {
        largest = std::max(largest, std::abs(whole[i] - other[i]));
      }
    }
    // A backend without banks of FP8 computes the same.
    EXPECT_EQ(largest > 0.0f, stores);
    EXPECT_LT(largest, 0.1f);
  }
}

}  // namespace
}  // namespace moeserve::testing
