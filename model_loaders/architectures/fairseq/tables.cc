#include "model_loaders/architectures/fairseq/tables.h"

#include <deque>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"

namespace moeserve::fairseq {
namespace {

// Rows of learned positions before the first: fairseq's positions begin after the id of padding, 1.
constexpr int kRowsBeforeFirst = 2;

// What the files of all families have in common; a family's own rules come before these.
constexpr TensorRule kStackTensors[] = {
    {"embed.weight", "decoder.embed_tokens.weight"},
    {"embed_position.weight", "decoder.embed_positions.weight"},
    {"embed_norm.weight", "decoder.layernorm_embedding.weight"},
    {"embed_norm.bias", "decoder.layernorm_embedding.bias"},
    {"norm.weight", "decoder.layer_norm.weight"},
    {"norm.bias", "decoder.layer_norm.bias"},
    {"head.weight", "decoder.output_projection.weight"},
    // The head of masked tokens.
    {"head.bias", "decoder.output_projection.bias"},
    {"head.layer.weight", "decoder.output_projection.dense.weight"},
    {"head.layer.bias", "decoder.output_projection.dense.bias"},
    {"head.layer_norm.weight", "decoder.output_projection.layer_norm.weight"},
    {"head.layer_norm.bias", "decoder.output_projection.layer_norm.bias"},
    {"blocks.*.attention.norm.weight", "decoder.layers.*.self_attn_layer_norm.weight"},
    {"blocks.*.attention.norm.bias", "decoder.layers.*.self_attn_layer_norm.bias"},
    {"blocks.*.attention.q.weight", "decoder.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.q.bias", "decoder.layers.*.self_attn.q_proj.bias"},
    {"blocks.*.attention.k.weight", "decoder.layers.*.self_attn.k_proj.weight"},
    {"blocks.*.attention.k.bias", "decoder.layers.*.self_attn.k_proj.bias"},
    {"blocks.*.attention.v.weight", "decoder.layers.*.self_attn.v_proj.weight"},
    {"blocks.*.attention.v.bias", "decoder.layers.*.self_attn.v_proj.bias"},
    {"blocks.*.attention.o.weight", "decoder.layers.*.self_attn.out_proj.weight"},
    {"blocks.*.attention.out_bias", "decoder.layers.*.self_attn.out_proj.bias"},
    // The norm before the feed-forward (or after it, in post-norm models), not the last norm.
    {"blocks.*.feed_forward.norm.weight", "decoder.layers.*.final_layer_norm.weight"},
    {"blocks.*.feed_forward.norm.bias", "decoder.layers.*.final_layer_norm.bias"},
};

constexpr KeyRule kStackKeys[] = {
    {"vocab_size", "rows of decoder.embed_tokens.weight"},
    {"hidden_size", "decoder_embed_dim"},
    {"num_hidden_layers", "decoder_layers"},
    {"max_position_embeddings", "max_target_positions"},
    {"tie_word_embeddings", "share_decoder_input_output_embed"},
    {"embedding_norm", "layernorm_embedding"},
    {"feed_forward.width", "decoder_ffn_embed_dim"},
    {"cross_attention.num_heads", "decoder_attention_heads"},
};

constexpr std::string_view kStackIgnoredTensors[] = {
    "decoder.version",
    "decoder.embed_positions._float_tensor",  // marks sinusoidal positions
    "decoder.embed_positions.weights",        // their values, in old files
};

// The tables of a model, with their texts.
struct OwnedTables {
  std::deque<std::string> texts;  // keeps the addresses of its elements
  std::vector<TensorRule> tensors;
  std::vector<KeyRule> keys;
  std::vector<std::string_view> ignored;

  std::string_view Keep(std::string text) { return texts.emplace_back(std::move(text)); }
  void Add(const TensorRule& rule, std::string model, std::string file) {
    TensorRule own = rule;
    own.model = Keep(std::move(model));
    own.file = Keep(std::move(file));
    tensors.push_back(own);
  }
};

// Returns `text` with `to` in place of every `from`.
std::string Replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t found = text.find(from, at);
    out.append(text.substr(at, found - at));
    if (found == std::string_view::npos) break;
    out.append(to);
    at = found + from.size();
  }
  return out;
}

void AddTensor(const TensorRule& rule, const StackSet& set, std::string_view stack,
               OwnedTables& out) {
  const bool of_head = rule.model.starts_with("head.");
  if (of_head && set.pair() && stack == kEncoderName) return;
  const bool common =
      of_head || !set.pair() || (rule.model == "embed.weight" && set.shared_embeddings);
  const std::string prefix = common ? "" : Concat(stack, '.');
  out.Add(rule, prefix + std::string(rule.model), OfStack(rule.file, stack));
  constexpr std::string_view kOwn = "blocks.*.attention.";
  if (!set.pair() || stack == kEncoderName || !rule.model.starts_with(kOwn)) return;
  out.Add(rule, Concat("decoder.blocks.*.cross_attention.", rule.model.substr(kOwn.size())),
          Replaced(rule.file, ".self_attn", ".encoder_attn"));
}

