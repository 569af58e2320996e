#include "model_loaders/inspect.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "base/kinds.h"
#include "engine/spec/weights.h"
#include "model_loaders/architectures/native/describe.h"
#include "model_loaders/checkpoint/quantized_tensors.h"

namespace moeserve {
namespace {

// Returns the parameters of an expert with `in` inputs per row and inner width `inner`.
int64_t ExpertParameters(const ExpertSpec& expert, NormKind norm, int64_t in, int64_t inner) {
  const int64_t up_like = expert.form == ExpertForm::kGated ? 2 : 1;
  const int64_t vectors = norm == NormKind::kLayer ? 2 : 1;  // of a norm
  int64_t count = (up_like + 1) * in * inner;
  if (expert.bias) count += up_like * inner + in;
  if (expert.inner_norm) count += vectors * inner;
  if (expert.residual) count += vectors * in;
  return count * expert.depth;
}

void SetExpertsPerToken(const RoutedLayerSpec& routing, RoutedBlockSummary* block) {
  const int64_t experts = routing.num_experts;
  const int64_t per_row = routing.select.MaxSelected();
  block->min_experts = routing.select.MinSelected();
  block->max_experts = std::min(experts, per_row * routing.split.heads);
}

RoutedBlockSummary AttentionBlock(const ModelSpec& spec, const BlockSpec& owner) {
  const bool source = owner.kind() == BlockKind::kCrossAttention;
  const AttentionSpec& attention = source ? *owner.cross_attention() : *owner.attention();
  RoutedBlockSummary block;
  block.layer = owner.layer;
  block.block = owner.kind();
  const RoutedLayerSpec& routing = *owner.routing();
  const int64_t width = attention.routed()
                            ? int64_t{2} * attention.num_kv_heads * attention.head_dim
                            : attention.value_width();
  block.expert_parameters.assign(routing.num_experts, width * spec.hidden_size);
  SetExpertsPerToken(routing, &block);
  return block;
}

RoutedBlockSummary FeedForwardBlock(const ModelSpec& spec, int layer) {
  const FeedForwardSpec& feed_forward = spec.feed_forward(layer);
  const RoutedLayerSpec& routing = *feed_forward.routing;
  RoutedBlockSummary block;
  block.layer = layer;
  block.block = BlockKind::kFeedForward;
  const int64_t row =
      routing.latent_width > 0 ? routing.latent_width : spec.hidden_size / routing.split.heads;
  block.expert_parameters.reserve(static_cast<size_t>(routing.num_experts));
  for (int e = 0; e < routing.num_experts; ++e) {
    const int body = routing.BodyOf(e);
    block.expert_parameters.push_back(
        body < 0 ? (routing.IsConstant(e) ? row : 0)
                 : ExpertParameters(feed_forward.expert, spec.norm.kind, row,
                                    routing.widths[static_cast<size_t>(body)]));
  }
  SetExpertsPerToken(routing, &block);
  return block;
}

void AddRoutedBlocks(const ModelSpec& spec, ModelSummary& summary) {
  if (spec.encoder != nullptr) AddRoutedBlocks(*spec.encoder, summary);
  for (const BlockSpec& block : spec.blocks) {
    if (block.routing() == nullptr) continue;
    summary.routed_blocks.push_back(block.kind() == BlockKind::kFeedForward
                                        ? FeedForwardBlock(spec, block.layer)
                                        : AttentionBlock(spec, block));
    summary.routed_blocks.back().stack = spec.stack;
  }
}

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// Returns the bytes of a tensor in a folder with quantization `folder`, in which tensors that are
// not quantized are bf16.
int64_t BytesIn(const TensorRequirement& tensor, Quantization folder) {
  int64_t bytes = 0;
  for (const StoredTensor& stored : StoredTensors(tensor, folder)) {
    int64_t elements = 1;
    for (const int64_t dim : stored.shape) elements *= dim;
    bytes += elements * SizeOf(NewTypeOf(stored, ElementType::kBF16));
  }
  return bytes;
}

ActivatedParameters Activated(const ModelSpec& spec, const ModelSummary& summary) {
  const int64_t base = summary.parameters - summary.expert_parameters;
  ActivatedParameters activated{.min = base, .max = base, .nominal = base};
  for (const RoutedBlockSummary& block : summary.routed_blocks) {
    std::vector<int64_t> sizes = block.expert_parameters;
    std::sort(sizes.begin(), sizes.end());
    activated.min += std::accumulate(sizes.begin(), sizes.begin() + block.min_experts, int64_t{0});
    activated.max += std::accumulate(sizes.end() - block.max_experts, sizes.end(), int64_t{0});
    const ModelSpec& stack = block.stack == Stack::kEncoder ? *spec.encoder : spec;
    const RoutedLayerSpec& routing = *stack.FindBlock(block.layer, block.block)->routing();
    if (routing.select.kind == SelectKind::kTopP) activated.nominal.reset();
    if (activated.nominal.has_value()) {
      const double mean = static_cast<double>(Sum(sizes)) / static_cast<double>(sizes.size());
      *activated.nominal += static_cast<int64_t>(mean * static_cast<double>(block.max_experts));
    }
  }
  return activated;
}

std::vector<LayerGroup> Groups(const ModelSpec& spec) {
  std::vector<LayerGroup> groups;
  if (spec.encoder != nullptr) groups = Groups(*spec.encoder);
  for (int i = 0; i < spec.num_layers(); ++i) {
    const auto describe = [](const BlockSpec* block) {
      return block == nullptr ? std::string("none") : DescribeBlock(*block);
    };
    std::string attention = describe(spec.token_mixer(i));
    std::string feed_forward = describe(spec.FindBlock(i, BlockKind::kFeedForward));
    const BlockSpec* const cross = spec.FindBlock(i, BlockKind::kCrossAttention);
    std::string source = cross == nullptr ? "" : DescribeBlock(*cross);
    auto same = std::find_if(groups.begin(), groups.end(), [&](const LayerGroup& group) {
      return group.stack == spec.stack && group.attention == attention && group.source == source &&
             group.feed_forward == feed_forward;
    });
    if (same == groups.end()) {
      groups.push_back(
          {spec.stack, {}, std::move(attention), std::move(source), std::move(feed_forward)});
      same = groups.end() - 1;
    }
    same->layers.push_back(i);
  }
  return groups;
}

constexpr const char* StackWord(Stack stack) {
  return stack == Stack::kOnly ? "" : stack == Stack::kEncoder ? "encoder" : "decoder";
}

// Returns a list of layers with runs of consecutive numbers, such as "layers 0-3, 6".
std::string LayersText(const std::vector<int>& layers) {
  std::string text = layers.size() == 1 ? "layer " : "layers ";
  for (size_t i = 0; i < layers.size();) {
    size_t last = i;
    while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
    if (i > 0) text.append(", ");
    text.append(last == i ? Concat(layers[i]) : Concat(layers[i], '-', layers[last]));
    i = last + 1;
  }
  return text;
}

// Formats 1234567 as "1,234,567". `value` must not be negative.
std::string Grouped(int64_t value) {
  const std::string digits = std::to_string(value);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string Mebibytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
  return text;
}

// Returns "min to max, nominally n", or only what differs.
std::string RangeText(int64_t min, int64_t max, std::optional<int64_t> nominal = {}) {
  if (min == max) return Grouped(min);
  const std::string range = Concat(Grouped(min), " to ", Grouped(max));
  return nominal.has_value() ? Concat(range, ", nominally ", Grouped(*nominal)) : range;
}

}  // namespace

ModelSummary Summarize(const ModelSpec& spec) {
  ModelSummary summary;
  for (const Quantization type : AllKinds(Quantization::kInt8)) {
    summary.quantized_bytes.emplace_back(type, 0);
  }
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    int64_t elements = 1;
    for (const int64_t dim : tensor.shape) elements *= dim;
    if (!tensor.ids) summary.parameters += elements;
    for (auto& [type, bytes] : summary.quantized_bytes) bytes += BytesIn(tensor, type);
    if (tensor.name.ends_with("embed.weight") || tensor.name.ends_with("embed_layers.weight") ||
        tensor.name.ends_with("embed_position.weight") || tensor.name == "head.weight") {
      summary.embedding_parameters += elements;
    }
  }
  AddRoutedBlocks(spec, summary);
  for (const KvLayerShape& shape : CacheShapes(spec)) {
    const int values = shape.latent_dim > 0 ? 0 : shape.value_dim();
    summary.kv_elements_per_token += int64_t{shape.num_kv_heads} * (shape.head_dim + values);
  }
  summary.state_bytes = StateStorage::SlotBytes(StateShapes(spec), 0);
  for (const RoutedBlockSummary& block : summary.routed_blocks) {
    summary.expert_parameters += Sum(block.expert_parameters);
  }
  summary.always_active =
      summary.parameters - summary.embedding_parameters - summary.expert_parameters;
  summary.activated = Activated(spec, summary);
  summary.macs = MacsOf(spec);
  if (spec.encoder != nullptr) summary.source_macs = SourceMacsOf(spec);
  summary.head_macs = HeadMacs(spec);
  summary.groups = Groups(spec);
  summary.general = DescribeModel(spec);
  return summary;
}

