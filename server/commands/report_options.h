// Options and output that the commands which report expert statistics share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>

#include "server/base/json.h"
#include "server/commands/checked_options.h"
#include "server/reports/statistics_report.h"

namespace moeserve::server {

// Adds --threshold, --min-count, --top and --eps.
inline void AddReportOptions(CLI::App& app, ProfileReportOptions& options) {
  AddNumberOption(
      app, "--threshold", options.threshold,
      "An expert counts as active if its selections, divided by the tokens, exceed this", 0.0, 1e6);
  AddNumberOption(app, "--min-count", options.min_count,
                  "List a token for an expert only if it was routed there at least this often", 1u,
                  1u << 30);
  AddNumberOption(app, "--top", options.top, "Most tokens to list per expert", 0, 1000);
  AddNumberOption(app, "--eps", options.eps, "Smoothing of the token counts in KL divergences",
                  1e-12, 1e6);
}

// Prints to standard output. Replaces invalid UTF-8, which the name of a folder can contain, by
// U+FFFD.
inline void PrintJson(const OrderedJson& json) {
  std::printf("%s\n", json.dump(2, ' ', false, OrderedJson::error_handler_t::replace).c_str());
}

}  // namespace moeserve::server
