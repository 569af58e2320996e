// Results over HTTP equal those of the PyTorch references.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "absl/strings/escaping.h"
#include "engine/validate_request.h"
#include "tests/server/encode_server.h"
#include "tests/support/encoder_golden.h"

namespace moeserve::server::testing {
namespace {

using moeserve::testing::EncodedText;
using moeserve::testing::EncoderGolden;
using moeserve::testing::GoldenModel;

// The results of PyTorch are themselves so far from exact ones.
constexpr double kMostDifference = 1e-5;

class EncodeGoldens : public EncodeServer, public ::testing::WithParamInterface<GoldenModel> {
 protected:
  static std::vector<float> Floats(const Json& list) {
    std::vector<float> out;
    for (const Json& item : list) {
      if (item.is_array()) {
        for (const Json& value : item) out.push_back(value.get<float>());
      } else {
        out.push_back(item.get<float>());
      }
    }
    return out;
  }

  // Returns the numbers of an answer to a request about one text that the golden file has, too.
  std::vector<float> Found(Json request, const std::string& task) {
    if (task == "fill_mask") {
      request["logprobs"] = true;
      return Floats(Answer("/v1/fill-mask", request)["logprobs"]);
    }
    if (task == "embed") {
      return Floats(Answer("/v1/embeddings", request)["data"][0]["embedding"]);
    }
    request["task"] = task;
    request["use_activation"] = false;
    return Floats(Answer("/pooling", request)["data"][0]["data"]);
  }
};

TEST_P(EncodeGoldens, ReferenceInF32) {
  const auto golden = moeserve::testing::ReadEncoderGolden(GetParam().golden);
  ASSERT_TRUE(golden.ok()) << golden.status();
  Start(GetParam().name, {.tokenizer = false});
  double worst = 0.0;
  int compared = 0;
  for (int i = 0; i < golden->texts(); ++i) {
    Json request = {{"input", golden->tokens[static_cast<size_t>(i)]}};
    if (spec().token_types > 0) request["token_type_ids"] = golden->types[static_cast<size_t>(i)];
    const EncodedText& expected = golden->f32[static_cast<size_t>(i)];
    for (const std::string_view task : TaskNames(spec())) {
      const std::vector<float>& values = task == "fill_mask"        ? expected.target_logprobs
                                         : task == "token_classify" ? expected.logits
                                                                    : expected.text;
      if (task == "generate" || task == "token_embed" || task == "score") continue;
      const std::vector<float> found = Found(request, std::string(task));
      ASSERT_EQ(found.size(), values.size()) << task;
      for (size_t k = 0; k < found.size(); ++k) {
        const double error = std::abs(double{found[k]} - values[k]);
        if (!(error <= worst)) worst = error;
      }
      ++compared;
    }
  }
  std::printf("%s over HTTP: worst difference %.2e\n", GetParam().name.c_str(), worst);
  EXPECT_GE(compared, golden->texts());
  EXPECT_LE(worst, kMostDifference);
}

INSTANTIATE_TEST_SUITE_P(Models, EncodeGoldens,
                         ::testing::ValuesIn(moeserve::testing::EncoderGoldenModels()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moeserve::server::testing
