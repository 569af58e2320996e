#include "server/commands/progress/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace moeserve::server {
namespace {

constexpr size_t kUsualColumns = 80;

std::string_view Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

}  // namespace

std::optional<size_t> TerminalColumns(std::FILE* file) {
  const int descriptor = fileno(file);
  if (descriptor < 0 || isatty(descriptor) != 1) return std::nullopt;
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsualColumns;
  return size.ws_col;
}

bool CanRewriteLines(std::FILE* file) {
  return TerminalColumns(file).has_value() && Variable("TERM") != "dumb";
}

bool CanShowColours(std::FILE* file) {
  return CanRewriteLines(file) && Variable("NO_COLOR").empty();
}

}  // namespace moeserve::server
