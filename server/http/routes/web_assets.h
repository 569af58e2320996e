// The dashboard, built into the program: a page at "/" and its files under "/dashboard/".
#pragma once

#include <span>
#include <string_view>

#include "server/http/router.h"

namespace moeserve::server::http {

struct EmbeddedFile {
  std::string_view name;  // such as "index.html"
  std::string_view bytes;
};

// Returns the files of server/web. The views stay valid until the program exits.
std::span<const EmbeddedFile> EmbeddedFiles();

// Adds routes for the dashboard's files. The routes need no API key: the page itself asks the user
// for a key if the server requires one. Responses have an ETag and must be revalidated; their
// content security policy allows connections to this server only.
void AddWebAssets(Router& router);

}  // namespace moeserve::server::http
