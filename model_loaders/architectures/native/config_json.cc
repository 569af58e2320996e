#include "model_loaders/architectures/native/config_json.h"

#include <cctype>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "base/message.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/leftover.h"
#include "model_loaders/architectures/native/config_blocks.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/tokenizer/token_ids.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kNativeModelType = "routed_decoder";
constexpr int kFormatVersion = 1;

NormSpec ParseNorm(const Json& json, Problems* problems) {
  ObjectReader reader(json, "norm", problems);
  NormSpec norm;
  if (!reader.valid()) return norm;
  norm.kind = reader.Pick<NormKind>("kind", {{"rms", NormKind::kRms}, {"layer", NormKind::kLayer}})
                  .value_or(NormKind::kRms);
  const auto read_eps = [&](const char* key, double fallback) {
    const double eps = reader.Real(key, fallback);
    if (std::fabs(eps) <= std::numeric_limits<float>::max()) return static_cast<float>(eps);
    reader.Fault(key, "a number that f32 can hold", ShowJson(json[key]));
    return 0.0f;
  };
  norm.eps = read_eps("eps", 1e-5);
  if (json.contains("final_eps")) norm.final_eps = read_eps("final_eps", 1e-5);
  norm.placement = reader
                       .Pick<NormPlacement>("placement",
                                            {{"pre", NormPlacement::kPre},
                                             {"post", NormPlacement::kPost},
                                             {"output", NormPlacement::kOutput},
                                             {"both", NormPlacement::kBoth}},
                                            NormPlacement::kPre)
                       .value_or(NormPlacement::kPre);
  if (json.contains("final")) norm.final_norm = reader.Bool("final", false);
  reader.RefuseOthers();
  return norm;
}

RelativeBias ParseRelativeBias(const Json& json, Problems* problems) {
  ObjectReader reader(json, "relative_bias", problems);
  RelativeBias bias;
  if (!reader.valid()) return bias;
  bias.buckets = reader.Int("buckets");
  bias.max_distance = reader.Int("max_distance");
  bias.bidirectional = reader.Bool("bidirectional", false);
  reader.RefuseOthers();
  return bias;
}

Quantization ParseQuantization(const Json& json, Problems* problems) {
  ObjectReader reader(json, "quantization", problems);
  const auto type = reader.PickKind("type", Quantization::kInt8);  // any value except kNone
  if (!type.has_value()) return Quantization::kNone;
  const size_t before = problems->count();
  const int group = reader.Int("group_size");
  if (problems->count() == before && group != StatedGroupSize(*type)) {
    reader.Fault("group_size",
                 Concat(StatedGroupSize(*type), " (type is ", Quoted(Name(*type)), ')'),
                 std::to_string(group));
  }
  reader.RefuseOthers();
  return *type;
}

int64_t ExpertsOf(const Mixer& mixer) {
  const RoutedLayerSpec* const routing = BlockSpec{.mixer = mixer}.routing();
  return routing == nullptr ? 0 : routing->num_experts;
}
int64_t ExpertsOf(const FeedForwardSpec& block) {
  return block.routing.has_value() ? block.routing->num_experts : 0;
}

// Reads the blocks of all layers from one object, or from a list with one object per layer. Limits
// the number of experts while reading, because a short file can demand long lists of widths in many
// layers.
template <typename Block>
std::vector<Block> ParseBlocks(ObjectReader& reader, const char* key, int layers, bool* is_list,
                               Block (*parse)(const Json&, const std::string&, Problems*),
                               Problems* problems) {
  const std::string expected = Concat("an object or a list of ", layers, " objects");
  const Json* json = reader.Required(key, expected);
  if (json == nullptr) return {};
  *is_list = json->is_array();
  const auto too_many = [&](int64_t experts) {
    if (experts <= kMaxExpertsOfModel) return false;
    reader.Fault(key, Concat("at most ", kMaxExpertsOfModel, " experts in all layers together"),
                 Concat(experts, " (num_hidden_layers is ", layers, ')'));
    return true;
  };
  if (!*is_list) {
    const Block block = parse(*json, key, problems);
    if (!problems->empty() || too_many(ExpertsOf(block) * layers)) return {};
    return std::vector<Block>(layers, block);
  }
  if (json->size() != static_cast<size_t>(layers)) {
    reader.Fault(key, expected,
                 Concat("a list of ", json->size(), " (num_hidden_layers is ", layers, ')'));
    return {};
  }
  std::vector<Block> blocks;
  int64_t experts = 0;
  for (const Json& item : *json) {
    blocks.push_back(parse(item, Concat(key, '[', blocks.size(), ']'), problems));
    experts += ExpertsOf(blocks.back());
    if (problems->count() >= Problems::kShown || too_many(experts)) break;
  }
  return blocks;
}

// Returns an error about another model type or version at once, because errors in other keys would
// only follow from it.
absl::Status CheckFormat(ObjectReader& reader, const Problems& problems) {
  reader.Pick<int>("model_type", {{kNativeModelType, 0}});
  const size_t before = problems.count();
  const int version = reader.Int("format_version", kFormatVersion);
  if (problems.count() == before && version != kFormatVersion) {
    reader.Fault("format_version",
                 version > kFormatVersion
                     ? Concat(kFormatVersion, " (the newest that this server reads)")
                     : std::to_string(kFormatVersion),
                 std::to_string(version));
  }
  return problems.ToStatus(kConfigFile);
}

