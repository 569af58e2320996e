// moeserve experts: profiles of what experts did, kept, added, shown and compared.
#pragma once

#include <CLI/CLI.hpp>

#include "server/commands/command.h"

namespace moeserve::server {

void AddExpertsCommand(CLI::App& app, Command& selected);

// moeserve experts compare
void AddExpertsCompareCommand(CLI::App& experts, Command& selected);

}  // namespace moeserve::server
