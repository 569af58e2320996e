// The subcommands of the program. Each Add...Command() registers one subcommand with the command
// line parser. If the user chose that subcommand, its callback sets `selected` to the function that
// main() then runs.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace moeserve::server {

// Runs a subcommand after the command line was parsed. Returns the exit status of the process.
using Command = std::function<int()>;

void AddServeCommand(CLI::App& app, Command& selected);     // serves a model over HTTP and gRPC
void AddConfigCommand(CLI::App& app, Command& selected);    // checks and shows configurations
void AddGenerateCommand(CLI::App& app, Command& selected);  // streams one completion to stdout
void AddChatCommand(CLI::App& app, Command& selected);      // talks with a model
void AddScoreCommand(CLI::App& app, Command& selected);     // prints perplexity, expert statistics
void AddEmbedCommand(CLI::App& app, Command& selected);     // prints vectors of texts
void AddClassifyCommand(CLI::App& app, Command& selected);  // prints labels of texts
void AddExpertsCommand(CLI::App& app, Command& selected);   // handles expert profile files
void AddInspectCommand(CLI::App& app, Command& selected);   // prints architecture and sizes
void AddCheckCommand(CLI::App& app, Command& selected);     // validates a checkpoint
void AddConvertCommand(CLI::App& app, Command& selected);   // writes a folder in the native format
void AddQuantizeCommand(CLI::App& app, Command& selected);  // writes a copy with integer weights
void AddPackCommand(CLI::App& app, Command& selected);      // writes files of packed weights
void AddBenchCommand(CLI::App& app, Command& selected);     // measures speed
void AddHealthCommand(CLI::App& app, Command& selected);    // checks whether a server is ready
// These describe all commands of `app`, which must outlive them.
void AddCompletionCommand(CLI::App& app, Command& selected);  // prints a script for a shell
void AddManCommand(CLI::App& app, Command& selected);         // writes manual pages

// These add a subcommand of a subcommand.
void AddExpertsCompareCommand(CLI::App& experts, Command& selected);  // "experts compare"
void AddExpertsCurvesCommand(CLI::App& experts, Command& selected);   // "experts curves"
void AddExpertsPlaceCommand(CLI::App& experts, Command& selected);    // "experts place"
void AddBenchLoadCommand(CLI::App& bench, Command& selected);         // "bench load"

}  // namespace moeserve::server
