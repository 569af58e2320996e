// `moeserve quantize`: a copy of a model folder with its matrices as integers.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddQuantizeCommand(CLI::App& app, Command& selected);

}  // namespace moeserve::server
