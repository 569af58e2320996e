// `moeserve completion` and `moeserve man`: what the shell and man(1) need.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/error_text.h"
#include "server/base/version.h"
#include "server/commands/command_line/completion.h"
#include "server/commands/command_line/man_pages.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"

namespace moeserve::server {
namespace {

int PrintCompletion(const CLI::App& app, const std::string& shell) {
  const std::string script = shell == "bash"  ? BashCompletion(app)
                             : shell == "zsh" ? ZshCompletion(app)
                                              : FishCompletion(app);
  std::fputs(script.c_str(), stdout);
  return 0;
}

int WriteManPages(const CLI::App& app, const std::string& folder, const std::string& date) {
  const std::vector<const CLI::App*> commands =
      app.get_subcommands([](const CLI::App*) { return true; });
  const bool is_command =
      std::any_of(commands.begin(), commands.end(),
                  [&](const CLI::App* command) { return command->get_name() == folder; });
  if (is_command) {
    return Fail(absl::InvalidArgumentError(Concat(
        "expected a folder for the pages of all commands, found the command ", folder, ": try ",
        app.get_name(), " man ./", folder, ", or ", app.get_name(), ' ', folder, " --help")));
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::vector<ManPage> pages = ManPages(app, std::string(kVersion), date);
  for (const ManPage& page : pages) {
    const std::string path = (std::filesystem::path(folder) / page.file).string();
    std::ofstream file(path, std::ios::binary);
    file << page.text;
    file.close();
    if (!file) return Fail(absl::UnavailableError(Concat("cannot write ", path)));
  }
  std::printf("%zu pages in %s\n", pages.size(), folder.c_str());
  return 0;
}

}  // namespace

void AddCompletionCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "completion", "Print a script that lets a shell complete the command line");
  auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "The shell")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->required();
  command->footer(
      "For bash: source <(moeserve completion bash). For zsh: save it as _moeserve in a folder of "
      "$fpath. For fish: save it as ~/.config/fish/completions/moeserve.fish.");
  command->callback([&app, shell, &selected] {
    selected = [&app, shell] { return PrintCompletion(app, *shell); };
  });
}

void AddManCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("man", "Write the manual pages of all commands");
  auto folder = std::make_shared<std::string>();
  auto date = std::make_shared<std::string>();
  command->add_option("FOLDER", *folder, "Folder to write them to, which is created if missing")
      ->required();
  command->add_option("--date", *date, "Date to print in the pages, as YYYY-MM-DD");
  command->callback([&app, folder, date, &selected] {
    selected = [&app, folder, date] { return WriteManPages(app, *folder, *date); };
  });
}

}  // namespace moeserve::server
