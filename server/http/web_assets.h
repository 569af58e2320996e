// The dashboard: a page at "/" and what it is made of under "/dashboard/", built into the program.
#pragma once

#include <span>
#include <string_view>

#include "server/http/router.h"

namespace moeserve::server::http {

struct EmbeddedFile {
  std::string_view name;  // "index.html"
  std::string_view bytes;
};

// The files of server/web, for as long as the program runs.
std::span<const EmbeddedFile> EmbeddedFiles();

// Serves them, open to everybody: they hold nothing but the page, which asks for a key where one is
// needed. Answers carry an ETag and are to be revalidated; a page may load and call nothing but
// this server.
void AddWebAssets(Router& router);

}  // namespace moeserve::server::http
