// moeserve bench: how fast a model, or a synthetic one, runs as a share of what the memory allows.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddBenchCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
