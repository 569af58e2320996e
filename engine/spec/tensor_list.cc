#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error_text.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"

namespace moeserve {
namespace {

// A tensor dimension and the configuration key that determines it.
struct Dim {
  int64_t size = 0;
  std::string key;
};

// Dimensions of a network with the tensors of an expert: a routed or shared expert, or a dense
// feed-forward.
struct ExpertShape {
  Dim in;     // width of the input and output rows
  Dim inner;  // width between up and down
};

class TensorList {
 public:
  explicit TensorList(const ModelSpec& spec)
      : spec_(spec), stack_(TensorPrefix(spec.stack)), hidden_{spec.hidden_size, "hidden_size"} {}

  std::vector<TensorRequirement> Build() {
    const Dim vocabulary{spec_.vocab_size, "vocab_size"};
    const bool shared = spec_.share_embeddings;
    const bool predicts = spec_.stack == Stack::kPrediction;
    if (!shared || (spec_.stack != Stack::kEncoder && !predicts)) {
      Add((shared ? "" : stack_) + "embed.weight", {vocabulary, hidden_});
    }
    if (spec_.position.kind == PositionKind::kLearned) {
      Add(stack_ + "embed_position.weight",
          {{spec_.max_position_embeddings, "max_position_embeddings"}, hidden_},
          "position.kind is \"learned\"");
    }
    if (spec_.token_types > 0) {
      Add(stack_ + "embed_type.weight", {{spec_.token_types, "token_types"}, hidden_},
          "token_types is above 0");
    }
    if (spec_.embedding_norm) AddNorm(stack_ + "embed_norm", hidden_, "embedding_norm is true");
    const bool biased = spec_.relative_bias.has_value();
    if (biased && !spec_.relative_bias->per_layer) AddRelativeBias("relative_bias is set");
    if (spec_.norm.HasFinal()) {
      AddNorm(stack_ + "norm", hidden_,
              spec_.norm.final_norm.has_value() ? "norm.final is true" : "");
    }
    if (predicts) {
      AddNorm(stack_ + "hidden_norm", hidden_, "prediction is set");
      AddLinear(stack_ + "join", hidden_, {int64_t{2} * spec_.hidden_size, "2 * hidden_size"});
    }
    AddHead(vocabulary);
    for (int layer = 0; spec_.layer_scale && layer < spec_.num_layers(); ++layer) {
      Add(Concat(stack_, "blocks.", layer, ".scale"), {{1, "1"}}, "layer_scale is true");
    }
    if (spec_.layer_input.has_value()) AddLayerInputs(vocabulary);
    for (const BlockSpec& block : spec_.blocks) {
      const std::string name = block.name() + ".";
      const std::string key = Concat(Name(block.kind()), '[', block.layer, "].");
      AddBlockNorms(name, key, block);
      if (biased && spec_.relative_bias->per_layer && block.attention() != nullptr) {
        AddRelativeBias("relative_bias.per_layer is true", block.layer);
      }
      std::visit([&](const auto& mixer) { AddMixer(name, key, SettingsOf(mixer)); }, block.mixer);
    }
    if (spec_.encoder != nullptr) {
      std::ranges::move(TensorList(*spec_.encoder).Build(), std::back_inserter(list_));
    }
    if (spec_.prediction != nullptr) {
      std::ranges::move(TensorList(*spec_.prediction).Build(), std::back_inserter(list_));
    }
    return std::move(list_);
  }

 private:
  // `when` is the configuration setting that makes the tensor necessary; empty if it is always
  // needed.
  void Add(std::string name, std::initializer_list<Dim> dims, const std::string& when = "") {
    TensorRequirement tensor;
    tensor.name = std::move(name);
    tensor.shape.reserve(dims.size());
    for (const Dim& dim : dims) {
      tensor.follows_from += (tensor.shape.empty() ? "[" : ", ") + dim.key;
      tensor.shape.push_back(dim.size);
    }
    tensor.follows_from += "]";
    if (!when.empty()) tensor.follows_from += "; " + when;
    list_.push_back(std::move(tensor));
  }

  void AddRelativeBias(const std::string& when, std::optional<int> layer = std::nullopt) {
    Add(RelativeBiasName(spec_, layer),
        {{spec_.relative_bias->buckets, "relative_bias.buckets"},
         {FirstAttention(spec_)->num_heads, "attention[0].num_heads"}},
        when);
  }

