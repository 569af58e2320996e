// The tiny models of checkpoint families in tests/golden/families, with their answers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "base/status.h"

namespace moeserve::testing {

struct FamilyCase {
  std::string name;
  std::filesystem::path folder;
};
inline void PrintTo(const FamilyCase& c, std::ostream* out) { *out << c.name; }

// Returns all cases, sorted by name.
std::vector<FamilyCase> FamilyCases();

// Returns the name of a case as a part of a test's name.
std::string TestName(const FamilyCase& c);

// The results of the family's own implementation for P prompts of `length` tokens.
struct FamilyAnswers {
  int prompts = 0;
  int length = 0;
  int vocab = 0;
  int continuation = 0;
  std::vector<int32_t> tokens;    // [P, length]
  std::vector<float> logprobs;    // [P, length, vocab]
  std::vector<int32_t> greedy;    // [P, continuation]
  std::vector<float> margin;      // [P, continuation]
  std::vector<float> prediction;  // [P, length - 1, vocab]; empty without prediction layers

  std::vector<int32_t> Prompt(int p) const {
    return {tokens.begin() + p * length, tokens.begin() + (p + 1) * length};
  }
};

Result<FamilyAnswers> ReadFamilyAnswers(const std::filesystem::path& folder);

}  // namespace moeserve::testing
