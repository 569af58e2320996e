#include "server/fields/routing_fields.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/check.h"
#include "base/error_text.h"
#include "model_loaders/profiles/npy_writer.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

constexpr char kControl[] = "routing_control";
constexpr char kWords[] = "return_word_experts";

absl::Status CheckKnownKeys(const Json& object, std::initializer_list<std::string_view> known) {
  for (const auto& [name, value] : object.items()) {
    bool found = false;
    for (const std::string_view key : known) found = found || key == name;
    if (!found) {
      return InvalidValue(kControl, Concat("'routing_control': unknown key ", Quoted(name, 64)));
    }
  }
  return absl::OkStatus();
}

// Reads "layer" and "block" of an entry of `masked_experts` or `biased_experts`.
Result<RoutingChange::Expert> ParseBlock(const Json& entry) {
  RoutingChange::Expert out;
  MOESERVE_ASSIGN_OR_RETURN(const auto layer, IntField(entry, "layer", 0, kMaxChangedExperts));
  if (!layer) return InvalidValue(kControl, "'routing_control': an entry lacks 'layer'");
  out.layer = static_cast<int>(*layer);
  MOESERVE_ASSIGN_OR_RETURN(const auto block, StringField(entry, "block"));
  if (block == "attention") {
    out.block = BlockKind::kAttention;
  } else if (block == "cross_attention") {
    out.block = BlockKind::kCrossAttention;
  } else if (block && *block != "feed_forward") {
    return InvalidValue(kControl,
                        "'routing_control': 'block' must be \"attention\", \"cross_attention\" or "
                        "\"feed_forward\"");
  }
  return out;
}

Result<std::optional<int>> ParseExpert(const Json& value) {
  const std::optional<int64_t> expert = AsInteger(value);
  if (!expert || *expert < 0 || *expert > INT32_MAX) {
    return InvalidValue(kControl, "'routing_control': an expert is a number from 0");
  }
  return std::optional<int>(static_cast<int>(*expert));
}

// Returns the value of a field, which must be a list of objects; null if the field is absent.
Result<const Json*> ParseList(const Json& body, const char* name) {
  const Json* list = FindField(body, name);
  if (list == nullptr) return list;
  bool objects = list->is_array();
  if (objects) {
    for (const Json& entry : *list) objects = objects && entry.is_object();
  }
  if (!objects) {
    return InvalidValue(kControl,
                        Concat("'routing_control': '", name, "' must be a list of objects"));
  }
  return list;
}

absl::Status AddExpert(const RoutingChange::Expert& expert, RoutingChange& change) {
  if (change.experts.size() == kMaxChangedExperts) {
    return InvalidValue(kControl,
                        Concat("'routing_control' names at most ", kMaxChangedExperts, " experts"));
  }
  change.experts.push_back(expert);
  return absl::OkStatus();
}

absl::Status ParseMasked(const Json& field, RoutingChange& change) {
  MOESERVE_ASSIGN_OR_RETURN(const Json* const entries, ParseList(field, "masked_experts"));
  if (entries == nullptr) return absl::OkStatus();
  for (const Json& entry : *entries) {
    MOESERVE_RETURN_IF_ERROR(CheckKnownKeys(entry, {"layer", "block", "experts"}));
    MOESERVE_ASSIGN_OR_RETURN(RoutingChange::Expert expert, ParseBlock(entry));
    const Json* ids = FindField(entry, "experts");
    if (ids == nullptr || !ids->is_array() || ids->empty() || ids->size() > kMaxChangedExperts) {
      return InvalidValue(kControl,
                          "'routing_control': 'masked_experts' needs 'experts', a list of numbers");
    }
    for (const Json& id : *ids) {
      MOESERVE_ASSIGN_OR_RETURN(const auto number, ParseExpert(id));
      expert.expert = *number;
      MOESERVE_RETURN_IF_ERROR(AddExpert(expert, change));
    }
  }
  return absl::OkStatus();
}

absl::Status ParseBiased(const Json& field, RoutingChange& change) {
  MOESERVE_ASSIGN_OR_RETURN(const Json* const entries, ParseList(field, "biased_experts"));
  if (entries == nullptr) return absl::OkStatus();
  for (const Json& entry : *entries) {
    MOESERVE_RETURN_IF_ERROR(CheckKnownKeys(entry, {"layer", "block", "expert", "bias"}));
    MOESERVE_ASSIGN_OR_RETURN(RoutingChange::Expert expert, ParseBlock(entry));
    const Json* id = FindField(entry, "expert");
    MOESERVE_ASSIGN_OR_RETURN(const auto number, ParseExpert(id == nullptr ? Json() : *id));
    expert.expert = *number;
    MOESERVE_ASSIGN_OR_RETURN(expert.bias, NumberField(entry, "bias", -1000.0, 1000.0));
    if (!expert.bias) return InvalidValue(kControl, "'routing_control': an entry lacks 'bias'");
    MOESERVE_RETURN_IF_ERROR(AddExpert(expert, change));
  }
  return absl::OkStatus();
}

