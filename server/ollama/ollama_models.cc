#include "server/ollama/ollama_models.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/error_text.h"
#include "server/ollama/ollama_writer.h"
#include "server/tools/call_syntax.h"

namespace moeserve::server {
namespace {

// How long a running model is said to stay: models stay until an operator unloads them.
constexpr absl::Duration kForever = absl::Hours(24 * 365 * 100);

std::string NameWithTag(const std::string& name) {
  return name.find(':') == std::string::npos ? name + ":latest" : name;
}

// Returns 64 hexadecimal digits that differ for different served versions of models. They are no
// hash of the files.
std::string VersionDigest(const ServedModel& model) {
  const std::string identity = Concat(model.name(), '\n', model.version(), '\n', model.created());
  std::string out;
  for (uint64_t part = 0; part < 4; ++part) {
    uint64_t hash = 14695981039346656037U + part;  // FNV-1a
    for (const char c : identity) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211U;
    out += absl::StrFormat("%016x", hash);
  }
  return out;
}

// Returns the routing of the first routed feed-forward, or else of the first routed attention; null
// for a dense model.
const RoutedLayerSpec* FirstRouting(const ModelSpec& spec) {
  const RoutedLayerSpec* attention = nullptr;
  for (const BlockSpec& block : spec.blocks) {
    if (block.routing() == nullptr) continue;
    if (block.kind() == BlockKind::kFeedForward) return block.routing();
    if (attention == nullptr) attention = block.routing();
  }
  return attention;
}

std::string Family(const ServedModel& model) {
  return FirstRouting(model.engine().spec()) != nullptr ? "moe" : "dense";
}

OrderedJson Details(const ServedModel& model) {
  const std::string family = Family(model);
  return {{"parent_model", ""},   {"format", "safetensors"},
          {"family", family},     {"families", OrderedJson::array({family})},
          {"parameter_size", ""}, {"quantization_level", ""}};
}

OrderedJson Entry(const std::string& name, const ServedModel& model) {
  const std::string tagged = NameWithTag(name);
  OrderedJson out;
  out["name"] = tagged;
  out["model"] = tagged;
  out["size"] = model.memory_bytes();
  out["digest"] = VersionDigest(model);
  out["details"] = Details(model);
  return out;
}

std::string Created(const ServedModel& model) {
  return OllamaTime(absl::FromUnixSeconds(model.created()));
}

}  // namespace

OrderedJson OllamaTagJson(const std::string& name, const ServedModel& model) {
  OrderedJson out = Entry(name, model);
  out["modified_at"] = Created(model);
  return out;
}

OrderedJson OllamaRunningJson(const std::string& name, const ServedModel& model) {
  OrderedJson out = Entry(name, model);
  out["expires_at"] = OllamaTime(absl::Now() + kForever);
  out["size_vram"] = 0;
  out["context_length"] = model.engine().max_model_len();
  return out;
}

OrderedJson OllamaShowJson(const ServedModel& model, bool show_template) {
  const Engine& engine = model.engine();
  const std::string family = Family(model);
  OrderedJson info;
  info["general.architecture"] = family;
  info["general.basename"] = model.name();
  info[family + ".context_length"] = engine.max_model_len();
  info[family + ".block_count"] = engine.spec().num_layers();
  info[family + ".embedding_length"] = engine.spec().hidden_size;
  info[family + ".vocab_size"] = engine.spec().vocab_size;
  if (const RoutedLayerSpec* routing = FirstRouting(engine.spec())) {
    info[family + ".expert_count"] = routing->num_experts;
  }
  const std::string source = model.tokenizer_config().chat_template.value_or("");
  OrderedJson capabilities = OrderedJson::array({"completion"});
  if (model.chat_format().status().ok()) capabilities.push_back("tools");
  if (HasThinkTags(source)) capabilities.push_back("thinking");
  OrderedJson out;
  out["modelfile"] = "";
  out["parameters"] = "";
  out["template"] = show_template ? source : std::string();
  out["details"] = Details(model);
  out["model_info"] = std::move(info);
  out["capabilities"] = std::move(capabilities);
  out["modified_at"] = Created(model);
  return out;
}

}  // namespace moeserve::server
