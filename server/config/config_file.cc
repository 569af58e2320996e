#include "server/config/config_file.h"

#include <yaml.h>

#include <climits>
#include <map>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/files/mapped_file.h"

namespace moeserve::server {
namespace {

int Line(const yaml_mark_t& mark) { return static_cast<int>(mark.line) + 1; }

std::string_view View(const yaml_char_t* text, size_t size) {
  return {reinterpret_cast<const char*>(text), size};
}

bool IsNull(std::string_view text) {
  return text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL";
}

// Reads the parser's events into entries, without building a tree.
class Reader {
 public:
  explicit Reader(std::string_view text) {
    initialized_ = yaml_parser_initialize(&parser_) != 0;
    if (!initialized_) return;
    yaml_parser_set_encoding(&parser_, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&parser_, reinterpret_cast<const unsigned char*>(text.data()),
                                 text.size());
  }
  ~Reader() {
    if (initialized_) yaml_parser_delete(&parser_);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Returns OK with all entries, or an error whose message is "LINE: ...".
  Result<std::vector<ConfigEntry>> Read() {
    if (!initialized_) return absl::ResourceExhaustedError("0: there is no memory to read it");
    while (true) {
      yaml_event_t event;
      if (yaml_parser_parse(&parser_, &event) == 0) {
        const char* problem = parser_.problem != nullptr ? parser_.problem : "unknown problem";
        return Error(Line(parser_.problem_mark),
                     Concat("not acceptable YAML: ", Printable(problem, 200)));
      }
      const bool end = event.type == YAML_STREAM_END_EVENT;
      const absl::Status status = Take(event);
      yaml_event_delete(&event);
      MOESERVE_RETURN_IF_ERROR(status);
      if (end) return std::move(entries_);
    }
  }

 private:
  enum class Place { kTop, kKey, kValue, kItem };

  static absl::Status Error(int line, std::string_view what) {
    return absl::InvalidArgumentError(Concat(line, ": ", what));
  }

  absl::Status Take(const yaml_event_t& event) {
    switch (event.type) {
      case YAML_DOCUMENT_START_EVENT:
        if (std::exchange(begun_, true)) {
          return Error(Line(event.start_mark), "expected one document, found a second one");
        }
        return absl::OkStatus();
      case YAML_ALIAS_EVENT:
        return CheckProperties(event, event.data.alias.anchor, nullptr);
      case YAML_SCALAR_EVENT:
        MOESERVE_RETURN_IF_ERROR(
            CheckProperties(event, event.data.scalar.anchor, event.data.scalar.tag));
        return TakeScalar(event);
      case YAML_SEQUENCE_START_EVENT:
        MOESERVE_RETURN_IF_ERROR(CheckProperties(event, event.data.sequence_start.anchor,
                                                 event.data.sequence_start.tag));
        if (place_ != Place::kValue) return Refuse(event, "a list");
        entries_.back().is_list = true;
        place_ = Place::kItem;
        return absl::OkStatus();
      case YAML_SEQUENCE_END_EVENT:
        place_ = Place::kKey;
        return absl::OkStatus();
      case YAML_MAPPING_START_EVENT:
        MOESERVE_RETURN_IF_ERROR(
            CheckProperties(event, event.data.mapping_start.anchor, event.data.mapping_start.tag));
        if (place_ != Place::kTop) return Refuse(event, "a mapping");
        place_ = Place::kKey;
        return absl::OkStatus();
      default:
        return absl::OkStatus();
    }
  }

  absl::Status TakeScalar(const yaml_event_t& event) {
    const auto& scalar = event.data.scalar;
    const std::string_view text = View(scalar.value, scalar.length);
    const bool quoted = scalar.style != YAML_PLAIN_SCALAR_STYLE;
    const bool null = !quoted && IsNull(text);
    if (place_ == Place::kTop) return null ? absl::OkStatus() : Refuse(event, "one value");
    if (null) return Refuse(event, "nothing");
    if (++count_ > kMaxConfigValues) {
      return Error(Line(event.start_mark),
                   Concat("expected at most ", kMaxConfigValues, " values"));
    }
    if (place_ == Place::kKey) return AddKey(Line(event.start_mark), std::string(text));
    entries_.back().values.push_back({std::string(text), quoted, Line(event.start_mark)});
    if (place_ == Place::kValue) place_ = Place::kKey;
    return absl::OkStatus();
  }

  absl::Status AddKey(int line, const std::string& key) {
    const auto [found, is_new] = lines_.emplace(key, line);
    if (!is_new) {
      return Error(line, Concat(Quoted(key), " is given twice, first in line ", found->second));
    }
    ConfigEntry entry;
    entry.key = key;
    entry.line = line;
    entries_.push_back(std::move(entry));
    place_ = Place::kValue;
    return absl::OkStatus();
  }

  // Returns the error for something that cannot stand at place_.
  absl::Status Refuse(const yaml_event_t& event, std::string_view found) const {
    const int line = Line(event.start_mark);
    switch (place_) {
      case Place::kTop:
        return Error(line, Concat("expected a mapping from option names to values, found ", found));
      case Place::kKey:
        return Error(line, Concat("expected the name of an option, found ", found));
      case Place::kValue:
        return Error(entries_.back().line,
                     Concat(Quoted(entries_.back().key),
                            ": expected a value or a list of values, found ", found));
      case Place::kItem:
        break;
    }
    return Error(line, Concat(Quoted(entries_.back().key), ": expected a list of values, found ",
                              found, " in it"));
  }

  static absl::Status CheckProperties(const yaml_event_t& event, const yaml_char_t* anchor,
                                      const yaml_char_t* tag) {
    if (anchor != nullptr) {
      return Error(Line(event.start_mark), "anchors and aliases are not supported");
    }
    if (tag != nullptr) {
      return Error(Line(event.start_mark), Concat("expected a value without a tag, found the tag ",
                                                  Quoted(reinterpret_cast<const char*>(tag))));
    }
    return absl::OkStatus();
  }

  yaml_parser_t parser_;
  bool initialized_ = false;
  std::vector<ConfigEntry> entries_;
  std::map<std::string, int> lines_;  // by key
  size_t count_ = 0;
  Place place_ = Place::kTop;
  bool begun_ = false;
};

}  // namespace

Result<ConfigFile> ParseConfig(std::string_view text, std::string_view name) {
  ConfigFile out;
  out.name = Printable(name, PATH_MAX);
  if (text.size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(
        Concat(out.name, ": expected at most ", kMaxConfigBytes, " bytes, found ", text.size()));
  }
  auto entries = Reader(text).Read();
  if (!entries.ok()) return Prefixed(Concat(out.name, ':'), entries.status());
  out.entries = *std::move(entries);
  return out;
}

Result<ConfigFile> ReadConfigFile(const std::filesystem::path& file) {
  auto text = ReadTextFile(file, kMaxConfigBytes);
  if (!text.ok()) {
    // The message begins with the last component of the path.
    const std::string folder = Printable(file.parent_path().string(), PATH_MAX);
    return Prefixed(folder.empty() ? "" : Concat(folder, '/'), text.status());
  }
  return ParseConfig(*text, file.string());
}

}  // namespace moeserve::server
