#include "tests/support/family_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "base/check.h"
#include "model_loaders/architectures/native/write_config.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/safetensors.h"
#include "nlohmann/json.hpp"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

template <typename T>
std::vector<T> Values(const SafetensorsFile& file, const TensorEntry& entry) {
  const std::string_view bytes = file.Bytes(entry);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// Adds the settings in a part of a config.json to `settings`, as texts.
void AddSettings(const nlohmann::ordered_json& part, const std::string& path,
                 std::set<std::string>& settings) {
  if (part.is_object()) {
    for (const auto& [key, value] : part.items()) AddSettings(value, path + '.' + key, settings);
  } else if (part.is_array()) {
    for (const auto& value : part) AddSettings(value, path + "[]", settings);
  } else if (part.is_number()) {
    const auto number = part.get<double>();
    const bool whole = number == std::floor(number);
    const char* kind = number == 0 ? "0" : number == 1 ? "1" : whole ? "whole" : "fraction";
    settings.insert(path + ": " + kind);
  } else {
    settings.insert(path + ": " + part.dump());
  }
}

}  // namespace

std::vector<FamilyCase> CoveringFamilyCases() {
  std::vector<std::pair<FamilyCase, std::set<std::string>>> left;
  for (const FamilyCase& c : FamilyCases()) {
    const auto checkpoint = LoadCheckpoint(c.folder, {.require_tokenizer = false});
    MOESERVE_CHECK(checkpoint.ok(), "every case can be read");
    std::set<std::string> settings;
    AddSettings(NativeConfigJson(checkpoint->spec), "", settings);
    left.emplace_back(c, std::move(settings));
  }
  std::vector<FamilyCase> chosen;
  while (true) {
    const auto most = std::max_element(left.begin(), left.end(), [](const auto& a, const auto& b) {
      return a.second.size() < b.second.size();
    });
    if (most == left.end() || most->second.empty()) return chosen;
    chosen.push_back(most->first);
    const std::set<std::string> covered = most->second;
    for (auto& [unused, settings] : left) {
      std::erase_if(settings, [&](const std::string& s) { return covered.contains(s); });
    }
  }
}

std::vector<FamilyCase> FamilyCases() {
  std::vector<FamilyCase> cases;
  for (const auto& entry :
       std::filesystem::directory_iterator(SourcePath("tests/golden/families"))) {
    cases.push_back({entry.path().filename().string(), entry.path()});
  }
  std::sort(cases.begin(), cases.end(),
            [](const FamilyCase& a, const FamilyCase& b) { return a.name < b.name; });
  return cases;
}

std::string TestName(const FamilyCase& c) {
  std::string name = c.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

Result<FamilyAnswers> ReadFamilyAnswers(const std::filesystem::path& folder) {
  MOESERVE_ASSIGN_OR_RETURN(const std::shared_ptr<const SafetensorsFile> file,
                            SafetensorsFile::Open(folder / "golden.safetensors"));
  const TensorEntry* const tokens = file->Find("tokens");
  const TensorEntry* const logprobs = file->Find("logprobs");
  const TensorEntry* const greedy = file->Find("greedy");
  const TensorEntry* const margin = file->Find("margin");
  if (tokens == nullptr || logprobs == nullptr || greedy == nullptr || margin == nullptr ||
      logprobs->shape.size() != 3 || greedy->shape.size() != 2) {
    return absl::InvalidArgumentError(folder.string() + ": not the answers of a family");
  }
  return FamilyAnswers{.prompts = static_cast<int>(logprobs->shape[0]),
                       .length = static_cast<int>(logprobs->shape[1]),
                       .vocab = static_cast<int>(logprobs->shape[2]),
                       .continuation = static_cast<int>(greedy->shape[1]),
                       .tokens = Values<int32_t>(*file, *tokens),
                       .logprobs = Values<float>(*file, *logprobs),
                       .greedy = Values<int32_t>(*file, *greedy),
                       .margin = Values<float>(*file, *margin)};
}

}  // namespace moeserve::testing
