// moeserve inspect: what a checkpoint contains.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddInspectCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
