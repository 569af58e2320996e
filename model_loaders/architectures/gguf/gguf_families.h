// The architectures of GGUF files that this server reads, and what they differ in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "engine/spec/spec.h"

namespace moeserve {

struct GgufFamily {
  // Which of the n rotated dimensions of a head are rotated together.
  enum class Pairs : uint8_t {
    kHalves,    // i and i + n / 2
    kPermuted,  // the same in the original, but converters permute the rows of query and key
                // projections, so that a pair is adjacent in the file
    kAdjacent,  // 2 i and 2 i + 1, in the original as well
  };
  enum class Norms : uint8_t {
    kInput,          // attn_norm, ffn_norm
    kPostAttention,  // the same, but that of the feed-forward is called post_attention_norm
    kBoth,           // attn_norm, post_attention_norm, ffn_norm, post_ffw_norm
    kOne,            // attn_norm alone, because layers have one block
    kShared,         // attn_norm alone, which both blocks read; their outputs are added together
  };
  // What takes the place of attention in some layers. Which ones, follows from the numbers of kv
  // heads, which are 0 there; with kDelta, every n-th layer has attention.
  enum class Recurrent : uint8_t {
    kNone,
    kShortConvolution,
    kDelta,         // a decay for each head
    kChannelDelta,  // a decay for each channel of the keys
    kBoundedDelta,  // the same, and decays have a lower bound
    kStateSpace,
  };
  enum class Experts : uint8_t { kNone, kIfCounted, kAlways };
  enum class Shared : uint8_t {
    kNone,
    kGated,  // a shared expert with a gate
    kPlain,  // shared experts, stored as one
    kDense,  // the dense network is a branch beside the experts, with norms of its own
  };

  std::string_view name;  // value of general.architecture

  // Attention.
  Pairs pairs = Pairs::kHalves;
  Norms norms = Norms::kInput;
  bool always_biased = false;  // q, k and v have a bias, even if the file lacks it
  QkNorm qk_norm = QkNorm::kNone;
  bool qk_norm_optional = false;  // without the norms' tensors, there are none
  bool qk_norm_after_rope = false;
  int unnormed_experts = 0;  // a model with this number of experts has no norms of queries and keys
  bool latent = false;       // multi-head latent attention
  // The heads' outputs are gated: by attn_gate, or by rows of attn_q behind those of each query.
  bool gated = false;
  bool gated_queries = false;
  bool gate_optional = false;  // without its tensor, there is no gate
  GateActivation gate_activation = GateActivation::kSigmoid;
  bool head_gates = false;  // with `gated`: one gate for each head
  // Layers differ in the numbers of their heads, which are lists.
  bool layer_heads = false;
  bool value_widths = false;  // values may be narrower than keys, and have a factor
  bool value_norm = false;    // values have a norm without weights
  // In layers with experts, the projection of values may be routed as the experts are. The weights
  // of several experts always have the sum 1.
  bool value_experts = false;
  bool keys_as_values = false;  // layers without a window may have no projection of values
  double fixed_scale = 0.0;     // if not 0, the scale of scores
  bool rope = true;             // else there are no positions
  bool window_rope = false;     // if there are windows, only layers with one have positions
  // An indexer chooses keys, but all of them in texts that are short enough.
  bool indexed = false;
  // Tokens see the whole text, windows reach to both sides, and the model makes vectors of texts,
  // possibly by dense layers behind the pooling.
  bool bidirectional = false;
  // In a model with this number of layers, the scale of scores is that of heads with hidden_size /
  // num_heads dimensions, which the heads do not have.
  int derived_scale_layers = 0;
  bool sinks = false;
  bool layer_sinks = false;  // the layers that have the tensor have sinks
  // If set, queries are scaled in this way, unless keys have other numbers: in layers without a
  // window, if there are windows. Without a factor, only keys have it; with one, the step 0 stands
  // for the original context of the rotary positions.
  std::optional<QueryScaleSpec> query_scale = std::nullopt;
  // If set, layers have sliding windows, except every n-th layer; 0 means no exception.
  std::optional<int> window_period = std::nullopt;
  // The window if the file does not have its size: 0 means that there are no windows; without a
  // value, the file must have it.
  std::optional<int> default_window = 0;
  // If set, layers with a window have rotary positions of their own, without scaling, and with this
  // theta if the file has none for them.
  std::optional<double> window_theta = std::nullopt;
  WindowKind window_kind = WindowKind::kSliding;
  int window_extra = 0;        // positions that a window has beyond the number in the file
  bool window_widths = false;  // the heads of layers with a window have a width of their own
  // Layers without a window rotate half of the dimensions that the file says.
  bool half_rotated = false;
  bool head_pairs = false;  // RopeSpan::kHead, if a part of a head is rotated
  // rope_freqs.weight is for layers without a window; divisors of 1e30 stand for dimensions that
  // are not rotated. The other keys count all dimensions of a head.
  bool proportional_rope = false;
  bool yarn_truncate = true;    // RopeScaling::truncate
  bool long_rope = false;       // tensors may contain the factors of LongRoPE
  double long_magnitude = 0.0;  // if not 0, replaces that of files with these factors

  Recurrent recurrent = Recurrent::kNone;
  // Heads of values are stored in another order, if there are more than key heads: the first ones
  // of all key heads, then the second ones, ...
  bool tiled_values = false;

  // Feed-forward.
  ActivationKind activation = ActivationKind::kSilu;
  bool plain_experts = false;   // no gate projections
  bool joined_gate_up = false;  // ffn_up contains the gate projections, then the up projections
  Experts experts = Experts::kNone;
  std::string_view expert_width = ".expert_feed_forward_length";
  GateKind gate = GateKind::kSoftmax;  // if no key has another one
  bool renormalize = false;            // if no key says otherwise
  Shared shared = Shared::kNone;
  int shared_count = 0;           // of shared experts, if no key says it
  bool weight_input = false;      // RoutedLayerSpec::weight_input
  bool layer_limits = false;      // layers have limits of activations
  bool group_sums = false;        // groups of experts are ranked by their best two
  bool softmax_selected = false;  // softmax gates are those of the selected experts
  // The file says which layers are dense, what the gate is, and whether experts are in groups and
  // have a choice bias.
  bool free_router = false;
  bool router_decides = false;   // the layers that have a router are those with experts
  bool clamped_experts = false;  // gpt-oss: router and experts have biases, activations a limit
  // The number of layers includes layers that predict further tokens, which are not needed.
  bool counts_next_token_layers = false;

  // The whole model.
  bool layer_norms = false;           // with biases; head and output projection may have one, too
  bool plain_layer_norms = false;     // norms with layer_norm_epsilon are layer norms without bias
  bool grouped_norms = false;         // norms may be of groups
  bool layer_scales = false;          // layers may end with a factor
  bool plain_logit_scale = false;     // logit_scale multiplies the logits
  bool root_embedding_scale = false;  // the embedding is multiplied by sqrt(hidden_size)
  bool granite_factors = false;       // keys for embedding, residual and logit factors
  double logit_cap = 0.0;             // default of final_logit_softcapping, if the keys exist
  double attention_cap = 0.0;         // default of attn_logit_softcapping
  bool soft_caps = false;             // whether keys for soft caps exist
};

// Returns null if this server does not know the architecture.
const GgufFamily* FindGgufFamily(std::string_view name);

// Returns the names of all architectures, also of encoders, for error messages.
std::string GgufFamilyNames();

}  // namespace moeserve
