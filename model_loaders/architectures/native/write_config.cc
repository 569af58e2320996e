#include "model_loaders/architectures/native/write_config.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/kinds.h"
#include "engine/spec/settings.h"
#include "model_loaders/architectures/families.h"

namespace moeserve {
namespace {

// Keeps the order of the keys.
using OrderedJson = nlohmann::ordered_json;

// Returns a short decimal number that becomes `value` when it is rounded to f32: 1e-6 instead of
// 9.999999974752427e-07.
double Decimal(float value) {
  char text[32];
  const std::to_chars_result written = std::to_chars(text, text + sizeof(text), value);
  double decimal = 0.0;
  std::from_chars(text, written.ptr, decimal);
  return static_cast<float>(decimal) == value ? decimal : static_cast<double>(value);
}

// Returns the object of a structure. `context` is that of the table.
template <typename S, typename... Context>
OrderedJson SettingsJson(const S& spec, const Context&... context);

// Writes the settings of a table of engine/spec/settings.h.
template <typename S>
class SettingsWriter : public SettingsVisitor<SettingsWriter<S>, const S> {
 public:
  SettingsWriter(OrderedJson& json, const S& spec)
      : SettingsVisitor<SettingsWriter, const S>(spec), json_(json) {}

  template <typename T>
  void Row(const char* key, const T& value, const T* assumed, const Rule& rule) {
    if (!rule.used || (assumed != nullptr && value == *assumed && !rule.written)) return;
    if constexpr (requires { value.has_value(); }) {
      Row(key, *value, static_cast<decltype(&*value)>(nullptr), rule);
    } else if constexpr (std::is_enum_v<T>) {
      json_[key] = std::string(KindName(value));
    } else if constexpr (std::is_same_v<T, float>) {
      json_[key] = Decimal(value);
    } else {
      json_[key] = value;
    }
  }

  template <typename T>
  bool Form(const char* key, std::optional<T> S::*member) {
    json_[key] = (this->spec.*member).has_value() ? "routed" : "dense";
    return true;
  }

  void OnlyKind(const char* key, std::string_view name) { json_[key] = std::string(name); }

  void Named(const char* key, bool S::*member, std::string_view, std::string_view yes) {
    if (this->spec.*member) json_[key] = std::string(yes);
  }

  void Widths(const char* key, std::vector<int> S::*member, const Rule&) {
    const std::vector<int>& widths = this->spec.*member;
    const bool equal =
        std::adjacent_find(widths.begin(), widths.end(), std::not_equal_to<>()) == widths.end();
    json_[key] = equal && !widths.empty() ? OrderedJson(widths.front()) : OrderedJson(widths);
  }

  template <typename T, typename... Context>
  void Object(const char* key, T S::*member, Need need = {}, const Context&... context) {
    const T& part = this->spec.*member;
    if constexpr (requires { part.has_value(); }) {
      if (part.has_value()) json_[key] = SettingsJson(*part, context...);
    } else {
      OrderedJson json = SettingsJson(part, context...);
      if (need == Need::kOptional && json == SettingsJson(T(), context...)) return;
      json_[key] = std::move(json);
    }
  }

  template <typename T>
  void List(const char* key, std::vector<T> S::*member, int /*most*/) {
    for (const T& item : this->spec.*member) json_[key].push_back(SettingsJson(item));
  }

