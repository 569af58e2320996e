// What the tests of fairseq checkpoints share.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "nlohmann/json.hpp"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {

// Returns the folder of a model that tests/reference/fairseq/make_fairseq_goldens.py wrote.
inline std::filesystem::path FairseqGolden(const std::string& name) {
  return SourcePath("tests/golden/fairseq/" + name);
}

// Returns all these models, sorted by name.
inline std::vector<FamilyCase> FairseqCases() {
  std::vector<FamilyCase> cases;
  for (const auto& entry : std::filesystem::directory_iterator(FairseqGolden(""))) {
    cases.push_back({entry.path().filename().string(), entry.path()});
  }
  std::sort(cases.begin(), cases.end(),
            [](const FamilyCase& a, const FamilyCase& b) { return a.name < b.name; });
  return cases;
}

// Returns the encoders and encoder-decoders that make_fairseq_text_goldens.py wrote.
inline std::vector<FamilyCase> FairseqTextCases() {
  std::vector<FamilyCase> cases;
  for (const char* kind : {"tests/golden/encoders", "tests/golden/pairs"}) {
    for (const auto& entry : std::filesystem::directory_iterator(SourcePath(kind))) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("fairseq-")) cases.push_back({name, entry.path()});
    }
  }
  std::sort(cases.begin(), cases.end(),
            [](const FamilyCase& a, const FamilyCase& b) { return a.name < b.name; });
  return cases;
}

inline Result<Checkpoint> LoadModel(const std::filesystem::path& path) {
  return LoadCheckpoint(path, {.require_tokenizer = false});
}

inline bool Contains(const std::vector<std::string>& sentences, std::string_view part) {
  return std::any_of(sentences.begin(), sentences.end(),
                     [&](const std::string& s) { return s.find(part) != s.npos; });
}

// A copy of a golden model that a test can change.
class FairseqCopy {
 public:
  explicit FairseqCopy(const std::string& name) {
    for (const auto& entry : std::filesystem::directory_iterator(FairseqGolden(name))) {
      if (entry.path().extension() == ".safetensors") continue;
      std::filesystem::copy(entry.path(), folder_.path());
    }
  }

  const std::filesystem::path& path() const { return folder_.path(); }
  std::filesystem::path operator/(const std::string& file) const { return path() / file; }

  // Writes a config.json whose members replace options.
  void SetOptions(nlohmann::json options) {
    options["model_type"] = "torchscale";
    WriteFile(path() / "config.json", options.dump());
  }

 private:
  TempFolder folder_;
};

}  // namespace moeserve::testing
