// moeserve score: perplexity of a text, and what the experts did with it.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddScoreCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
