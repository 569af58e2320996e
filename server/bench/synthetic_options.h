// Command line options for the shape of a synthetic model: the name of a shape, and flags that
// change parts of it.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"

namespace moeserve::server {

// The shape that the command line describes. Unset members keep the value of the named shape.
struct SyntheticOptions {
  std::string name;  // empty if the model is not synthetic
  std::optional<int> hidden, layers, vocab;
  std::optional<int> heads, kv_heads, head_dim, window;
  std::optional<std::string> attention;  // "dense" or "routed" (MoA)
  std::optional<int> attention_experts, attention_top_k;
  std::optional<std::string> feed_forward;  // "dense" or "routed"
  std::optional<int> experts;
  std::vector<int> widths;  // inner widths of the experts; a shorter list repeats
  std::optional<int> top_k;
  std::optional<double> top_p;  // with top_k, at most top_k experts are selected
  std::optional<int> split_heads;
  std::optional<std::string> score;  // "dot" or "cosine"
};

// Adds --synthetic and the flags that change the shape; these flags require --synthetic. Returns
// the option object of --synthetic. `options` must outlive `app`.
CLI::Option* AddSyntheticOptions(CLI::App& app, SyntheticOptions& options);

// Returns the spec of the named shape with all changes, validated. InvalidArgument for an unknown
// name, for a flag about a part that the shape does not have, or for inconsistent sizes.
Result<ModelSpec> BuildSyntheticSpec(const SyntheticOptions& options);

// Returns the name and the changed flags in a fixed order, such as "small --top-p 0.9 --top-k 2".
std::string Describe(const SyntheticOptions& options);

}  // namespace moeserve::server
