// What the families of Hugging Face's `transformers` have in common: the keys of a decoder's sizes,
// attention, rotary positions and experts, and the names of its tensors. A family's file combines
// these parts and adds what is its own.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/spec/spec.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/huggingface/parts/replaced_experts.h"
#include "model_loaders/architectures/name_table.h"
#include "model_loaders/files/object_reader.h"
#include "nlohmann/json.hpp"

namespace moeserve::huggingface {

// The names of the keys of a model's sizes.
struct SizeKeys {
  std::string_view hidden_size = "hidden_size";
  std::string_view layers = "num_hidden_layers";
  std::string_view positions = "max_position_embeddings";
  std::string_view heads = "num_attention_heads";
};

// The values that a family's configuration class has for keys that config.json omits.
struct DecoderDefaults {
  SizeKeys size_keys = {};
  int max_position_embeddings = 2048;
  std::string_view norm_eps_key = "rms_norm_eps";
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  bool tie_word_embeddings = false;
  std::optional<int> bos_token_id = 1;
  std::vector<int32_t> eos_token_ids = {2};
  double partial_rotary_factor = 1.0;
  std::optional<int> num_key_value_heads = std::nullopt;  // nullopt: as many as there are heads
  // If set, "original_max_position_embeddings" beside the rotary parameters is the one that counts.
  std::optional<int> original_max_position_embeddings = std::nullopt;
  bool rope = true;    // rotary positions
  bool mxfp4 = false;  // quantized files of the family have MXFP4 weights; else FP8
};

// The names of the keys of a family's experts; all three keys are required.
struct ExpertKeys {
  std::string_view count = "num_experts";
  std::string_view width = "moe_intermediate_size";
  std::string_view selected = "num_experts_per_tok";
};

// The values that a family's configuration class has for keys of DecoderConfig::DeepSeekExperts().
struct DeepSeekDefaults {
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;
  int n_group = 1;
  int topk_group = 1;
  int n_shared_experts = 0;
  std::string_view factor_key = "routed_scaling_factor";
  std::string_view shared_key = "n_shared_experts";
};

// Reads one config.json. Skeleton() comes first; Finish() comes last and returns all errors.
//
// A key that no function reads is refused, because it may change the model's answers, unless its
// value is null or the table of neutral_keys.cc says that it does not. Ignore() names such keys of
// one family.
class DecoderConfig {
 public:
  // Both arguments must outlive the object.
  DecoderConfig(const nlohmann::json& json, const StoredNames& stored);

  // Reads sizes, token ids, norm and rotary positions into spec().
  void Skeleton(const DecoderDefaults& defaults);

  // Reads "num_attention_heads", "num_key_value_heads" and "head_dim". If "num_key_value_heads" is
  // null, there are as many kv heads as heads. Without "head_dim", it is `head_dim`; if one of them
  // is null, hidden_size / num_attention_heads.
  AttentionSpec Attention(std::optional<int> head_dim = std::nullopt);

  // Reads the width of a dense feed-forward, gated and without bias.
  FeedForwardSpec Dense(std::string_view width_key = "intermediate_size");
  // Reads the experts of a routed feed-forward, gated and without bias, with top-k selection. Files
  // of different versions have the number of experts as "num_experts", "num_local_experts" or
  // "n_routed_experts"; each of these names stands for the others.
  FeedForwardSpec Experts(const ExpertKeys& keys);

  // Reads experts with the router of DeepSeek-V3: sigmoid gates, a choice bias, groups scored by
  // the sum of two, "norm_topk_prob", "routed_scaling_factor", and shared experts.
  FeedForwardSpec DeepSeekExperts(const ExpertKeys& keys, const DeepSeekDefaults& defaults);
  // Returns the width of the shared experts, which are stored as one: the number of them, from the
  // key `count`, times "moe_intermediate_size". Null is 0. Call after Experts().
  int SharedWidth(std::string_view count, int fallback);

  // Layers after the last one, for the prediction of several tokens, are not needed.
  void IgnoreNextTokenLayers(int count);
  // If the caller wants prediction layers and the files store one, the first of them becomes
  // ModelSpec::prediction, a layer like `layer`. `rules` are those of its tensors beside it.
  // Without `prefix` it is numbered behind the model's layers (PredictionNames). The texts must be
  // literals.
  void Prediction(const LayerSpec& layer, std::span<const TensorRule> rules,
                  std::string_view prefix = {});
  // Both, for families with the names of DeepSeek-V3.
  void NextTokenLayers(int count, const LayerSpec& layer);

  // Reads rotary positions with their scaling: "rope_parameters", or the older keys "rope_theta",
  // "rope_scaling" and "partial_rotary_factor".
  PositionSpec Rope(double default_theta, double default_fraction);
  // Reads one object of rotary parameters, "rope_parameters" or a part of it. `path` is its name in
  // error messages.
  PositionSpec RopeFrom(const nlohmann::json& json, const std::string& path, double default_theta);

  // Returns whether `json` is an object with rotary parameters for each type of layer.
  static bool IsRopeOfLayers(const nlohmann::json& json);