Result<NativeConfig> ReadNativeConfig(const Json& json) {
  Problems problems;
  ObjectReader reader(json, "", &problems);
  MOESERVE_RETURN_IF_ERROR(CheckFormat(reader, problems));

  NativeConfig config;
  ModelSpec& spec = config.spec;
  spec.vocab_size = reader.Int("vocab_size");
  spec.hidden_size = reader.Int("hidden_size");
  size_t before = problems.count();
  int layers = reader.Int("num_hidden_layers");
  if (problems.count() == before && (layers < 1 || layers > kMaxLayers)) {
    reader.Fault("num_hidden_layers", Concat("an integer in [1, ", kMaxLayers, "]"),
                 std::to_string(layers));
  }
  const bool layers_known = problems.count() == before;
  spec.max_position_embeddings = reader.Int("max_position_embeddings");
  if (const Json* bos = reader.Required("bos_token_id", "an integer or null")) {
    spec.bos_token_id = IntFrom(*bos);
    if (!spec.bos_token_id.has_value() && !bos->is_null()) {
      reader.Fault("bos_token_id", "an integer or null", ShowJson(*bos));
    }
  }
  if (const Json* eos = reader.Required("eos_token_id", kTokenIdsExpected)) {
    spec.eos_token_ids = ParseTokenIds(*eos, "eos_token_id", &problems);
  }
  if (const Json* norm = reader.Optional("norm")) spec.norm = ParseNorm(*norm, &problems);
  if (const Json* position = reader.Optional("position")) {
    spec.position = ParsePosition(*position, "position", &problems);
  }
  if (const Json* bias = reader.Optional("relative_bias")) {
    spec.relative_bias = ParseRelativeBias(*bias, &problems);
  }
  spec.embedding_scale = reader.Real("embedding_scale", 1.0);
  spec.embedding_norm = reader.Bool("embedding_norm", false);
  spec.residual_scale = reader.Real("residual_scale", 1.0);
  spec.logit_scale = reader.Real("logit_scale", 1.0);
  spec.logit_soft_cap = reader.Real("logit_soft_cap", 0.0);
  spec.tie_word_embeddings = reader.Bool("tie_word_embeddings", false);
  spec.head_bias = reader.Bool("head_bias", false);
  if (const Json* quantization = reader.Optional("quantization")) {
    config.quantization = ParseQuantization(*quantization, &problems);
  }

  std::vector<Mixer> attention;
  std::vector<FeedForwardSpec> feed_forward;
  if (layers_known) {
    attention = ParseBlocks<Mixer>(reader, "attention", layers, &config.attention_is_list,
                                   ParseTokenMixer, &problems);
    feed_forward = ParseBlocks<FeedForwardSpec>(
        reader, "feed_forward", layers, &config.feed_forward_is_list, ParseFeedForward, &problems);
  } else {
    reader.Optional("attention");
    reader.Optional("feed_forward");
  }
  reader.RefuseOthers();
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(kConfigFile));

  for (int i = 0; i < layers; ++i) {
    spec.AddLayer(std::move(attention[i]), std::move(feed_forward[i]));
  }
  MOESERVE_RETURN_IF_ERROR(ValidateConfig(config));
  return config;
}

Result<std::unique_ptr<const CheckpointConfig>> ReadNative(const Json& json, const StoredNames&) {
  MOESERVE_ASSIGN_OR_RETURN(NativeConfig config, ReadNativeConfig(json));
  return std::make_unique<const NativeConfig>(std::move(config));
}

}  // namespace

constinit const Architecture kNativeArchitecture = {
    .model_type = kNativeModelType,
    .recognizes = [](const Json& config) { return HasModelType(config, kNativeModelType); },
    .read = ReadNative};

std::optional<TensorPlace> NativeConfig::Place(const TensorRequirement& tensor) const {
  return TensorPlace{.name = tensor.name};
}

std::optional<std::string> NativeConfig::LeftOverReason(std::string_view name) const {
  return WhyLeftOver(name, spec);
}

std::string NativeConfig::AsInFile(std::string_view text) const {
  std::string out;
  const auto collapse = [&](std::string_view word, bool is_list) {
    if (is_list || !text.starts_with(word)) return false;
    size_t end = word.size();
    while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end]))) ++end;
    if (end == word.size() || end == text.size() || text[end] != ']') return false;
    out.append(word.substr(0, word.size() - 1));
    text.remove_prefix(end + 1);
    return true;
  };
  while (!text.empty()) {
    if (collapse("attention[", attention_is_list)) continue;
    if (collapse("feed_forward[", feed_forward_is_list)) continue;
    out.push_back(text[0]);
    text.remove_prefix(1);
  }
  return out;
}

Result<NativeConfig> ParseNativeConfig(std::string_view text) {
  MOESERVE_ASSIGN_OR_RETURN(const Json json, ParseConfigJson(text));
  return ReadNativeConfig(json);
}

}  // namespace moeserve