  void AddLayerInputs(const Dim& vocabulary) {
    const std::string when = "layer_input is set";
    const Dim width{spec_.layer_input->width, "layer_input.width"};
    const Dim all{width.size * spec_.num_layers(), Concat("num_hidden_layers * ", width.key)};
    Add(stack_ + "embed_layers.weight", {vocabulary, all}, when);
    Add(stack_ + "layer_input.weight", {all, hidden_}, when);
    Add(stack_ + "layer_input.norm.weight", {width}, when);
    for (int layer = 0; layer < spec_.num_layers(); ++layer) {
      const std::string name = Concat(stack_, "blocks.", layer, ".input.");
      AddLinear(name + "gate", width, hidden_, "", when);
      AddLinear(name + "down", hidden_, width, "", when);
      Add(name + "norm.weight", {hidden_}, when);
    }
  }

  void AddHead(const Dim& vocabulary) {
    const HeadSpec& head = spec_.head;
    const std::string kind = Concat("head.kind is ", Quoted(KindName(head.kind)));
    if (spec_.pooling.has_value()) {
      Dim in = hidden_;
      for (size_t i = 0; i < spec_.pooling->dense.size(); ++i) {
        const DenseSpec& dense = spec_.pooling->dense[i];
        const std::string key = Concat("pooling.dense[", i, "].");
        const Dim out{dense.width, key + "width"};
        AddLinear(Concat("pooling.dense.", i), out, in, dense.bias ? key + "bias" : "");
        in = out;
      }
    }
    if (head.layer.has_value()) {
      AddLinear("head.layer", hidden_, hidden_, head.layer->bias ? "head.layer.bias" : "",
                "head.layer is set");
      if (head.layer->norm) AddNorm("head.layer_norm", hidden_, "head.layer.norm is true");
    }
    if (HasLabels(head.kind)) {
      AddLinear("classifier", {static_cast<int64_t>(head.labels.size()), "number of head.labels"},
                hidden_, head.bias ? "head.bias" : "", kind);
    }
    if (!HasVocabulary(head.kind)) return;
    if (!spec_.tie_word_embeddings) {
      Add("head.weight", {vocabulary, hidden_}, "tie_word_embeddings is false");
    }
    if (spec_.head_bias) Add("head.bias", {vocabulary}, "head_bias is true");
  }

  // Adds a norm of the kind NormSpec::kind.
  void AddNorm(const std::string& name, const Dim& width, const std::string& when = "") {
    Add(name + ".weight", {width}, when);
    if (spec_.norm.HasBias()) Add(name + ".bias", {width}, "norm.kind is \"layer\"");
  }

  // Adds the norms of a block: before the branch, or after the residual sum, and on its output.
  void AddBlockNorms(const std::string& name, const std::string& key, const BlockSpec& block) {
    const NormPlacement placement = NormPlacementOf(spec_, block);
    if (HasNorm(placement)) AddNorm(name + "norm", hidden_);
    if (!NormsOutput(placement)) return;
    const bool own = block.residual.norm_placement.has_value();
    AddNorm(name + "output_norm", hidden_,
            Concat(own ? key + "norm_placement" : "norm.placement", " is ",
                   Quoted(Traits(placement).name)));
  }

  // `bias_key` is the configuration key that switches the bias on; empty if there is no bias.
  void AddLinear(const std::string& name, const Dim& out, const Dim& in,
                 const std::string& bias_key = "", const std::string& when = "") {
    Add(name + ".weight", {out, in}, when);
    if (!bias_key.empty()) Add(name + ".bias", {out}, bias_key + " is true");
  }

