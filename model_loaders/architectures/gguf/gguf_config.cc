#include "model_loaders/architectures/gguf/gguf_config.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/message.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_keys.h"
#include "model_loaders/architectures/name_table.h"

namespace moeserve {
namespace {

constexpr std::string_view kMetadata = "metadata";
constexpr std::string_view kRopeFactors = "rope_freqs.weight";

// What the architectures of GGUF files differ in.
struct Family {
  std::string_view name;  // value of general.architecture
  // The rows of query and key projections are permuted, so that the dimensions that rotary
  // positions rotate together are adjacent.
  bool adjacent_pairs = false;
  bool always_biased = false;  // q, k and v have a bias, even if the file lacks it
  QkNorm qk_norm = QkNorm::kNone;
  enum class Experts { kNone, kIfCounted, kAlways } experts = Experts::kNone;
  std::string_view expert_width = ".expert_feed_forward_length";
  bool renormalize = false;
  bool shared = false;  // a shared expert with a gate
};

using Experts = Family::Experts;

constexpr Family kFamilies[] = {
    {.name = "llama",
     .adjacent_pairs = true,
     .experts = Experts::kIfCounted,
     .expert_width = ".feed_forward_length",
     .renormalize = true},
    {.name = "olmoe",
     .qk_norm = QkNorm::kFull,
     .experts = Experts::kAlways,
     .expert_width = ".feed_forward_length"},
    {.name = "qwen2", .always_biased = true},
    {.name = "qwen2moe", .always_biased = true, .experts = Experts::kAlways, .shared = true},
    {.name = "qwen3", .qk_norm = QkNorm::kHead},
    {.name = "qwen3moe",
     .qk_norm = QkNorm::kHead,
     .experts = Experts::kAlways,
     .renormalize = true},
};

// Experts are stacked. In older files, each has tensors of its own; newer ones may join gate and
// up, and q, k and v.
constexpr TensorRule kTensors[] = {
    {"embed.weight", "token_embd.weight"},
    {"norm.weight", "output_norm.weight"},
    {"head.weight", "output.weight"},
    {"blocks.*.attention.norm.weight", "blk.*.attn_norm.weight"},
    {"blocks.*.attention.q.weight", "blk.*.attn_q.weight"},
    {"blocks.*.attention.k.weight", "blk.*.attn_k.weight"},
    {"blocks.*.attention.v.weight", "blk.*.attn_v.weight"},
    {"blocks.*.attention.o.weight", "blk.*.attn_output.weight"},
    {"blocks.*.attention.q.bias", "blk.*.attn_q.bias"},
    {"blocks.*.attention.k.bias", "blk.*.attn_k.bias"},
    {"blocks.*.attention.v.bias", "blk.*.attn_v.bias"},
    {"blocks.*.attention.q.weight", "blk.*.attn_qkv.weight", 0, 3, RowOrder::kQkv},
    {"blocks.*.attention.k.weight", "blk.*.attn_qkv.weight", 1, 3, RowOrder::kQkv},
    {"blocks.*.attention.v.weight", "blk.*.attn_qkv.weight", 2, 3, RowOrder::kQkv},
    {"blocks.*.attention.q.bias", "blk.*.attn_qkv.bias", 0, 3, RowOrder::kQkv},
    {"blocks.*.attention.k.bias", "blk.*.attn_qkv.bias", 1, 3, RowOrder::kQkv},
    {"blocks.*.attention.v.bias", "blk.*.attn_qkv.bias", 2, 3, RowOrder::kQkv},
    {"blocks.*.attention.out_bias", "blk.*.attn_output.bias"},
    {"blocks.*.attention.q_norm.weight", "blk.*.attn_q_norm.weight"},
    {"blocks.*.attention.k_norm.weight", "blk.*.attn_k_norm.weight"},
    {"blocks.*.feed_forward.norm.weight", "blk.*.ffn_norm.weight"},
    {"blocks.*.feed_forward.gate.weight", "blk.*.ffn_gate.weight"},
    {"blocks.*.feed_forward.up.weight", "blk.*.ffn_up.weight"},
    {"blocks.*.feed_forward.down.weight", "blk.*.ffn_down.weight"},
    {"blocks.*.feed_forward.gate.bias", "blk.*.ffn_gate.bias"},
    {"blocks.*.feed_forward.up.bias", "blk.*.ffn_up.bias"},
    {"blocks.*.feed_forward.down.bias", "blk.*.ffn_down.bias"},
    {"blocks.*.feed_forward.router.weight", "blk.*.ffn_gate_inp.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "blk.*.ffn_gate_exps.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "blk.*.ffn_up_exps.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight", "blk.*.ffn_down_exps.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "blk.*.ffn_gate.*.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "blk.*.ffn_up.*.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight", "blk.*.ffn_down.*.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "blk.*.ffn_gate_up_exps.weight", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight", "blk.*.ffn_gate_up_exps.weight", 1, 2},
    {"blocks.*.feed_forward.shared.gate.weight", "blk.*.ffn_gate_shexp.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "blk.*.ffn_up_shexp.weight"},
    {"blocks.*.feed_forward.shared.down.weight", "blk.*.ffn_down_shexp.weight"},
    {"blocks.*.feed_forward.shared_gate.weight", "blk.*.ffn_gate_inp_shexp.weight"},
};

constexpr KeyRule kKeys[] = {
    {"vocab_size", ".vocab_size"},
    {"hidden_size", ".embedding_length"},
    {"num_hidden_layers", ".block_count"},
    {"max_position_embeddings", ".context_length"},
    {"bos_token_id", "tokenizer.ggml.bos_token_id"},
    {"eos_token_id", "tokenizer.ggml.eos_token_id"},
    {"norm.eps", ".attention.layer_norm_rms_epsilon"},
    {"position.theta", ".rope.freq_base"},
    {"position.fraction", ".rope.dimension_count"},
    {"position.scaling.factor", ".rope.scaling.factor"},
    {"position.scaling.original_positions", ".rope.scaling.original_context_length"},
    {"attention.num_heads", ".attention.head_count"},
    {"attention.num_kv_heads", ".attention.head_count_kv"},
    {"attention.head_dim", ".attention.key_length"},
    {"attention.scale", ".attention.scale"},
    {"num_heads", ".attention.head_count"},
    {"num_kv_heads", ".attention.head_count_kv"},
    {"feed_forward.width", ".feed_forward_length"},
    {"feed_forward.shared_width", ".expert_shared_feed_forward_length"},
    {"feed_forward.routing.num_experts", ".expert_count"},
    {"feed_forward.routing.select.k", ".expert_used_count"},
    {"feed_forward.routing.scale", ".expert_weights_scale"},
    {"num_experts", ".expert_count"},
    {"routing.num_experts", ".expert_count"},
};

// The names of the keys of one file, which the rules refer to. A base class, so that it exists
// before NameTableConfig.
struct KeyNames {
  std::deque<std::string> names;
  std::vector<KeyRule> rules;

  explicit KeyNames(const Family& family) {
    const auto add = [&](std::string_view model, std::string_view key) {
      names.push_back(key.starts_with('.') ? Concat(family.name, key) : std::string(key));
      rules.push_back({model, names.back()});
    };
    for (const KeyRule& rule : kKeys) add(rule.model, rule.file);
    add("feed_forward.routing.widths", family.expert_width);
  }
};

class GgufConfig final : private KeyNames, public NameTableConfig {
 public:
  GgufConfig(const Family& family, const StoredNames& stored)
      : KeyNames(family), NameTableConfig(kTensors, rules, stored) {
    key_place = kMetadata;
    ignored.push_back(kRopeFactors);
    ignored.push_back("blk.*.attn_rot_embd");  // frequencies, in files of early versions
  }

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override {
    std::optional<TensorPlace> place = NameTableConfig::Place(tensor);
    if (!place.has_value()) return place;
    const std::string_view name = tensor.name;
    if (place->name.find(".attn_qkv.") != std::string::npos) {
      place->follows_from = "[(num_heads + 2 * num_kv_heads) * attention.head_dim, hidden_size]";
    }
    const auto is = [&](std::string_view part) { return name.find(part) != name.npos; };
    if (paired_rows != 0 && (is(".attention.q.") || is(".attention.k."))) {
      place->paired_rows = paired_rows;
    }
    // Most files store the gate, a matrix of one row, as a vector.
    if (vector_gate && name.ends_with(".shared_gate.weight")) {
      place->shape = {tensor.shape.back()};
      place->follows_from = "[hidden_size]";
    }
    return place;
  }

  int64_t paired_rows = 0;  // TensorPlace::paired_rows of query and key projections
  bool vector_gate = false;
};

std::string FamilyNames() {
  std::string names;
  for (size_t i = 0; i < std::size(kFamilies); ++i) {
    if (i > 0) names += i + 1 == std::size(kFamilies) ? " or " : ", ";
    names += Quoted(kFamilies[i].name);
  }
  return names;
}

// Reads the configuration of one file.
class ConfigReader {
 public:
  ConfigReader(const GgufFile& file, const WeightFiles& weights, const Family& family)
      : file_(file), weights_(weights), family_(family), keys_(file, family.name, &problems_) {
    for (const WeightFiles::Location& tensor : weights.tensors()) {
      stored_.insert(tensor.entry->name);
    }
  }

  Result<std::unique_ptr<const CheckpointConfig>> Read() {
    auto config = std::make_unique<GgufConfig>(family_, stored_);
    ModelSpec& spec = config->spec;
    ReadSizes(spec);
    ReadTokenIds(spec);
    AttentionSpec attention = ReadAttention(spec);
    spec.position = ReadPosition(attention.head_dim);
    const FeedForwardSpec feed_forward = ReadFeedForward();
    RefuseSettings();
    const std::string prefix = Concat(Printable(file_.file_name()), ": ", kMetadata);
    MOESERVE_RETURN_IF_ERROR(problems_.ToStatus(prefix));
    // With all dimensions rotated, the rows can be put into the order of other formats, which makes
    // the results equal to theirs to the last bit.
    if (family_.adjacent_pairs) {
      if (spec.position.fraction == 1.0 && attention.head_dim % 2 == 0) {
        config->paired_rows = attention.head_dim;
      } else {
        spec.position.pairing = RopePairing::kInterleaved;
      }
    }
    const WeightFiles::Location* gate = weights_.Find("blk.0.ffn_gate_inp_shexp.weight");
    config->vector_gate = gate == nullptr || gate->entry->shape.size() == 1;
    spec.layers.assign(static_cast<size_t>(layers_), LayerSpec{attention, feed_forward});
    const absl::Status valid = Validate(spec);
    if (!valid.ok()) {
      const std::string message(valid.message());
      return absl::Status(valid.code(), Concat(prefix, ": ", config->AsInFile(message)));
    }
    return config;
  }

 private:
  bool Has(const std::string& tensor) const { return stored_.contains(tensor); }

  void ReadSizes(ModelSpec& spec) {
    layers_ = keys_.Int(".block_count");
    // Every layer has tensors, so a small file cannot demand long lists of them.
    const int64_t most = std::min<int64_t>(kMaxLayers, static_cast<int64_t>(stored_.size()));
    if (problems_.empty() && (layers_ < 1 || layers_ > most)) {
      keys_.Fault(".block_count",
                  Concat("an integer in [1, ", most, "] (the files have ", stored_.size(),
                         stored_.size() == 1 ? " tensor)" : " tensors)"),
                  std::to_string(layers_));
    }
    spec.hidden_size = keys_.Int(".embedding_length");
    spec.max_position_embeddings = keys_.Int(".context_length");
    spec.norm.eps = static_cast<float>(keys_.Real(".attention.layer_norm_rms_epsilon"));
    spec.tie_word_embeddings = !Has("output.weight");
    const WeightFiles::Location* const embedding = weights_.Find("token_embd.weight");
    const int64_t rows = embedding == nullptr ? 0 : embedding->entry->shape.front();
    spec.vocab_size = keys_.Int(".vocab_size", rows > 0 && rows <= kMaxVocabulary
                                                   ? std::optional(static_cast<int>(rows))
                                                   : std::nullopt);
  }

  void ReadTokenIds(ModelSpec& spec) {
    spec.bos_token_id = keys_.OptionalInt("tokenizer.ggml.bos_token_id");
    // The ids that end a text, a turn and a message.
    for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                            "tokenizer.ggml.eom_token_id"}) {
      const std::optional<int> id = keys_.OptionalInt(key);
      std::vector<int32_t>& ids = spec.eos_token_ids;
      if (id.has_value() && std::find(ids.begin(), ids.end(), *id) == ids.end()) ids.push_back(*id);
    }
  }

