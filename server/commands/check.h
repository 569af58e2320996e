// moeserve check: whether a checkpoint can be served.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddCheckCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