Result<RoutingChange> ParseChange(const Json& field) {
  if (!field.is_object()) return InvalidValue(kControl, "'routing_control' must be an object");
  MOESERVE_RETURN_IF_ERROR(
      CheckKnownKeys(field, {"top_k", "top_p", "masked_experts", "biased_experts"}));
  RoutingChange change;
  MOESERVE_ASSIGN_OR_RETURN(const auto top_k, IntField(field, "top_k", 1, kMaxChangedExperts));
  if (top_k) change.top_k = static_cast<int>(*top_k);
  MOESERVE_ASSIGN_OR_RETURN(change.top_p, NumberField(field, "top_p", 0.0, 1.0, true));
  MOESERVE_RETURN_IF_ERROR(ParseMasked(field, change));
  MOESERVE_RETURN_IF_ERROR(ParseBiased(field, change));
  return change;
}

// Reads the list of `return_word_experts`.
Result<std::vector<std::string>> ParseWords(const Json& field) {
  std::vector<std::string> words;
  bool valid = field.is_array() && !field.empty() && field.size() <= kMaxListedWords;
  for (size_t i = 0; valid && i < field.size(); ++i) {
    valid = field[i].is_string() && !field[i].get_ref<const std::string&>().empty() &&
            field[i].get_ref<const std::string&>().size() <= kMaxWordBytes;
    if (valid) words.push_back(field[i].get<std::string>());
  }
  if (valid) return words;
  return InvalidValue(kWords, Concat("'", kWords, "' must be a list of 1 to ", kMaxListedWords,
                                     " words of up to ", kMaxWordBytes, " bytes"));
}

// Returns an error unless routes fit into the table [token, layer, k]: every layer must have at
// most one routed block, and all blocks the same k.
absl::Status CheckTable(const RoutingRules& rules) {
  const auto refuse = [](const char* why) {
    return InvalidValue("return_routed_experts",
                        Concat("'return_routed_experts': a table [token, layer, k] cannot say what "
                               "this model does (",
                               why, "); 'return_routing' can"));
  };
  int k = 0;
  for (const BlockSpec& block : rules.spec->blocks) {
    if (block.routing() == nullptr) continue;
    if (block.kind() == BlockKind::kAttention) return refuse("it routes attention");
    const RoutedLayerSpec& routing = *block.routing();
    if (routing.split.heads > 1) return refuse("it routes sub-tokens");
    if (routing.select.kind == SelectKind::kTopP) return refuse("it selects by top-p");
    if (k != 0 && routing.select.k != k) return refuse("its layers differ in k");
    k = routing.select.k;
  }
  return k == 0 ? refuse("it has no routed layer") : absl::OkStatus();
}

// Returns the double that has the same shortest decimal as the float `value`, so that JSON does not
// show digits beyond the float's precision.
double Shortest(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  double out = value;
  std::from_chars(text, end, out);
  return out;
}

}  // namespace

absl::Status ParseRoutingFields(const Json& body, const RoutingRules& rules, bool stream,
                                RoutingParams& out) {
  out.layout = rules.layout;
  out.source_layout = rules.source_layout;
  MOESERVE_ASSIGN_OR_RETURN(const auto record, BoolField(body, "return_routing"));
  out.record = record.value_or(false);
  if (out.record) MOESERVE_RETURN_IF_ERROR(CheckRecords(rules, "return_routing"));
  MOESERVE_ASSIGN_OR_RETURN(const auto table, BoolField(body, "return_routed_experts"));
  out.table = table.value_or(false);
  if (const Json* words = FindField(body, kWords); words != nullptr) {
    MOESERVE_RETURN_IF_ERROR(CheckRecords(rules, kWords));
    if (stream) return InvalidValue(kWords, Concat("'", kWords, "' cannot be streamed"));
    MOESERVE_ASSIGN_OR_RETURN(out.words, ParseWords(*words));
  }
  const Json* control = FindField(body, kControl);
  if (out.table) {
    MOESERVE_RETURN_IF_ERROR(CheckRecords(rules, "return_routed_experts"));
    if (stream) {
      return InvalidValue("return_routed_experts", "'return_routed_experts' cannot be streamed");
    }
    if (control != nullptr) {
      return InvalidValue("return_routed_experts",
                          "'return_routed_experts' cannot be combined with 'routing_control'");
    }
    MOESERVE_RETURN_IF_ERROR(CheckTable(rules));
    out.num_layers = rules.spec->num_layers();
  }
  if (control == nullptr) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(const RoutingChange change, ParseChange(*control));
  if (change.empty()) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(out.control, MakeRoutingControl(change, rules, kControl));
  return absl::OkStatus();
}

