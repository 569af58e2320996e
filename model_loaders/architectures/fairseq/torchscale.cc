// Models of torchscale: decoders, encoders and both together, dense ones, mixtures with a plain
// router or that of X-MoE, and MH-MoE, whose code is a fork of torchscale with options of its own.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "model_loaders/architectures/fairseq/reader.h"
#include "model_loaders/architectures/fairseq/torchscale_tables.h"

namespace moeserve::fairseq {
namespace {

using Json = nlohmann::json;

// Options that only routed layers need.
constexpr std::string_view kRoutingOptions[] = {
    "mhmoe_heads_number",
    "moe_eval_capacity_token_fraction",
    "moe_gating_use_fp32",
    "moe_normalize_gate_prob_before_dropping",
    "moe_second_expert_policy",
    "moe_top1_expert",
    "moe_top_k",
    "use_xmoe",
};

// Options that only the fork with MH-MoE has.
constexpr std::string_view kForkOptions[] = {
    "glu",        "input_bits", "mhmoe_heads_number", "moe_ffn_dim",  "moe_top_k",
    "n_kv_heads", "no_bias",    "rms_norm",           "rotary_embed", "weight_bits",
};

// Quantizers of the fork that change their inputs even if 32 bits are left.
constexpr std::string_view kChangingQuantizers[] = {
    "absmax_per_token_relu",
    "absmax_per_token_relu2",
    "absmax_per_token_sp",
    "absmax_per_token_sparse_me",
};

class TorchscaleReader {
 public:
  explicit TorchscaleReader(const FairseqSource& source) : r_(source), keys_(r_.keys()) {
    for (const std::string_view key : kForkOptions) {
      if (source.options.values.contains(key)) fork_ = true;
    }
  }

  ConfigResult Read() {
    r_.Ignore(kTorchscaleIgnoredOptions);
    RefuseOptions();
    r_.ReadSizes();
    for (const std::string_view stack : r_.stacks()) {
      r_.Use(stack);
      ReadNorms();
      ReadPositions();
      ReadRelativeBias();
      const AttentionSpec attention = ReadAttention();
      r_.SetLayers(ReadLayers(attention));
    }
    r_.ReadHead(activation_);
    return r_.Finish({kTorchscaleTensors, kTorchscaleKeys, kTorchscaleIgnoredTensors});
  }

 private:
  void RefuseOptions() {
    const auto refuse = [&](std::string_view key, const Json& value, std::string_view why) {
      r_.Require(key, value, why);
    };
    if (fork_) refuse("xpos_rel_pos", false, "XPOS positions of this fork are not supported");
    if (r_.pair()) r_.RequireCrossAttention();
    refuse("multiway", false, "models of several modalities are not supported");
    refuse("no_output_layer", false, "a language model has an output layer");
    refuse("segment_length", "", "dilated attention is not supported");
    refuse("dilated_ratio", "", "dilated attention is not supported");
    refuse("model_parallel_size", 1, "files that are split over several devices are not supported");
    refuse("moe_lora_rank", -1, "experts of low rank are not supported");
    refuse("relu_squared", false, "squared activations are not supported");
    refuse("negative_slope", -1, "leaky activations are not supported");
    refuse("nozero_rmsnorm", false, "this norm is not supported");
    constexpr std::string_view kQuantized = "models with quantizers are not supported";
    for (const char* key : {"weight_bits", "input_bits"}) refuse(key, 32, kQuantized);
    for (const char* key :
         {"binary_attn", "binary_query", "use_quant_for_activation", "quant_ffn_output"}) {
      refuse(key, false, kQuantized);
    }
    for (const char* key : {"ffn_bits", "fc2_bits"}) {
      if (keys_.Int(key, -1) != -1) refuse(key, 32, kQuantized);
    }
    for (const char* key : {"input_quant_method", "ffn_quant_method", "fc2_quant_method"}) {
      const Json* const found = keys_.Optional(key);
      for (const std::string_view method : kChangingQuantizers) {
        if (found != nullptr && *found == method) {
          r_.Fault(key, "a method that changes nothing at 32 bits", ShowJson(*found));
        }
      }
    }
  }

