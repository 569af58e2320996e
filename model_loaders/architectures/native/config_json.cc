#include "model_loaders/architectures/native/config_json.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/error_text.h"
#include "engine/spec/settings.h"
#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/leftover.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/tokenizer/token_ids.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr int kFormatVersion = 2;
// Stands for a block that a layer does not have.
constexpr std::string_view kNoBlock = "none";

// Reads one width for all experts, or a list with one width per expert. `num_experts` is 0 if its
// value was invalid; only the type is then checked.
std::vector<int> ParseWidths(const Json& json, const std::string& path, int num_experts,
                             Problems* problems) {
  if (const std::optional<int> width = IntFrom(json)) return std::vector<int>(num_experts, *width);
  if (!json.is_array() || (num_experts > 0 && json.size() != static_cast<size_t>(num_experts))) {
    const std::string found = json.is_array() ? Concat("a list of ", json.size()) : ShowJson(json);
    const std::string expected = Concat(path, ": expected an integer or a list of ");
    problems->Add(num_experts > 0 ? Concat(expected, num_experts, " integers, found ", found,
                                           " (num_experts is ", num_experts, ')')
                                  : Concat(expected, "integers, found ", found));
    return {};
  }
  std::vector<int> widths;
  for (const Json& item : json) {
    const std::optional<int> width = IntFrom(item);
    if (!width.has_value()) {
      problems->Add(
          Concat(path, '[', widths.size(), "]: expected an integer, found ", ShowJson(item)));
      return {};
    }
    widths.push_back(*width);
  }
  return widths;
}

// Calls run(M()) for every mixer M that stands in the place of attention.
template <typename Run>
void ForOtherMixers(const Run& run) {
  const auto one = [&]<typename M>(const M& mixer) {
    if constexpr (requires { M::kKind; }) run(mixer);
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (one(std::variant_alternative_t<i, Mixer>()), ...);
  }
  (std::make_index_sequence<std::variant_size_v<Mixer>>());
}

// Reads the object of a structure, which error messages call `path`. The result is valid only if
// the call added nothing to `problems`. `context` is that of the table.
template <typename S, typename... Context>
void ReadSettings(const Json& json, const std::string& path, Problems* problems, S& spec,
                  const Context&... context);

// Reads the settings of a table of engine/spec/settings.h.
template <typename S>
class SettingsReader : public SettingsVisitor<SettingsReader<S>, S> {
 public:
  SettingsReader(ObjectReader& reader, Problems* problems, S& spec)
      : SettingsVisitor<SettingsReader, S>(spec), reader_(reader), problems_(problems) {}

  template <typename T>
  void Row(const char* key, T& value, const T* assumed, const Rule& rule) {
    if (!rule.used) return;
    const std::optional<T> fallback = assumed == nullptr ? std::nullopt : std::optional(*assumed);
    if constexpr (std::is_enum_v<T>) {
      const T first = static_cast<T>(std::max(rule.low, 0.0));
      value = reader_.PickKind<T>(key, first, fallback).value_or(fallback.value_or(first));
    } else if constexpr (std::is_same_v<T, bool>) {
      value = reader_.Bool(key, fallback.value_or(false));
    } else if constexpr (std::is_same_v<T, int>) {
      const size_t before = problems_->count();
      value = reader_.Int(key, fallback);
      if (rule.early && problems_->count() == before) CheckEarly(key, value, rule);
    } else if constexpr (std::is_same_v<T, double>) {
      value = reader_.Real(key, fallback);
    } else if constexpr (std::is_same_v<T, float>) {
      const double number = reader_.Real(key, fallback);
      const bool fits = std::fabs(number) <= std::numeric_limits<float>::max();
      value = fits ? static_cast<float>(number) : 0.0f;
      if (!fits) {
        reader_.Fault(key, "a number that f32 can hold", ShowJson(*reader_.Optional(key)));
      }
    } else if constexpr (std::is_same_v<T, std::vector<double>>) {
      value = reader_.Reals(key);
    } else if constexpr (std::is_same_v<T, std::vector<int>>) {
      if (reader_.Optional(key) != nullptr) value = reader_.Ints(key, kMaxExperts);
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      if (reader_.Optional(key) != nullptr) value = reader_.Texts(key);
    } else if (const Json* json = reader_.Optional(key)) {
      ReadOptional(key, *json, value, rule);
    }
  }

