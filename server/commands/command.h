// How a subcommand presents itself to main().
#pragma once

#include <functional>

namespace moeserve::server {

// What to run once the command line has been read; gives the exit status. Each Add...Command
// function registers a subcommand whose callback sets it.
using Command = std::function<int()>;

}  // namespace moeserve::server
