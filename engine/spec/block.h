// The blocks of a model as plain data: what a block computes and how its result joins the residual
// stream. A block mixes tokens (an attention, dense or routed, or a short convolution) or is a
// feed-forward, dense or routed. recurrent.h has further mixers of tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/kinds.h"
#include "engine/spec/recurrent.h"
#include "kernels/base/activation.h"
#include "kernels/base/rope.h"
#include "kernels/base/routing_kinds.h"
#include "kernels/state_storage.h"

namespace moeserve {

enum class NormKind : uint8_t { kRms, kLayer };
constexpr NameTraits Traits(NormKind k) { return NameIn({"rms", "layer"}, k); }
// Where a layer's norms are; f is attention or feed-forward.
enum class NormPlacement : uint8_t {
  kPre,     // x + f(norm(x))
  kPost,    // norm(x + f(x))
  kOutput,  // x + norm(f(x))
  kBoth,    // x + norm_out(f(norm(x)))
  kNone     // x + f(x)
};
constexpr NameTraits Traits(NormPlacement k) {
  return NameIn({"pre", "post", "output", "both", "none"}, k);
}
constexpr bool NormsInput(NormPlacement p) {
  return p == NormPlacement::kPre || p == NormPlacement::kBoth;
}
// Whether the block has a norm of its input or of the sum.
constexpr bool HasNorm(NormPlacement p) { return NormsInput(p) || p == NormPlacement::kPost; }
constexpr bool NormsOutput(NormPlacement p) {
  return p == NormPlacement::kOutput || p == NormPlacement::kBoth;
}

struct NormSpec {
  NormKind kind = NormKind::kRms;
  float eps = 1e-5f;
  std::optional<bool> bias = std::nullopt;  // kLayer only; unset: there is one
  std::optional<float> final_eps;           // of the final norm, if it differs
  // Of the norms of the embeddings and of the head's layer, if it differs.
  std::optional<float> outer_eps = std::nullopt;
  NormPlacement placement = NormPlacement::kPre;
  // Whether there is a norm before the LM head; unset: unless the placement is kPost.
  std::optional<bool> final_norm = std::nullopt;
  // kRms only. Rows of hidden_size elements consist of this many adjacent groups of equal size, and
  // each group is normalised by itself.
  int groups = 1;