std::string SummaryText(const ModelSummary& summary) {
  std::string text = summary.general + "\n";
  for (const LayerGroup& group : summary.groups) {
    const std::string layers = Concat(
        StackWord(group.stack), group.stack == Stack::kOnly ? "" : " ", LayersText(group.layers));
    text.append(Concat(layers, ": attention ", group.attention, '\n'));
    if (!group.source.empty()) text.append(Concat(layers, ": source ", group.source, '\n'));
    text.append(Concat(layers, ": feed-forward ", group.feed_forward, '\n'));
  }
  text.append(Concat("parameters: ", Grouped(summary.parameters), " (embedding and head ",
                     Grouped(summary.embedding_parameters), ", routed experts ",
                     Grouped(summary.expert_parameters), ", always active ",
                     Grouped(summary.always_active), ")\n"));
  const ActivatedParameters& activated = summary.activated;
  text.append(Concat("activated by one token: ",
                     RangeText(activated.min, activated.max, activated.nominal), '\n'));
  const MacsRange& macs = summary.macs;
  text.append(
      Concat("MACs per token: ", RangeText(macs.min, macs.max, macs.nominal), "; attention ",
             RangeText(macs.min_per_key, macs.max_per_key), " for each key",
             macs.max_per_source_key == 0
                 ? ""
                 : Concat(" and ", RangeText(macs.min_per_source_key, macs.max_per_source_key),
                          " for each token of the source"),
             "; LM head ", Grouped(summary.head_macs), '\n'));
  if (summary.source_macs) {
    const MacsRange& source = *summary.source_macs;
    text.append(Concat(
        "MACs per token of the source: ", RangeText(source.min, source.max, source.nominal),
        "; attention ", RangeText(source.min_per_key, source.max_per_key), " for each key\n"));
  }
  text.append(Concat("weights: ", Mebibytes(summary.WeightBytes(DType::kF32)), " in f32, ",
                     Mebibytes(summary.WeightBytes(DType::kBF16)), " in bf16 or f16"));
  for (const auto& [type, bytes] : summary.quantized_bytes) {
    text.append(Concat(", ", Mebibytes(bytes), " with ", Name(type)));
  }
  text.append("\n");
  text.append(Concat("KV cache per token: ", Grouped(summary.KvBytesPerToken(DType::kF32)),
                     " bytes in f32, ", Grouped(summary.KvBytesPerToken(DType::kBF16)),
                     " bytes in bf16\n"));
  if (summary.state_bytes > 0) {
    text.append(Concat("state per sequence: ", Grouped(summary.state_bytes), " bytes\n"));
  }
  return text;
}