  AttentionSpec ReadAttention(const ModelSpec& spec) {
    AttentionSpec attention;
    attention.num_heads = keys_.Int(".attention.head_count");
    attention.num_kv_heads = keys_.Int(".attention.head_count_kv", attention.num_heads);
    const int derived = attention.num_heads > 0 ? spec.hidden_size / attention.num_heads : 0;
    attention.head_dim = keys_.Int(".attention.key_length", derived);
    keys_.Require(".attention.value_length", attention.head_dim);
    const double scale = keys_.Real(".attention.scale", 0.0);
    if (scale != 0.0) {
      attention.scale = scale;
    } else if (attention.head_dim > 0) {
      attention.scale = 1.0 / std::sqrt(attention.head_dim);
    }
    attention.bias =
        family_.always_biased || Has("blk.0.attn_q.bias") || Has("blk.0.attn_qkv.bias");
    attention.out_bias = Has("blk.0.attn_output.bias");
    attention.qk_norm = family_.qk_norm;
    return attention;
  }

  PositionSpec ReadPosition(int head_dim) {
    PositionSpec position;
    position.theta = keys_.Real(".rope.freq_base", 10000.0);
    const int rotated = keys_.Int(".rope.dimension_count", head_dim);
    if (head_dim > 0) position.fraction = static_cast<double>(rotated) / head_dim;
    position.scaling = ReadScaling(rotated);
    return position;
  }

