#include "model_loaders/architectures/name_table.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/error_text.h"
#include "model_loaders/architectures/leftover.h"
#include "model_loaders/architectures/row_sections.h"

namespace moeserve {
namespace {

constexpr std::string_view kScaleSuffix = "_scale_inv";  // of the scales of FP8 weights
// Behind PredictionNames::prefix, in the names of the layer's own tensors.
constexpr std::string_view kFirstPredictionLayer = "layers.0.";

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsKeyStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool IsKeyPart(char c) { return IsKeyStart(c) || IsDigit(c) || c == '_'; }

size_t Stars(std::string_view pattern) {
  return static_cast<size_t>(std::count(pattern.begin(), pattern.end(), '*'));
}

// Returns the numbers if `name` matches `pattern`, else nullopt. A number has no leading zeros and
// fits int.
std::optional<Numbers> Match(std::string_view pattern, std::string_view name) {
  Numbers numbers;
  while (!pattern.empty()) {
    if (name.empty()) return std::nullopt;
    if (pattern.front() != '*') {
      if (pattern.front() != name.front()) return std::nullopt;
      pattern.remove_prefix(1);
      name.remove_prefix(1);
      continue;
    }
    if (numbers.count == numbers.value.size() || !IsDigit(name.front())) return std::nullopt;
    int& number = numbers.value[numbers.count++];
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    const auto digits = static_cast<size_t>(end - name.data());
    if (error != std::errc() || (digits > 1 && name.front() == '0')) return std::nullopt;
    pattern.remove_prefix(1);
    name.remove_prefix(digits);
  }
  return name.empty() ? std::optional(numbers) : std::nullopt;
}

// Returns `pattern` with each "*" replaced by the next of `numbers`; by 0 if there are too few
// numbers.
std::string Substitute(std::string_view pattern, const Numbers& numbers) {
  std::string name;
  size_t next = 0;
  for (const char c : pattern) {
    if (c == '*') {
      name.append(std::to_string(next < numbers.count ? numbers.value[next] : 0));
      ++next;
    } else {
      name.push_back(c);
    }
  }
  return name;
}

// Returns the pattern of a name: every number between dots replaced by "*".
std::string NamePattern(std::string_view name) {
  std::string pattern;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (begin > 0) pattern.push_back('.');
    // Some files have a number of an expert behind a word.
    constexpr std::string_view kExpert = "expert_";
    const std::string_view number = part.starts_with(kExpert) ? part.substr(kExpert.size()) : part;
    const bool is_number = !number.empty() && std::all_of(number.begin(), number.end(), IsDigit);
    pattern.append(part.substr(0, part.size() - number.size()));
    pattern.append(is_number ? "*" : number);
    begin = end + 1;
  }
  return pattern;
}

// Returns the configuration key, with its indices, that `text` starts with; "" if there is none.
std::string_view LeadingKey(std::string_view text) {
  size_t end = 0;
  while (end < text.size() && IsKeyStart(text[end])) {
    while (end < text.size() && IsKeyPart(text[end])) ++end;
    if (end < text.size() && text[end] == '[') {
      size_t close = end + 1;
      while (close < text.size() && IsDigit(text[close])) ++close;
      if (close == end + 1 || close == text.size() || text[close] != ']') break;
      end = close + 1;
    }
    if (end + 1 >= text.size() || text[end] != '.' || !IsKeyStart(text[end + 1])) break;
    ++end;
  }
  return text.substr(0, end);
}

std::string WithoutIndices(std::string_view key) {
  std::string out;
  bool inside = false;
  for (const char c : key) {
    inside = c == '[' || (inside && c != ']');
    if (!inside && c != ']') out.push_back(c);
  }
  return out;
}

}  // namespace

bool MatchesName(std::string_view pattern, std::string_view name) {
  return Match(pattern, name).has_value();
}

