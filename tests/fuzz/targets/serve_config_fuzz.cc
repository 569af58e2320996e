// The file of `serve --config`, with options of every kind.

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "server/config/config_file.h"
#include "server/config/option_sources.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve {
namespace {

class Command {
 public:
  Command() {
    app_.add_option("--text", text_, "")->capture_default_str();
    app_.add_option("--integer", integer_, "")->check(CLI::Range(0, 8))->capture_default_str();
    app_.add_option("--number", number_, "")->capture_default_str();
    app_.add_option("--word", word_, "")
        ->check(CLI::IsMember({"on", "off"}))
        ->capture_default_str();
    app_.add_option("--list", list_, "");
    app_.add_option("--parts", parts_, "")->delimiter(',');
    app_.add_flag("--flag", flag_, "");
    app_.add_flag("!--no-flag", no_flag_, "");
    sources_.emplace(app_, std::vector<std::string>(), std::vector<std::string>());
  }

  absl::Status Read(server::ConfigFile file) {
    return sources_->Resolve(std::move(file), [](const char*) { return nullptr; });
  }
  std::string ToYaml() const { return sources_->ToYaml(); }
  const std::string& text() const { return text_; }

 private:
  CLI::App app_;
  std::string text_ = "text";
  int integer_ = 1;
  double number_ = 1.5;
  std::string word_ = "on";
  std::vector<std::string> list_;
  std::vector<std::string> parts_;
  bool flag_ = false;
  bool no_flag_ = true;
  std::optional<server::OptionSources> sources_;
};

}  // namespace
}  // namespace moeserve

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  auto file = server::ParseConfig(testing::Text(data, size), "input");
  if (!file.ok()) return 0;
  Command command;
  if (!command.Read(*std::move(file)).ok()) return 0;
  testing::CountAccepted();
  // What is shown can be read again, and means the same.
  auto shown = server::ParseConfig(command.ToYaml(), "shown");
  if (command.ToYaml().size() > server::kMaxConfigBytes) return 0;
  MOESERVE_CHECK(shown.ok(), "the printed configuration is valid");
  Command again;
  MOESERVE_CHECK(again.Read(*std::move(shown)).ok(), "the printed values are accepted");
  MOESERVE_CHECK(again.text() == command.text(), "the printed text is the same");
  return 0;
}