  bool HasBias() const { return kind == NormKind::kLayer && bias.value_or(true); }
  bool HasFinal() const { return final_norm.value_or(placement != NormPlacement::kPost); }
};

// How a block's output joins the residual stream.
struct ResidualSpec {
  // If set, replaces NormSpec::placement or ModelSpec::residual_scale in this block.
  std::optional<NormPlacement> norm_placement = std::nullopt;
  std::optional<double> scale = std::nullopt;
  // The block reads the stream that the block before it reads, not its output: x + f(x) + g(x).
  bool parallel = false;
};

enum class PositionKind : uint8_t { kRope, kSinusoidal, kLearned, kNone };
constexpr NameTraits Traits(PositionKind k) {
  return NameIn({"rope", "sinusoidal", "learned", "none"}, k);
}
// The frequencies of sinusoids of width d: 10000^(-j/(d/2 - 1)), or 10000^(-2j/d).
enum class SinusoidSpacing : uint8_t { kFairseq, kHalf };
constexpr NameTraits Traits(SinusoidSpacing k) { return NameIn({"fairseq", "half"}, k); }
enum class RopePairing : uint8_t { kHalf, kInterleaved };
constexpr NameTraits Traits(RopePairing k) { return NameIn({"half", "interleaved"}, k); }

// What half pairing, or the exponents of frequencies, refer to: the rotated dimensions of a head,
// or all of them.
enum class RopeSpan : uint8_t { kRotated, kHead };
constexpr NameTraits Traits(RopeSpan k) { return NameIn({"rotated", "head"}, k); }

struct PositionSpec {
  PositionKind kind = PositionKind::kRope;
  double theta = 10000.0;                    // rope only
  RopePairing pairing = RopePairing::kHalf;  // rope only
  double fraction = 1.0;                     // rope only: fraction of head_dim that is rotated
  RopeScaling scaling;                       // rope only
  int first = 0;                             // sinusoidal only: position of a text's first token
  SinusoidSpacing spacing = SinusoidSpacing::kFairseq;  // sinusoidal only
  // False: padding tokens have no positions of their own, so requests cannot contain them. Learned
  // and sinusoidal only.
  bool count_padding = true;
  double xpos_base = 0.0;  // rope only: RopeSettings::xpos_base; 0: no XPOS
  // Rope only, with n of d dimensions rotated. Half pairing: the pairs are (i, i + n/2), or, over
  // the whole head, (i, i + d/2), for i < n/2. Frequencies: theta^(-2i/n) or theta^(-2i/d).
  RopeSpan span = RopeSpan::kRotated;
  RopeSpan frequencies = RopeSpan::kRotated;
};

// Stage "split": splits tokens into sub-tokens as in MH-MoE ("Multi-Head Mixture-of-Experts", eq.
// 3, 4 and 9).
struct SplitSpec {
  int heads = 1;  // h: each token becomes h rows of width hidden_size / h
  // Projections before the split and after the merge. Files have both by default if h is above 1;
  // with h = 1, they project tokens that are not split (table 6).
  bool projection = false;
  bool merge_projection = false;
  int depth = 1;          // linear layers of each projection, with ReLU in between (table 7)
  bool bias = true;       // all layers of the projections have a bias
  bool residual = false;  // adds each sub-token to the sum of its experts' outputs (eq. 6)
};

// Stage "score": scores are dot products, or X-MoE's cosines on a low-dimensional sphere ("On the
// Representation Collapse of Sparse Mixture of Experts", eq. 7).
//
// The router's rows can be normalised and scaled before the scores; the experts get the rows as
// they are.
struct ScoreSpec {
  // The router reads the residual stream before the block's norm; only without a split.
  bool stream = false;
  RowNorm norm = RowNorm::kNone;  // its eps is NormSpec::eps
  double row_scale = 1.0;         // multiplies the row, after the norm
  ScoreKind kind = ScoreKind::kDot;
  bool bias = false;  // dot: added to the scores; cosine: added to the projection
  int dim = 16;       // cosine only: dimension of the sphere's space
  bool normalize_row = true;
  bool normalize_expert = true;
  double eps = 1e-12;
  TemperatureKind temperature = TemperatureKind::kNone;
};

// Stage "select": top-k; top-p ("HMoE", eq. 9 to 11), which selects a variable number of experts
// for each row; or a table with the experts of each token id ("Hash Layers For Large Sparse
// Models"), whose weights depend on the scores (the first layers of DeepSeek-V4).
struct SelectSpec {
  SelectKind kind = SelectKind::kTopK;
  int k = 1;       // top_k and table only
  double p = 0.0;  // top_p only: the sum of gate values to reach
  TopPCompare compare = TopPCompare::kGe;
  int max_experts = 1;  // top_p only: largest number of experts for a row
  // Experts are ranked by choice values: gate values plus a bias (DeepSeek-V3), and only in the
  // best groups. The weights remain those of the gate.
  bool bias = false;
  int groups = 1;       // groups of adjacent experts, equally large
  int best_groups = 1;  // at most `groups`
  GroupScoreKind group_score = GroupScoreKind::kMax;
  GroupMaskKind group_mask = GroupMaskKind::kMinusInfinity;

  // Return the smallest and the largest number of experts that one row can select.
  int MinSelected() const {
    switch (kind) {
      case SelectKind::kTopK:
      case SelectKind::kTable:
        return k;
      case SelectKind::kTopP:
        return 1;
    }
    return 1;
  }
  int MaxSelected() const {
    switch (kind) {
      case SelectKind::kTopK:
      case SelectKind::kTable:
        return k;
      case SelectKind::kTopP:
        return max_experts;
    }
    return 1;
  }
};

enum class ExpertForm : uint8_t { kPlain, kGated };
constexpr NameTraits Traits(ExpertForm k) { return NameIn({"plain", "gated"}, k); }

// kPlain computes down(act(up x)), kGated computes down(act(gate x) * up x).
struct ExpertSpec {
  ExpertForm form = ExpertForm::kGated;
  ActivationKind activation = ActivationKind::kSilu;  // never kNone
  // Gated only: the members of Activation (kernels/base/activation.h) with these names.
  float activation_limit = 0.0f;
  float activation_slope = 1.0f;
  float up_offset = 0.0f;
  bool limit_after = false;
  bool bias = false;
  bool inner_norm = false;  // a norm of the kind NormSpec::kind before `down`
  // The expert is a stack of `depth` sub-layers x + f(norm(x)), where f is the network of `form`
  // and the norm is of the kind NormSpec::kind (X-MoE, section 4, after BASE layers). The expert's
  // output is that of the last sub-layer, so it contains the expert's input.
  bool residual = false;
  int depth = 1;  // 1 without `residual`
};

// Experts without matrices. They have the last ids of a routed layer, in this order.
struct NullExperts {
  int zero = 0;      // experts that return zeros
  int copy = 0;      // experts that return their input
  int constant = 0;  // experts that return a vector of the model
  // Ids, ascending, of further experts that return a vector. They have the places of experts that
  // had matrices before the model was pruned ("Mixture of Novice Experts").
  std::vector<int> replaced = {};

