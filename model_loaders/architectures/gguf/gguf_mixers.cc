// The layers of GGUF files that have a recurrent mixer, or a feed-forward alone, in the place of
// attention.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_reader.h"

namespace moeserve {
namespace {

using Recurrent = GgufFamily::Recurrent;

constexpr std::string_view kKvHeads = ".attention.head_count_kv";
constexpr std::string_view kInterval = ".full_attention_interval";
constexpr std::string_view kInner = ".ssm.inner_size";
constexpr std::string_view kHeads = ".ssm.time_step_rank";
constexpr std::string_view kTaps = ".ssm.conv_kernel";

}  // namespace

// Finds out what each layer has, and reads the recurrent mixer.
void GgufConfigReader::ReadMixers() {
  kinds_.assign(static_cast<size_t>(layers_), LayerKind::kAttention);
  switch (family_.recurrent) {
    case Recurrent::kNone:
      return;
    case Recurrent::kDelta:
      ReadInterval();
      recurrent_ = ReadDelta();
      return;
    case Recurrent::kShortConvolution: {
      ReadKvHeads();
      ShortConvolutionSpec convolution;
      convolution.taps = keys_.Int(".shortconv.l_cache");
      recurrent_ = convolution;
      return;
    }
    case Recurrent::kChannelDelta:
    case Recurrent::kBoundedDelta:
      ReadKvHeads();
      recurrent_ = ReadChannelDelta();
      return;
    case Recurrent::kStateSpace:
      ReadKvHeads();
      recurrent_ = ReadStateSpace();
      return;
  }
}

std::optional<int> GgufConfigReader::FirstOf(LayerKind kind) const {
  const auto found = std::ranges::find(kinds_, kind);
  if (found == kinds_.end()) return std::nullopt;
  return static_cast<int>(found - kinds_.begin());
}

bool GgufConfigReader::HasIn(std::optional<int> layer, std::string_view tensor) const {
  return layer.has_value() && Has(Concat("blk.", *layer, '.', tensor));
}

// Every n-th layer has attention.
void GgufConfigReader::ReadInterval() {
  const int interval = keys_.Int(kInterval, 4);
  if (interval < 1) {
    keys_.Fault(kInterval, "an integer of at least 1", std::to_string(interval));
    return;
  }
  for (int i = 0; i < layers_; ++i) {
    if ((i + 1) % interval != 0) kinds_[static_cast<size_t>(i)] = LayerKind::kRecurrent;
  }
}

// Layers without kv heads have no attention. If layers have one block, those that have neither kv
// heads nor the width of a feed-forward are recurrent.
void GgufConfigReader::ReadKvHeads() {
  const int all = layers_ + next_token_layers_;
  const std::vector<int> heads = keys_.Ints(kKvHeads, all, std::nullopt);
  if (family_.norms == GgufFamily::Norms::kOne) {
    widths_ = keys_.Ints(".feed_forward_length", all, std::nullopt);
  }
  for (int i = 0; i < layers_; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool feeds = at < widths_.size() && widths_[at] != 0;
    if (heads[at] == 0) {
      kinds_[at] = feeds ? LayerKind::kFeedForward : LayerKind::kRecurrent;
      continue;
    }
    if (feeds) {
      keys_.Fault(".feed_forward_length",
                  Concat("0 for layer ", i, " (", keys_.NameOf(kKvHeads), " is ", heads[at], ')'),
                  std::to_string(widths_[at]));
      return;
    }
    if (kv_heads_.value_or(heads[at]) != heads[at]) {
      keys_.Fault(kKvHeads, Concat("0 or ", *kv_heads_, " for layer ", i),
                  std::to_string(heads[at]));
      return;
    }
    kv_heads_ = heads[at];
  }
  // Without attention, any number will do.
  if (!kv_heads_.has_value()) kv_heads_ = 1;
}

// Returns the width of each of `heads` heads.
int GgufConfigReader::ReadHeadWidth(int heads) {
  const int inner = keys_.Int(kInner);
  if (!problems_.empty()) return 1;
  if (heads >= 1 && inner >= heads && inner % heads == 0) return inner / heads;
  keys_.Fault(
      kInner,
      Concat("a multiple of the number of heads (", keys_.NameOf(kHeads), " is ", heads, ')'),
      std::to_string(inner));
  return 1;
}

DeltaSpec GgufConfigReader::ReadDelta() {
  DeltaSpec delta;
  delta.num_heads = keys_.Int(kHeads);
  delta.num_key_heads = keys_.Int(".ssm.group_count");
  delta.key_dim = keys_.Int(".ssm.state_size");
  delta.value_dim = ReadHeadWidth(delta.num_heads);
  delta.taps = keys_.Int(kTaps);
  return delta;
}

// Files have no key for the number of heads, which have a strength each.
DeltaSpec GgufConfigReader::ReadChannelDelta() {
  DeltaSpec delta;
  const std::optional<int> layer = FirstOf(LayerKind::kRecurrent);
  const int64_t heads = layer.has_value() ? RowsOf(Concat("blk.", *layer, ".ssm_beta.weight")) : 1;
  // A missing tensor is reported later.
  delta.num_heads = delta.num_key_heads =
      static_cast<int>(std::clamp<int64_t>(heads, 1, kMaxWidth));
  delta.key_dim = delta.value_dim = keys_.Int(".kda.head_dim");
  delta.taps = keys_.Int(kTaps);
  delta.decay = DecayOf::kChannel;
  delta.gate_activation = GateActivation::kSigmoid;
  if (family_.recurrent == Recurrent::kBoundedDelta) {
    delta.decay_form = DecayForm::kBounded;
    delta.decay_bound = keys_.Real(".kda.gate_lower_bound");
    keys_.Require(".kda.safe_gate", 1);
    return delta;
  }
  // The ranks are the width of a head.
  delta.decay_rank = delta.gate_rank = delta.key_dim;
  return delta;
}

StateSpaceSpec GgufConfigReader::ReadStateSpace() {
  StateSpaceSpec ssm;
  ssm.num_heads = keys_.Int(kHeads);
  ssm.head_dim = ReadHeadWidth(ssm.num_heads);
  ssm.state_dim = keys_.Int(".ssm.state_size");
  ssm.groups = keys_.Int(".ssm.group_count");
  ssm.taps = keys_.Int(kTaps);
  ssm.conv_bias = HasIn(FirstOf(LayerKind::kRecurrent), "ssm_conv1d.bias");
  ssm.bias = HasIn(FirstOf(LayerKind::kRecurrent), "ssm_in.bias");
  return ssm;
}

}  // namespace moeserve
