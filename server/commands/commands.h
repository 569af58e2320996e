// The subcommands of the program. Each Add...Command() registers one with the command line; when
// the user chose it, its callback sets `selected` to what main() runs.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace moeserve::server {

// Runs a subcommand after the command line was read; returns the exit status of the process.
using Command = std::function<int()>;

void AddServeCommand(CLI::App& app, Command& selected);     // serves a model over HTTP and gRPC
void AddGenerateCommand(CLI::App& app, Command& selected);  // streams one completion to stdout
void AddScoreCommand(CLI::App& app, Command& selected);     // perplexity and expert statistics
void AddExpertsCommand(CLI::App& app, Command& selected);   // files of expert profiles
void AddInspectCommand(CLI::App& app, Command& selected);   // architecture, parameters, memory
void AddCheckCommand(CLI::App& app, Command& selected);     // validates a checkpoint
void AddQuantizeCommand(CLI::App& app, Command& selected);  // writes a folder of integer weights
void AddBenchCommand(CLI::App& app, Command& selected);     // speed as a share of the machine's
void AddHealthCommand(CLI::App& app, Command& selected);    // whether a local server is ready

// Subcommands of subcommands.
void AddExpertsCompareCommand(CLI::App& experts, Command& selected);  // experts compare
void AddBenchLoadCommand(CLI::App& bench, Command& selected);         // bench load

}  // namespace moeserve::server
