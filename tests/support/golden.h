// Reads golden files: results of the Python reference, written by tests/reference/make_goldens.py.
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

// The results for P prompts of `length` tokens. make_goldens.py documents the shapes.
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
  // Results of the reference with bf16 products and the routes of its f32 run.
  std::vector<float> bf16_target_logprobs;                  // [P, length - 1]
  std::vector<float> bf16_top_logprobs;                     // [P, length, top], at top_ids
  std::map<std::pair<int, BlockKind>, GivenRoutes> routes;  // per block: routes of all prompts
  std::map<std::string, std::string> metadata;

  std::vector<int32_t> Prompt(int p) const {
    return {tokens.begin() + p * length, tokens.begin() + (p + 1) * length};
  }
  // Returns the routes of tokens [begin, end) of prompt p in a block that splits a token into
  // `heads` rows.
  GivenRoutes Routes(int layer, BlockKind block, int p, int begin, int end, int heads) const;
};

Result<Golden> ReadGolden(const std::filesystem::path& file);

// Returns the path of `relative` in the source tree, for example of "tests/golden".
std::filesystem::path SourcePath(const std::string& relative);

// GoldenModels() returns all models that have a golden file, sorted by name. The golden files are
// in tests/golden, the models in tests/golden or deploy/models.
struct GoldenModel {
  std::string name;
  std::filesystem::path model;
  std::filesystem::path golden;
};
inline void PrintTo(const GoldenModel& m, std::ostream* out) { *out << m.name; }
std::vector<GoldenModel> GoldenModels();

}  // namespace moeserve::testing