  template <typename T>
  bool Kind(const char* key, T S::*member) {
    const std::optional<T> kind = reader_.PickKind<T>(key);
    if (!kind.has_value()) return kind_known_ = false;
    this->spec.*member = *kind;
    Variant(Concat("kind is ", Quoted(KindName(*kind))));
    return true;
  }

  template <typename T>
  bool Form(const char* key, std::optional<T> S::*member) {
    std::vector<Choice<bool>> kinds = {{"dense", false}, {"routed", true}};
    // ReadSettings() of a mixer has seen that it is none of the other kinds.
    if constexpr (std::is_same_v<S, AttentionSpec>) {
      ForOtherMixers([&](const auto& other) { kinds.push_back({other.kKind, false}); });
    }
    // ReadBlock() has seen that there is a block.
    kinds.push_back({kNoBlock, false});
    const auto routed = reader_.Pick<bool>(key, kinds);
    if (!routed.has_value()) return kind_known_ = false;
    if (*routed) (this->spec.*member).emplace();
    Variant(*routed ? "kind is \"routed\"" : "kind is \"dense\"");
    return true;
  }

  void OnlyKind(const char* key, std::string_view name) {
    reader_.Optional(key);
    Variant(Concat("kind is ", Quoted(name)));
  }

  void Variant(std::string_view text) { variant_ = Concat(" (", text, ')'); }

  void Named(const char* key, bool S::*member, std::string_view no, std::string_view yes) {
    this->spec.*member = reader_.Pick<bool>(key, {{no, false}, {yes, true}}, false).value_or(false);
  }

  void Widths(const char* key, std::vector<int> S::*member, const Rule&) {
    const Json* json = reader_.Required(key, "an integer or a list of integers");
    if (json == nullptr) return;
    this->spec.*member = ParseWidths(*json, reader_.PathOf(key), this->spec.num_experts, problems_);
  }

  template <typename T, typename... Context>
  void Object(const char* key, T S::*member, Need need = {}, const Context&... context) {
    const Json* json =
        need == Need::kRequired ? reader_.Required(key, "an object") : reader_.Optional(key);
    if (json == nullptr) return;
    auto& part = this->spec.*member;
    if constexpr (requires { part.emplace(); }) {
      ReadSettings(*json, reader_.PathOf(key), problems_, part.emplace(), context...);
    } else {
      ReadSettings(*json, reader_.PathOf(key), problems_, part, context...);
    }
    // Files have the number of experts with matrices.
    if constexpr (std::is_same_v<T, NullExperts>) this->spec.num_experts += part.total();
  }

  template <typename T>
  void List(const char* key, std::vector<T> S::*member, int most) {
    const Json* json = reader_.Optional(key);
    if (json == nullptr) return;
    if (!json->is_array() || json->size() > static_cast<size_t>(most)) {
      reader_.Fault(key, Concat("a list of at most ", most, " objects"), ShowJson(*json));
      return;
    }
    for (const Json& item : *json) {
      std::vector<T>& list = this->spec.*member;
      const std::string path = Concat(reader_.PathOf(key), '[', list.size(), ']');
      ReadSettings(item, path, problems_, list.emplace_back());
    }
  }

  void RefuseOthers() {
    if (kind_known_) reader_.RefuseOthers(variant_);
  }

 private:
  void CheckEarly(const char* key, int& value, const Rule& rule) {
    if (!reader_.valid() || (value >= rule.low && value <= rule.high)) return;
    const auto low = static_cast<int>(rule.low), high = static_cast<int>(rule.high);
    reader_.Fault(key, Concat("an integer in [", low, ", ", high, ']'), std::to_string(value));
    value = 0;
  }

  template <typename T>
  void ReadOptional(const char* key, const Json& json, std::optional<T>& value, const Rule& rule) {
    if constexpr (std::is_same_v<T, int>) {
      value = IntFrom(json);
      if (!value && !json.is_null()) reader_.Fault(key, "null or an integer", ShowJson(json));
    } else {
      Row(key, value.emplace(), static_cast<const T*>(nullptr), rule);
    }
  }

