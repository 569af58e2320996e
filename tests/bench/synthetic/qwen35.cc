#include <cmath>
#include <string>
#include <utility>

#include "tests/bench/synthetic/family_files.h"

namespace moeserve::testing {
namespace {

using Json = nlohmann::json;
using Source = ComposedTensor::Source;
using Rows = ComposedTensor::Rows;

constexpr std::string_view kGgufName = "qwen35moe";

// Which of every so many layers has attention: the last.
int AttentionInterval(const ModelSpec& spec) {
  int layer = 0;
  while (layer < spec.num_layers() && spec.token_mixer(layer)->attention() == nullptr) ++layer;
  return layer + 1;
}

bool IsQwenDelta(const DeltaSpec& delta, const DeltaSpec& first) {
  return delta.num_heads == first.num_heads && delta.num_key_heads == first.num_key_heads &&
         delta.key_dim == first.key_dim && delta.taps == first.taps &&
         delta.key_dim == delta.value_dim && delta.decay == DecayOf::kHead &&
         delta.decay_form == DecayForm::kSoftplus && delta.decay_rank == 0 &&
         delta.gate_activation == GateActivation::kSilu && delta.gate_rank == 0;
}

bool IsQwenAttention(const AttentionSpec& a) {
  return !a.routed() && a.qk_norm == QkNorm::kHead && !a.window && a.gate && !a.gate_per_head &&
         a.group_order == GroupOrder::kInterleave;
}

// The value heads of each key head, in the order of GGUF files: the first of all key heads, then
// the second ones.
std::vector<int64_t> TiledHeads(const DeltaSpec& delta) {
  const int each = delta.num_heads / delta.num_key_heads;
  std::vector<int64_t> heads;
  for (int i = 0; i < each; ++i) {
    for (int k = 0; k < delta.num_key_heads; ++k) heads.push_back(int64_t{k} * each + i);
  }
  return heads;
}

// Appends the rows of heads of `size` rows each.
void AppendHeads(size_t source, const std::vector<int64_t>& heads, int64_t size,
                 std::vector<Rows>& rows) {
  for (const int64_t head : heads) rows.push_back({source, head * size, size});
}

// The tensors of one layer, composed where they are not the engine's.
class Layer {
 public:
  Layer(const ModelSpec& spec, int layer)
      : d_(spec.hidden_size),
        mixer_("blocks." + std::to_string(layer) + ".attention."),
        feed_forward_("blocks." + std::to_string(layer) + ".feed_forward."),
        delta_(spec.token_mixer(layer)->delta()),
        attention_(spec.token_mixer(layer)->attention()) {
    if (delta_ == nullptr) return;
    keys_ = delta_->recurrence().key_width();
    values_ = delta_->recurrence().value_width();
  }

  const std::string& mixer() const { return mixer_; }
  const std::string& feed_forward() const { return feed_forward_; }
  int64_t queries() const { return int64_t{attention_->num_heads} * attention_->head_dim; }
  int64_t keys() const { return keys_; }
  int64_t values() const { return values_; }
  int64_t channels() const { return 2 * keys_ + values_; }

  // Queries and gates, head by head.
  ComposedTensor GatedQueries() const {
    ComposedTensor made;
    made.sources = {{mixer_ + "q.weight", {queries(), d_}},
                    {mixer_ + "gate.weight", {queries(), d_}}};
    for (int64_t head = 0; head < attention_->num_heads; ++head) {
      AppendHeads(0, {head}, attention_->head_dim, made.rows);
      AppendHeads(1, {head}, attention_->head_dim, made.rows);
    }
    return made;
  }
  // Queries, keys and values of the projections (`suffix` "") or the convolutions ("_conv").
  ComposedTensor Joined(const std::string& suffix, int64_t columns, bool tiled) const {
    ComposedTensor made;
    made.sources = {{mixer_ + "q" + suffix + ".weight", {keys_, columns}},
                    {mixer_ + "k" + suffix + ".weight", {keys_, columns}},
                    {mixer_ + "v" + suffix + ".weight", {values_, columns}}};
    made.rows = {{0, 0, keys_}, {1, 0, keys_}};
    if (tiled) {
      AppendHeads(2, TiledHeads(*delta_), delta_->value_dim, made.rows);
    } else {
      made.rows.push_back({2, 0, values_});
    }
    return made;
  }
  // A tensor with `size` rows for each value head.
  ComposedTensor Tiled(const std::string& part, std::vector<int64_t> shape, int64_t size) const {
    ComposedTensor made;
    made.sources = {{mixer_ + part, std::move(shape)}};
    AppendHeads(0, TiledHeads(*delta_), size, made.rows);
    return made;
  }

