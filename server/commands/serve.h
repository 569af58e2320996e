// moeserve serve: the HTTP and gRPC servers, until a signal.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddServeCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