  ObjectReader& reader_;
  Problems* const problems_;
  std::string variant_;
  bool kind_known_ = true;
};

template <typename S, typename... Context>
void ReadSettings(const Json& json, const std::string& path, Problems* problems, S& spec,
                  const Context&... context) {
  ObjectReader object(json, path, problems);
  SettingsReader<S> reader(object, problems, spec);
  Settings(reader, spec, context...);
  reader.RefuseOthers();
}

// Reads the object of a block: the settings of its mixer and how it joins the residual stream.
// `block` has a default mixer; "attention" may be another mixer of tokens. Returns whether the
// layer has the block.
bool ReadBlock(const Json& json, const std::string& path, Problems* problems, BlockSpec& block) {
  const auto kind = json.is_object() ? json.find("kind") : json.end();
  if (kind != json.end() && *kind == kNoBlock) {
    ObjectReader object(json, path, problems);
    object.Optional("kind");
    object.RefuseOthers(Concat(" (kind is ", Quoted(kNoBlock), ')'));
    return false;
  }
  ForOtherMixers([&](const auto& other) {
    const bool of_tokens = block.kind() != BlockKind::kFeedForward;
    if (of_tokens && kind != json.end() && *kind == other.kKind) block.mixer = other;
  });
  ObjectReader object(json, path, problems);
  SettingsReader<ResidualSpec> residual(object, problems, block.residual);
  Settings(residual, block.residual);
  const auto read = [&](auto& mixer) {
    auto& spec = SettingsOf(mixer);
    SettingsReader<std::remove_reference_t<decltype(spec)>> reader(object, problems, spec);
    Settings(reader, spec);
    reader.RefuseOthers();
  };
  std::visit(read, block.mixer);
  return true;
}

// The block of each layer with one of the two names of blocks; nullopt where the layer has none.
using BlockList = std::vector<std::optional<BlockSpec>>;

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

int64_t ExpertsOf(const BlockSpec& block) {
  return block.routing() == nullptr ? 0 : block.routing()->num_experts;
}

// Reads the blocks of all layers from one object, or from a list with one object per layer. Limits
// the number of experts while reading, because a short file can demand long lists of widths in many
// layers.
BlockList ParseBlocks(ObjectReader& reader, const char* key, const Mixer& mixer, int layers,
                      bool* is_list, Problems* problems) {
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
    BlockSpec block{.mixer = mixer};
    const bool exists = ReadBlock(*json, reader.PathOf(key), problems, block);
    if (!problems->empty() || too_many(ExpertsOf(block) * layers)) return {};
    return BlockList(layers, exists ? std::optional(block) : std::nullopt);
  }
  if (json->size() != static_cast<size_t>(layers)) {
    reader.Fault(key, expected,
                 Concat("a list of ", json->size(), " (num_hidden_layers is ", layers, ')'));
    return {};
  }
  BlockList blocks;
  int64_t experts = 0;
  for (const Json& item : *json) {
    const std::string path = Concat(reader.PathOf(key), '[', blocks.size(), ']');
    std::optional<BlockSpec>& block = blocks.emplace_back(BlockSpec{.mixer = mixer});
    if (!ReadBlock(item, path, problems, *block)) block.reset();
    if (block.has_value()) experts += ExpertsOf(*block);
    if (problems->count() >= Problems::kShown || too_many(experts)) break;
  }
  return blocks;
}

// Returns an error about another model type or version at once, because errors in other keys would
// only follow from it.
absl::Status CheckFormat(ObjectReader& reader, const Problems& problems, ModelKind& kind) {
  kind = reader.PickKind<ModelKind>("model_type").value_or(kind);
  const size_t before = problems.count();
  const int version = reader.Int("format_version", kFormatVersion);
  if (problems.count() == before && (version < 1 || version > kFormatVersion)) {
    reader.Fault("format_version",
                 Concat("1 or ", kFormatVersion, " (the newest that this server reads)"),
                 std::to_string(version));
  }
  return problems.ToStatus(kConfigFile);
}

// The lists of blocks of one stack, as files have them.
struct StackBlocks {
  int layers = 0;
  BlockList attention, cross_attention, feed_forward;
};

