#include "engine/run/encode_step.h"

#include <algorithm>

#include "engine/model/output_head.h"
#include "engine/sample/sampler.h"

namespace moeserve {
namespace {

// Appends the log-probabilities of one of EncodeParams::rows.
void CollectTokens(const EncodeParams& encode, std::span<const float> logits,
                   EncodeResult& encoded) {
  const size_t index = encoded.rows.size();
  const TokenId own = encode.own.empty() ? 0 : encode.own[index];
  encoded.rows.push_back(Logprob(logits, own, encode.top));
  const double log_sum = encode.targets.empty() ? 0.0 : LogSumExp(logits);
  for (const TokenId target : encode.targets) {
    encoded.targets.push_back(static_cast<float>(logits[target] - log_sum));
  }
}

}  // namespace

void CollectEncoded(Sequence& s, const RowLogits& logits, std::span<const float> texts,
                    const ModelSpec& spec) {
  const EncodeParams& encode = *s.request.encode;
  EncodeResult& encoded = s.encoded;
  const bool of_rows =
      encode.output == EncodeOutput::kLogits || encode.output == EncodeOutput::kTokens;
  encoded.width = of_rows ? RowOutputs(spec) : TextOutputs(spec);
  if (encode.output != EncodeOutput::kTokens) {
    encoded.values.insert(encoded.values.end(), texts.begin(), texts.end());
    encoded.values.insert(encoded.values.end(), logits.values.begin(), logits.values.end());
    return;
  }
  const auto width = static_cast<size_t>(encoded.width);
  for (size_t row = 0; row < logits.positions.size(); ++row) {
    CollectTokens(encode, logits.values.subspan(row * width, width), encoded);
  }
}

}  // namespace moeserve
