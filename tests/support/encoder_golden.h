// Reads golden files of encoders, which tests/reference/make_encoder_goldens.py writes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/support/golden.h"

namespace moeserve::testing {

// What the reference computes of one text of T tokens; empty where the model does not have it.
struct EncodedText {
  std::vector<float> target_logprobs;  // [T]
  std::vector<float> top_logprobs;     // [T, top]
  std::vector<float> logits;           // [T, labels]
  std::vector<float> text;             // [width]
};

struct EncoderGolden {
  int top = 0;
  std::vector<std::vector<int32_t>> tokens;  // of each text
  std::vector<std::vector<uint8_t>> types;
  std::vector<std::vector<int32_t>> top_ids;  // [T, top] of each text
  std::vector<EncodedText> f32;
  std::vector<EncodedText> bf16;  // with the routes of the f32 run
  // Routes of all texts, by layer and block.
  std::map<std::pair<int, BlockKind>, GivenRoutes> routes;

  int texts() const { return static_cast<int>(tokens.size()); }
};

Result<EncoderGolden> ReadEncoderGolden(const std::filesystem::path& file);

// Returns the models in tests/golden/encoders, sorted by name.
std::vector<GoldenModel> EncoderGoldenModels();

}  // namespace moeserve::testing