NameTableConfig::NameTableConfig(std::span<const TensorRule> tensors, std::span<const KeyRule> keys,
                                 const StoredNames& stored, const NamePrefix& prefix,
                                 const NameMapping& mapping, const PredictionNames& predictions)
    : tensors_(tensors.begin(), tensors.end()),
      keys_(keys.begin(), keys.end()),
      prefix_(prefix),
      mapping_(mapping),
      predictions_(predictions) {
  // Every layer has the same layout, so the pattern of one layer decides.
  std::set<std::string> patterns;
  std::set<std::string> names;
  for (const std::string& file_name : stored.names) {
    std::string name = NameInRules(file_name);
    if (name != file_name) stored_names_.emplace(name, file_name);
    names.insert(std::move(name));
  }
  for (const std::string& name : names) {
    patterns.insert(NamePattern(name));
    if (name.ends_with(kScaleSuffix)) scales_.insert(name);
  }
  for (const TensorRule& rule : tensors_) {
    if (patterns.contains(NamePattern(rule.file))) found_.insert(rule.file);
  }
  // Layers of different kinds may have the same tensor of the model in different places.
  for (const TensorRule& rule : tensors_) {
    const auto same = [&](const TensorRule& other) {
      return other.model == rule.model && found_.contains(other.file);
    };
    if (!found_.contains(rule.file) || std::ranges::count_if(tensors_, same) < 2) continue;
    ambiguous_.insert(rule.model);
    std::ranges::copy_if(
        names, std::inserter(ambiguous_names_, ambiguous_names_.end()),
        [&](const std::string& name) { return Match(rule.file, name).has_value(); });
  }
}

std::string NameTableConfig::NameForRules(const std::string& tensor) const {
  std::string_view name = tensor;
  if (!IsOfPrediction(name)) return tensor;
  name.remove_prefix(std::string_view(TensorPrefix(Stack::kPrediction)).size());
  if (const std::optional<Numbers> numbers =
          Match("blocks.*", name.substr(0, name.find('.', std::string_view("blocks.").size())));
      numbers.has_value()) {
    name.remove_prefix(name.find('.', std::string_view("blocks.").size()) + 1);
    return Concat("blocks.", predictions_.layer + numbers->value[0], '.', name);
  }
  return Concat("blocks.", predictions_.layer, ".prediction.", name);
}

const BlockSpec* NameTableConfig::FindBlock(int layer, BlockKind kind) const {
  const int own = spec.num_layers();
  if (layer < own || spec.prediction == nullptr) return spec.FindBlock(layer, kind);
  return spec.prediction->FindBlock(layer - own, kind);
}

const BlockSpec* NameTableConfig::TokenMixer(int layer) const {
  const int own = spec.num_layers();
  if (layer < own || spec.prediction == nullptr) return spec.token_mixer(layer);
  return spec.prediction->token_mixer(layer - own);
}

const RoutedLayerSpec* NameTableConfig::RoutingOf(std::string_view pattern, int layer) const {
  const bool of_encoder = pattern.starts_with("encoder.") && spec.encoder != nullptr;
  const auto is_of = [&](std::string_view part) { return pattern.find(part) != pattern.npos; };
  const BlockKind kind = is_of("blocks.*.attention.")         ? BlockKind::kAttention
                         : is_of("blocks.*.cross_attention.") ? BlockKind::kCrossAttention
                                                              : BlockKind::kFeedForward;
  const BlockSpec* const block =
      of_encoder ? spec.encoder->FindBlock(layer, kind) : FindBlock(layer, kind);
  return block == nullptr ? nullptr : block->routing();
}