OrderedJson RouteLayoutJson(const RouteLayout& layout) {
  OrderedJson out;
  out["rows_per_token"] = layout.rows_per_token;
  out["blocks"] = OrderedJson::array();
  for (const RoutedBlock& block : layout.blocks) {
    out["blocks"].push_back({{"layer", block.layer},
                             {"block", Name(block.block)},
                             {"experts", block.num_experts},
                             {"sub_tokens", block.sub_tokens},
                             {"first_row", block.first_row}});
  }
  return out;
}

OrderedJson RoutingRecordJson(const RoutingRecord& record, const RouteLayout& layout) {
  OrderedJson out;
  if (record.first_position == 0) out["layout"] = RouteLayoutJson(layout);
  out["first_position"] = record.first_position;
  out["tokens"] = record.tokens;
  out["reused"] = OrderedJson::array();
  for (const auto& [begin, end] : record.reused) out["reused"].push_back({begin, end});
  out["offsets"] = record.offsets;
  out["experts"] = record.experts;
  out["weights"] = OrderedJson::array();
  for (const float weight : record.weights) out["weights"].push_back(Shortest(weight));
  return out;
}

OrderedJson RoutingControlJson(const RoutingChange& change) {
  using Out = OrderedJson;
  Out out = Out::object();
  if (change.top_k) out["top_k"] = *change.top_k;
  if (change.top_p) out["top_p"] = *change.top_p;
  Out masked = Out::array(), biased = Out::array();
  for (const RoutingChange::Expert& e : change.experts) {
    if (e.bias) {
      biased.push_back(
          {{"layer", e.layer}, {"block", Name(e.block)}, {"expert", e.expert}, {"bias", *e.bias}});
      continue;
    }
    if (masked.empty() || masked.back()["layer"] != e.layer ||
        masked.back()["block"] != Name(e.block)) {
      masked.push_back({{"layer", e.layer}, {"block", Name(e.block)}, {"experts", Out::array()}});
    }
    masked.back()["experts"].push_back(e.expert);
  }
  if (!masked.empty()) out["masked_experts"] = std::move(masked);
  if (!biased.empty()) out["biased_experts"] = std::move(biased);
  return out;
}

std::string RoutedExpertsTable(const RoutingRecord& record, const RouteLayout& layout,
                               int num_layers) {
  const size_t per_token = static_cast<size_t>(layout.rows_per_token);
  const size_t rows = static_cast<size_t>(record.tokens) * per_token;
  const uint32_t k = rows == 0 ? 0 : record.offsets[1] - record.offsets[0];
  int most = 0;
  for (const RoutedBlock& block : layout.blocks) most = std::max(most, block.num_experts);
  const size_t bytes = most <= 256 ? 1 : 2;
  std::string data(static_cast<size_t>(record.tokens) * static_cast<size_t>(num_layers) * k * bytes,
                   '\0');
  for (size_t r = 0; r < rows; ++r) {
    MOESERVE_CHECK(record.offsets[r + 1] - record.offsets[r] == k, "k experts for every row");
    const size_t token = r / per_token;
    const size_t layer =
        static_cast<size_t>(layout.blocks[layout.block_of_row[r % per_token]].layer);
    for (uint32_t i = 0; i < k; ++i) {
      const size_t at = ((token * static_cast<size_t>(num_layers) + layer) * k + i) * bytes;
      const uint16_t expert = record.experts[record.offsets[r] + i];
      data[at] = static_cast<char>(expert & 0xff);
      if (bytes == 2) data[at + 1] = static_cast<char>(expert >> 8);
    }
  }
  const std::string header =
      NpyHeader(bytes == 1 ? "|u1" : "<u2", std::array<int64_t, 3>{record.tokens, num_layers, k});
  std::string encoded;
  absl::Base64Escape(header + data, &encoded);
  return encoded;
}

}  // namespace moeserve::server