  RopeScaling ReadScaling(int rotated) {
    RopeScaling s;
    const double old_factor = keys_.Real(".rope.scale_linear", 1.0);
    s.factor = keys_.Real(".rope.scaling.factor", old_factor);
    if (s.factor == 0.0) s.factor = 1.0;  // stands for "not set"
    // A factor without a type has always meant linear scaling.
    const std::string type(
        keys_.Text(".rope.scaling.type").value_or(s.factor == 1.0 ? "none" : "linear"));
    keys_.Ignore(".rope.scaling.finetuned");
    const bool factors = Has(std::string(kRopeFactors));
    if (type == "yarn") {
      s.kind = RopeScalingKind::kYarn;
      s.original_positions = keys_.Real(".rope.scaling.original_context_length");
      s.beta_fast = keys_.Real(".rope.scaling.yarn_beta_fast", 32.0);
      s.beta_slow = keys_.Real(".rope.scaling.yarn_beta_slow", 1.0);
      s.magnitude = keys_.Real(".rope.scaling.attn_factor", 1.0);
      if (s.factor > 1.0) s.magnitude *= 0.1 * std::log(s.factor) + 1.0;
    } else if (type == "linear") {
      s.kind = s.factor == 1.0 ? RopeScalingKind::kNone : RopeScalingKind::kLinear;
      keys_.Ignore(".rope.scaling.original_context_length");
    } else if (type == "none") {
      s.factor = 1.0;
      keys_.Ignore(".rope.scaling.original_context_length");
    } else {
      keys_.Fault(".rope.scaling.type", R"("none", "linear" or "yarn")", Quoted(type));
    }
    if (!factors) return s;
    if (s.kind != RopeScalingKind::kNone) {
      keys_.Fault(".rope.scaling.type", Concat("\"none\" with a tensor ", Quoted(kRopeFactors)),
                  Quoted(type));
      return s;
    }
    return FromFactors(rotated);
  }