std::string NameTableConfig::NameInRules(std::string_view stored) const {
  if (const std::string_view prefix = predictions_.prefix;
      predictions_.layer >= 0 && !prefix.empty() && stored.starts_with(prefix)) {
    stored.remove_prefix(prefix.size());
    const bool of_layer = stored.starts_with(kFirstPredictionLayer);
    if (of_layer) stored.remove_prefix(kFirstPredictionLayer.size());
    std::string name = Concat("model.layers.", predictions_.layer, '.', stored);
    const std::string pattern = NamePattern(name);
    const auto beside = std::ranges::find(tensors_, pattern, &TensorRule::file);
    const bool is_beside =
        beside != tensors_.end() && beside->model.find(".prediction.") != std::string_view::npos;
    if (of_layer != is_beside) return name;
    return std::string(prefix) + std::string(stored);  // a name that nobody uses
  }
  std::string name = WithPrefixOfRules(stored);
  return mapping_.in_rules == nullptr ? name : mapping_.in_rules(name);
}

std::string NameTableConfig::WithPrefixOfRules(std::string_view stored) const {
  if (prefix_.rule == prefix_.file || !stored.starts_with(prefix_.file)) return std::string(stored);
  const std::string name = Concat(prefix_.rule, stored.substr(prefix_.file.size()));
  const std::string pattern = NamePattern(name);
  const bool known =
      std::ranges::any_of(tensors_, [&](const TensorRule& rule) { return rule.file == pattern; });
  return known || !prefix_.file.empty() ? name : std::string(stored);
}

bool NameTableConfig::IsFor(const TensorRule& rule, const Numbers& numbers) const {
  if (!rule.mixer.has_value()) return true;
  const BlockSpec* const block = TokenMixer(numbers.value[0]);
  return block != nullptr && block->kind() == *rule.mixer;
}

const TensorRule* NameTableConfig::RuleOf(std::string_view tensor) const {
  const TensorRule* first = nullptr;
  for (const TensorRule& rule : tensors_) {
    const std::optional<Numbers> numbers = Match(rule.model, tensor);
    if (!numbers.has_value() || !IsFor(rule, *numbers)) continue;
    const bool found = found_.contains(rule.file);
    if (found && (!ambiguous_.contains(rule.model) ||
                  ambiguous_names_.contains(Substitute(rule.file, *numbers)))) {
      return &rule;
    }
    if (first == nullptr || (found && !found_.contains(first->file))) first = &rule;
  }
  return first;
}

BlockFormat NameTableConfig::FormatOf(const TensorRule& rule, const std::string& stored) const {
  constexpr std::string_view kBlocks = "_blocks";
  if (rule.mxfp4 && stored.ends_with(kBlocks)) {
    return {.kind = BlockFormatKind::kMxfp4,
            .scales = stored.substr(0, stored.size() - kBlocks.size()) + "_scales"};
  }
  if (!fp8.has_value() || !scales_.contains(stored + std::string(kScaleSuffix))) return {};
  BlockFormat format = *fp8;
  format.kind = BlockFormatKind::kFp8;
  format.scales = stored + std::string(kScaleSuffix);
  return format;
}

std::optional<TensorPlace> NameTableConfig::LatentPlace(const TensorRule& rule,
                                                        const Numbers& numbers,
                                                        TensorPlace place) const {
  const int layer = numbers.value[0], head = numbers.value[1];
  const BlockSpec* const block = FindBlock(layer, BlockKind::kAttention);
  if (block == nullptr || !block->attention()->latent.has_value()) return std::nullopt;
  const AttentionSpec& attention = *block->attention();
  const LatentSpec& latent = *attention.latent;
  const int64_t keys = attention.head_dim - latent.rope_dim;
  const int64_t rows = keys + latent.value_dim;
  place.shape = {attention.num_heads * rows, latent.rank};
  place.follows_from = "[num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]";
  if (rule.part == 0) {
    place.transposed = true;
    place.first_column = head * rows;
  } else {
    place.first_row = head * rows + keys;
  }
  return place;
}

std::optional<TensorPlace> NameTableConfig::SectionPlace(const TensorRule& rule,
                                                         const Numbers& numbers,
                                                         const TensorRequirement& tensor,
                                                         TensorPlace place) const {
  const BlockSpec* const block = TokenMixer(numbers.value[0]);
  const std::optional<RowSection> section =
      block == nullptr ? std::nullopt : SectionOf(rule.order, rule.part, *block);
  if (!section.has_value()) return std::nullopt;
  if (place.shape.empty()) place.shape = tensor.shape;
  place.shape[0] = section->stored_rows;
  place.first_row = section->first_row;
  place.group_rows = section->group_rows;
  place.group_stride = section->group_stride;
  return place;
}

