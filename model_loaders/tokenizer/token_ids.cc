#include "model_loaders/tokenizer/token_ids.h"

#include <optional>

#include "model_loaders/files/object_reader.h"

namespace moeserve {

std::vector<int32_t> ParseTokenIds(const nlohmann::json& json, const std::string& path,
                                   Problems* problems) {
  if (const std::optional<int> id = IntFrom(json)) return {*id};
  if (!json.is_array()) {
    problems->Add(Concat(path, ": expected ", kTokenIdsExpected, ", found ", ShowJson(json)));
    return {};
  }
  if (json.size() > kMaxTokenIds) {
    problems->Add(
        Concat(path, ": expected at most ", kMaxTokenIds, " ids, found a list of ", json.size()));
    return {};
  }
  std::vector<int32_t> ids;
  for (const nlohmann::json& item : json) {
    const std::optional<int> id = IntFrom(item);
    if (!id.has_value()) {
      problems->Add(
          Concat(path, '[', ids.size(), "]: expected an integer, found ", ShowJson(item)));
      return {};
    }
    ids.push_back(*id);
  }
  return ids;
}

}  // namespace moeserve