  // Whether the files have the last norm tells pre-norm from post-norm models: versions of the
  // original code differ in how the options decide it. Only models with DeepNorm can have both
  // norms after layers and the last one, if the options say that norms are not before layers.
  void ReadNorms() {
    ModelSpec& spec = r_.spec();
    const std::string last = r_.Tensor("layer_norm.weight");
    const bool final_norm = r_.Has(last);
    const bool deepnorm = keys_.Bool("deepnorm", false);
    const std::string inner = Concat(AttentionLayer(), "self_attn.inner_attn_ln.weight");
    inner_norm_ = r_.Has(inner);
    const bool subln = keys_.Bool("subln", inner_norm_);
    const std::string before_key = r_.Key("normalize_before");
    const bool before = keys_.Bool(before_key, final_norm);
    const bool without = r_.in_encoder() && !keys_.Bool("normalize_output", true);
    spec.norm.kind = keys_.Bool("rms_norm", false) ? NormKind::kRms : NormKind::kLayer;
    const bool pre = (final_norm || (without && before)) && (!deepnorm || before);
    spec.norm.placement = pre ? NormPlacement::kPre : NormPlacement::kPost;
    if (final_norm != pre) spec.norm.final_norm = final_norm;
    const double eps = keys_.Real("layernorm_eps", 1e-5);
    spec.norm.eps = static_cast<float>(eps);
    const std::string has = final_norm ? " (the files have" : " (the files do not have";
    if (!deepnorm && !subln && before != pre) {
      r_.Fault(before_key, Concat(final_norm ? "true" : "false", has, ' ', last, ')'),
               before ? "true" : "false");
    }
    if (!deepnorm && subln != inner_norm_) {
      r_.Fault("subln",
               Concat(inner_norm_ ? "true (the files have " : "false (the files do not have ",
                      inner, ')'),
               subln ? "true" : "false");
    }
    if (inner_norm_) {
      r_.Require("group_norm_size", 1, "norms in groups are not supported");
    } else {
      keys_.Optional("group_norm_size");
    }
    if (!deepnorm) return;
    if (pre || inner_norm_) {
      r_.Fault("deepnorm",
               Concat("false beside ", pre ? Concat(last, " and ", before_key, " (pre-norm)")
                                           : std::string("norms inside of layers (subln)")),
               "true");
      return;
    }
    // norm(alpha x + f(x)) with eps is norm(x + f(x) / alpha) with eps / alpha^2.
    if (r_.layers() < 1) return;
    const double alpha = DeepNormFactor();
    spec.residual_scale = 1.0 / alpha;
    if (final_norm) spec.norm.final_eps = static_cast<float>(eps);
    if (spec.embedding_norm) spec.norm.outer_eps = static_cast<float>(eps);
    spec.norm.eps = static_cast<float>(eps / (alpha * alpha));
  }

  // Returns the factor of the rows that bypass a block. It follows from the options, not from the
  // layers that X-MoE inserts.
  double DeepNormFactor() const {
    if (!r_.pair()) return std::pow(2.0 * r_.layers(), 0.25);
    if (!r_.in_encoder()) return std::pow(3.0 * r_.layers(), 0.25);
    return 0.81 * std::pow(std::pow(r_.encoder_layers(), 4.0) * r_.decoder_layers(), 1.0 / 16);
  }

  // Returns what begins the names of the first layer with attention.
  std::string AttentionLayer() const {
    for (int i = 0; i <= r_.layers(); ++i) {
      if (r_.HasAny(r_.Layer(i) + "self_attn.")) return r_.Layer(i);
    }
    return r_.Layer(0);
  }

  void ReadPositions() {
    PositionSpec& position = r_.spec().position;
    position = r_.AddedPositions();
    const double fraction = keys_.Real("partial_rotary_factor", 1.0);
    const bool rotary = keys_.Bool("rotary_embed", false);
    const bool xpos = !fork_ && keys_.Bool("xpos_rel_pos", false);
    const double xpos_base = keys_.Real("xpos_scale_base", 512.0);
    if (xpos && r_.in_encoder()) {
      r_.Fault("xpos_rel_pos", "false (XPOS in an encoder is not supported)", "true");
      return;
    }
    if (!rotary && !xpos) return;
    if (position.kind != PositionKind::kNone) {
      r_.Fault("no_token_positional_embeddings",
               Concat("true beside ", xpos ? "xpos_rel_pos" : "rotary_embed"), "false");
    }
    if (!xpos) {
      position = {.kind = PositionKind::kRope, .fraction = fraction, .scaling = {}};
      return;
    }
    // Validate() accepts 0, which would mean no XPOS.
    if (!(xpos_base > 0.0)) {
      r_.Fault("xpos_scale_base", "a number above 0", ShowJson(Json(xpos_base)));
    }
    position = {.kind = PositionKind::kRope,
                .pairing = RopePairing::kInterleaved,
                .scaling = {},
                .xpos_base = xpos_base};
  }