nlohmann::json SummaryJson(const ModelSummary& summary) {
  using Json = nlohmann::json;
  const auto bytes = [](const auto& of) {
    Json by_dtype;
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      by_dtype[std::string(Name(dtype))] = of(dtype);
    }
    return by_dtype;
  };
  Json blocks = Json::array();
  for (const RoutedBlockSummary& block : summary.routed_blocks) {
    blocks.push_back({{"layer", block.layer},
                      {"block", Name(block.block)},
                      {"expert_parameters", block.expert_parameters},
                      {"experts_per_token", {block.min_experts, block.max_experts}}});
    if (block.stack != Stack::kOnly) blocks.back()["stack"] = StackWord(block.stack);
  }
  Json groups = Json::array();
  for (const LayerGroup& group : summary.groups) {
    groups.push_back({{"layers", group.layers},
                      {"attention", group.attention},
                      {"feed_forward", group.feed_forward}});
    if (group.stack != Stack::kOnly) groups.back()["stack"] = StackWord(group.stack);
    if (!group.source.empty()) groups.back()["cross_attention"] = group.source;
  }
  Json activated = {{"min", summary.activated.min}, {"max", summary.activated.max}};
  activated["nominal"] =
      summary.activated.nominal.has_value() ? Json(*summary.activated.nominal) : Json(nullptr);
  const auto macs_json = [](const MacsRange& range) {
    return Json{{"min", range.min},
                {"max", range.max},
                {"nominal", range.nominal.has_value() ? Json(*range.nominal) : Json(nullptr)},
                {"attention_per_key", {{"min", range.min_per_key}, {"max", range.max_per_key}}}};
  };
  Json macs = macs_json(summary.macs);
  macs["lm_head"] = summary.head_macs;
  if (summary.source_macs) {
    macs["attention_per_source_key"] = {{"min", summary.macs.min_per_source_key},
                                        {"max", summary.macs.max_per_source_key}};
    macs["source"] = macs_json(*summary.source_macs);
  }
  Json weight_bytes = bytes([&](DType d) { return summary.WeightBytes(d); });
  for (const auto& [type, size] : summary.quantized_bytes) {
    weight_bytes[std::string(Name(type))] = size;
  }
  return {{"general", summary.general},
          {"layers", groups},
          {"parameters", summary.parameters},
          {"embedding_parameters", summary.embedding_parameters},
          {"expert_parameters", summary.expert_parameters},
          {"always_active_parameters", summary.always_active},
          {"activated_parameters", activated},
          {"macs_per_token", macs},
          {"routed_blocks", blocks},
          {"weight_bytes", weight_bytes},
          {"kv_bytes_per_token", bytes([&](DType d) { return summary.KvBytesPerToken(d); })},
          {"state_bytes_per_sequence", summary.state_bytes}};
}

}  // namespace moeserve
