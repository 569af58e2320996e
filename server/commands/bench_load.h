// moeserve bench load: latencies and throughput of a server, or of the engine in this process,
// under a reproducible load.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

// Adds "load" to the bench command.
void AddBenchLoadCommand(CLI::App& bench, Command& selected);

}  // namespace moeserve::server