  void ReadRelativeBias() {
    const int buckets = r_.IntOrUnset("rel_pos_buckets", 0);
    const int max_distance = r_.IntOrUnset("max_rel_pos", 0);
    if (buckets <= 0 || max_distance <= 0) return;
    if (fork_ || r_.pair()) {
      r_.Fault(
          "rel_pos_buckets",
          Concat("0 (biases of relative positions ",
                 r_.pair() ? "in attention to a source" : "of this fork", " are not supported)"),
          std::to_string(buckets));
    }
    // The decoder's buckets are those of an encoder, half of which are for later positions.
    r_.spec().relative_bias =
        RelativeBias{.buckets = buckets, .max_distance = max_distance, .bidirectional = true};
  }

  AttentionSpec ReadAttention() {
    AttentionSpec attention = r_.Heads();
    attention.num_kv_heads = r_.IntOrUnset("n_kv_heads", attention.num_heads);
    if (r_.spec().position.kind == PositionKind::kRope && attention.head_dim > 0) {
      // The original code rounds the number of rotated dimensions down.
      double& fraction = r_.spec().position.fraction;
      fraction = std::floor(fraction * attention.head_dim) / attention.head_dim;
    }
    bias_ = !keys_.Bool("no_bias", false);
    attention.bias = bias_;
    attention.out_bias = bias_;
    attention.inner_norm = inner_norm_;
    // Keys and values are repeated as a whole: head j uses kv head j mod n_kv_heads.
    if (attention.num_kv_heads != attention.num_heads) attention.group_order = GroupOrder::kTile;
    return attention;
  }

  ExpertSpec ReadExpert() {
    ExpertSpec expert;
    expert.bias = bias_;
    expert.inner_norm = inner_norm_;
    const std::optional<ActivationKind> activation =
        keys_.Pick<ActivationKind>("activation_fn", {{"relu", ActivationKind::kRelu},
                                                     {"gelu", ActivationKind::kGelu},
                                                     {"swish", ActivationKind::kSilu},
                                                     {"silu", ActivationKind::kSilu}});
    expert.activation = activation.value_or(ActivationKind::kRelu);
    const bool glu = keys_.Bool("glu", false);
    // The fork has a gate for every activation but gelu.
    const bool gated = fork_ && (glu || expert.activation != ActivationKind::kGelu);
    expert.form = gated ? ExpertForm::kGated : ExpertForm::kPlain;
    return expert;
  }

  Layers ReadLayers(const AttentionSpec& attention) {
    r_.Ignore(kRoutingOptions);  // a dense model has them, too
    const std::string frequency_key = FrequencyKey();
    const int frequency = keys_.Int(frequency_key, 0);
    const int experts = keys_.Int("moe_expert_count", 0);
    const int width = keys_.Int(r_.Key("ffn_embed_dim"));
    int expert_width = keys_.Int("moe_ffn_dim", -1);
    if (expert_width == -1) expert_width = width;
    const ExpertSpec expert = ReadExpert();
    activation_ = expert.activation;
    if (frequency < 0)
      r_.Fault(frequency_key, "an integer of at least 0", std::to_string(frequency));
    if (!r_.ok()) return {};

    const std::vector<Form> forms = LayerForms(frequency);
    const auto routed = std::ranges::count_if(forms, [](const Form& f) { return f.routed; });
    RoutedLayerSpec routing;
    ExpertSpec stack = expert;
    if (routed > 0) {
      if (!r_.CheckExperts("moe_expert_count", experts, routed)) return {};
      const auto first = std::ranges::find(forms, true, &Form::routed);
      const std::string prefix = r_.Layer(static_cast<int>(first - forms.begin())) + "moe_layer.";
      routing = ReadRouting(experts, prefix);
      routing.widths.assign(static_cast<size_t>(experts), expert_width);
      stack = WithSubLayers(expert, prefix);
    }
    Layers layers;
    for (int i = 0; i < static_cast<int>(forms.size()); ++i) {
      const Form& form = forms[static_cast<size_t>(i)];
      CheckKind(i, form.routed, frequency_key, frequency);
      FeedForwardSpec feed_forward;
      feed_forward.expert = form.routed ? stack : expert;
      if (form.routed) {
        feed_forward.routing = routing;
      } else {
        feed_forward.width = width;
      }
      std::vector<BlockSpec>& blocks = layers.emplace_back();
      if (form.attention) blocks.push_back({.mixer = attention});
      if (form.attention && r_.pair() && !r_.in_encoder()) blocks.push_back(CrossAttention());
      blocks.push_back({.mixer = std::move(feed_forward)});
      // An inserted layer of experts with norms of their own has none before it.
      if (!form.attention && !r_.Has(r_.Layer(i) + "final_layer_norm.weight")) {
        blocks.back().residual.norm_placement = NormPlacement::kNone;
      }
    }
    return layers;
  }

