#include "model_loaders/architectures/huggingface/wrappers.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/architectures/huggingface/parts/neutral_keys.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/tokenizer/token_ids.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;
using NamePart = std::string_view;

constexpr std::string_view kTextConfig = "text_config";

constexpr NamePart kVisual[] = {"model.visual."};
constexpr NamePart kErnieVision[] = {"vision_model.", "model.vision_model.", "model.vision_tower.",
                                     "model.resampler_model."};
constexpr NamePart kGemma4Towers[] = {"model.vision_tower.", "model.audio_tower.",
                                      "model.embed_vision.", "model.embed_audio."};
constexpr NamePart kKimiVision[] = {"vision_tower.", "mm_projector."};
constexpr NamePart kLlama4Vision[] = {"vision_model.", "multi_modal_projector."};
constexpr NamePart kMiniMaxVision[] = {"vision_tower.", "multi_modal_projector.",
                                       "patch_merge_mlp.", "mtp."};
constexpr NamePart kMistralVision[] = {"vision_tower.", "multi_modal_projector.",
                                       "model.vision_tower.", "model.multi_modal_projector."};
constexpr NamePart kStepVision[] = {"vision_model.", "vit_large_projector."};

constexpr NamePart kErnieText[] = {"ernie4_5_vl_moe_text"};
constexpr NamePart kGemma3Text[] = {"gemma3_text"};
constexpr NamePart kGemma4Text[] = {"gemma4_text"};
constexpr NamePart kGlm4vText[] = {"glm4v_moe_text"};
constexpr NamePart kKimiText[] = {"deepseek_v3", "kimi_k2"};
constexpr NamePart kLlama4Text[] = {"llama4_text"};
constexpr NamePart kMiniMaxText[] = {"minimax_m3_vl_text"};
constexpr NamePart kMistralText[] = {"mistral4", "mistral"};
constexpr NamePart kQwen35Text[] = {"qwen3_5_text"};
constexpr NamePart kQwen35MoeText[] = {"qwen3_5_moe_text"};
constexpr NamePart kQwen3VlText[] = {"qwen3_vl_moe_text"};
constexpr NamePart kStepText[] = {"step3p5"};

constexpr Wrapper kWrappers[] = {
    {"ernie4_5_vl_moe", kErnieText, kErnieVision},
    {"gemma3", kGemma3Text, kMistralVision},
    {"gemma4", kGemma4Text, kGemma4Towers},
    {"glm4v_moe", kGlm4vText, kVisual},
    {"kimi_k25", kKimiText, kKimiVision},
    {"llama4", kLlama4Text, kLlama4Vision},
    {"minimax_m3_vl", kMiniMaxText, kMiniMaxVision},
    {"mistral3", kMistralText, kMistralVision},
    {"qwen3_5", kQwen35Text, kVisual},
    {"qwen3_5_moe", kQwen35MoeText, kVisual},
    {"qwen3_vl_moe", kQwen3VlText, kVisual},
    {"step3p7", kStepText, kStepVision},
};

// How the names of a decoder's tensors may begin in a wrapper, in the place of "model.".
constexpr NamePart kDecoderPrefixes[] = {"model.language_model.", "language_model.model.",
                                         "language_model."};
constexpr NamePart kModel = "model.", kHead = "lm_head.", kPrediction = "mtp.",
                   kInnerHead = "language_model.lm_head.";

// Keys of a wrapper that say nothing about its decoder. Those of other parts begin like the others.
constexpr NamePart kOuterKeys[] = {"im_patch_id",
                                   "language_model_only",
                                   "merged_hidden_size",
                                   "mm_tokens_per_image",
                                   "model_type",
                                   "patch_token_len",
                                   "spatial_merge_size",
                                   "text_config",
                                   "tie_word_embeddings",
                                   "understand_projector_stride",
                                   "use_unified_vision_chunk"};
constexpr NamePart kOuterBeginnings[] = {"audio_",     "image_",      "media_",
                                         "mm_",        "multimodal_", "projection_",
                                         "projector_", "video_",      "vision_"};
constexpr NamePart kOuterEnds[] = {"_token_id", "_token_index"};

bool StartsWithAny(std::string_view name, std::span<const NamePart> beginnings) {
  return std::ranges::any_of(beginnings, [&](NamePart b) { return name.starts_with(b); });
}

bool IsOuterKey(std::string_view key) {
  return std::ranges::find(kOuterKeys, key) != std::end(kOuterKeys) ||
         StartsWithAny(key, kOuterBeginnings) ||
         std::ranges::any_of(kOuterEnds, [&](NamePart end) { return key.ends_with(end); });
}