std::optional<TensorPlace> NameTableConfig::Place(const TensorRequirement& tensor) const {
  if (const auto own = named.find(tensor.name); own != named.end()) {
    return TensorPlace{.name = own->second};
  }
  std::optional<TensorPlace> place = PlaceInRules(tensor);
  if (!place.has_value()) return place;
  if (positions_from > 0 && tensor.name.ends_with("embed_position.weight")) {
    place->shape = {tensor.shape[0] + positions_from, tensor.shape[1]};
    place->first_row = positions_from;
    place->follows_from = "[max_position_embeddings, hidden_size]";
  }
  for (std::string* const name : {&place->name, &place->format.scales}) {
    const auto stored = stored_names_.find(*name);
    if (stored != stored_names_.end()) {
      *name = stored->second;
    } else if (IsOfPrediction(tensor.name) && !predictions_.prefix.empty() && !name->empty()) {
      // Missing in the files, for error messages.
      const bool of_layer = tensor.name.starts_with("prediction.blocks.");
      const std::string own = Concat("model.layers.", predictions_.layer, '.');
      *name = Concat(predictions_.prefix, of_layer ? kFirstPredictionLayer : "",
                     name->substr(std::min(own.size(), name->size())));
    } else if (mapping_.in_files != nullptr) {
      *name = mapping_.in_files(*name);
    }
  }
  return place;
}

std::optional<TensorPlace> NameTableConfig::PlaceInRules(const TensorRequirement& tensor) const {
  const std::string name = NameForRules(tensor.name);
  const TensorRule* const found = RuleOf(name);
  if (found == nullptr) return std::nullopt;
  const TensorRule& rule = *found;
  const std::optional<Numbers> numbers = Match(rule.model, name);
  TensorPlace place{.name = Substitute(rule.file, *numbers)};
  place.add = rule.add;
  place.function = rule.function;
  place.units = rule.units;
  if (tensor.shape.size() == 2) place.format = FormatOf(rule, place.name);
  const bool stacked = Stars(rule.file) < Stars(rule.model) && rule.order != RowOrder::kExperts;
  if (rule.channel) place.shape = {tensor.shape[0], 1, tensor.shape[1]};
  if (IsRowSection(rule.order)) return SectionPlace(rule, *numbers, tensor, std::move(place));
  if (rule.channel) return place;
  if (!stacked && rule.parts == 1 && !rule.transposed && rule.slices == 0 &&
      rule.order == RowOrder::kJoined) {
    if (place.format.kind != BlockFormatKind::kNone) place.shape = tensor.shape;
    return place;
  }

  // For a stack of joined tensors, "[width, hidden_size]" becomes "[num_experts, 2 * width,
  // hidden_size]".
  std::string follows_from = "[";
  place.shape = tensor.shape;
  switch (rule.order) {
    case RowOrder::kJoined:
      place.first_row = rule.part * tensor.shape[0];
      place.shape[0] *= rule.parts;
      break;
    case RowOrder::kInterleaved:
      place.first_row = rule.part;
      place.row_step = rule.parts;
      place.shape[0] *= rule.parts;
      break;
    case RowOrder::kQkv: {
      const BlockSpec* const block = FindBlock(numbers->value[0], BlockKind::kAttention);
      if (block == nullptr) return std::nullopt;
      const AttentionSpec& attention = *block->attention();
      const int64_t queries = int64_t{attention.num_heads} * attention.head_dim;
      const int64_t keys = int64_t{attention.num_kv_heads} * attention.head_dim;
      place.first_row = rule.part == 0 ? 0 : queries + (rule.part - 1) * keys;
      place.shape[0] = queries + keys + attention.value_width();
      place.follows_from =
          "[(num_attention_heads + 2 * num_key_value_heads) * head_dim, hidden_size]";
      return place;
    }
    case RowOrder::kExperts: {
      const RoutedLayerSpec* const routing = RoutingOf(rule.model, numbers->value[0]);
      if (routing == nullptr) return std::nullopt;
      const int expert = numbers->value[1];
      place.transposed = rule.transposed;
      if (rule.transposed) {
        place.first_column = expert * tensor.shape[1];
        place.shape = {routing->num_experts * tensor.shape[1], tensor.shape[0]};
      } else {
        place.first_row = expert * tensor.shape[0];
        place.shape[0] *= routing->num_experts;
      }
      place.follows_from = "[num_experts * n_inner, n_embd]";
      return place;
    }
    case RowOrder::kLatent:
      return LatentPlace(rule, *numbers, std::move(place));
    default:
      break;  // row sections
  }
  if (rule.transposed && place.shape.size() == 2) {
    place.transposed = true;
    std::swap(place.shape[0], place.shape[1]);
  }
  if (stacked) {
    const int layer = numbers->value[0];
    const RoutedLayerSpec* routing = RoutingOf(rule.model, layer);
    if (routing == nullptr) return std::nullopt;
    place.index = numbers->value[numbers->count - 1];
    place.shape.insert(place.shape.begin(), routing->num_experts);
    follows_from +=
        Concat(rule.model.starts_with("blocks.*.attention.") ? "attention[" : "feed_forward[",
               layer, "].routing.num_experts, ");
  }
  if (rule.slices > 0) {
    place.index = 0;
    place.shape.insert(place.shape.begin(), rule.slices);
    follows_from += Concat(rule.slices, ", ");
  }
  if (rule.parts > 1) follows_from += Concat(rule.parts, " * ");
  if (tensor.follows_from.starts_with('[') && !place.transposed) {
    place.follows_from = follows_from + tensor.follows_from.substr(1);
  }
  return place;
}