 private:
  int64_t d_;
  std::string mixer_, feed_forward_;  // beginnings of names
  const DeltaSpec* delta_;
  const AttentionSpec* attention_;
  int64_t keys_ = 0, values_ = 0;
};

float Same(float v) { return v; }
float MinusOne(float v) { return v - 1.0f; }

ComposedTensor Mapped(const std::string& source, std::vector<int64_t> shape,
                      float (*value)(float)) {
  ComposedTensor made;
  made.sources = {{source, std::move(shape)}};
  made.value = value;
  return made;
}

// Adds tensors to a GGUF file.
class GgufTensors {
 public:
  GgufTensors(const ModelSpec& spec, GgufWriter& file, ComposedWeights& weights)
      : d_(spec.hidden_size), file_(file), weights_(weights) {}

  void Matrix(const std::string& name, const std::string& source, std::vector<int64_t> shape) {
    file_.AddTensor({name, GgufType::kBF16, std::move(shape), {source}});
  }
  void Vector(const std::string& name, const std::string& source, int64_t n) {
    file_.AddTensor({name, GgufType::kF32, {n}, {source}});
  }
  void Composed(const std::string& name, std::vector<int64_t> shape, ComposedTensor tensor) {
    const GgufType type = tensor.value || shape.size() == 1 ? GgufType::kF32 : GgufType::kBF16;
    weights_.Add(name, std::move(tensor));
    file_.AddTensor({name, type, std::move(shape), {name}});
  }

  void Delta(const std::string& to, const Layer& layer, const DeltaSpec& delta) {
    const int64_t heads = delta.num_heads;
    Composed(to + "attn_qkv.weight", {layer.channels(), d_}, layer.Joined("", d_, true));
    Composed(to + "attn_gate.weight", {layer.values(), d_},
             layer.Tiled("gate.weight", {layer.values(), d_}, delta.value_dim));
    Composed(to + "ssm_beta.weight", {heads, d_}, layer.Tiled("beta.weight", {heads, d_}, 1));
    Composed(to + "ssm_alpha.weight", {heads, d_}, layer.Tiled("decay.weight", {heads, d_}, 1));
    ComposedTensor convolution = layer.Joined("_conv", delta.taps, true);
    convolution.value = Same;
    Composed(to + "ssm_conv1d.weight", {layer.channels(), delta.taps}, std::move(convolution));
    ComposedTensor rates = layer.Tiled("decay_log", {heads}, 1);
    rates.value = [](float v) { return static_cast<float>(-std::exp(static_cast<double>(v))); };
    Composed(to + "ssm_a", {heads}, std::move(rates));
    Composed(to + "ssm_dt.bias", {heads}, layer.Tiled("decay_bias", {heads}, 1));
    Vector(to + "ssm_norm.weight", layer.mixer() + "out_norm.weight", delta.value_dim);
    ComposedTensor out;
    out.sources = {{layer.mixer() + "o.weight", {d_, layer.values()}}};
    out.column_blocks = TiledHeads(delta);
    Composed(to + "ssm_out.weight", {d_, layer.values()}, std::move(out));
  }

  void Attention(const std::string& to, const Layer& layer, const AttentionSpec& a) {
    const int64_t keys = int64_t{a.num_kv_heads} * a.head_dim;
    Vector(to + "attn_q_norm.weight", layer.mixer() + "q_norm.weight", a.head_dim);
    Vector(to + "attn_k_norm.weight", layer.mixer() + "k_norm.weight", a.head_dim);
    Composed(to + "attn_q.weight", {2 * layer.queries(), d_}, layer.GatedQueries());
    Matrix(to + "attn_k.weight", layer.mixer() + "k.weight", {keys, d_});
    Matrix(to + "attn_v.weight", layer.mixer() + "v.weight", {keys, d_});
    Matrix(to + "attn_output.weight", layer.mixer() + "o.weight", {d_, layer.queries()});
  }

  void Shared(const std::string& to, const Layer& layer, int64_t width) {
    const std::string from = layer.feed_forward() + "shared.";
    Composed(to + "ffn_gate_inp_shexp.weight", {d_},
             Mapped(layer.feed_forward() + "shared_gate.weight", {1, d_}, Same));
    Matrix(to + "ffn_gate_shexp.weight", from + "gate.weight", {width, d_});
    Matrix(to + "ffn_up_shexp.weight", from + "up.weight", {width, d_});
    Matrix(to + "ffn_down_shexp.weight", from + "down.weight", {d_, width});
  }

