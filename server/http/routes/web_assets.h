// The dashboard: a page at "/" and its files under "/dashboard/", built into the program.
#pragma once

#include <span>
#include <string_view>

#include "server/http/router.h"

namespace moeserve::server::http {

struct EmbeddedFile {
  std::string_view name;  // "index.html"
  std::string_view bytes;
};

// The files of server/web. The views are valid until the program exits.
std::span<const EmbeddedFile> EmbeddedFiles();

// Adds routes for the files, open without a key: the page itself asks for one if the server needs
// it. Answers have an ETag and must be revalidated; their content security policy allows this
// server only.
void AddWebAssets(Router& router);

}  // namespace moeserve::server::http