  int total() const { return zero + copy + constant + static_cast<int>(replaced.size()); }
};

// The routed layer, both in attention and in feed-forward. Its stages are
// split -> score -> gate -> select -> dispatch -> experts -> combine -> merge.
struct RoutedLayerSpec {
  int num_experts = 1;       // E, all experts that a row can select
  NullExperts null_experts;  // feed-forward only: those of the num_experts without matrices
  // Feed-forward only: hidden width of each expert that has matrices; may differ (HMoE).
  std::vector<int> widths;
  SplitSpec split;  // feed-forward only
  // Feed-forward only: above 0, experts compute rows of this width. One matrix projects the rows
  // that the router scores to it, another one projects the combined outputs back.
  int latent_width = 0;
  ScoreSpec score;
  GateKind gate = GateKind::kSoftmax;
  double mixer_limit = 0.0;  // gate kSparseMixer only: RouteSettings::mixer_limit
  SelectSpec select;
  bool renormalize = false;
  double scale = 1.0;
  bool expert_scale = false;  // each expert has a learned factor of its weights, applied last
  // Feed-forward only: an expert's weight multiplies its input instead of its output (Llama 4).
  bool weight_input = false;

  // Returns the number of experts that have matrices.
  int num_bodies() const { return num_experts - null_experts.total(); }
  // Returns the number of experts that have matrices or are replaced; their ids are the first ones.
  int num_places() const { return num_bodies() + static_cast<int>(null_experts.replaced.size()); }
  // Returns the index in `widths` of an expert, or -1 if it has no matrices.
  int BodyOf(int expert) const;
  // Returns whether an expert returns a vector of the model.
  bool IsConstant(int expert) const;
  // Returns the widths of the experts with ids below num_places(); 0 for those without matrices.
  std::vector<int> PlaceWidths() const;
};

// RMS norms of queries and keys. kHead: of each head, all with one weight [d_h]. kFull: of all
// heads together. kHeads: of each head, with weights of its own. kL2: of each head, without a
// weight.
enum class QkNorm : uint8_t { kNone, kHead, kFull, kHeads, kL2 };
constexpr NameTraits Traits(QkNorm k) { return NameIn({"none", "head", "full", "heads", "l2"}, k); }
// Whether the window of a token ends at the token, or positions form chunks of the window's size,
// of which a token sees its own.
enum class WindowKind : uint8_t { kSliding, kChunk };
constexpr NameTraits Traits(WindowKind k) { return NameIn({"sliding", "chunk"}, k); }
// With H query heads and G kv heads, query head j uses kv head floor(j / (H / G)) (kInterleave) or
// j mod G (kTile).
enum class GroupOrder : uint8_t { kInterleave, kTile };
constexpr NameTraits Traits(GroupOrder k) { return NameIn({"interleave", "tile"}, k); }

// Multi-head latent attention ("DeepSeek-V2", section 2.1). Keys and values of all heads are
// products of one latent vector per token with matrices of the heads; one rotated key part is
// shared by all heads. The cache holds the latent vector and the rotated part.
struct LatentSpec {
  int query_rank = 0;      // above 0: queries are a product of two matrices with a norm in between
  int rank = 1;            // elements of the latent vector
  int rope_dim = 2;        // elements of a head, at its end, that are rotated
  int value_dim = 1;       // elements of a head's values
  float norm_eps = 1e-6f;  // of the norms of the latent vector and of the query in between
  double scale = 1.0;      // multiplies the latent vector after its norm
};

// PositionScale (kernels/base/position_scale.h) of queries.
struct QueryScaleSpec {
  double step = 1.0;
  double factor = 0.0;
  int first = 0;