// How the names of stored tensors and those that the decoder's family has for them belong together.
class DecoderNames {
 public:
  DecoderNames(const StoredNames& stored, std::span<const NamePart> other_parts)
      : other_parts_(other_parts) {
    const auto is_used = [&](NamePart prefix) {
      return std::ranges::any_of(stored.names, [&](const std::string& name) {
        return name.starts_with(prefix) && !name.starts_with(kInnerHead) && !IsOther(name);
      });
    };
    const auto* const used = std::ranges::find_if(kDecoderPrefixes, is_used);
    if (used != std::end(kDecoderPrefixes)) prefix_ = *used;
  }

  bool renames() const { return prefix_ != kModel; }
  bool IsOther(std::string_view stored) const { return StartsWithAny(stored, other_parts_); }

  // Returns the family's name of a stored tensor; nullopt if it does not belong to the decoder.
  std::optional<std::string> InFamily(std::string_view stored) const {
    if (IsOther(stored)) return std::nullopt;
    if (stored.starts_with(kInnerHead)) return Concat(kHead, stored.substr(kInnerHead.size()));
    if (stored.starts_with(kHead) || stored.starts_with(kPrediction)) return std::string(stored);
    if (!stored.starts_with(prefix_)) return std::nullopt;
    return Concat(kModel, stored.substr(prefix_.size()));
  }

  // Returns what the decoder's reader knows of the folder, and notes how its tensors are stored.
  StoredNames Inner(const StoredNames& stored) {
    StoredNames inner;
    inner.predictions = stored.predictions;
    for (const std::string& name : stored.names) {
      const std::optional<std::string> family = InFamily(name);
      if (!family.has_value() || !inner.names.insert(*family).second) continue;
      stored_.emplace(*family, name);
      const auto stack = stored.stacks.find(name);
      if (stack != stored.stacks.end()) inner.stacks.emplace(*family, stack->second);
    }
    return inner;
  }

  // Returns the stored name of a tensor that the family calls `family`.
  std::string Stored(const std::string& family) const {
    const auto found = stored_.find(family);
    if (found != stored_.end()) return found->second;
    if (!family.starts_with(kModel)) return family;
    return Concat(prefix_, family.substr(kModel.size()));
  }

 private:
  std::span<const NamePart> other_parts_;
  NamePart prefix_ = kModel;
  std::map<std::string, std::string, std::less<>> stored_;  // by the family's names
};

// The configuration of the decoder in a wrapper.
class WrappedConfig : public CheckpointConfig {
 public:
  WrappedConfig(std::shared_ptr<const CheckpointConfig> inner, DecoderNames names)
      : CheckpointConfig(*inner), inner_(std::move(inner)), names_(std::move(names)) {}

  std::optional<TensorPlace> Place(const TensorRequirement& tensor) const override {
    std::optional<TensorPlace> place = inner_->Place(tensor);
    if (!place.has_value()) return place;
    place->name = names_.Stored(place->name);
    if (!place->format.scales.empty()) place->format.scales = names_.Stored(place->format.scales);
    return place;
  }

  std::optional<std::string> LeftOverReason(std::string_view name) const override {
    if (names_.IsOther(name)) return std::nullopt;
    const std::optional<std::string> family = names_.InFamily(name);
    // Of two tensors with the same name in the family, only one is used.
    if (!family.has_value() || names_.Stored(*family) != name) {
      return "no key of the configuration, and no other part of the model, asks for it";
    }
    return inner_->LeftOverReason(*family);
  }

  std::unique_ptr<const CheckpointConfig> WithOwnHead() const override {
    std::shared_ptr<const CheckpointConfig> own = inner_->WithOwnHead();
    if (own == nullptr) return nullptr;
    auto config = std::make_unique<WrappedConfig>(*this);
    config->spec.tie_word_embeddings = false;
    config->inner_ = std::move(own);
    return config;
  }

  std::string AsInFile(std::string_view text) const override { return inner_->AsInFile(text); }

 private:
  std::shared_ptr<const CheckpointConfig> inner_;
  const DecoderNames names_;
};

// Returns the decoder's configuration with the keys of the whole file that count for it.
Json DecoderKeys(const Wrapper& wrapper, const Json& config, ObjectReader& outer,
                 Problems& problems) {
  const Json* const found = outer.Required(kTextConfig, "an object");
  Json text = found == nullptr ? Json::object() : *found;
  if (!text.is_object()) {
    outer.Fault(kTextConfig, "an object", ShowJson(text));
    return text;
  }
  if (const auto type = text.find("model_type"); type == text.end() || type->is_null()) {
    text["model_type"] = wrapper.text_types.front();
  } else if (std::ranges::none_of(wrapper.text_types, [&](NamePart t) { return *type == t; })) {
    std::string expected;
    for (const NamePart t : wrapper.text_types) {
      expected += Concat(expected.empty() ? "" : " or ", Quoted(t));
    }
    outer.Fault("text_config.model_type", expected, ShowJson(*type));
  }
  for (const char* key : {"architectures", "quantization_config", "compression_config"}) {
    const Json* const value = outer.Optional(key);
    if (value == nullptr || value->is_null()) continue;
    const auto own = text.find(key);
    const bool differs = own != text.end() && !own->is_null() && *own != *value;
    if (differs && key != std::string_view("architectures")) {
      outer.Fault(key, Concat("the same as text_config.", key, ", or none"), ShowJson(*value));
    }
    text[key] = *value;
  }
  const auto tie = config.find("tie_word_embeddings");
  if (tie != config.end() && !tie->is_null()) {
    if (!tie->is_boolean()) {
      problems.Add(Concat("tie_word_embeddings: expected true or false, found ", ShowJson(*tie)));
    }
    text["tie_word_embeddings"] = *tie;
  }
  return text;
}

