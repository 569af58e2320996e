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

absl::Status Refused(const FairseqSource& source, std::string_view expected,
                     std::string_view tensor, std::string_view what) {
  return absl::InvalidArgumentError(Concat(Printable(source.file), ": expected ", expected,
                                           ", found ", what, " (tensor ", Quoted(tensor), ')'));
}

}  // namespace

ConfigResult ReadFairseqConfig(const FairseqSource& source) {
  const auto first = [&](const auto& matches) { return FirstName(source.files, matches); };
  using Name = std::string_view;
  const Name encoder = first([](Name n) { return n.starts_with("encoder."); });
  const Name cross = first([](Name n) { return n.find(".encoder_attn.") != n.npos; });
  if (!cross.empty() && encoder.empty()) {
    return Refused(source, "an encoder beside a decoder that attends to its output", cross,
                   "a decoder alone");
  }
  const Name retention = first([](Name n) { return n.find(".retention.") != n.npos; });
  if (!retention.empty()) {
    return Refused(source, "layers with attention", retention,
                   "layers of RetNet, which this server cannot compute");
  }
  const Name roberta = first([](Name n) { return n.starts_with("encoder.sentence_encoder."); });
  if (!roberta.empty()) {
    return Refused(source, "an encoder of torchscale", roberta,
                   "fairseq's RoBERTa, which Hugging Face's library converts to files that this "
                   "server reads");
  }
  const Name moa = first([](Name n) { return n.ends_with(".self_attn.q_proj.experts.w"); });
  if (!moa.empty()) return fairseq::ReadMoa(source);
  // torchscale's layers have "ffn." or "moe_layer." in front of the names of these matrices.
  const Name plain = first([](Name n) {
    return n == "decoder.layers.0.fc1.weight" || n == "encoder.layers.0.fc1.weight";
  });
  return plain.empty() ? fairseq::ReadTorchscale(source) : fairseq::ReadTransformerLm(source);
}

}  // namespace moeserve
