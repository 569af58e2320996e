// Options and output that the commands which report expert statistics share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>

#include "nlohmann/json.hpp"
#include "server/reports/statistics_report.h"

namespace moeserve::server {

// Adds --threshold, --min-count, --top and --eps.
inline void AddReportOptions(CLI::App& app, ProfileReportOptions& options) {
  app.add_option("--threshold", options.threshold,
                 "An expert counts as active if its selections, divided by the tokens, exceed this")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--min-count", options.min_count,
                 "List a token for an expert only if it was routed there at least this often")
      ->check(CLI::Range(1u, 1u << 30))
      ->capture_default_str();
  app.add_option("--top", options.top, "Most tokens to list per expert")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  app.add_option("--eps", options.eps, "Smoothing of the token counts in KL divergences")
      ->check(CLI::Range(1e-12, 1e6))
      ->capture_default_str();
}

// Prints to standard output. Replaces invalid UTF-8, which the name of a folder can contain, by
// U+FFFD.
inline void PrintJson(const nlohmann::ordered_json& json) {
  std::printf("%s\n",
              json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
}

}  // namespace moeserve::server