std::optional<std::string> NameTableConfig::LeftOverReason(std::string_view stored) const {
  const std::string name = NameInRules(stored);
  for (const std::string_view pattern : ignored) {
    if (Match(pattern, name).has_value()) return std::nullopt;
  }
  for (const std::string& prefix : ignored_prefixes) {
    if (name.starts_with(prefix)) return std::nullopt;
  }
  for (const IgnoredRange& range : ignored_ranges) {
    const std::optional<Numbers> numbers = Match(range.pattern, name);
    if (!numbers.has_value() || range.number >= numbers->count) continue;
    const int number = numbers->value[range.number];
    if (number >= range.from && number < range.to) return std::nullopt;
  }
  for (const TensorRule& rule : tensors_) {
    const std::optional<Numbers> numbers = Match(rule.file, name);
    if (numbers.has_value()) return WhyLeftOver(Substitute(rule.model, *numbers), spec);
  }
  return std::string(kUnknownTensor);
}

std::unique_ptr<const CheckpointConfig> NameTableConfig::WithOwnHead() const {
  auto own = std::make_unique<NameTableConfig>(*this);
  own->spec.tie_word_embeddings = false;
  return own;
}

std::string NameTableConfig::AsInFile(std::string_view text) const {
  std::string out;
  while (!text.empty()) {
    const std::string_view key = LeadingKey(text);
    if (key.empty()) {
      out.push_back(text[0]);
      text.remove_prefix(1);
      continue;
    }
    std::string plain = WithoutIndices(key);
    // Prediction layers have the settings of the model's.
    if (IsOfPrediction(plain)) plain.erase(0, plain.find('.') + 1);
    const auto rule = std::find_if(keys_.begin(), keys_.end(),
                                   [&](const KeyRule& r) { return r.model == plain; });
    out.append(rule == keys_.end() ? plain : rule->file);
    text.remove_prefix(key.size());
  }
  return out;
}

}  // namespace moeserve
