#include "model_loaders/architectures/fairseq/options.h"

#include <cmath>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "base/strict_json.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using K = PickleKind;

// The options of fairseq are some hundred values. Values can be shared in a pickle, so that a small
// file could stand for a very large tree.
constexpr int kMaxValues = 50'000;
constexpr int kMaxOptionDepth = 8;
constexpr size_t kMaxText = 1000;

absl::Status OptionFault(std::string_view place, std::string_view expected,
                         const PickleValue* found) {
  return absl::InvalidArgumentError(Concat(place, ": expected ", expected, ", found ",
                                           found == nullptr ? "nothing" : ShowPickle(*found)));
}

bool IsOf(const PickleValue& call, std::string_view package) {
  const std::string_view module = call.callee().module();
  return module == package ||
         (module.starts_with(package) && module.substr(package.size()).starts_with('.'));
}

// Returns an attribute of an object; null if it has none of that name.
const PickleValue* Attribute(const PickleValue& object, std::string_view name) {
  return object.Is(K::kCall) && object.state() != nullptr ? object.state()->Get(name) : nullptr;
}

// Returns the members of a dict, a Namespace or a DictConfig of OmegaConf, as a kDict; null if
// `value` is none of them.
const PickleValue* MembersOf(const PickleValue& value) {
  if (value.Is(K::kDict)) return &value;
  if (!value.Is(K::kCall)) return nullptr;
  const PickleValue* members =
      IsOf(value, "omegaconf") ? Attribute(value, "_content") : value.state();
  return members != nullptr && members->Is(K::kDict) ? members : nullptr;
}

// Converts values of a pickle to JSON. What has no counterpart becomes a text that describes it, so
// that a reader that needs the option reports what it found.
class Converter {
 public:
  Json Convert(const PickleValue& value, int depth = 0) {
    if (--left_ < 0 || depth > kMaxOptionDepth) return "(nested too deep)";
    switch (value.kind) {
      case K::kNone:
        return nullptr;
      case K::kBool:
        return value.integer != 0;
      case K::kInt:
        return value.integer;
      case K::kFloat:
        if (!std::isfinite(value.real)) break;  // JSON has no such number
        return value.real;
      case K::kString:
        return Printable(value.text, kMaxText);
      case K::kTuple:
      case K::kList:
      case K::kSet: {
        Json list = Json::array();
        for (const PickleValue* item : value.items) {
          if (left_ < 0) break;
          list.push_back(Convert(*item, depth + 1));
        }
        return list;
      }
      case K::kDict:
        return Members(value, depth);
      case K::kCall:
        return Object(value, depth);
      default:
        break;
    }
    return Concat('(', ShowPickle(value), ')');
  }

  bool too_many() const { return left_ < 0; }

 private:
  Json Members(const PickleValue& dict, int depth) {
    Json object = Json::object();
    // Each pair counts, because many values may share one dict.
    for (size_t i = 0; i < dict.items.size() && --left_ >= 0; i += 2) {
      if (!dict.items[i]->Is(K::kString)) continue;  // no option
      object[Printable(dict.items[i]->text, kMaxText)] = Convert(*dict.items[i + 1], depth + 1);
    }
    return object;
  }

  Json Object(const PickleValue& value, int depth) {
    // The search for a member passes all of them.
    if (value.state() != nullptr) left_ -= value.state()->items.size() / 2;
    if (left_ < 0) return "(too many values)";
    if (IsOf(value, "omegaconf")) {
      for (const char* name : {"_val", "_content"}) {  // of a value; of a container
        const PickleValue* inner = Attribute(value, name);
        if (inner != nullptr) return Convert(*inner, depth + 1);
      }
    } else if (const PickleValue* members = MembersOf(value)) {
      return Members(*members, depth);
    }
    // A choice of fairseq, which is an enum of texts.
    const std::vector<const PickleValue*>& arguments = value.arguments().items;
    if (IsOf(value, "fairseq") && arguments.size() == 1 && arguments[0]->Is(K::kString)) {
      return Printable(arguments[0]->text, kMaxText);
    }
    return Concat('(', ShowPickle(value), ')');
  }

  int64_t left_ = kMaxValues;
};

absl::Status FlattenInto(const Json& object, const std::string& prefix, Json* flat) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_null()) continue;
    const std::string name = prefix + key;
    if (name.size() > kMaxText) {
      return absl::InvalidArgumentError(Concat("expected names of options with at most ", kMaxText,
                                               " characters, found ", Printable(name, 64), "..."));
    }
    if (value.is_object()) {
      MOESERVE_RETURN_IF_ERROR(FlattenInto(value, name + "_", flat));
      continue;
    }
    const auto [it, added] = flat->emplace(name, value);
    if (!added && *it != value) {
      return absl::InvalidArgumentError(Concat(Printable(name), ": expected one value, found ",
                                               ShowJson(*it), " and ", ShowJson(value)));
    }
  }
  return absl::OkStatus();
}

Result<Json> Flat(const PickleValue& members, std::string_view place) {
  Converter converter;
  const Json nested = converter.Convert(members);
  if (converter.too_many()) {
    return absl::InvalidArgumentError(
        Concat(place, ": expected at most ", kMaxValues, " values, found more"));
  }
  Result<Json> flat = FlattenOptions(nested);
  if (!flat.ok()) return Prefixed(Concat(place, ": "), flat.status());
  return flat;
}

}  // namespace

Result<Json> FlattenOptions(const Json& nested) {
  Json flat = Json::object();
  MOESERVE_RETURN_IF_ERROR(FlattenInto(nested, "", &flat));
  return flat;
}

Result<std::optional<FairseqOptions>> ReadFairseqOptions(const PickleValue& root) {
  const PickleValue* const args = root.Get("args");
  if (args != nullptr && !args->Is(K::kNone)) {
    constexpr std::string_view kPlace = "args";
    const PickleValue* members = MembersOf(*args);
    if (members == nullptr) return OptionFault(kPlace, "a Namespace or a dict", args);
    MOESERVE_ASSIGN_OR_RETURN(Json values, Flat(*members, kPlace));
    return std::optional(FairseqOptions{std::move(values), kPlace, {}});
  }
  const PickleValue* const cfg = root.Get("cfg");
  if (cfg == nullptr || cfg->Is(K::kNone)) return std::optional<FairseqOptions>();
  const PickleValue* const parts = MembersOf(*cfg);
  if (parts == nullptr) return OptionFault("cfg", "a dict", cfg);
  constexpr std::string_view kPlace = "cfg.model";
  const PickleValue* const model = parts->Get("model");
  const PickleValue* const members = model == nullptr ? nullptr : MembersOf(*model);
  if (members == nullptr) return OptionFault(kPlace, "a dict or a Namespace", model);
  MOESERVE_ASSIGN_OR_RETURN(Json values, Flat(*members, kPlace));
  // A model takes the lengths of its texts and its languages from the task.
  const PickleValue* const task = parts->Get("task");
  const PickleValue* const task_members = task == nullptr ? nullptr : MembersOf(*task);
  const auto take = [&](const char* key, bool text) {
    const PickleValue* found = task_members == nullptr ? nullptr : task_members->Get(key);
    if (found == nullptr || values.contains(key)) return;
    const Json value = Converter().Convert(*found);
    if (text ? value.is_string() : value.is_number()) values[key] = value;
  };
  for (const char* key : {"max_source_positions", "max_target_positions", "tokens_per_sample"}) {
    take(key, false);
  }
  for (const char* key : {kSourceLanguage, kTargetLanguage}) take(key, true);
  return std::optional(FairseqOptions{std::move(values), kPlace, {}});
}

}  // namespace moeserve
