#include "model_loaders/architectures/gguf/gguf_mixer_tensors.h"

namespace moeserve {
namespace {

using Recurrent = GgufFamily::Recurrent;

constexpr TensorRule kShortConvolution[] = {
    {"blocks.*.attention.b.weight", "blk.*.shortconv.in_proj.weight", 0, 3},
    {"blocks.*.attention.c.weight", "blk.*.shortconv.in_proj.weight", 1, 3},
    {"blocks.*.attention.x.weight", "blk.*.shortconv.in_proj.weight", 2, 3},
    {"blocks.*.attention.conv.weight", "blk.*.shortconv.conv.weight"},
    {.model = "blocks.*.attention.o.weight",
     .file = "blk.*.shortconv.out_proj.weight",
     .mixer = BlockKind::kShortConvolution},
};

constexpr TensorRule Delta(std::string_view model, std::string_view file, RowOrder order = {},
                           int part = 0) {
  return {.model = model, .file = file, .part = part, .order = order, .mixer = BlockKind::kDelta};
}

// Files store the negative rates of decays.
constexpr TensorRule Rates(BlockKind mixer) {
  return {.model = "blocks.*.attention.decay_log",
          .file = "blk.*.ssm_a",
          .function = kLogOfNegative,
          .units = true,
          .mixer = mixer};
}

constexpr TensorRule kDelta[] = {
    Delta("blocks.*.attention.q.weight", "blk.*.attn_qkv.weight", RowOrder::kDelta, 0),
    Delta("blocks.*.attention.k.weight", "blk.*.attn_qkv.weight", RowOrder::kDelta, 1),
    Delta("blocks.*.attention.v.weight", "blk.*.attn_qkv.weight", RowOrder::kDelta, 2),
    Delta("blocks.*.attention.gate.weight", "blk.*.attn_gate.weight"),
    Delta("blocks.*.attention.beta.weight", "blk.*.ssm_beta.weight"),
    Delta("blocks.*.attention.decay.weight", "blk.*.ssm_alpha.weight"),
    // Qwen3-Next, and early files of it.
    Delta("blocks.*.attention.beta.weight", "blk.*.ssm_ba.weight", RowOrder::kDeltaPairs, 0),
    Delta("blocks.*.attention.decay.weight", "blk.*.ssm_ba.weight", RowOrder::kDeltaPairs, 1),
    Delta("blocks.*.attention.q.weight", "blk.*.ssm_in.weight", RowOrder::kDeltaGroups, 0),
    Delta("blocks.*.attention.k.weight", "blk.*.ssm_in.weight", RowOrder::kDeltaGroups, 1),
    Delta("blocks.*.attention.v.weight", "blk.*.ssm_in.weight", RowOrder::kDeltaGroups, 2),
    Delta("blocks.*.attention.gate.weight", "blk.*.ssm_in.weight", RowOrder::kDeltaGroups, 3),
    Delta("blocks.*.attention.q_conv.weight", "blk.*.ssm_conv1d.weight", RowOrder::kDelta, 0),
    Delta("blocks.*.attention.k_conv.weight", "blk.*.ssm_conv1d.weight", RowOrder::kDelta, 1),
    Delta("blocks.*.attention.v_conv.weight", "blk.*.ssm_conv1d.weight", RowOrder::kDelta, 2),
    Rates(BlockKind::kDelta),
    Delta("blocks.*.attention.decay_bias", "blk.*.ssm_dt.bias"),
    Delta("blocks.*.attention.out_norm.weight", "blk.*.ssm_norm.weight"),
    Delta("blocks.*.attention.o.weight", "blk.*.ssm_out.weight"),
};

constexpr TensorRule Convolution(std::string_view model, std::string_view file) {
  return {.model = model, .file = file, .units = true, .mixer = BlockKind::kDelta};
}

// The names differ in gates, decays and rates.
#define MOESERVE_CHANNEL_DELTA                                                      \
  Delta("blocks.*.attention.q.weight", "blk.*.attn_q.weight"),                      \
      Delta("blocks.*.attention.k.weight", "blk.*.attn_k.weight"),                  \
      Delta("blocks.*.attention.v.weight", "blk.*.attn_v.weight"),                  \
      Convolution("blocks.*.attention.q_conv.weight", "blk.*.ssm_conv1d_q.weight"), \
      Convolution("blocks.*.attention.k_conv.weight", "blk.*.ssm_conv1d_k.weight"), \
      Convolution("blocks.*.attention.v_conv.weight", "blk.*.ssm_conv1d_v.weight"), \
      Delta("blocks.*.attention.beta.weight", "blk.*.ssm_beta.weight"),             \
      Delta("blocks.*.attention.decay_bias", "blk.*.ssm_dt.bias"),                  \
      Delta("blocks.*.attention.out_norm.weight", "blk.*.ssm_norm.weight"),         \
      Delta("blocks.*.attention.o.weight", "blk.*.attn_output.weight")

constexpr TensorRule kChannelDelta[] = {
    MOESERVE_CHANNEL_DELTA,
    Delta("blocks.*.attention.gate_down.weight", "blk.*.ssm_g_a.weight"),
    Delta("blocks.*.attention.gate.weight", "blk.*.ssm_g_b.weight"),
    Delta("blocks.*.attention.decay_down.weight", "blk.*.ssm_f_a.weight"),
    Delta("blocks.*.attention.decay.weight", "blk.*.ssm_f_b.weight"),
    Rates(BlockKind::kDelta),
};

constexpr TensorRule kBoundedDelta[] = {
    MOESERVE_CHANNEL_DELTA,
    Delta("blocks.*.attention.gate.weight", "blk.*.ssm_g_a.weight"),
    Delta("blocks.*.attention.decay.weight", "blk.*.ssm_f_a.weight"),
    {.model = "blocks.*.attention.decay_log",
     .file = "blk.*.ssm_a",
     .function = kLogarithm,
     .units = true,
     .mixer = BlockKind::kDelta},
};
#undef MOESERVE_CHANNEL_DELTA

constexpr TensorRule StateSpace(std::string_view model, std::string_view file, RowOrder order = {},
                                int part = 0) {
  return {
      .model = model, .file = file, .part = part, .order = order, .mixer = BlockKind::kStateSpace};
}

constexpr TensorRule kStateSpace[] = {
    StateSpace("blocks.*.attention.gate.weight", "blk.*.ssm_in.weight", RowOrder::kStateSpace, 0),
    StateSpace("blocks.*.attention.x.weight", "blk.*.ssm_in.weight", RowOrder::kStateSpace, 1),
    StateSpace("blocks.*.attention.b.weight", "blk.*.ssm_in.weight", RowOrder::kStateSpace, 2),
    StateSpace("blocks.*.attention.c.weight", "blk.*.ssm_in.weight", RowOrder::kStateSpace, 3),
    StateSpace("blocks.*.attention.step.weight", "blk.*.ssm_in.weight", RowOrder::kStateSpace, 4),
    StateSpace("blocks.*.attention.gate.bias", "blk.*.ssm_in.bias", RowOrder::kStateSpace, 0),
    StateSpace("blocks.*.attention.x.bias", "blk.*.ssm_in.bias", RowOrder::kStateSpace, 1),
    StateSpace("blocks.*.attention.b.bias", "blk.*.ssm_in.bias", RowOrder::kStateSpace, 2),
    StateSpace("blocks.*.attention.c.bias", "blk.*.ssm_in.bias", RowOrder::kStateSpace, 3),
    StateSpace("blocks.*.attention.step.bias", "blk.*.ssm_in.bias", RowOrder::kStateSpace, 4),
    StateSpace("blocks.*.attention.conv.weight", "blk.*.ssm_conv1d.weight"),
    StateSpace("blocks.*.attention.conv.bias", "blk.*.ssm_conv1d.bias"),
    Rates(BlockKind::kStateSpace),
    StateSpace("blocks.*.attention.step_bias", "blk.*.ssm_dt.bias"),
    {.model = "blocks.*.attention.skip", .file = "blk.*.ssm_d", .units = true},
    StateSpace("blocks.*.attention.out_norm.weight", "blk.*.ssm_norm.weight"),
    StateSpace("blocks.*.attention.o.weight", "blk.*.ssm_out.weight"),
    StateSpace("blocks.*.attention.o.bias", "blk.*.ssm_out.bias"),
};

constexpr KeyRule kConvolutionKeys[] = {{"attention.conv", ".shortconv.l_cache"}};

constexpr KeyRule kDeltaKeys[] = {
    {"attention.num_key_heads", ".ssm.group_count"},
    {"attention.key_dim", ".ssm.state_size"},
    {"attention.value_dim", ".ssm.inner_size"},
    {"attention.conv", ".ssm.conv_kernel"},
};

constexpr KeyRule kChannelKeys[] = {
    {"attention.num_key_heads", ".attention.head_count"},
    {"attention.key_dim", ".kda.head_dim"},
    {"attention.value_dim", ".kda.head_dim"},
    {"attention.decay_rank", ".kda.head_dim"},
    {"attention.gate_rank", ".kda.head_dim"},
    {"attention.decay_bound", ".kda.gate_lower_bound"},
    {"attention.conv", ".ssm.conv_kernel"},
};

constexpr KeyRule kStateSpaceKeys[] = {
    {"attention.state_dim", ".ssm.state_size"},
    {"attention.groups", ".ssm.group_count"},
    {"attention.conv", ".ssm.conv_kernel"},
};

}  // namespace

std::span<const TensorRule> RecurrentTensors(Recurrent recurrent) {
  switch (recurrent) {
    case Recurrent::kNone:
      return {};
    case Recurrent::kShortConvolution:
      return kShortConvolution;
    case Recurrent::kDelta:
      return kDelta;
    case Recurrent::kChannelDelta:
      return kChannelDelta;
    case Recurrent::kBoundedDelta:
      return kBoundedDelta;
    case Recurrent::kStateSpace:
      return kStateSpace;
  }
  return {};
}

std::span<const KeyRule> RecurrentKeys(Recurrent recurrent) {
  switch (recurrent) {
    case Recurrent::kNone:
      return {};
    case Recurrent::kShortConvolution:
      return kConvolutionKeys;
    case Recurrent::kDelta:
      return kDeltaKeys;
    case Recurrent::kChannelDelta:
    case Recurrent::kBoundedDelta:
      return kChannelKeys;
    case Recurrent::kStateSpace:
      return kStateSpaceKeys;
  }
  return {};
}

void PlaceRecurrent(std::string_view name, const BlockSpec& block, bool tiled, TensorPlace& place) {
  const auto is = [&](std::string_view end) { return name.ends_with(end); };
  if (const StateSpaceSpec* const ssm = block.state_space(); ssm != nullptr) {
    if (!is(".out_norm.weight")) return;
    place.shape = {ssm->groups, ssm->recurrence().value_width() / ssm->groups};
    place.units = true;
  }
  const DeltaSpec* const delta = block.delta();
  if (delta == nullptr || !tiled || delta->num_heads == delta->num_key_heads) return;
  BlockOrder order{
      .size = 1, .outer = delta->num_key_heads, .inner = delta->num_heads / delta->num_key_heads};
  if (is(".beta.weight") || is(".decay.weight") || is(".decay_log") || is(".decay_bias")) {
    place.row_blocks = order;
  }
  order.size = delta->value_dim;
  if (is(".v.weight") || is(".v_conv.weight") || is(".gate.weight")) place.row_blocks = order;
  if (is(".o.weight")) place.column_blocks = order;
}

}  // namespace moeserve