 private:
  int64_t d_;
  GgufWriter& file_;
  ComposedWeights& weights_;
};

// How many rotated pairs of a head have positions in time, height and width. They are equal for
// texts.
std::vector<int32_t> Sections(const AttentionSpec& a) {
  const int pairs = a.head_dim / 2;
  return {(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3};
}

// Adds tensors to a folder.
class FolderTensors {
 public:
  FolderTensors(const ModelSpec& spec, ComposedWeights& weights)
      : d_(spec.hidden_size), weights_(weights) {}

  void Plain(std::string name, std::string source, std::vector<int64_t> shape) {
    tensors_.push_back({std::move(name), std::move(source), std::move(shape)});
  }
  void Composed(const std::string& name, std::vector<int64_t> shape, ComposedTensor tensor) {
    weights_.Add(name, std::move(tensor));
    Plain(name, name, std::move(shape));
  }
  // Files have the difference of these norms from 1.
  void Norm(const std::string& name, const std::string& source, int64_t n) {
    Composed(name, {n}, Mapped(source, {n}, MinusOne));
  }

  void Delta(const std::string& to, const Layer& layer, const DeltaSpec& delta) {
    const int64_t heads = delta.num_heads;
    Composed(to + "in_proj_qkv.weight", {layer.channels(), d_}, layer.Joined("", d_, false));
    Plain(to + "in_proj_z.weight", layer.mixer() + "gate.weight", {layer.values(), d_});
    Plain(to + "in_proj_b.weight", layer.mixer() + "beta.weight", {heads, d_});
    Plain(to + "in_proj_a.weight", layer.mixer() + "decay.weight", {heads, d_});
    Composed(to + "conv1d.weight", {layer.channels(), 1, delta.taps},
             layer.Joined("_conv", delta.taps, false));
    Plain(to + "A_log", layer.mixer() + "decay_log", {heads});
    Plain(to + "dt_bias", layer.mixer() + "decay_bias", {heads});
    Plain(to + "norm.weight", layer.mixer() + "out_norm.weight", {delta.value_dim});
    Plain(to + "out_proj.weight", layer.mixer() + "o.weight", {d_, layer.values()});
  }

  void Attention(const std::string& to, const Layer& layer, const AttentionSpec& a) {
    const int64_t keys = int64_t{a.num_kv_heads} * a.head_dim;
    Norm(to + "q_norm.weight", layer.mixer() + "q_norm.weight", a.head_dim);
    Norm(to + "k_norm.weight", layer.mixer() + "k_norm.weight", a.head_dim);
    Composed(to + "q_proj.weight", {2 * layer.queries(), d_}, layer.GatedQueries());
    Plain(to + "k_proj.weight", layer.mixer() + "k.weight", {keys, d_});
    Plain(to + "v_proj.weight", layer.mixer() + "v.weight", {keys, d_});
    Plain(to + "o_proj.weight", layer.mixer() + "o.weight", {d_, layer.queries()});
  }

  // A gated network.
  void Network(const std::string& to, const std::string& from, int64_t width) {
    Plain(to + "gate_proj.weight", from + "gate.weight", {width, d_});
    Plain(to + "up_proj.weight", from + "up.weight", {width, d_});
    Plain(to + "down_proj.weight", from + "down.weight", {d_, width});
  }

  void Experts(const std::string& to, const Layer& layer, const FeedForwardSpec& f) {
    const std::string& from = layer.feed_forward();
    Plain(to + "gate.weight", from + "router.weight", {f.routing->num_experts, d_});
    for (int e = 0; e < f.routing->num_experts; ++e) {
      const std::string expert = "experts." + std::to_string(e) + ".";
      Network(to + expert, from + expert, f.routing->widths[0]);
    }
    Network(to + "shared_expert.", from + "shared.", f.shared_width);
    Plain(to + "shared_expert_gate.weight", from + "shared_gate.weight", {1, d_});
  }

  std::vector<StoredTensor> Take() { return std::move(tensors_); }

 private:
  int64_t d_;
  ComposedWeights& weights_;
  std::vector<StoredTensor> tensors_;
};

}  // namespace

absl::Status CheckQwen35(const ModelSpec& spec, std::string_view option) {
  const int interval = AttentionInterval(spec);
  const DeltaSpec* const first = spec.token_mixer(0)->delta();
  bool same = first != nullptr && interval <= spec.num_layers();
  for (int i = 0; same && i < spec.num_layers(); ++i) {
    const BlockSpec& mixer = *spec.token_mixer(i);
    const FeedForwardSpec& f = spec.feed_forward(i);
    same = (i + 1) % interval == 0
               ? mixer.attention() != nullptr && IsQwenAttention(*mixer.attention())
               : mixer.delta() != nullptr && IsQwenDelta(*mixer.delta(), *first);
    same = same && f.routed() && HasQwenExperts(f) && f.shared_width > 0 && f.shared_gate;
  }
  if (same) return absl::OkStatus();
  return absl::InvalidArgumentError(
      std::string(option) +
      ": expected linear attention with heads of one width, in the last of every few layers dense "
      "attention with normed heads and a gate, and gated experts of one width, top-k by dot "
      "product, beside a shared one, found a shape that Qwen3.5 cannot express");
}

void AddQwen35Gguf(const ModelSpec& spec, GgufWriter& file, ComposedWeights& weights) {
  const std::string arch(kGgufName);
  const AttentionSpec& attention = *FirstAttention(spec);
  const DeltaSpec& delta = *spec.token_mixer(0)->delta();
  AddCommonKeys(spec, attention, arch, file);
  const auto add = [&](const char* key, int value) {
    file.AddU32(arch + "." + key, static_cast<uint32_t>(value));
  };
  add("expert_shared_feed_forward_length", spec.feed_forward(0).shared_width);
  add("full_attention_interval", AttentionInterval(spec));
  add("ssm.conv_kernel", delta.taps);
  add("ssm.state_size", delta.key_dim);
  add("ssm.group_count", delta.num_key_heads);
  add("ssm.time_step_rank", delta.num_heads);
  add("ssm.inner_size", delta.num_heads * delta.value_dim);
  std::vector<int32_t> sections = Sections(attention);
  sections.push_back(0);
  file.AddI32s(arch + ".rope.dimension_sections", sections);

  GgufTensors to(spec, file, weights);
  const int64_t d = spec.hidden_size;
  to.Matrix("token_embd.weight", "embed.weight", {spec.vocab_size, d});
  to.Vector("output_norm.weight", "norm.weight", d);
  to.Matrix("output.weight", "head.weight", {spec.vocab_size, d});
  for (int i = 0; i < spec.num_layers(); ++i) {
    const std::string name = "blk." + std::to_string(i) + ".";
    const Layer layer(spec, i);
    const BlockSpec& mixer = *spec.token_mixer(i);
    to.Vector(name + "attn_norm.weight", layer.mixer() + "norm.weight", d);
    if (mixer.delta() != nullptr) {
      to.Delta(name, layer, *mixer.delta());
    } else {
      to.Attention(name, layer, *mixer.attention());
    }
    to.Vector(name + "post_attention_norm.weight", layer.feed_forward() + "norm.weight", d);
    to.Shared(name, layer, spec.feed_forward(i).shared_width);
    AddExperts(spec, i, file);
  }
}

std::vector<StoredTensor> Qwen35Tensors(const ModelSpec& spec, ComposedWeights& weights) {
  FolderTensors to(spec, weights);
  const int64_t d = spec.hidden_size;
  to.Plain("model.embed_tokens.weight", "embed.weight", {spec.vocab_size, d});
  to.Norm("model.norm.weight", "norm.weight", d);
  to.Plain("lm_head.weight", "head.weight", {spec.vocab_size, d});
  for (int i = 0; i < spec.num_layers(); ++i) {
    const std::string name = "model.layers." + std::to_string(i) + ".";
    const Layer layer(spec, i);
    const BlockSpec& mixer = *spec.token_mixer(i);
    to.Norm(name + "input_layernorm.weight", layer.mixer() + "norm.weight", d);
    if (mixer.delta() != nullptr) {
      to.Delta(name + "linear_attn.", layer, *mixer.delta());
    } else {
      to.Attention(name + "self_attn.", layer, *mixer.attention());
    }
    to.Norm(name + "post_attention_layernorm.weight", layer.feed_forward() + "norm.weight", d);
    to.Experts(name + "mlp.", layer, spec.feed_forward(i));
  }
  return to.Take();
}

Json Qwen35Config(const ModelSpec& spec) {
  const AttentionSpec& attention = *FirstAttention(spec);
  const DeltaSpec& delta = *spec.token_mixer(0)->delta();
  const FeedForwardSpec& f = spec.feed_forward(0);
  Json json = CommonConfig(spec, attention, *f.routing);
  Json kinds = Json::array();
  for (int i = 0; i < spec.num_layers(); ++i) {
    const bool linear = spec.token_mixer(i)->delta() != nullptr;
    kinds.push_back(linear ? "linear_attention" : "full_attention");
  }
  json.update({{"architectures", {"Qwen3_5MoeForCausalLM"}},
               {"model_type", "qwen3_5_moe_text"},
               {"layer_types", std::move(kinds)},
               {"full_attention_interval", AttentionInterval(spec)},
               {"linear_conv_kernel_dim", delta.taps},
               {"linear_key_head_dim", delta.key_dim},
               {"linear_value_head_dim", delta.value_dim},
               {"linear_num_key_heads", delta.num_key_heads},
               {"linear_num_value_heads", delta.num_heads},
               {"shared_expert_intermediate_size", f.shared_width},
               {"rope_parameters",
                {{"rope_type", "default"},
                 {"rope_theta", spec.position.theta},
                 {"partial_rotary_factor", 1.0},
                 {"mrope_interleaved", true},
                 {"mrope_section", Sections(attention)}}}});
  return json;
}

}  // namespace moeserve::testing