  // What a layer consists of.
  struct Form {
    bool attention = true;
    bool routed = false;
  };

  // Returns the option with the frequency of routed layers: of one stack only if there is none of
  // both.
  std::string FrequencyKey() {
    const int both = keys_.Int("moe_freq", 0);
    const std::string own = r_.Key("moe_freq");
    const int of_stack = keys_.Int(own, 0);
    return both == 0 && of_stack != 0 ? own : "moe_freq";
  }

  // An encoder may have layers of experts alone, which X-MoE inserts between the others, and which
  // "encoder_layers" does not count.
  std::vector<Form> LayerForms(int frequency) const {
    std::vector<Form> forms;
    for (int ordinary = 0, i = 0; ordinary < r_.layers(); ++i) {
      const bool inserted = r_.in_encoder() && !r_.HasAny(r_.Layer(i) + "self_attn.") &&
                            r_.HasAny(r_.Layer(i) + "moe_layer.");
      if (!inserted) ++ordinary;
      const bool routed = frequency > 0 && ordinary % frequency == 0;
      forms.push_back({.attention = !inserted, .routed = inserted || routed});
    }
    const int next = static_cast<int>(forms.size());
    const bool last = r_.in_encoder() && !r_.HasAny(r_.Layer(next) + "self_attn.") &&
                      r_.HasAny(r_.Layer(next) + "moe_layer.");
    if (last) forms.push_back({.attention = false, .routed = true});
    return forms;
  }

  BlockSpec CrossAttention() {
    AttentionSpec attention = r_.Heads();
    attention.bias = attention.out_bias = bias_;
    return {.mixer = CrossAttentionSpec{attention}};
  }

  // Experts may be stacks of residual sub-layers, as those of fairseq's BASE layers are.
  ExpertSpec WithSubLayers(ExpertSpec expert, const std::string& prefix) {
    int depth = 0;
    while (depth < kMostSubLayers && r_.Has(Concat(prefix, "experts.0.", depth, ".ff1.weight"))) {
      ++depth;
    }
    if (depth == 0) return expert;
    expert.residual = true;
    expert.depth = depth;
    expert.inner_norm = false;
    const int stated = r_.IntOrUnset("base_sublayers", depth);
    if (stated != depth && stated != 1) {
      r_.Fault("base_sublayers", Concat(depth, " (the files have ", prefix, "experts.0.*)"),
               std::to_string(stated));
    }
    return expert;
  }

  // Compares the kind of a layer with the tensors that the files have for it.
  void CheckKind(int layer, bool routed, const std::string& key, int frequency) {
    const std::string other = r_.Layer(layer) + (routed ? "ffn." : "moe_layer.");
    if (!r_.HasAny(other)) return;
    r_.Fault(key,
             Concat("a number with which layer ", layer, " is ", routed ? "dense" : "routed",
                    " (the files have ", other, "*)"),
             std::to_string(frequency));
  }

  // `prefix` is what the names of the first routed layer's tensors begin with.
  RoutedLayerSpec ReadRouting(int experts, const std::string& prefix) {
    RoutedLayerSpec routing;
    routing.num_experts = experts;
    routing.split.heads = r_.IntOrUnset("mhmoe_heads_number", 1);
    routing.split.projection = routing.split.heads > 1 || r_.Has(prefix + "multi_heads.weight");
    routing.split.merge_projection = routing.split.projection;
    if (routing.split.projection) {
      routing.split.bias = r_.Has(prefix + "multi_heads.bias");
      r_.Decide(
          "MH-MoE: the sum of a sub-token's experts is used as it is, as in the original code; the "
          "paper (eq. 6) adds the sub-token to it");
    }
    ReadScore(prefix, &routing.score);
    ReadSelection(&routing);
    ReadCapacity();
    return routing;
  }

