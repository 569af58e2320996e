// "moeserve health": whether a server on this machine is ready, for health checks of containers.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddHealthCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