  static constexpr std::string_view kKind = "log";  // in files
};

struct AttentionSpec {
  int num_heads = 1;     // dense: H. Routed: unused; every expert has num_kv_heads query heads
  int num_kv_heads = 1;  // G
  int head_dim = 1;      // d_h
  bool bias = false;     // on q, k, v (dense; q, k with value_routing) or k, v (routed)
  bool out_bias = false;
  double scale = 1.0;     // multiplies q.k
  double soft_cap = 0.0;  // above 0: a scaled score s becomes soft_cap * tanh(s / soft_cap)
  bool sinks = false;     // dense only: a learned score per head, in the softmax alone
  // Whether a token attends to positions up to its own only. Unset: except in encoders.
  std::optional<bool> causal = std::nullopt;
  // Number of positions, its own included, that a token attends to in each direction.
  std::optional<int> window;
  QkNorm qk_norm = QkNorm::kNone;   // dense only
  bool qk_norm_after_rope = false;  // else before it
  // Dense only, without `latent`. Above 0: elements of q, k and v are limited to [-qkv_clip,
  // qkv_clip] before rope, and after a norm before it.
  double qkv_clip = 0.0;
  // Dense only: multiplies the heads' outputs by the activation of W x (+ bias), before o. There is
  // a gate for each element, or one for each head.
  bool gate = false;
  bool gate_per_head = false;
  bool gate_bias = false;
  GateActivation gate_activation = GateActivation::kSigmoid;
  bool inner_norm = false;  // dense only: a norm of the outputs of all heads together, before o
  GroupOrder group_order = GroupOrder::kInterleave;  // dense only
  // If set, replaces ModelSpec::position in this layer; its kind is kRope or kNone. Allowed only if
  // the model's kind is one of these two.
  std::optional<PositionSpec> position;
  // Dense only. If set, num_kv_heads is num_heads, head_dim is the whole width of a head's keys,
  // the rope settings are those of rope_dim dimensions, and there are neither QK norms nor sinks.
  std::optional<LatentSpec> latent;
  std::optional<RoutedLayerSpec> routing;  // if set: MoA, "Mixture of Attention Heads"
  // The rest is for dense attention without `latent`, except query_scale and window_kind.
  std::optional<int> value_dim = std::nullopt;  // elements of a head's values; unset: head_dim
  double value_scale = 1.0;                     // multiplies the values
  bool value_norm = false;  // an RMS norm of each value head, without a weight, before value_scale
  // There is no value projection: values are the keys before their norm and rotation.
  bool value_from_key = false;
  std::optional<QueryScaleSpec> query_scale = std::nullopt;  // applied last; not in MoA
  WindowKind window_kind = WindowKind::kSliding;             // kChunk only if causal
  // If set, the value projection is routed ("MoVA"): values are the weighted sum of silu(W_e x)
  // over the selected experts e.
  std::optional<RoutedLayerSpec> value_routing = std::nullopt;
  // If set, the layer has no keys and values of its own: it reads those of this layer, which is
  // before it, and has dense attention of the same shape and window with keys of its own.
  std::optional<int> kv_layer = std::nullopt;

  bool routed() const { return routing.has_value(); }
  // Returns whether the block has a matrix for the values of all tokens.
  bool projects_values() const {
    return !value_from_key && !value_routing.has_value() && !kv_layer.has_value();
  }
  // Return the width of a head's output, that of the values of all heads, and the number of gates;
  // 0 if there are none.
  int output_dim() const {
    return latent.has_value() ? latent->value_dim : value_dim.value_or(head_dim);
  }
  int value_width() const { return num_kv_heads * output_dim(); }
  int gates() const { return !gate ? 0 : gate_per_head ? num_heads : num_heads * output_dim(); }
  // Returns how many dimensions of a head the fraction of rotated dimensions refers to.
  int rope_width() const { return latent.has_value() ? latent->rope_dim : head_dim; }
};

struct FeedForwardSpec {
  ExpertSpec expert;
  int width = 0;                           // dense only
  std::optional<RoutedLayerSpec> routing;  // if set, the block is routed
  int shared_width = 0;  // routed only: width of a shared, always active expert; 0 if there is none
  bool shared_gate = false;  // multiplies the shared expert's output by sigmoid(w.x)
  // The shared expert is a branch beside the routed experts with norms of its own (Gemma 4). It
  // reads a norm of the residual stream; both branches' outputs are normalised before the sum.
  bool shared_norms = false;
  // Replaces ExpertSpec::activation_limit in the shared expert.
  std::optional<float> shared_limit = std::nullopt;
  // With a shared expert: the sum of the routed experts joins the residual stream at the end of the
  // next layer (LongCat-Flash); only the shared expert's output joins it in this block.
  bool late_experts = false;
  bool out_bias = false;  // one bias [hidden_size], added to the block's output