  void AddRouter(const std::string& name, const std::string& key, const RoutedLayerSpec& routing,
                 const Dim& row) {
    const bool has_null = routing.null_experts.total() > 0;
    const Dim experts{routing.num_experts,
                      key + (has_null ? "num_experts + " + key + "null_experts" : "num_experts")};
    const std::string score = key + "score.";
    const std::string bias_key = routing.score.bias ? score + "bias" : "";
    if (routing.select.kind == SelectKind::kTable) {
      Add(name + ".table", {{spec_.vocab_size, "vocab_size"}, {routing.select.k, key + "select.k"}},
          key + "select.kind is \"table\"");
      list_.back().ids = true;
    }
    if (routing.score.norm == RowNorm::kRmsWeight) {
      Add(name + ".norm.weight", {row}, score + "norm is \"rms_weight\"");
    }
    if (routing.expert_scale) {
      Add(name + ".expert_scale", {experts}, key + "expert_scale is true");
    }
    if (routing.select.bias) {
      Add(name + ".choice_bias", {experts}, key + "select.bias is true");
    }
    switch (routing.score.kind) {
      case ScoreKind::kDot:
        AddLinear(name, experts, row, bias_key);
        return;
      case ScoreKind::kCosine: {
        const Dim dim{routing.score.dim, score + "dim"};
        const std::string cosine = score + "kind is \"cosine\"";
        AddLinear(name + ".projection", dim, row, bias_key, cosine);
        Add(name + ".experts.weight", {experts, dim}, cosine);
        if (routing.score.temperature != TemperatureKind::kNone) {
          Add(name + ".temperature", {{1, "1"}}, score + "temperature is not \"none\"");
        }
        return;
      }
    }
  }

  void AddExpert(const std::string& name, const std::string& key, const ExpertSpec& expert,
                 const ExpertShape& shape, const std::string& when = "") {
    if (!expert.residual) {
      AddSublayer(name, key, expert, shape, when);
      return;
    }
    for (int i = 0; i < expert.depth; ++i) {
      const std::string layer = name + "layers." + std::to_string(i) + ".";
      AddNorm(layer + "norm", shape.in, key + "expert.sublayer is \"residual\"");
      AddSublayer(layer, key, expert, shape, when);
    }
  }

  void AddSublayer(const std::string& name, const std::string& key, const ExpertSpec& expert,
                   const ExpertShape& shape, const std::string& when) {
    const std::string bias_key = expert.bias ? key + "expert.bias" : "";
    if (expert.form == ExpertForm::kGated) {
      AddLinear(name + "gate", shape.inner, shape.in, bias_key,
                when.empty() ? key + "expert.form is \"gated\"" : when);
    }
    AddLinear(name + "up", shape.inner, shape.in, bias_key, when);
    AddLinear(name + "down", shape.in, shape.inner, bias_key, when);
    if (expert.inner_norm) {
      AddNorm(name + "inner_norm", shape.inner, key + "expert.inner_norm is true");
    }
  }

  // Adds a projection before the split into sub-tokens or after the merge, if `setting` is true.
  void AddProjection(const std::string& name, const std::string& key, const SplitSpec& split,
                     bool SplitSpec::*setting) {
    if (!(split.*setting)) return;
    const bool first = setting == &SplitSpec::projection;
    const std::string when = Concat(key, "split.", first ? "" : "merge_", "projection is true");
    for (int i = 0; i < split.depth; ++i) {
      AddLinear(split.depth == 1 ? name : name + "." + std::to_string(i), hidden_, hidden_,
                split.bias ? key + "split.bias" : "", when);
    }
  }