  void ReadScore(const std::string& prefix, ScoreSpec* score) {
    const TensorEntry* const projection = r_.Find(prefix + "gate.wg_reduction.weight");
    const bool stored = projection != nullptr;
    if (keys_.Bool("use_xmoe", stored) != stored) {
      r_.Fault("use_xmoe",
               Concat(stored ? "true (the files have " : "false (the files do not have ", prefix,
                      "gate.wg_reduction.weight)"),
               stored ? "false" : "true");
    }
    if (!keys_.Bool("moe_gating_use_fp32", true)) {
      r_.Decide(
          "router: the original code computes shares in the model's type (moe_gating_use_fp32 is "
          "false); here in f32");
    }
    if (!stored) return;
    score->kind = ScoreKind::kCosine;
    if (projection->shape.size() == 2 && projection->shape[0] <= kMaxProjection) {
      score->dim = static_cast<int>(projection->shape[0]);
    }
    // The code rescales an expert embedding before it normalizes it, so only its direction counts.
    score->eps = 1e-12;
    if (r_.Has(prefix + "gate.gating_t")) {
      score->temperature = TemperatureKind::kDivide;
      r_.Decide(
          "X-MoE: scores as in the paper (eq. 7 and 8), because the files have a temperature");
      return;
    }
    score->normalize_row = false;
    r_.Decide(
        "X-MoE: scores as in the original code, which neither normalizes a token's projection nor "
        "has a temperature; the paper (eq. 7 and 8) does both");
  }

  void ReadSelection(RoutedLayerSpec* routing) {
    const bool normalize = keys_.Bool("moe_normalize_gate_prob_before_dropping", false);
    const bool top1 = keys_.Bool("moe_top1_expert", false);
    const Json* const given = keys_.Optional("moe_second_expert_policy");
    if (fork_) {
      routing->select.k = keys_.Int("moe_top_k");
      if (normalize && routing->select.k > 1) {
        r_.Decide(
            "weights of selected experts: their shares among all experts, as in the original code, "
            "which does not use moe_normalize_gate_prob_before_dropping");
      }
      return;
    }
    routing->select.k = top1 ? 1 : 2;
    if (top1) return;
    routing->renormalize = true;
    std::string policy = "random";
    if (given != nullptr && !keys_.Bool("use_xmoe", false)) {
      policy = given->is_string() ? given->get<std::string>() : "";
      if (policy != "all" && policy != "random" && policy != "sampling") {
        r_.Fault("moe_second_expert_policy", R"("all", "random" or "sampling")", ShowJson(*given));
      }
    }
    if (policy == "random") {
      r_.Decide(
          "second experts: the original code drops a token's second expert at random, also outside "
          "of training; here it is always used (\"all\")");
    } else if (policy == "sampling") {
      r_.Decide(
          "second experts: the original code chooses a token's second expert with random noise, "
          "also outside of training; here it is the one with the second largest score (\"all\")");
    }
  }

  void ReadCapacity() {
    const double fraction = keys_.Real("moe_eval_capacity_token_fraction", 0.25);
    if (fraction >= 1.0) return;  // room for all tokens
    r_.Decide(
        "capacity: the original code leaves out tokens for which an expert has no room (" +
        (fraction > 0.0 ? Concat("moe_eval_capacity_token_fraction is ", ShowJson(Json(fraction)))
                        : std::string("as in training")) +
        "), so answers depend on other texts of a batch; here an expert has room for all tokens");
  }

  static constexpr int64_t kMaxProjection = 1 << 20;
  static constexpr int kMostSubLayers = 8;  // for which kTorchscaleTensors has names

  Reader r_;
  ObjectReader& keys_;
  bool fork_ = false;
  bool inner_norm_ = false;
  bool bias_ = true;
  ActivationKind activation_ = ActivationKind::kRelu;  // of the layers
};

}  // namespace

ConfigResult ReadTorchscale(const FairseqSource& source) { return TorchscaleReader(source).Read(); }

}  // namespace moeserve::fairseq