// Refuses keys of a wrapper of which nothing is known.
void JudgeOuter(const Json& config, ObjectReader& outer, Problems& problems,
                std::vector<std::string>& ignored) {
  for (const std::string& key : outer.Unread()) {
    const Json& value = config[key];
    if (value.is_null()) continue;
    const KeyEffect effect = IsOuterKey(key) ? KeyEffect::kNone : EffectOf(key, value);
    if (effect == KeyEffect::kNone) {
      const bool read = key == "model_type" || key == "tie_word_embeddings";
      if (!read && key != "transformers_version") ignored.push_back(key);
    } else if (effect == KeyEffect::kChanges) {
      outer.Fault(key, HarmlessValue(key), ShowJson(value) + IgnoreHint(key));
    } else {
      problems.Add(UnknownKey(key, ShowJson(value)));
    }
  }
}

// Returns a sentence about the parts of a model that are not computed.
std::string OtherParts(const Wrapper& wrapper, std::string_view text_type,
                       const StoredNames& stored) {
  std::string parts;
  for (const NamePart beginning : wrapper.other_parts) {
    const auto count = std::ranges::count_if(
        stored.names, [&](const std::string& name) { return name.starts_with(beginning); });
    if (count == 0) continue;
    parts += Concat(parts.empty() ? "" : ", ", beginning, "* (", count,
                    count == 1 ? " tensor)" : " tensors)");
  }
  return Concat("the model is a ", wrapper.model_type, ", of which the decoder of text (",
                text_type, ") is computed", parts.empty() ? "" : "; not computed: ", parts);
}

}  // namespace

std::span<const Wrapper> Wrappers() { return kWrappers; }

const Wrapper* FindWrapper(const Json& config) {
  if (!config.is_object() || !config.contains(kTextConfig)) return nullptr;
  const auto* const found = std::ranges::find_if(
      kWrappers, [&](const Wrapper& w) { return HasModelType(config, w.model_type); });
  return found == std::end(kWrappers) ? nullptr : found;
}

bool IsTextType(std::string_view type) {
  return std::ranges::any_of(kWrappers, [&](const Wrapper& w) {
    return std::ranges::find(w.text_types, type) != w.text_types.end();
  });
}

ConfigResult ReadWrapped(const Wrapper& wrapper, const Json& config, const StoredNames& stored,
                         ArchitectureList families, UnknownDecoder unknown) {
  Problems problems;
  ObjectReader outer(config, "", &problems);
  const Json text = DecoderKeys(wrapper, config, outer, problems);
  std::vector<int32_t> ends;
  if (const Json* const eos = outer.Optional("eos_token_id"); eos != nullptr && !eos->is_null()) {
    ends = ParseTokenIds(*eos, "eos_token_id", &problems);
  }
  std::vector<std::string> ignored;
  JudgeOuter(config, outer, problems, ignored);
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(kConfigFile));

  const auto family =
      std::ranges::find_if(families, [&](const Architecture* a) { return a->Recognizes(text); });
  if (family == families.end()) return unknown(wrapper.model_type, text, families);
  DecoderNames names(stored, wrapper.other_parts);
  StoredNames inner_names = names.Inner(stored);
  inner_names.key_object = kTextConfig;
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<const CheckpointConfig> inner,
                            (*family)->read(text, inner_names));
  auto wrapped = std::make_unique<WrappedConfig>(std::move(inner), std::move(names));
  for (const int32_t id : ends) {
    std::vector<int32_t>& all = wrapped->spec.eos_token_ids;
    if (std::ranges::find(all, id) == all.end()) all.push_back(id);
  }
  MOESERVE_RETURN_IF_ERROR(ValidateConfig(*wrapped));
  wrapped->ignored_keys.insert(wrapped->ignored_keys.end(), ignored.begin(), ignored.end());
  wrapped->decisions.push_back(OtherParts(wrapper, (*family)->model_type, stored));
  return wrapped;
}

ConfigResult ReadAlone(const Architecture& family, const Json& config, const StoredNames& stored) {
  DecoderNames names(stored, {});
  if (!names.renames()) return family.read(config, stored);
  const StoredNames inner_names = names.Inner(stored);
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<const CheckpointConfig> inner,
                            family.read(config, inner_names));
  return std::make_unique<WrappedConfig>(std::move(inner), std::move(names));
}

}  // namespace moeserve::huggingface