  void AddMixer(const std::string& name, const std::string& key, const AttentionSpec& attention) {
    const std::string per_head = " * " + key + "head_dim";
    const std::string per_value =
        attention.value_dim.has_value() ? " * " + key + "value_dim" : per_head;
    const int64_t head_dim = attention.head_dim;
    const Dim keys{attention.num_kv_heads * head_dim, key + "num_kv_heads" + per_head};
    const Dim values{attention.value_width(), key + "num_kv_heads" + per_value};
    const std::string bias_key = attention.bias ? key + "bias" : "";
    if (attention.latent.has_value()) {
      AddLatentAttention(name, key, attention, bias_key);
      return;
    }
    if (!attention.kv_layer.has_value()) AddLinear(name + "k", keys, hidden_, bias_key);
    if (attention.projects_values()) AddLinear(name + "v", values, hidden_, bias_key);
    if (attention.value_routing.has_value()) {
      AddRouter(name + "router", key + "value_routing.", *attention.value_routing, hidden_);
      for (int j = 0; j < attention.value_routing->num_experts; ++j) {
        AddLinear(Concat(name, "experts.", j, ".v"), values, hidden_, "",
                  key + "value_routing is set");
      }
    }
    if (attention.routed()) {
      const RoutedLayerSpec& routing = *attention.routing;
      AddRouter(name + "router", key + "routing.", routing, hidden_);
      for (int j = 0; j < routing.num_experts; ++j) {
        const std::string expert = name + "experts." + std::to_string(j) + ".";
        AddLinear(expert + "q", keys, hidden_);
        AddLinear(expert + "o", hidden_, keys);
      }
    } else {
      const Dim queries{attention.num_heads * head_dim, key + "num_heads" + per_head};
      AddLinear(name + "q", queries, hidden_, bias_key);
      const Dim outputs{int64_t{attention.num_heads} * attention.output_dim(),
                        key + "num_heads" + per_value};
      AddGate(name, key, attention);
      AddLinear(name + "o", hidden_, outputs);
      if (attention.inner_norm) AddNorm(name + "inner_norm", outputs, key + "inner_norm is true");
      AddQkNorm(name, key, attention, queries, keys);
      if (attention.sinks) {
        Add(name + "sinks", {{attention.num_heads, key + "num_heads"}}, key + "sinks is true");
      }
    }
    if (attention.out_bias) Add(name + "out_bias", {hidden_}, key + "out_bias is true");
  }

  void AddMixer(const std::string& name, const std::string& key,
                const ShortConvolutionSpec& convolution) {
    const std::string bias_key = convolution.bias ? key + "bias" : "";
    for (const char* part : {"b", "c", "x"}) AddLinear(name + part, hidden_, hidden_, bias_key);
    AddLinear(name + "conv", hidden_, {convolution.taps, key + "conv"}, bias_key);
    AddLinear(name + "o", hidden_, hidden_, bias_key);
  }

  void AddMixer(const std::string& name, const std::string& key, const DeltaSpec& delta) {
    const RecurrentShape shape = delta.recurrence();
    const Dim heads{delta.num_heads, key + "num_heads"};
    const Dim keys{shape.key_width(), key + "num_key_heads * " + key + "key_dim"};
    const Dim values{shape.value_width(), key + "num_heads * " + key + "value_dim"};
    const bool channels = shape.decays_keys;
    const Dim decays{shape.decay_width(),
                     channels ? heads.key + " * " + key + "key_dim" : heads.key};
    for (const char* part : {"q", "k"}) AddLinear(name + part, keys, hidden_);
    AddLinear(name + "v", values, hidden_);
    const auto add = [&](const char* part, const Dim& out, int rank, const char* rank_key) {
      const std::string above = Concat(key, rank_key, " is above 0");
      const Dim inner{rank, key + rank_key};
      if (rank > 0) AddLinear(Concat(name, part, "_down"), inner, hidden_, "", above);
      AddLinear(name + part, out, rank > 0 ? inner : hidden_);
    };
    add("gate", values, delta.gate_rank, "gate_rank");
    AddLinear(name + "beta", heads, hidden_);
    add("decay", decays, delta.decay_rank, "decay_rank");
    const Dim taps{delta.taps, key + "conv"};
    for (const char* part : {"q_conv", "k_conv"}) AddLinear(name + part, keys, taps);
    AddLinear(name + "v_conv", values, taps);
    Add(name + "decay_log", {heads});
    Add(name + "decay_bias", {decays});
    Add(name + "out_norm.weight", {{delta.value_dim, key + "value_dim"}});
    AddLinear(name + "o", hidden_, values);
  }

  void AddMixer(const std::string& name, const std::string& key, const StateSpaceSpec& ssm) {
    const RecurrentShape shape = ssm.recurrence();
    const std::string bias_key = ssm.bias ? key + "bias" : "";
    const Dim heads{ssm.num_heads, key + "num_heads"};
    const Dim keys{shape.key_width(), key + "groups * " + key + "state_dim"};
    const Dim values{shape.value_width(), key + "num_heads * " + key + "head_dim"};
    for (const char* part : {"gate", "x"}) AddLinear(name + part, values, hidden_, bias_key);
    for (const char* part : {"b", "c"}) AddLinear(name + part, keys, hidden_, bias_key);
    AddLinear(name + "step", heads, hidden_, bias_key);
    AddLinear(name + "conv", {values.size + 2 * keys.size, Concat(values.key, " + 2 * ", keys.key)},
              {ssm.taps, key + "conv"}, ssm.conv_bias ? key + "conv_bias" : "");
    for (const char* part : {"decay_log", "step_bias", "skip"}) Add(name + part, {heads});
    Add(name + "out_norm.weight", {values});
    AddLinear(name + "o", hidden_, values, bias_key);
  }