void AddClassifier(const std::string& name, OwnedTables& out) {
  for (const auto& [model, file] : {std::pair("head.layer", "dense"), {"classifier", "out_proj"}}) {
    for (const char* part : {".weight", ".bias"}) {
      out.Add({}, Concat(model, part), Concat("classification_heads.", name, '.', file, part));
    }
  }
}

OwnedTables Build(const Tables& tables, const StackSet& set) {
  OwnedTables out;
  if (set.head_is_embedding) out.Add({}, "head.weight", "decoder.embed_tokens.weight");
  if (!set.classifier.empty()) AddClassifier(set.classifier, out);
  for (const auto& [exists, stack] :
       {std::pair(set.decoder, kDecoderName), {set.encoder, kEncoderName}}) {
    if (!exists) continue;
    for (const auto& rules : {tables.tensors, std::span<const TensorRule>(kStackTensors)}) {
      for (const TensorRule& rule : rules) AddTensor(rule, set, stack, out);
    }
    for (const auto& rules : {tables.keys, std::span<const KeyRule>(kStackKeys)}) {
      for (const KeyRule& rule : rules) {
        const bool prefixed = set.pair() && stack == kEncoderName;
        out.keys.push_back({out.Keep(Concat(prefixed ? "encoder." : "", rule.model)),
                            out.Keep(OfStack(rule.file, stack))});
      }
    }
    for (const auto& names :
         {tables.ignored, std::span<const std::string_view>(kStackIgnoredTensors)}) {
      for (const std::string_view name : names) {
        out.ignored.push_back(out.Keep(OfStack(name, stack)));
        if (!set.pair() || stack == kEncoderName) continue;
        out.ignored.push_back(out.Keep(Replaced(name, ".self_attn", ".encoder_attn")));
      }
    }
    if (set.ignores_head) {
      out.ignored.push_back(out.Keep(Concat(stack, ".output_projection.weight")));
    }
    // Both stacks have the same table under two names.
    if (set.shared_embeddings) {
      out.ignored.push_back(out.Keep(Concat(stack, ".embed_tokens.weight")));
    }
  }
  return out;
}

class FairseqConfig final : private OwnedTables, public NameTableConfig {
 public:
  FairseqConfig(OwnedTables tables, const StackSet& set, const StoredNames& stored)
      : OwnedTables(std::move(tables)),
        NameTableConfig(OwnedTables::tensors, OwnedTables::keys, stored) {
    NameTableConfig::ignored = OwnedTables::ignored;
    if (set.ignores_classifiers) ignored_prefixes.push_back("classification_heads.");
    if (set.ignores_token_head) ignored_prefixes.push_back("encoder.output_projection.");
  }

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override {
    std::optional<TensorPlace> place = NameTableConfig::Place(tensor);
    if (!place.has_value()) return place;
    if (place->name.ends_with(".embed_positions.weight")) {
      place->shape = {tensor.shape[0] + kRowsBeforeFirst, tensor.shape[1]};
      place->first_row = kRowsBeforeFirst;
      place->follows_from =
          Concat("[max_position_embeddings + ", kRowsBeforeFirst, ", hidden_size]");
    }
    // The keys of a tensor's sizes have no prefix that tells the stacks apart.
    if (spec.encoder != nullptr && tensor.name.starts_with("encoder.")) {
      const std::string keys =
          place->follows_from.empty() ? tensor.follows_from : place->follows_from;
      place->follows_from = OfStack(AsInFile(keys), kEncoderName);
    }
    return place;
  }

  std::optional<std::string> LeftOverReason(std::string_view name) const override {
    // Limits of quantizers, which 32 bits do not use.
    if (name.ends_with(".weight_clip_val") || name.ends_with(".input_clip_val")) {
      return std::nullopt;
    }
    return NameTableConfig::LeftOverReason(name);
  }

  // Reader has looked at the data of the head.
  std::unique_ptr<const CheckpointConfig> WithOwnHead() const override { return nullptr; }
};

}  // namespace

std::string OfStack(std::string_view text, std::string_view stack) {
  if (stack == kDecoderName) return std::string(text);
  return Replaced(Replaced(text, kDecoderName, kEncoderName), "max_target_positions",
                  "max_source_positions");
}

std::unique_ptr<NameTableConfig> MakeFairseqConfig(const Tables& tables, const StackSet& stacks,
                                                   const StoredNames& stored) {
  return std::make_unique<FairseqConfig>(Build(tables, stacks), stacks, stored);
}

}  // namespace moeserve::fairseq