// Reads the number of layers of a stack; nullopt if it is not valid.
std::optional<int> ReadLayers(ObjectReader& reader, const Problems& problems) {
  const size_t before = problems.count();
  const int layers = reader.Int("num_hidden_layers");
  if (problems.count() == before && (layers < 1 || layers > kMaxLayers)) {
    reader.Fault("num_hidden_layers", Concat("an integer in [1, ", kMaxLayers, "]"),
                 std::to_string(layers));
  }
  return problems.count() == before ? std::optional(layers) : std::nullopt;
}

// Reads the blocks of a stack.
StackBlocks ReadBlocks(ObjectReader& reader, Problems* problems, Stack stack,
                       std::optional<int> layers, NativeConfig& config) {
  StackBlocks blocks;
  blocks.layers = layers.value_or(0);
  const auto read = [&](const char* key, const Mixer& mixer, bool& is_list, BlockList& list) {
    bool listed = false;
    if (layers.has_value()) {
      list = ParseBlocks(reader, key, mixer, *layers, &listed, problems);
    } else {
      reader.Optional(key);
    }
    is_list = is_list || listed;
  };
  read("attention", AttentionSpec(), config.attention_is_list, blocks.attention);
  if (stack == Stack::kDecoder) {
    read("cross_attention", CrossAttentionSpec(), config.attention_is_list, blocks.cross_attention);
  }
  read("feed_forward", FeedForwardSpec(), config.feed_forward_is_list, blocks.feed_forward);
  return blocks;
}

// Reads the keys of a stack into `spec`, except its blocks, which are returned.
StackBlocks ReadStack(ObjectReader& reader, Problems* problems, ModelSpec& spec,
                      NativeConfig& config) {
  const std::optional<int> layers = ReadLayers(reader, *problems);
  spec.max_position_embeddings = reader.Int("max_position_embeddings");
  SettingsReader<ModelSpec> settings(reader, problems, spec);
  StackSettings(settings, spec);
  return ReadBlocks(reader, problems, spec.stack, layers, config);
}

// Reads the object "prediction".
StackBlocks ReadPrediction(const Json& json, Problems* problems, NativeConfig& config) {
  ObjectReader object(json, "prediction", problems);
  const std::optional<int> layers = ReadLayers(object, *problems);
  StackBlocks blocks = ReadBlocks(object, problems, Stack::kPrediction, layers, config);
  object.RefuseOthers();
  return blocks;
}

// Adds the blocks to the spec.
absl::Status AddBlocks(StackBlocks& stack, ModelSpec& spec) {
  stack.cross_attention.resize(static_cast<size_t>(stack.layers));
  for (int i = 0; i < stack.layers; ++i) {
    const int before = spec.num_blocks();
    for (BlockList* list : {&stack.attention, &stack.cross_attention, &stack.feed_forward}) {
      std::optional<BlockSpec>& block = (*list)[static_cast<size_t>(i)];
      if (!block.has_value()) continue;
      block->layer = i;
      block->stack = spec.stack;
      spec.blocks.push_back(*std::move(block));
    }
    if (spec.num_blocks() > before) continue;
    return absl::InvalidArgumentError(
        Concat(kConfigFile, ": ", TensorPrefix(spec.stack), "layer ", i,
               ": expected an attention or feed_forward, found none"));
  }
  return absl::OkStatus();
}

// Reads the objects "encoder" and "decoder", each with the keys of its stack.
std::pair<StackBlocks, StackBlocks> ReadStacks(ObjectReader& reader, Problems* problems,
                                               ModelSpec& encoder, NativeConfig& config) {
  std::pair<StackBlocks, StackBlocks> stacks;
  const auto read = [&](const char* key, ModelSpec& spec, StackBlocks& blocks) {
    const Json* const json = reader.Required(key, "an object");
    if (json == nullptr) return;
    ObjectReader object(*json, key, problems);
    if (&spec == &encoder) spec.vocab_size = object.Int("vocab_size", config.spec.vocab_size);
    blocks = ReadStack(object, problems, spec, config);
    object.RefuseOthers();
  };
  read("encoder", encoder, stacks.first);
  read("decoder", config.spec, stacks.second);
  return stacks;
}

