// Every tensor of every family's files in turn is renamed, changed, removed, or gets a neighbour
// that the model does not have. The loader must use a tensor, refuse it by name, or list it as not
// needed.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "nlohmann/json.hpp"
#include "tests/support/family_cases.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// A safetensors file in memory.
struct Weights {
  Json header;
  std::string data;

  static Weights Read(const fs::path& path) {
    const std::string bytes = ReadFile(path);
    uint64_t size = 0;
    std::memcpy(&size, bytes.data(), sizeof(size));
    return {Json::parse(bytes.substr(8, size)), bytes.substr(8 + size)};
  }

  void Write(const fs::path& path) const {
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    const uint64_t size = text.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), sizeof(size));
    file << text << data;
  }

  // Changes the sign of every element, or some bits of integers.
  void Change(const std::string& name) {
    const Json& entry = header[name];
    const std::string type = entry["dtype"];
    const size_t width = type == "F32" ? 4 : type == "BF16" || type == "F16" ? 2 : 1;
    const char bits =
        static_cast<char>(type == "U8" ? (name.ends_with("_scales") ? 1 : 0x88) : 0x80);
    const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    for (size_t i = begin + width - 1; i < end; i += width)
      data[i] = static_cast<char>(data[i] ^ bits);
  }

  void Rename(const std::string& name, const std::string& other) {
    header[other] = header[name];
    header.erase(name);
  }
};

// The name with "*" for numbers between dots.
std::string PatternOf(const std::string& name) {
  std::string pattern;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool digit = name[i] >= '0' && name[i] <= '9';
    if (!digit || (i > 0 && name[i - 1] != '.' && !pattern.ends_with('*'))) {
      pattern += name[i];
    } else if (!pattern.ends_with('*')) {
      pattern += '*';
    }
  }
  return pattern;
}

class FamilyTensorsTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override {
    answers_ = *ReadFamilyAnswers(GetParam().folder);
    original_ = Weights::Read(GetParam().folder / "model.safetensors");
    fs::copy(GetParam().folder / "config.json", dir_.path() / "config.json");
    // The first and the last tensor of each name.
    std::map<std::string, std::pair<std::string, std::string>> ends;
    for (const auto& [name, unused] : original_.header.items()) {
      if (name == "__metadata__") continue;
      const auto [it, added] = ends.try_emplace(PatternOf(name), name, name);
      if (!added) it->second.second = name;
    }
    for (const auto& [pattern, names] : ends) {
      first_.insert(names.first);
      ends_.insert({names.first, names.second});
    }
    base_ = Logits(original_);
    ASSERT_FALSE(base_.empty());
  }

  Result<Checkpoint> Load(const Weights& weights, bool predictions = true) {
    weights.Write(dir_.path() / "model.safetensors");
    return LoadCheckpoint(dir_.path(), {.require_tokenizer = false, .predictions = predictions});
  }

  // The logits of all prompts, and of prediction layers; empty if the files are refused.
  std::vector<float> Logits(const Weights& weights) {
    weights.Write(dir_.path() / "model.safetensors");
    RunnerOptions options{.threads = 1};
    options.load.predictions = true;
    auto runner = ModelRunner::Load(dir_.path(), options);
    if (!runner.ok()) return {};
    std::vector<float> all;
    for (int p = 0; p < answers_.prompts; ++p) {
      const std::vector<float> logits = (*runner)->Run(answers_.Prompt(p), answers_.length);
      all.insert(all.end(), logits.begin(), logits.end());
      if ((*runner)->spec().prediction == nullptr) continue;
      const std::vector<int32_t> prompt = answers_.Prompt(p);
      const std::vector<float> next = (*runner)->Predict({prompt.begin() + 1, prompt.end()}, 0);
      all.insert(all.end(), next.begin(), next.end());
    }
    return all;
  }

  // Returns whether a note counts the tensor among those of prediction layers.
  static bool IsCounted(const std::string& note, const std::string& name) {
    constexpr std::string_view kWords = "those of prediction layers, ";
    const size_t begin = note.find(kWords);
    if (begin == std::string::npos) return false;
    const size_t from = begin + kWords.size();
    return name.find(note.substr(from, note.find('*', from) - from)) != std::string::npos;
  }

  // Returns whether the notes of a checkpoint, which `inspect` prints, list a tensor.
  static bool IsListed(const Checkpoint& checkpoint, const std::string& name) {
    return std::any_of(checkpoint.notes.begin(), checkpoint.notes.end(), [&](const auto& note) {
      return note.find("tensors that the model does not need: ") == 0 &&
             (note.find(name) != std::string::npos ||
              note.find(PatternOf(name)) != std::string::npos || IsCounted(note, name));
    });
  }

  // Succeeds if the files with the tensor `name` are refused and the message names the tensor, or
  // if they are read and the tensor is listed as not needed.
  void ExpectRefusedOrListed(const Weights& weights, const std::string& name) {
    const auto loaded = Load(weights, /*predictions=*/false);
    if (loaded.ok()) {
      EXPECT_TRUE(IsListed(*loaded, name)) << name << " is read, and not listed";
    } else {
      // Long names are cut.
      EXPECT_NE(loaded.status().message().find(name.substr(0, 76)), std::string::npos)
          << name << ": " << loaded.status();
    }
  }

  TempFolder dir_;
  FamilyAnswers answers_;
  Weights original_;
  std::set<std::string> first_;  // of each pattern of names
  std::set<std::string> ends_;   // the first and the last of each pattern
  std::vector<float> base_;
};

