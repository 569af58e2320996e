// Results of the Python reference (tests/reference/make_goldens.py).
#pragma once

#include <filesystem>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"

namespace moeserve::testing {

// P prompts of `length` tokens; shapes as the script states them.
struct Golden {
  int prompts = 0;
  int length = 0;
  int top = 0;
  std::vector<int32_t> tokens;         // [P, length]
  std::vector<float> target_logprobs;  // [P, length - 1]
  std::vector<int32_t> top_ids;        // [P, length, top]
  std::vector<float> top_logprobs;     // [P, length, top]
  std::vector<int32_t> greedy;         // [P, length]
  std::vector<float> greedy_margin;    // [P, length]
  // Of the reference with bf16 products, the f32 run\'s routes replayed.
  std::vector<float> bf16_target_logprobs;                  // [P, length - 1]
  std::vector<float> bf16_top_logprobs;                     // [P, length, top], at top_ids
  std::map<std::pair<int, BlockKind>, GivenRoutes> routes;  // rows of all prompts
  std::map<std::string, std::string> metadata;

  std::vector<int32_t> Prompt(int p) const {
    return {tokens.begin() + p * length, tokens.begin() + (p + 1) * length};
  }
  // Routes of tokens [begin, end) of prompt p where the block splits a token into `heads` rows.
  GivenRoutes Routes(int layer, BlockKind block, int p, int begin, int end, int heads) const;
};

Result<Golden> ReadGolden(const std::filesystem::path& file);

// The source tree's folder of that name, e.g. "tests/golden".
std::filesystem::path SourcePath(const std::string& relative);

// Folders below tests/golden and deploy/models that hold both a model and a golden file:
// (model folder, golden file), sorted by name.
struct GoldenModel {
  std::string name;
  std::filesystem::path model;
  std::filesystem::path golden;
};
inline void PrintTo(const GoldenModel& m, std::ostream* out) { *out << m.name; }
std::vector<GoldenModel> GoldenModels();

}  // namespace moeserve::testing