  // Reads the list `key`, which has one of `names` for each layer, and returns their indices.
  // Reports other names as not supported. nullopt if there is no such list.
  std::optional<std::vector<int>> LayerNames(std::string_view key,
                                             std::span<const std::string_view> names);
  // Reads the list "layer_types" and returns, for each layer, whether it uses the sliding window.
  // Without the list, `fallback` decides. Reports layers of other types as not supported.
  std::vector<bool> SlidingLayers(const std::function<bool(int)>& fallback);
  // Does the same with "mlp_layer_types" and whether a layer has experts. SparseFrom(): without the
  // list, those from the layer "first_k_dense_replace" on have.
  std::vector<bool> SparseLayers(const std::function<bool(int)>& fallback);
  std::vector<bool> SparseFrom(int default_first);
  // Returns which layers have experts by "mlp_only_layers", a list of the others, and
  // "decoder_sparse_step". Without the list, those of `dense_layers` have none.
  std::function<bool(int)> SparseByStep(std::vector<int> dense_layers = {});

  // Reads the name of an activation function. `fallback` is the name if the key is absent.
  ActivationKind Activation(std::string_view key = "hidden_act",
                            std::string_view fallback = "silu");
  // Returns `block` with the activation function that the file names.
  FeedForwardSpec WithActivation(FeedForwardSpec block);

  // Reads the size of the sliding window. Returns `fallback` if the key is absent, nullopt if its
  // value is null.
  std::optional<int> Window(std::optional<int> fallback = std::nullopt);

  // Returns whether the file has `key` with the value null, which often differs from no such key.
  bool IsNull(std::string_view key) const;
  // Reads the number of kv heads; `heads` is that of the query heads.
  int KvHeads(int heads);

  // Reads a soft cap. Returns `fallback` if the key is absent, 0 if its value is null.
  double Cap(std::string_view key, double fallback);

  // Returns the first of several names of one key that the file has; else the first.
  std::string_view FirstOf(std::initializer_list<std::string_view> keys) const;

  // The keys do not change a model's answers.
  void Ignore(std::initializer_list<std::string_view> keys);
  // Refuses any value of `key` except null and `value`, because the engine computes only these.
  void Require(std::string_view key, const nlohmann::json& value);

  // Texts have at most `tokens` tokens, above 0, for the reason `why`
  // (CheckpointConfig::context_reason). Call after the rotary positions were read, whose scaling
  // depends on the number of positions.
  void LimitContext(int64_t tokens, std::string_view why);

  // Adds a sentence to CheckpointConfig::decisions.
  void Decide(std::string_view sentence) { decisions_.emplace_back(sentence); }

  ObjectReader& keys() { return reader_; }
  Problems& problems() { return problems_; }
  ModelSpec& spec() { return spec_; }
  int layers() const { return layers_; }
  // Sets the number of layers, where it is not that of the key which Skeleton() read.
  void SetLayers(int layers) { layers_ = layers; }
  bool ok() const { return problems_.empty(); }

  // Returns whether the files have a tensor of this name.
  bool Stores(std::string_view name) const { return stored_.contains(name); }
  // Returns whether the files have tensors, of which one has a name that matches `pattern` (see
  // NameTableConfig).
  bool StoresAny(std::string_view pattern) const;
  const StoredNames& stored() const { return stored_; }
  // The files may call the tensors whose names have the prefix `rule` in the rules by the first of
  // the prefixes `files` that they use; "" is used if no other is. The texts must be literals.
  void Prefix(std::string_view rule, std::initializer_list<std::string_view> files);
  void Mapping(const NameMapping& mapping) { mapping_ = mapping; }
  // The stored tables of positions have this many rows in front that no token has.
  // SkipPositions(): the file counts them as positions.
  void StoredPositionsFrom(int rows);
  void SkipPositions(int rows);
  // The model does not need these tensors, whose names are patterns.
  void IgnoreTensors(std::initializer_list<std::string_view> patterns) {
    ignored_tensors_.insert(ignored_tensors_.end(), patterns);
  }
  // Nor those whose names begin like this, or those of which one number is in a range.
  void IgnorePrefix(std::string_view prefix) { ignored_prefixes_.emplace_back(prefix); }
  void IgnoreRange(const IgnoredRange& range) { ignored_ranges_.push_back(range); }

  // Adds rules for tensors, and names of configuration keys.
  void Tensors(std::span<const TensorRule> rules);
  void Tensors(std::initializer_list<std::span<const TensorRule>> tables);
  // The same for layers whose mixer of tokens is of this kind.
  void MixerTensors(BlockKind mixer, std::initializer_list<std::span<const TensorRule>> tables);
  void Keys(std::span<const KeyRule> rules);

