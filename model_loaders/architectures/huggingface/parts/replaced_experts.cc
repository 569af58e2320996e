#include "model_loaders/architectures/huggingface/parts/replaced_experts.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error_text.h"
#include "engine/spec/spec_limits.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kApproximate = "approximate_experts";
constexpr std::string_view kCompression = "compression_config";
constexpr std::string_view kVector = "blocks.*.feed_forward.experts.*.constant";

constexpr TensorRule kTensors[] = {
    {kVector, "model.layers.*.mlp.experts.*.approx_value"},
    {kVector, "model.layers.*.block_sparse_moe.experts.*.approx_value"},
    {kVector, "model.layers.*.feed_forward.experts.*.approx_value"},
    {kVector, "model.layers.*.mixer.experts.*.approx_value"},
    {kVector, "model.layers.*.experts.*.approx_value"},
};

constexpr KeyRule kKeys[] = {
    {"feed_forward.routing.null_experts.replaced", kApproximate},
};

// Returns the number that `text` is, at most `most`; nullopt if it has another form.
std::optional<int> NumberFrom(std::string_view text, int most) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  const bool plain = text.size() == 1 || (!text.empty() && text[0] != '0');
  if (!whole || !plain || number < 0 || number > most) return std::nullopt;
  return number;
}

// Returns the only number between the dots of a module's name; nullopt if there are none or more.
std::optional<int> LayerOf(std::string_view path) {
  std::optional<int> layer;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (!part.empty() && part.find_first_not_of("0123456789") == part.npos) {
      if (layer.has_value()) return std::nullopt;
      layer = NumberFrom(part, kMaxLayers);
      if (!layer.has_value()) return std::nullopt;
    }
    begin = end + 1;
  }
  return layer;
}

void ReadIds(ObjectReader& reader, std::string_view key, int layer, ReplacedExperts& out) {
  ReplacedLayer replaced{.key = reader.PathOf(key)};
  for (const int id : reader.Ints(key, kMaxExperts)) {
    if (id < 0 || !replaced.experts.emplace(id, "").second) {
      reader.Fault(key, "different ids of at least 0", std::to_string(id));
      return;
    }
  }
  if (!replaced.experts.empty()) out.emplace(layer, std::move(replaced));
}

// Reads the ids of each layer: an object, or a list with the layers in order.
ReplacedExperts ReadApproximate(const Json& json, const std::string& path, Problems& problems) {
  ReplacedExperts out;
  Json object = json;
  if (json.is_array() && json.size() <= kMaxLayers) {
    object = Json::object();
    for (size_t i = 0; i < json.size(); ++i) object[std::to_string(i)] = json[i];
  }
  ObjectReader reader(object, path, &problems);
  if (!reader.valid()) return out;
  for (const auto& [key, value] : object.items()) {
    const std::optional<int> layer = NumberFrom(key, kMaxLayers);
    if (!layer.has_value()) {
      reader.Fault(key, "the number of a layer as key", Quoted(key));
      break;
    }
    if (!value.is_null()) ReadIds(reader, key, *layer, out);
  }
  return out;
}

// Reads an object of which all keys are known.
template <typename Read>
void ReadPart(ObjectReader& from, std::string_view key, Problems& problems, const Read& read) {
  const Json* const json = from.Required(key, "an object");
  if (json == nullptr) return;
  ObjectReader reader(*json, from.PathOf(key), &problems);
  if (!reader.valid()) return;
  read(reader, *json);
  reader.RefuseOthers();
}

void ReadTarget(ObjectReader& reader, const std::string& path, Problems& problems,
                ReplacedExperts& out) {
  ReplacedLayer replaced{.key = reader.PathOf(path)};
  const std::optional<int> layer = LayerOf(path);
  if (!layer.has_value() || !path.ends_with(".experts") || out.contains(*layer)) {
    reader.Optional(path);  // not an unknown key besides
    reader.Fault(path, "the name of a layer's experts, with one number, as key", Quoted(path));
    return;
  }
  ReadPart(reader, path, problems, [&](ObjectReader& target, const Json&) {
    replaced.num_experts = target.Int("num_logical_experts", 0);
    target.Pick<int>("weight_layout", {{"compact_retained_experts", 0}});
    ReadPart(target, "replacements", problems, [&](ObjectReader& list, const Json& all) {
      for (const auto& [id, value] : all.items()) {
        const std::optional<int> expert = NumberFrom(id, kMaxExperts);
        if (!expert.has_value()) {
          list.Optional(id);  // not an unknown key besides
          list.Fault(id, "the id of an expert as key", Quoted(id));
          return;
        }
        ReadPart(list, id, problems, [&](ObjectReader& replacement, const Json&) {
          replacement.Pick<int>("format", {{"constant-v1", 0}});
          ReadPart(replacement, "tensors", problems, [&](ObjectReader& tensors, const Json&) {
            const Json* const name = tensors.Required("value", "the name of a tensor");
            if (name == nullptr) return;
            if (!name->is_string() || name->get<std::string>().empty()) {
              tensors.Fault("value", "the name of a tensor", ShowJson(*name));
              return;
            }
            replaced.experts.emplace(*expert, name->get<std::string>());
          });
        });
      }
    });
  });
  if (!replaced.experts.empty()) out.emplace(*layer, std::move(replaced));
}