  void AddGate(const std::string& name, const std::string& key, const AttentionSpec& attention) {
    if (!attention.gate) return;
    std::string width = key + "num_heads";
    if (!attention.gate_per_head) {
      width += " * " + key +
               (attention.latent.has_value()      ? "latent.value_dim"
                : attention.value_dim.has_value() ? "value_dim"
                                                  : "head_dim");
    }
    AddLinear(name + "gate", {attention.gates(), width}, hidden_,
              attention.gate_bias ? key + "gate_bias" : "", key + "gate is true");
  }

  void AddLatentAttention(const std::string& name, const std::string& key,
                          const AttentionSpec& attention, const std::string& bias_key) {
    const LatentSpec& latent = *attention.latent;
    const int64_t heads = attention.num_heads;
    const std::string of_heads = key + "num_heads * " + key;
    const Dim rank{latent.rank, key + "latent.rank"};
    const Dim values{latent.value_dim, key + "latent.value_dim"};
    const Dim queries{heads * attention.head_dim, of_heads + "head_dim"};
    if (latent.query_rank > 0) {
      const Dim query_rank{latent.query_rank, key + "latent.query_rank"};
      AddLinear(name + "q_down", query_rank, hidden_, bias_key, query_rank.key + " is above 0");
      Add(name + "q_norm.weight", {query_rank}, query_rank.key + " is above 0");
      AddLinear(name + "q", queries, query_rank);
    } else {
      AddLinear(name + "q", queries, hidden_);
    }
    AddLinear(name + "latent",
              {rank.size + latent.rope_dim, rank.key + " + " + key + "latent.rope_dim"}, hidden_,
              bias_key);
    Add(name + "latent_norm.weight", {rank});
    const Dim unrotated{attention.head_dim - latent.rope_dim,
                        key + "head_dim - " + key + "latent.rope_dim"};
    for (int h = 0; h < attention.num_heads; ++h) {
      const std::string head = name + "heads." + std::to_string(h) + ".";
      AddLinear(head + "k", rank, unrotated);
      AddLinear(head + "v", values, rank);
    }
    AddGate(name, key, attention);
    AddLinear(name + "o", hidden_, {heads * latent.value_dim, of_heads + "latent.value_dim"});
    if (attention.out_bias) Add(name + "out_bias", {hidden_}, key + "out_bias is true");
  }

  // QK norms are always RMS norms, which have no bias.
  void AddQkNorm(const std::string& name, const std::string& key, const AttentionSpec& attention,
                 const Dim& queries, const Dim& keys) {
    const Dim head{attention.head_dim, key + "head_dim"};
    const bool own_keys = !attention.kv_layer.has_value();
    switch (attention.qk_norm) {
      case QkNorm::kNone:
      case QkNorm::kL2:
        return;
      case QkNorm::kHead:
        Add(name + "q_norm.weight", {head}, key + "qk_norm is \"head\"");
        if (own_keys) Add(name + "k_norm.weight", {head}, key + "qk_norm is \"head\"");
        return;
      case QkNorm::kFull:
      case QkNorm::kHeads: {
        const std::string when = Concat(key, "qk_norm is ", Quoted(KindName(attention.qk_norm)));
        Add(name + "q_norm.weight", {queries}, when);
        if (own_keys) Add(name + "k_norm.weight", {keys}, when);
        return;
      }
    }
  }