Result<NativeConfig> ReadNativeConfig(const Json& json) {
  Problems problems;
  ObjectReader reader(json, "", &problems);
  NativeConfig config;
  ModelSpec& spec = config.spec;
  MOESERVE_RETURN_IF_ERROR(CheckFormat(reader, problems, spec.kind));
  spec.vocab_size = reader.Int("vocab_size");
  spec.hidden_size = reader.Int("hidden_size");
  if (const Json* bos = reader.Required("bos_token_id", "an integer or null")) {
    spec.bos_token_id = IntFrom(*bos);
    if (!spec.bos_token_id.has_value() && !bos->is_null()) {
      reader.Fault("bos_token_id", "an integer or null", ShowJson(*bos));
    }
  }
  if (const Json* eos = reader.Required("eos_token_id", kTokenIdsExpected)) {
    spec.eos_token_ids = ParseTokenIds(*eos, "eos_token_id", &problems);
  }
  const bool pair = spec.kind == ModelKind::kEncoderDecoder;
  auto encoder = std::make_shared<ModelSpec>();
  StackBlocks of_encoder, blocks;
  if (pair) {
    encoder->kind = ModelKind::kEncoder;
    encoder->stack = Stack::kEncoder;
    encoder->head.kind = HeadKind::kNone;
    encoder->hidden_size = spec.hidden_size;
    spec.stack = Stack::kDecoder;
    spec.encoder = encoder;
    std::tie(of_encoder, blocks) = ReadStacks(reader, &problems, *encoder, config);
  } else {
    blocks = ReadStack(reader, &problems, spec, config);
  }
  std::optional<StackBlocks> of_prediction;
  if (const Json* const json = pair ? nullptr : reader.Optional("prediction"); json != nullptr) {
    of_prediction = ReadPrediction(*json, &problems, config);
  }
  SettingsReader<ModelSpec> settings(reader, &problems, spec);
  OutputSettings(settings, spec);
  if (!encoder->position.count_padding) encoder->pad_token_id = spec.pad_token_id;
  encoder->share_embeddings = spec.share_embeddings;
  if (const Json* quantization = reader.Optional("quantization")) {
    config.quantization = ParseQuantization(*quantization, &problems);
  }
  reader.RefuseOthers();
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(kConfigFile));
  if (pair) MOESERVE_RETURN_IF_ERROR(AddBlocks(of_encoder, *encoder));
  MOESERVE_RETURN_IF_ERROR(AddBlocks(blocks, spec));
  if (of_prediction.has_value()) {
    auto prediction = std::make_shared<ModelSpec>(PredictionOf(spec));
    MOESERVE_RETURN_IF_ERROR(AddBlocks(*of_prediction, *prediction));
    spec.prediction = std::move(prediction);
  }
  MOESERVE_RETURN_IF_ERROR(ValidateConfig(config));
  return config;
}

Result<std::unique_ptr<const CheckpointConfig>> ReadNative(const Json& json,
                                                           const StoredNames& stored) {
  MOESERVE_ASSIGN_OR_RETURN(NativeConfig config, ReadNativeConfig(json));
  if (!stored.predictions && config.spec.prediction != nullptr) {
    config.spec.prediction = nullptr;
    config.leaves_prediction = true;
    config.prediction_prefix = TensorPrefix(Stack::kPrediction);
    config.decisions.emplace_back(kPredictionsLeft);
  }
  return std::make_unique<const NativeConfig>(std::move(config));
}

}  // namespace

constinit const Architecture kNativeArchitecture = {.model_type = Traits(ModelKind::kDecoder).name,
                                                    .read = ReadNative};
constinit const Architecture kNativeEncoderArchitecture = {
    .model_type = Traits(ModelKind::kEncoder).name, .read = ReadNative};
constinit const Architecture kNativePairArchitecture = {
    .model_type = Traits(ModelKind::kEncoderDecoder).name, .read = ReadNative};

std::optional<TensorPlace> NativeConfig::Place(const TensorRequirement& tensor) const {
  return TensorPlace{.name = tensor.name};
}

std::optional<std::string> NativeConfig::LeftOverReason(std::string_view name) const {
  if (leaves_prediction && IsOfPrediction(name)) return std::nullopt;
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