  // Reads the tensor of divisors, one for each frequency, in which Llama 3 stores its scaling.
  RopeScaling FromFactors(int rotated) {
    const auto fault = [&](std::string_view expected, std::string_view found) {
      problems_.Add(
          Concat("tensor ", Quoted(kRopeFactors), ": expected ", expected, ", found ", found));
      return RopeScaling();
    };
    const WeightFiles::Location& tensor = *weights_.Find(kRopeFactors);
    const std::vector<int64_t> shape = {rotated / 2};
    if (tensor.entry->type != ElementType::kF32 || tensor.entry->shape != shape) {
      return fault(Concat("F32 ", ShapeText(shape)),
                   Concat(Name(tensor.entry->type), ' ', ShapeText(tensor.entry->shape)));
    }
    const Result<TensorData> data = tensor.file->Read(*tensor.entry);
    if (!data.ok()) return fault("data", std::string(data.status().message()));
    RopeScaling s;
    s.kind = RopeScalingKind::kFactors;
    for (int i = 0; i < rotated / 2; ++i) {
      float factor = 0.0f;
      std::memcpy(&factor, data->bytes.data() + static_cast<size_t>(i) * sizeof(factor),
                  sizeof(factor));
      if (!(factor > 0.0f) || !std::isfinite(factor)) {
        return fault("numbers above 0", Concat("another value at index ", i));
      }
      s.factors.push_back(factor);
    }
    const bool neutral =
        std::all_of(s.factors.begin(), s.factors.end(), [](double f) { return f == 1.0; });
    return neutral ? RopeScaling() : s;
  }