  void AddMixer(const std::string& name, const std::string& key,
                const FeedForwardSpec& feed_forward) {
    if (feed_forward.out_bias) Add(name + "out_bias", {hidden_}, key + "out_bias is true");
    if (!feed_forward.routed()) {
      AddExpert(name, key, feed_forward.expert, {hidden_, {feed_forward.width, key + "width"}});
      return;
    }
    const RoutedLayerSpec& routing = *feed_forward.routing;
    const std::string routing_key = key + "routing.";
    const SplitSpec& split = routing.split;
    Dim row = hidden_;
    if (split.heads > 1) {
      row = {spec_.hidden_size / split.heads, "hidden_size / " + routing_key + "split.heads"};
    }
    AddProjection(name + "split", routing_key, split, &SplitSpec::projection);
    AddProjection(name + "merge", routing_key, split, &SplitSpec::merge_projection);
    AddRouter(name + "router", routing_key, routing, row);
    if (routing.latent_width > 0) {
      const Dim latent{routing.latent_width, routing_key + "latent_width"};
      AddLinear(name + "latent_down", latent, row, "", latent.key + " is above 0");
      AddLinear(name + "latent_up", row, latent, "", latent.key + " is above 0");
      row = latent;
    }
    for (int j = 0; j < routing.num_experts; ++j) {
      const std::string number = std::to_string(j);
      const std::string expert = name + "experts." + number + ".";
      if (const int body = routing.BodyOf(j); body >= 0) {
        const std::string width = Concat(routing_key, "widths[", body, ']');
        AddExpert(expert, key, feed_forward.expert,
                  {row, {routing.widths[static_cast<size_t>(body)], width}});
      } else if (routing.IsConstant(j)) {
        const bool last = j >= routing.num_places();
        Add(expert + "constant", {row},
            Concat(routing_key, "null_experts.",
                   last ? "constant is above 0" : Concat("replaced has ", number)));
      }
    }
    if (feed_forward.shared_width > 0) {
      const std::string when = key + "shared_width is above 0";
      AddExpert(name + "shared.", key, feed_forward.expert,
                {hidden_, {feed_forward.shared_width, key + "shared_width"}}, when);
      if (feed_forward.shared_gate) {
        Add(name + "shared_gate.weight", {{1, "1"}, hidden_}, key + "shared_gate is true");
      }
      if (feed_forward.shared_norms) {
        for (const char* norm : {"shared_norm", "shared_output_norm", "experts_norm"}) {
          AddNorm(name + norm, hidden_, key + "shared_norms is true");
        }
      }
    }
  }

  const ModelSpec& spec_;
  const std::string stack_;  // the beginning of the names of the stack's tensors
  const Dim hidden_;
  std::vector<TensorRequirement> list_;
};

// These matrices are few, and with 4 bits they would cost most of the perplexity.
bool KeepsEightBits(std::string_view name) {
  return name == "head.weight" || name.ends_with(".attention.k.weight") ||
         name.ends_with(".attention.v.weight") || name.ends_with(".split.weight") ||
         name.ends_with(".merge.weight");
}

}  // namespace

std::vector<TensorRequirement> RequiredTensors(const ModelSpec& spec) {
  return TensorList(spec).Build();
}

std::string RelativeBiasName(const ModelSpec& spec, std::optional<int> layer) {
  const char* const stack = TensorPrefix(spec.stack);
  if (!layer.has_value()) return Concat(stack, "relative_bias.weight");
  return Concat(stack, "blocks.", *layer, ".relative_bias.weight");
}

Quantization QuantizationOf(std::string_view name, const std::vector<int64_t>& shape,
                            Quantization type) {
  if (type == Quantization::kNone || shape.size() != 2) return Quantization::kNone;
  for (const std::string_view stack : {TensorPrefix(Stack::kEncoder), TensorPrefix(Stack::kDecoder),
                                       TensorPrefix(Stack::kPrediction)}) {
    if (name.starts_with(stack)) name.remove_prefix(stack.size());
  }
  if (name.starts_with("embed") || name.ends_with("relative_bias.weight") ||
      name.find(".router.") != std::string_view::npos || name.ends_with("conv.weight") ||
      name.ends_with(".beta.weight") || name.ends_with(".decay.weight") ||
      name.ends_with(".decay_down.weight") || name.ends_with(".step.weight") ||
      name.find(".shared_gate.") != std::string_view::npos || name.starts_with("classifier.") ||
      name.starts_with("head.layer.") || name.starts_with("pooling.")) {
    return Quantization::kNone;
  }
  const bool four_bits = type == Quantization::kInt4 || type == Quantization::kInt4K;
  if (four_bits && KeepsEightBits(name)) {
    return type == Quantization::kInt4 ? Quantization::kInt8 : Quantization::kInt8Channel;
  }
  return type;
}

}  // namespace moeserve
