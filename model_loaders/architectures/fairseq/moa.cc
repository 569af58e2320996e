// Models with the layers of MoA ("Mixture of Attention Heads"): attention of routed heads, also to
// a source, and dense or routed feed-forward.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "model_loaders/architectures/fairseq/reader.h"

namespace moeserve::fairseq {
namespace {

using Json = nlohmann::json;

// Matrices of experts are stacks whose slices are multiplied from the right: [E, in, out].
constexpr TensorRule kFairseqMoaTensors[] = {
    Transposed({"blocks.*.attention.router.weight", "decoder.layers.*.self_attn.q_proj.w_gate"}),
    Transposed(
        {"blocks.*.attention.experts.*.q.weight", "decoder.layers.*.self_attn.q_proj.experts.w"}),
    Transposed({"blocks.*.attention.experts.*.o.weight",
                "decoder.layers.*.self_attn.q_proj.output_experts.w"}),
    {"blocks.*.feed_forward.up.weight", "decoder.layers.*.fc1.weight"},
    {"blocks.*.feed_forward.up.bias", "decoder.layers.*.fc1.bias"},
    {"blocks.*.feed_forward.down.weight", "decoder.layers.*.fc2.weight"},
    {"blocks.*.feed_forward.down.bias", "decoder.layers.*.fc2.bias"},
    Transposed({"blocks.*.feed_forward.router.weight", "decoder.layers.*.ffd.w_gate"}),
    Transposed({"blocks.*.feed_forward.experts.*.up.weight", "decoder.layers.*.ffd.experts.w"}),
    Transposed(
        {"blocks.*.feed_forward.experts.*.down.weight", "decoder.layers.*.ffd.output_experts.w"}),
};

constexpr KeyRule kFairseqMoaKeys[] = {
    {"attention.num_kv_heads", "1"},
    {"cross_attention.num_kv_heads", "1"},
    {"cross_attention.head_dim", "head_dim"},
    {"cross_attention.routing.num_experts", "num_expert"},
    {"cross_attention.routing.select.k", "decoder_attention_heads"},
    {"attention.head_dim", "head_dim"},
    {"attention.routing.num_experts", "num_expert"},
    {"attention.routing.select.k", "decoder_attention_heads"},
    {"feed_forward.routing.num_experts", "num_expert"},
    {"feed_forward.routing.widths", "decoder_embed_dim"},
    {"num_experts", "num_expert"},
    {"routing.num_experts", "num_expert"},
};

constexpr std::string_view kFairseqMoaIgnoredTensors[] = {
    "decoder.layers.*.self_attn.q_proj.w_noise",
    "decoder.layers.*.ffd.w_noise",
    "decoder.layers.*.ffd.*.weight",  // fc1 and fc2 under their second names
    "decoder.layers.*.ffd.*.bias",
};

// Options of training and options that nothing reads.
constexpr std::string_view kFairseqMoaIgnoredOptions[] = {
    "decoder_num_expert",
    "encoder_num_expert",
    "gating",
};

// Experts that a routed feed-forward selects, a constant of the original code.
constexpr int kFeedForwardExperts = 4;

class MoaReader {
 public:
  explicit MoaReader(const FairseqSource& source) : r_(source), keys_(r_.keys()) {}

  ConfigResult Read() {
    r_.Ignore(kFairseqMoaIgnoredOptions);
    r_.Require("adaptive_input", false, "embeddings of several widths are not supported");
    r_.Require("adaptive_softmax_cutoff", nullptr, "an adaptive softmax is not supported");
    r_.Require("base_layers", 0, "BASE layers are not supported");
    if (r_.pair()) {
      r_.RequireCrossAttention();
    } else {
      r_.Require("cross_self_attention", false, "there is no encoder");
    }
    for (const char* key : {"scale_attn", "scale_fc", "scale_heads", "scale_resids"}) {
      r_.Require(key, false, "scaled branches are not supported");
    }
    r_.ReadSizes();
    for (const std::string_view stack : r_.stacks()) {
      r_.Use(stack);
      ReadNorms();
      r_.spec().position = r_.AddedPositions();
      const int experts = keys_.Int("num_expert");
      const AttentionSpec attention = ReadAttention(experts);
      std::vector<BlockSpec> blocks = {{.mixer = attention}};
      if (r_.pair() && !r_.in_encoder()) blocks.push_back({.mixer = CrossAttentionSpec{attention}});
      blocks.push_back({.mixer = ReadFeedForward(experts)});
      r_.SetLayers(blocks);
    }
    r_.ReadHead(r_.Activation());
    return r_.Finish({kFairseqMoaTensors, kFairseqMoaKeys, kFairseqMoaIgnoredTensors});
  }

 private:
  void ReadNorms() {
    ModelSpec& spec = r_.spec();
    const std::string before_key = r_.Key("normalize_before");
    const std::string last = r_.Tensor("layer_norm.weight");
    const bool before = r_.RequiredBool(before_key);
    const bool final_norm = r_.Has(last);
    spec.norm.kind = NormKind::kLayer;
    spec.norm.placement = before ? NormPlacement::kPre : NormPlacement::kPost;
    if (!r_.in_encoder() && keys_.Bool("no_decoder_final_norm", false) && before) {
      r_.Fault("no_decoder_final_norm", "false beside decoder_normalize_before", "true");
    }
    if (before != final_norm) {
      r_.Fault(
          before_key,
          Concat(final_norm ? "true (the files have " : "false (the files do not have ", last, ')'),
          before ? "true" : "false");
    }
  }

  AttentionSpec ReadAttention(int experts) {
    AttentionSpec attention;
    attention.num_kv_heads = 1;
    attention.head_dim = keys_.Int("head_dim");
    if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
    RoutedLayerSpec routing;
    routing.num_experts = experts;
    // The number of heads is that of selected experts.
    routing.select.k = keys_.Int(r_.Key("attention_heads"));
    if (routing.select.k < experts) {
      r_.Decide(
          "weights of selected heads: their shares among all heads, as in the original code; the "
          "paper (eq. 9) divides them by their sum");
    }
    attention.routing = std::move(routing);
    return attention;
  }

  FeedForwardSpec ReadFeedForward(int experts) {
    FeedForwardSpec block;
    block.expert.form = ExpertForm::kPlain;
    block.expert.activation = r_.Activation();
    const bool routed =
        keys_.Pick<bool>("ffd_type", {{"normal", false}, {"moe", true}}, false).value_or(false);
    const int width = keys_.Int(r_.Key("ffn_embed_dim"));
    // Attention and a routed feed-forward have the same number of experts.
    const int64_t of_layer = (routed ? 2 : 1) + (r_.pair() && !r_.in_encoder() ? 1 : 0);
    const bool fits = r_.CheckExperts("num_expert", experts, r_.layers() * of_layer);
    if (!routed) {
      block.expert.bias = true;
      block.width = width;
      return block;
    }
    RoutedLayerSpec routing;
    routing.num_experts = experts;
    routing.select.k = std::min(kFeedForwardExperts, experts);
    if (fits) routing.widths.assign(static_cast<size_t>(experts), r_.spec().hidden_size);
    block.routing = std::move(routing);
    return block;
  }

  Reader r_;
  ObjectReader& keys_;
};

}  // namespace

ConfigResult ReadMoa(const FairseqSource& source) { return MoaReader(source).Read(); }

}  // namespace moeserve::fairseq
