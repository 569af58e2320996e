// What the program must know about the terminal that it writes to.
#pragma once

#include <cstddef>
#include <cstdio>
#include <optional>

namespace moeserve::server {

// Returns the number of columns of the terminal behind `file`, or nullopt if that is no terminal.
// A terminal that does not tell its width has 80 columns.
std::optional<size_t> TerminalColumns(std::FILE* file);

// Returns whether `file` is a terminal that can rewrite a line (TERM is not "dumb").
bool CanRewriteLines(std::FILE* file);

// Returns whether colours may be written to `file`: it can rewrite lines, and NO_COLOR is not set.
bool CanShowColours(std::FILE* file);

}  // namespace moeserve::server