TEST_P(FamilyTensorsTest, AChangedTensorChangesTheAnswers) {
  const auto checkpoint = Load(original_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const std::string& name : ends_) {
    if (IsListed(*checkpoint, name)) continue;
    // Where all experts are selected, their choice has no effect.
    const bool choice = name.ends_with("e_score_correction_bias");
    if (choice && GetParam().name.find("-all") != std::string::npos) continue;
    Weights changed = original_;
    changed.Change(name);
    const std::vector<float> logits = Logits(changed);
    ASSERT_EQ(logits.size(), base_.size()) << name;
    EXPECT_NE(logits, base_) << name << " has no effect";
  }
}

TEST_P(FamilyTensorsTest, ARenamedTensorIsRefusedOrListed) {
  for (const std::string& name : first_) {
    for (const std::string& other : {name + "_2", "x." + name}) {
      Weights renamed = original_;
      renamed.Rename(name, other);
      ExpectRefusedOrListed(renamed, other);
    }
  }
}

TEST_P(FamilyTensorsTest, AnAddedTensorIsRefusedOrListed) {
  for (const std::string& name : first_) {
    // A bias, a scale and an adapter beside the tensor, and the tensor of a layer or expert more.
    std::set<std::string> others = {name + "_scale_inv", name + "_scale", name + ".lora_A",
                                    name + "_quantizer"};
    if (name.ends_with(".weight")) others.insert(name.substr(0, name.size() - 6) + "bias");
    for (size_t i = 1; i < name.size(); ++i) {
      if (name[i - 1] == '.' && name[i] >= '0' && name[i] <= '9') {
        others.insert(name.substr(0, i) + "97" + name.substr(name.find('.', i)));
      }
    }
    for (const std::string& other : others) {
      if (original_.header.contains(other)) continue;
      Weights added = original_;
      added.header[other] = {{"dtype", "F32"},
                             {"shape", {1}},
                             {"data_offsets", {added.data.size(), added.data.size() + 4}}};
      added.data.append(4, '\0');
      ExpectRefusedOrListed(added, other);
    }
  }
}

TEST_P(FamilyTensorsTest, ATensorLeftOutIsNamed) {
  const auto checkpoint = Load(original_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const std::string& name : first_) {
    if (IsListed(*checkpoint, name)) continue;
    Weights without = original_;
    const Json entry = without.header[name];
    without.header.erase(name);
    const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    without.data.erase(begin, end - begin);
    for (auto& [other, place] : without.header.items()) {
      if (other == "__metadata__") continue;
      for (Json& offset : place["data_offsets"]) {
        if (offset.get<size_t>() >= end) offset = offset.get<size_t>() - (end - begin);
      }
    }
    const auto loaded = Load(without);
    // Without their joining matrix there are no prediction layers.
    const bool joins = name.ends_with("eh_proj.weight") || name == "mtp.fc.weight";
    if (joins && loaded.ok() && loaded->spec.prediction == nullptr) continue;
    ASSERT_FALSE(loaded.ok()) << name;
    const std::string message(loaded.status().message());
    // Other layouts of a file have other names for the same tensor.
    EXPECT_TRUE(message.find("is missing") != std::string::npos ||
                message.find(name.substr(0, 76)) != std::string::npos)
        << name << ": " << message;
  }
}

// Cases of each family that together have all of its names of tensors.
std::vector<FamilyCase> OneOfEach() {
  struct Candidate {
    FamilyCase of;
    std::set<std::string> patterns;
    bool all_experts;  // all are selected, so what only decides the selection has no effect
  };
  std::vector<Candidate> candidates;
  for (const FamilyCase& c : FamilyCases()) {
    if (!fs::exists(c.folder / "model.safetensors")) continue;
    const std::string family = Json::parse(ReadFile(c.folder / "config.json"))["model_type"];
    const Weights weights = Weights::Read(c.folder / "model.safetensors");
    Candidate& candidate =
        candidates.emplace_back(Candidate{c, {}, c.name.find("-all") != std::string::npos});
    for (const auto& [name, unused] : weights.header.items()) {
      candidate.patterns.insert(family + PatternOf(name));
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    if (a.all_experts != b.all_experts) return b.all_experts;
    return a.patterns.size() > b.patterns.size();
  });
  std::vector<FamilyCase> cases;
  std::set<std::string> seen;
  for (const Candidate& candidate : candidates) {
    const size_t before = seen.size();
    seen.insert(candidate.patterns.begin(), candidate.patterns.end());
    if (seen.size() > before) cases.push_back(candidate.of);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Families, FamilyTensorsTest, ::testing::ValuesIn(OneOfEach()),
                         [](const auto& info) { return TestName(info.param); });

}  // namespace
}  // namespace moeserve::testing