 private:
  OrderedJson& json_;
};

template <typename S, typename... Context>
OrderedJson SettingsJson(const S& spec, const Context&... context) {
  OrderedJson json = OrderedJson::object();
  SettingsWriter<S> writer(json, spec);
  Settings(writer, spec, context...);
  if constexpr (std::is_same_v<S, RoutedLayerSpec>) json["num_experts"] = spec.num_bodies();
  return json;
}

OrderedJson BlockJson(const BlockSpec& block) {
  OrderedJson json =
      std::visit([](const auto& mixer) { return SettingsJson(SettingsOf(mixer)); }, block.mixer);
  SettingsWriter<ResidualSpec> writer(json, block.residual);
  Settings(writer, block.residual);
  return json;
}

// Returns the blocks of all layers as one object if they are equal, else as a list.
OrderedJson BlocksJson(std::vector<OrderedJson> blocks) {
  const bool equal =
      std::adjacent_find(blocks.begin(), blocks.end(), std::not_equal_to<>()) == blocks.end();
  if (equal && !blocks.empty()) return std::move(blocks.front());
  return OrderedJson(std::move(blocks));
}

// Adds the keys of a stack, except its blocks.
void AddStack(OrderedJson& json, const ModelSpec& spec) {
  SettingsWriter<ModelSpec> writer(json, spec);
  StackSettings(writer, spec);
}

void AddBlocks(OrderedJson& json, const ModelSpec& spec) {
  std::vector<OrderedJson> attention, sources, feed_forward;
  const auto add = [](std::vector<OrderedJson>& list, const BlockSpec* block) {
    list.push_back(block == nullptr ? OrderedJson{{"kind", "none"}} : BlockJson(*block));
  };
  for (int layer = 0; layer < spec.num_layers(); ++layer) {
    add(attention, spec.token_mixer(layer));
    add(sources, spec.FindBlock(layer, BlockKind::kCrossAttention));
    add(feed_forward, spec.FindBlock(layer, BlockKind::kFeedForward));
  }
  json["attention"] = BlocksJson(std::move(attention));
  if (spec.stack == Stack::kDecoder) json["cross_attention"] = BlocksJson(std::move(sources));
  json["feed_forward"] = BlocksJson(std::move(feed_forward));
}

// Returns the object of one of two stacks.
OrderedJson StackJson(const ModelSpec& spec) {
  OrderedJson json = OrderedJson::object();
  json["num_hidden_layers"] = spec.num_layers();
  json["max_position_embeddings"] = spec.max_position_embeddings;
  AddStack(json, spec);
  AddBlocks(json, spec);
  return json;
}

}  // namespace

nlohmann::ordered_json NativeConfigJson(const ModelSpec& spec, Quantization quantization) {
  const bool pair = spec.encoder != nullptr;
  OrderedJson json = OrderedJson::object();
  json["model_type"] = std::string(KindName(spec.kind));
  // Readers of version 1 know neither encoders nor other heads.
  if (spec.kind != ModelKind::kDecoder || spec.head.kind != HeadKind::kLanguageModel ||
      spec.pooling.has_value()) {
    json["format_version"] = 2;
  }
  json["vocab_size"] = spec.vocab_size;
  json["hidden_size"] = spec.hidden_size;
  if (!pair) {
    json["num_hidden_layers"] = spec.num_layers();
    json["max_position_embeddings"] = spec.max_position_embeddings;
  }
  json["bos_token_id"] =
      spec.bos_token_id.has_value() ? OrderedJson(*spec.bos_token_id) : OrderedJson(nullptr);
  json["eos_token_id"] = spec.eos_token_ids.size() == 1 ? OrderedJson(spec.eos_token_ids.front())
                                                        : OrderedJson(spec.eos_token_ids);
  if (!pair) AddStack(json, spec);
  SettingsWriter<ModelSpec> writer(json, spec);
  OutputSettings(writer, spec);
  if (quantization != Quantization::kNone) {
    json["quantization"] = {{"type", std::string(Name(quantization))},
                            {"group_size", StatedGroupSize(quantization)}};
  }
  if (pair) {
    json["encoder"] = StackJson(*spec.encoder);
    if (spec.encoder->vocab_size != spec.vocab_size) {
      json["encoder"]["vocab_size"] = spec.encoder->vocab_size;
    }
    json["decoder"] = StackJson(spec);
  } else {
    AddBlocks(json, spec);
  }
  if (spec.prediction != nullptr) {
    json["prediction"] = {{"num_hidden_layers", spec.prediction->num_layers()}};
    AddBlocks(json["prediction"], *spec.prediction);
  }
  return json;
}

}  // namespace moeserve
