// The entry point: parses the command line and runs a subcommand.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "base/message.h"
#include "server/base/version.h"
#include "server/commands/commands.h"

int main(int argc, char** argv) {
  using namespace moeserve::server;
  try {
    CLI::App app("moeserve: a server for sparse mixture-of-experts language models", "moeserve");
    app.set_version_flag("--version", moeserve::Concat("moeserve ", kVersion));
    app.require_subcommand(1);
    Command selected;
    AddServeCommand(app, selected);
    AddConfigCommand(app, selected);
    AddGenerateCommand(app, selected);
    AddScoreCommand(app, selected);
    AddExpertsCommand(app, selected);
    AddInspectCommand(app, selected);
    AddCheckCommand(app, selected);
    AddConvertCommand(app, selected);
    AddQuantizeCommand(app, selected);
    AddBenchCommand(app, selected);
    AddHealthCommand(app, selected);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? 0 : 2;
    }
    return selected();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
