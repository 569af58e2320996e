// moeserve generate: one prompt, the answer on standard output.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddGenerateCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
