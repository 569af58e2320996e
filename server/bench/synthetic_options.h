// Command line options for the shape of a synthetic model: a name and flags that change it.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"

namespace moeserve::server {

// Unset members keep the value of the named shape.
struct SyntheticOptions {
  std::string name;  // empty: no synthetic model
  std::optional<int> hidden, layers, vocab;
  std::optional<int> heads, kv_heads, head_dim;
  std::optional<std::string> attention;  // "dense" or "routed" (MoA)
  std::optional<int> attention_experts, attention_top_k;
  std::optional<std::string> feed_forward;  // "dense" or "routed"
  std::optional<int> experts;
  std::vector<int> widths;  // inner widths, repeated for all experts
  std::optional<int> top_k;
  std::optional<double> top_p;  // with top_k: at most that many experts
  std::optional<int> split_heads;
  std::optional<std::string> score;  // "dot" or "cosine"
};

// Adds --synthetic and the flags, which are refused without it. Returns --synthetic's option.
// `options` must outlive `app`.
CLI::Option* AddSyntheticOptions(CLI::App& app, SyntheticOptions& options);

// Returns the changed shape, validated. InvalidArgument: an unknown name, a flag for a part that
// the shape does not have, or inconsistent sizes.
Result<ModelSpec> BuildSyntheticSpec(const SyntheticOptions& options);

// Returns the name and the changes in a fixed order: "small --top-p 0.9 --top-k 2".
std::string Describe(const SyntheticOptions& options);

}  // namespace moeserve::server
