#include "model_loaders/tokenizer/json_reader.h"

#include <fstream>
#include <system_error>
#include <unordered_set>
#include <vector>

#include "model_loaders/files/file_kind.h"

namespace moeserve {
namespace {

constexpr int kMaxDepth = 32;

}  // namespace

absl::StatusOr<std::optional<std::string>> ReadTokenizerFile(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  // The text can become public: templates are shown to clients.
  if (absl::Status inside = CheckInsideModel(path.parent_path(), path); !inside.ok()) return inside;
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > kMaxTokenizerFileBytes) {
    return absl::InvalidArgumentError(path.string() + ": expected a file of at most " +
                                      std::to_string(kMaxTokenizerFileBytes) + " bytes, found " +
                                      (error ? error.message() : std::to_string(size)));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(size, '\0');
  file.read(text.data(), static_cast<std::streamsize>(size));
  if (!file) return absl::InvalidArgumentError(path.string() + ": cannot be read");
  if (absl::Status kind = CheckFileKind(path.filename().string(), text); !kind.ok()) return kind;
  return text;
}

std::string DescribeJson(const nlohmann::json& value) {
  std::string text = value.type_name();
  if (value.is_string()) {
    const std::string& content = value.get_ref<const std::string&>();
    size_t shown = std::min<size_t>(content.size(), 60);
    while (shown < content.size() && shown > 0 && (content[shown] & 0xC0) == 0x80) --shown;
    text.append(" \"").append(content, 0, shown).append(shown < content.size() ? "...\"" : "\"");
  } else if (value.is_number() || value.is_boolean()) {
    text.append(" ").append(value.dump());
  }
  return text;
}

JsonReader::Json JsonReader::Parse(std::string_view text) {
  if (text.size() > kMaxTokenizerFileBytes) {
    Fail("", Concat("expected at most ", kMaxTokenizerFileBytes, " bytes, found ", text.size()));
    return nullptr;
  }
  std::vector<std::unordered_set<std::string>> keys;  // keys of each object that is open
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) Fail("", Concat("nested deeper than ", kMaxDepth, " levels"));
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.empty() &&
        !keys.back().insert(parsed.get_ref<const std::string&>()).second) {
      Fail("", "key " + DescribeJson(parsed) + " appears twice in one object");
    }
    return ok();
  };
  try {
    Json json = Json::parse(text.begin(), text.end(), watch);
    return ok() ? json : nullptr;
  } catch (const Json::exception& error) {
    Fail("", "not valid JSON: " + Printable(error.what(), 300));
    return nullptr;
  }
}

}  // namespace moeserve