  bool routed() const { return routing.has_value(); }
};

// A gated short convolution over the last tokens (LFM2): ShortConvolutionArgs, between a projection
// to b, c and x and one back. Its memory of a sequence is a state of fixed size.
struct ShortConvolutionSpec {
  int taps = 3;       // tokens that it sees, the newest one included
  bool bias = false;  // on the projections and the convolution

  static constexpr std::string_view kKind = "short_conv";  // in files
  // Returns the shape of the state that it keeps of a sequence. Mixers without a state have no such
  // function.
  StateShape State(int hidden_size) const { return {taps - 1, hidden_size}; }

  // A setting that every mixer has.
  static constexpr bool out_bias = false;  // the bias of the last projection is part of it
};

// Attention of a decoder's tokens to the outputs of an encoder, which it sees all. Dense or routed,
// but without positions, windows, sinks, latents, biases of relative positions and clips.
struct CrossAttentionSpec {
  AttentionSpec attention;
};

// What a block computes from its input. Mixers with a kKind stand in the place of attention.
using Mixer = std::variant<AttentionSpec, FeedForwardSpec, ShortConvolutionSpec, CrossAttentionSpec,
                           DeltaSpec, StateSpaceSpec>;

// Returns the structure of a mixer that has a table of settings.
constexpr auto& SettingsOf(auto& mixer) {
  if constexpr (requires { mixer.attention; }) {
    return mixer.attention;
  } else {
    return mixer;
  }
}

// In the order of Mixer.
enum class BlockKind : uint8_t {
  kAttention,
  kFeedForward,
  kShortConvolution,
  kCrossAttention,
  kDelta,
  kStateSpace
};
// Returns the word for the kind in names of tensors, configuration keys, JSON and metrics. All
// mixers of tokens have the same one, except attention to a source; a layer has one block of each
// name.
constexpr const char* Name(BlockKind b) {
  if (b == BlockKind::kCrossAttention) return "cross_attention";
  return b == BlockKind::kFeedForward ? "feed_forward" : "attention";
}

// The stacks of blocks of a model that translates a source; other models have one, and may have
// another that drafts tokens (ModelSpec::prediction).
enum class Stack : uint8_t { kOnly, kEncoder, kDecoder, kPrediction };
constexpr NameTraits Traits(Stack stack) {
  return NameIn({"only", "encoder", "decoder", "prediction"}, stack);
}
// The beginning of the names of a stack's tensors.
constexpr const char* TensorPrefix(Stack s) {
  constexpr const char* kPrefixes[] = {"", "encoder.", "decoder.", "prediction."};
  return kPrefixes[static_cast<size_t>(s)];
}

// A mixer between norms, and how it joins the residual stream.
struct BlockSpec {
  Mixer mixer;
  // Files, JSON and metrics name a block by its layer and Name(kind()). The blocks of a layer are
  // adjacent, and no two of them have the same name.
  int layer = 0;
  ResidualSpec residual = {};
  Stack stack = Stack::kOnly;

  BlockKind kind() const { return static_cast<BlockKind>(mixer.index()); }
  // Return null if the block is of another kind.
  const AttentionSpec* attention() const { return std::get_if<AttentionSpec>(&mixer); }
  const FeedForwardSpec* feed_forward() const { return std::get_if<FeedForwardSpec>(&mixer); }
  const AttentionSpec* cross_attention() const {
    const auto* const cross = std::get_if<CrossAttentionSpec>(&mixer);
    return cross == nullptr ? nullptr : &cross->attention;
  }
  const ShortConvolutionSpec* short_convolution() const {
    return std::get_if<ShortConvolutionSpec>(&mixer);
  }
  const DeltaSpec* delta() const { return std::get_if<DeltaSpec>(&mixer); }
  const StateSpaceSpec* state_space() const { return std::get_if<StateSpaceSpec>(&mixer); }
  // Returns the settings of the block's routed layer, which may be that of its values; null if
  // there is none.
  const RoutedLayerSpec* routing() const;
  // Returns the beginning of the names of the block's tensors: "blocks.3.attention", or
  // "decoder.blocks.3.attention".
  std::string name() const;
};

// The two blocks of an ordinary decoder layer.
struct LayerSpec {
  AttentionSpec attention;
  FeedForwardSpec feed_forward;
  // If set, takes the attention's place.
  std::optional<Mixer> token_mixer = std::nullopt;
  // The layer has one block only: `token_mixer`, which may be any mixer, or else the attention.
  bool one_block = false;
};

}  // namespace moeserve