ReplacedExperts ReadSubstitution(ObjectReader& file, Problems& problems) {
  ReplacedExperts out;
  ReadPart(file, kCompression, problems, [&](ObjectReader& compression, const Json&) {
    for (const char* informs : {"producer", "provenance"}) compression.Optional(informs);
    ReadPart(compression, "transform_config", problems, [&](ObjectReader& config, const Json&) {
      ReadPart(config, "expert_substitution", problems, [&](ObjectReader& reader, const Json&) {
        const int version = reader.Int("version");
        if (version != 1) reader.Fault("version", "1", std::to_string(version));
        ReadPart(reader, "router_semantics", problems, [&](ObjectReader& semantics, const Json&) {
          const auto require = [&](const char* key, bool value) {
            if (semantics.Required(key, value ? "true" : "false") == nullptr) return;
            if (semantics.Bool(key, value) == value) return;
            semantics.Fault(key, value ? "true" : "false", value ? "false" : "true");
          };
          require("preserve_logical_expert_ids", true);
          require("preserve_router_weights", true);
          require("renormalize_after_substitution", false);
        });
        ReadPart(reader, "targets", problems, [&](ObjectReader& targets, const Json& all) {
          for (const auto& [path, value] : all.items()) ReadTarget(targets, path, problems, out);
        });
      });
    });
  });
  return out;
}

}  // namespace

std::span<const TensorRule> ReplacedExpertTensors() { return kTensors; }
std::span<const KeyRule> ReplacedExpertKeys() { return kKeys; }

ReplacedExperts ReadReplacedExperts(ObjectReader& reader, Problems& problems) {
  const Json* const approximate = reader.Optional(kApproximate);
  const bool compressed = reader.Optional(kCompression) != nullptr;
  if (approximate != nullptr && compressed) {
    reader.Fault(kCompression, Concat("none (the file has ", kApproximate, ')'), "an object");
    return {};
  }
  const size_t before = problems.count();
  ReplacedExperts out;
  if (approximate != nullptr) {
    // What the search for experts counted, and by which program.
    reader.Optional("approximate_expert_init_tokens");
    reader.Optional("llmcompressor_mone_implementation");
    out = ReadApproximate(*approximate, reader.PathOf(kApproximate), problems);
  } else if (compressed) {
    out = ReadSubstitution(reader, problems);
  }
  return problems.count() == before ? out : ReplacedExperts();
}

absl::Status ReplaceExperts(const ReplacedExperts& replaced, const NameMapping& mapping,
                            ModelSpec& spec, std::map<std::string, std::string>& named) {
  for (const auto& [stored_layer, of_layer] : replaced) {
    const auto refuse = [&](const std::string& expected, const std::string& found) {
      return absl::InvalidArgumentError(
          Concat(kConfigFile, ": ", of_layer.key, ": expected ", expected, ", found ", found));
    };
    int layer = stored_layer;
    if (mapping.in_rules != nullptr) {
      layer = LayerOf(mapping.in_rules(Concat("model.layers.", layer, ".mlp.experts.gate")))
                  .value_or(layer);
    }
    const int block = spec.Find(layer, BlockKind::kFeedForward);
    FeedForwardSpec* const feed_forward =
        block < 0 ? nullptr : &std::get<FeedForwardSpec>(spec.blocks[block].mixer);
    if (feed_forward == nullptr || !feed_forward->routed()) {
      return refuse("a layer with experts", Concat("layer ", stored_layer));
    }
    RoutedLayerSpec& routing = *feed_forward->routing;
    const int experts = routing.num_bodies();
    if (of_layer.num_experts != 0 && of_layer.num_experts != experts) {
      return refuse(Concat("num_logical_experts ", experts), std::to_string(of_layer.num_experts));
    }
    const int last = of_layer.experts.rbegin()->first;
    if (last >= experts) {
      return refuse(Concat("ids in [0, ", experts - 1, ']'), std::to_string(last));
    }
    if (static_cast<int>(of_layer.experts.size()) == experts) {
      return refuse(Concat("at most ", experts - 1, " experts, so that one stays"),
                    std::to_string(experts));
    }
    std::vector<int> widths;
    for (int e = 0; e < experts; ++e) {
      const auto found = of_layer.experts.find(e);
      if (found == of_layer.experts.end()) {
        widths.push_back(routing.widths[static_cast<size_t>(e)]);
        continue;
      }
      routing.null_experts.replaced.push_back(e);
      if (found->second.empty()) continue;
      named[Concat(spec.blocks[block].name(), ".experts.", e, ".constant")] = found->second;
    }
    routing.widths = std::move(widths);
  }
  return absl::OkStatus();
}

}  // namespace moeserve::huggingface
