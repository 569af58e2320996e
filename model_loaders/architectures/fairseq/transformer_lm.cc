// fairseq's own dense models: the decoder transformer_lm and its variants (transformer_lm_gpt and
// so on), and the encoder-decoder transformer.
#include <string>
#include <utility>
#include <vector>

#include "model_loaders/architectures/fairseq/reader.h"

namespace moeserve::fairseq {
namespace {

using Json = nlohmann::json;

constexpr TensorRule kTransformerLmTensors[] = {
    {"blocks.*.feed_forward.up.weight", "decoder.layers.*.fc1.weight"},
    {"blocks.*.feed_forward.up.bias", "decoder.layers.*.fc1.bias"},
    {"blocks.*.feed_forward.down.weight", "decoder.layers.*.fc2.weight"},
    {"blocks.*.feed_forward.down.bias", "decoder.layers.*.fc2.bias"},
};

constexpr KeyRule kTransformerLmKeys[] = {
    {"attention.num_heads", "decoder_attention_heads"},
    {"attention.num_kv_heads", "decoder_attention_heads"},
    {"attention.head_dim", "(decoder_embed_dim / decoder_attention_heads)"},
};

// Options that only other options, which are refused, make effective.
constexpr std::string_view kTransformerLmIgnoredOptions[] = {
    "char_embedder_highway_layers",
};

class TransformerReader {
 public:
  explicit TransformerReader(const FairseqSource& source) : r_(source), keys_(r_.keys()) {}

  ConfigResult Read() {
    r_.Ignore(kTransformerLmIgnoredOptions);
    RefuseOptions();
    r_.ReadSizes();
    for (const std::string_view stack : r_.stacks()) {
      r_.Use(stack);
      ReadNorms();
      r_.spec().position = r_.AddedPositions();
      const AttentionSpec attention = ReadAttention();
      std::vector<BlockSpec> blocks = {{.mixer = attention}};
      if (r_.pair() && !r_.in_encoder()) blocks.push_back({.mixer = CrossAttentionSpec{attention}});
      blocks.push_back({.mixer = ReadFeedForward()});
      r_.SetLayers(blocks);
    }
    r_.ReadHead(r_.Activation());
    return r_.Finish({kTransformerLmTensors, kTransformerLmKeys, {}});
  }

 private:
  void RefuseOptions() {
    r_.Require("adaptive_input", false, "embeddings of several widths are not supported");
    r_.Require("adaptive_softmax_cutoff", nullptr, "an adaptive softmax is not supported");
    r_.Require("character_embeddings", false, "embeddings of characters are not supported");
    r_.Require("base_layers", 0, "BASE layers are not supported");
    if (r_.pair()) {
      r_.RequireCrossAttention();
    } else {
      r_.Require("cross_self_attention", false, "there is no encoder");
    }
    for (const char* key : {"decoder_xformers_att_config", "encoder_xformers_att_config"}) {
      r_.Require(key, nullptr, "attention of xFormers is not supported");
    }
    for (const char* key : {"scale_attn", "scale_fc", "scale_heads", "scale_resids"}) {
      r_.Require(key, false, "scaled branches are not supported");
    }
    // Options of torchscale, whose layers have other tensors.
    for (const char* key : {"deepnorm", "subln", "xpos_rel_pos", "rotary_embed", "rms_norm"}) {
      r_.Require(key, false, "layers of fairseq's transformer_lm do not have it");
    }
    for (const char* key : {"moe_freq", "moe_expert_count", "rel_pos_buckets", "max_rel_pos"}) {
      r_.Require(key, 0, "layers of fairseq's transformer_lm do not have it");
    }
  }

  // A pre-norm model has a last norm unless an option switches it off.
  void ReadNorms() {
    ModelSpec& spec = r_.spec();
    const std::string before_key = r_.Key("normalize_before");
    const std::string last = r_.Tensor("layer_norm.weight");
    const bool before = r_.RequiredBool(before_key);
    const bool without = !r_.in_encoder() && keys_.Bool("no_decoder_final_norm", false);
    const bool final_norm = r_.Has(last);
    spec.norm.kind = NormKind::kLayer;
    spec.norm.placement = before ? NormPlacement::kPre : NormPlacement::kPost;
    if (before && !final_norm) spec.norm.final_norm = false;
    if (final_norm == (before && !without)) return;
    if (before && without) {
      r_.Fault("no_decoder_final_norm", "false (the files have decoder.layer_norm.weight)", "true");
      return;
    }
    r_.Fault(
        before_key,
        Concat(final_norm ? "true (the files have " : "false (the files do not have ", last, ')'),
        before ? "true" : "false");
  }

  AttentionSpec ReadAttention() {
    AttentionSpec attention = r_.Heads();
    attention.bias = attention.out_bias = true;
    return attention;
  }

  FeedForwardSpec ReadFeedForward() {
    FeedForwardSpec block;
    block.expert.form = ExpertForm::kPlain;
    block.expert.bias = true;
    block.expert.activation = r_.Activation();
    block.width = keys_.Int(r_.Key("ffn_embed_dim"));
    return block;
  }

  Reader r_;
  ObjectReader& keys_;
};

}  // namespace

ConfigResult ReadTransformerLm(const FairseqSource& source) {
  return TransformerReader(source).Read();
}

}  // namespace moeserve::fairseq
