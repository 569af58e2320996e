// Commands whose model several processes compute together.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "server/commands/model_options.h"
#include "server/commands/ranks/rank_options.h"

namespace moeserve::server {

// Adds --ranks and the options that say how ranks divide a model and find each other.
void AddRankOptions(CLI::App& app, RankOptions& options);

// Runs a command and returns its exit status. With --ranks, the leader runs it with
// ModelOptionsText::session; it must destroy its engine before it ends. The followers load the same
// model and compute what the leader announces. kRankLostStatus if a rank was lost.
int RunWithRanks(ModelOptionsText& options, const std::function<int()>& run);

}  // namespace moeserve::server