  FeedForwardSpec ReadFeedForward() {
    FeedForwardSpec block;
    const int experts = keys_.Int(
        ".expert_count", family_.experts == Experts::kAlways ? std::nullopt : std::optional(0));
    const int selected =
        keys_.Int(".expert_used_count", experts == 0 ? std::optional(0) : std::nullopt);
    const bool routed = family_.experts == Experts::kAlways || experts != 0;
    if (family_.experts == Experts::kNone && experts != 0) {
      keys_.Fault(".expert_count", "0", std::to_string(experts));
    }
    if (!routed) {
      block.width = keys_.Int(".feed_forward_length");
      block.expert.bias = Has("blk.0.ffn_up.bias");
      return block;
    }
    // In most files with experts, this is the width of dense layers, of which there are none.
    const std::optional<int> dense = keys_.OptionalInt(".feed_forward_length");
    RoutedLayerSpec routing;
    routing.num_experts = experts;
    routing.select.k = selected;
    routing.renormalize = keys_.Bool(".expert_weights_norm", family_.renormalize);
    const double scale = keys_.Real(".expert_weights_scale", 1.0);
    routing.scale = scale == 0.0 ? 1.0 : scale;  // 0 stands for "not set"
    keys_.Require(".expert_gating_func", 1);     // softmax
    for (const char* key : {".leading_dense_block_count", ".expert_group_count",
                            ".expert_group_used_count", ".nextn_predict_layers"}) {
      keys_.Require(key, 0);
    }
    // Early files of qwen2moe have no keys for the widths of experts.
    const bool early = family_.shared && dense.has_value() && selected > 0;
    const int width =
        keys_.Int(family_.expert_width, early ? std::optional(*dense / selected) : std::nullopt);
    const int64_t most = layers_ > 0 ? kMaxExpertsOfModel / layers_ : kMaxExperts;
    const bool counted = keys_.Find(".expert_count") != nullptr;
    if (counted && (experts < 1 || experts > std::min<int64_t>(kMaxExperts, most))) {
      keys_.Fault(".expert_count",
                  Concat("at least 1 expert, at most ", kMaxExperts, " in a layer and ",
                         kMaxExpertsOfModel, " in all layers"),
                  Concat(experts, " (", keys_.NameOf(".block_count"), " is ", layers_, ')'));
    } else if (counted) {
      routing.widths.assign(static_cast<size_t>(experts), width);
    }
    if (family_.shared) {
      block.shared_width = keys_.Int(".expert_shared_feed_forward_length", dense);
      block.shared_gate = true;
    }
    block.routing = std::move(routing);
    return block;
  }

  void RefuseSettings() {
    keys_.Ignore(".tensor_data_layout");
    keys_.Ignore(".pooling_type");
    keys_.Require(".attention.causal", 1);
    for (const char* key : {".attention.sliding_window", ".attention.max_alibi_bias",
                            ".attention.clamp_kqv", ".use_parallel_residual"}) {
      keys_.Require(key, 0);
    }
    keys_.RefuseOthers();
  }

  const GgufFile& file_;
  const WeightFiles& weights_;
  const Family& family_;
  Problems problems_;
  GgufKeys keys_;
  StoredNames stored_;
  int layers_ = 0;
};

}  // namespace

Result<std::unique_ptr<const CheckpointConfig>> ReadGgufConfig(const GgufFile& file,
                                                               const WeightFiles& weights) {
  Problems problems;
  GgufKeys keys(file, "", &problems);
  const std::string prefix = Concat(Printable(file.file_name()), ": ", kMetadata);
  const std::string_view kind = keys.Text("general.type").value_or("model");
  if (kind != "model") keys.Fault("general.type", "\"model\"", Quoted(kind));
  const std::optional<std::string_view> name = keys.Text("general.architecture");
  const auto family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                   [&](const Family& f) { return f.name == name; });
  if (family == std::end(kFamilies)) {
    keys.Fault("general.architecture", FamilyNames(), name.has_value() ? Quoted(*name) : "none");
  }
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(prefix));
  return ConfigReader(file, weights, *family).Read();
}

}  // namespace moeserve
