// The shape of a synthetic model on the command line: a named one and flags that change it.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"

namespace moeserve::server {

// What is not set stays as the named shape has it.
struct SyntheticOptions {
  std::string name;  // empty: no synthetic model is asked for
  std::optional<int> hidden, layers, vocab;
  std::optional<int> heads, kv_heads, head_dim;
  std::optional<std::string> attention;  // "dense" or "routed" (MoA)
  std::optional<int> attention_experts, attention_top_k;
  std::optional<std::string> feed_forward;  // "dense" or "routed"
  std::optional<int> experts;
  std::vector<int> widths;  // inner widths; fewer than experts are repeated
  std::optional<int> top_k;
  std::optional<double> top_p;  // with top_k: never more experts than that
  std::optional<int> split_heads;
  std::optional<std::string> score;  // "dot" or "cosine"
};

// Adds --synthetic and the flags, which are refused without it. Returns --synthetic's option.
// `options` must outlive `app`.
CLI::Option* AddSyntheticOptions(CLI::App& app, SyntheticOptions& options);

// The named shape with the changes, validated. InvalidArgument: an unknown name, a flag for a part
// that the shape does not have, or sizes that do not fit together.
Result<ModelSpec> BuildSyntheticSpec(const SyntheticOptions& options);

// "small --top-p 0.9 --top-k 2": the name and what was changed, in a fixed order.
std::string Describe(const SyntheticOptions& options);

}  // namespace moeserve::server