  // Builds the configuration of layers that are all alike.
  ConfigResult Finish(const AttentionSpec& attention, const FeedForwardSpec& feed_forward);
  // Builds that of layers with experts from the layer `first` on, and dense ones before; or of
  // those with experts where `sparse` says so.
  ConfigResult Finish(const AttentionSpec& attention, const FeedForwardSpec& dense,
                      const FeedForwardSpec& experts, int first);
  ConfigResult Finish(const AttentionSpec& attention, const FeedForwardSpec& dense,
                      const FeedForwardSpec& experts, const std::vector<bool>& sparse);
  // Builds the layers and the configuration. `layer` returns the spec of a layer, or its blocks; it
  // is called only if there are no errors.
  ConfigResult Finish(const std::function<LayerSpec(int)>& layer);
  using BlocksOfLayer = std::function<std::vector<BlockSpec>(int)>;
  ConfigResult FinishBlocks(const BlocksOfLayer& layer);
  // Builds that of an encoder-decoder. spec() has the settings of the decoder, `encoder` those of
  // the encoder's stack; what both have in common is copied. Both have `layers` of their own.
  ConfigResult FinishPair(ModelSpec encoder, int encoder_layers, const BlocksOfLayer& encoder_layer,
                          const BlocksOfLayer& decoder_layer);

 private:
  // Returns the entries of LayerNames() as whether they are `yes`; else those of `fallback`.
  std::vector<bool> LayersOf(std::string_view key, std::string_view no, std::string_view yes,
                             const std::function<bool(int)>& fallback);
  // Returns the name under which the file has the number of experts.
  std::string_view ExpertCountKey(std::string_view own);
  // Decides whether the LM head is the embedding matrix where the configuration does not say it.
  void TieByTensors();
  // Reads the sections of rotary positions of images.
  void ReadSections(ObjectReader& reader);
  absl::Status CheckSections() const;
  RopeScaling ScalingOf(ObjectReader& reader, std::string_view type);
  RopeScaling LongRope(ObjectReader& reader);
  // Returns the context length before it was extended.
  double OriginalPositions(ObjectReader& reader);
  // Reads a key and notes that it is ignored.
  void IgnoreKey(std::string_view key);
  // Checks what was read so far.
  absl::Status Judge();
  // Reads which experts a pruned model has replaced.
  void ReadReplaced();
  // Returns the configuration with the layers of spec().
  ConfigResult Build();
  // Ignores or refuses the keys that were not read.
  void JudgeUnread();
  // Reads "quantization_config".
  void ReadQuantization(bool mxfp4);

  const nlohmann::json& original_;
  const nlohmann::json json_;  // without the keys whose value is null
  const StoredNames& stored_;
  Problems problems_;
  ObjectReader reader_;
  ModelSpec spec_;
  DecoderDefaults defaults_;
  int layers_ = 0;
  int expert_width_ = 0;
  std::vector<TensorRule> tensors_;
  std::vector<KeyRule> key_rules_;
  std::vector<std::string_view> ignored_tensors_;
  std::vector<std::string> ignored_prefixes_;
  std::vector<IgnoredRange> ignored_ranges_;
  std::vector<std::string> ignored_keys_;
  std::vector<std::string> decisions_;
  std::string context_reason_;
  std::optional<BlockFormat> fp8_;
  NamePrefix prefix_;
  NameMapping mapping_;
  std::optional<LayerSpec> prediction_;
  PredictionNames prediction_names_;
  std::string prediction_prefix_;
  ReplacedExperts replaced_experts_;
  int positions_from_ = 0;
  int64_t most_pairs_ = 0;    // of the sections of images' positions
  std::string sections_key_;  // their key
};

// Returns an object without the keys whose value is null.
nlohmann::json WithoutNulls(const nlohmann::json& json);

// Reads the factors of Granite models: "embedding_multiplier", "residual_multiplier" and
// "logits_scaling", which divides the logits.
void ReadGraniteFactors(DecoderConfig& config);

// Tables of tensor names that several families share.
std::span<const TensorRule> EmbeddingTensors();   // model.embed_tokens, model.norm, lm_head
std::span<const TensorRule> PreNormTensors();     // input_layernorm, post_attention_layernorm
std::span<const TensorRule> OutputNormTensors();  // post_attention_layernorm,
                                                  // post_feedforward_layernorm
std::span<const TensorRule> AttentionTensors();   // self_attn.{q,k,v,o}_proj
std::span<const TensorRule> QkNormTensors();      // self_attn.{q,k}_norm
// All of the norms above, stored as offsets from 1. They come before the other tables.
std::span<const TensorRule> OffsetNormTensors();
std::span<const TensorRule> DenseTensors();         // mlp.{gate,up,down}_proj
std::span<const TensorRule> ExpertTensors();        // mlp.gate, mlp.experts
std::span<const TensorRule> BlockSparseTensors();   // block_sparse_moe.gate and .experts
std::span<const TensorRule> SharedExpertTensors();  // mlp.shared_experts, choice bias of the router
std::span<const TensorRule> OneSharedExpertTensors();  // mlp.shared_expert, its gate
// The rows of queries, keys and values in one matrix, and other names, under `attention`.
std::span<const TensorRule> FusedAttentionTensors();

}  // namespace moeserve::huggingface
