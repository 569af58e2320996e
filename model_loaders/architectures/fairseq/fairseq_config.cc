#include "model_loaders/architectures/fairseq/fairseq_config.h"

#include <string>

#include "base/error_text.h"
#include "model_loaders/architectures/fairseq/reader.h"

namespace moeserve {
namespace {

// Returns the name of the first tensor that `matches`; "" if there is none.
template <typename Matches>
std::string_view FirstName(const WeightFiles& files, const Matches& matches) {
  for (const WeightFiles::Location& tensor : files.tensors()) {
    if (matches(std::string_view(tensor.entry->name))) return tensor.entry->name;
  }
  return "";
}

absl::Status Refused(const FairseqSource& source, std::string_view tensor, std::string_view what) {
  return absl::InvalidArgumentError(Concat(Printable(source.file), ": expected the decoder of a ",
                                           "language model, found ", what, " (tensor ",
                                           Quoted(tensor), ')'));
}

}  // namespace

ConfigResult ReadFairseqConfig(const FairseqSource& source) {
  const auto first = [&](const auto& matches) { return FirstName(source.files, matches); };
  using Name = std::string_view;
  const Name encoder =
      first([](Name n) { return n.starts_with("encoder.") || n.find(".encoder_attn.") != n.npos; });
  if (!encoder.empty()) {
    return Refused(source, encoder,
                   "an encoder-decoder, whose decoder attends to the output of an encoder, which "
                   "this server cannot compute");
  }
  const Name retention = first([](Name n) { return n.find(".retention.") != n.npos; });
  if (!retention.empty()) {
    return Refused(source, retention, "layers of RetNet, which this server cannot compute");
  }
  const Name moa = first([](Name n) { return n.ends_with(".self_attn.q_proj.experts.w"); });
  if (!moa.empty()) return fairseq::ReadMoa(source);
  // torchscale's layers have "ffn." or "moe_layer." in front of the names of these matrices.
  const Name plain = first([](Name n) { return n == "decoder.layers.0.fc1.weight"; });
  return plain.empty() ? fairseq::ReadTorchscale(source) : fairseq::ReadTransformerLm(source);
}

}  // namespace moeserve
