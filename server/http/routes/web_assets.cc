#include "server/http/routes/web_assets.h"

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "server/http/error_response.h"

namespace moeserve::server::http {
namespace {

constexpr std::string_view kFolder = "/dashboard/";

struct Asset {
  std::string_view bytes;
  std::string_view content_type;
  std::string etag;
};

std::string_view ContentType(std::string_view name) {
  if (name.ends_with(".html")) return "text/html; charset=utf-8";
  if (name.ends_with(".css")) return "text/css; charset=utf-8";
  if (name.ends_with(".js")) return "text/javascript; charset=utf-8";
  if (name.ends_with(".svg")) return "image/svg+xml";
  return "application/octet-stream";
}

// Returns the FNV-1a hash as an ETag. It only distinguishes versions of a file, which needs no
// collision resistance.
std::string MakeEtag(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char text[24];
  std::snprintf(text, sizeof(text), "\"%016llx\"", static_cast<unsigned long long>(hash));
  return text;
}

// Returns whether an If-None-Match value contains the ETag. The server's ETags contain no comma.
bool HoldsEtag(std::string_view list, std::string_view etag) {
  while (!list.empty()) {
    const size_t comma = list.find(',');
    std::string_view one = list.substr(0, comma);
    list.remove_prefix(comma == std::string_view::npos ? list.size() : comma + 1);
    while (!one.empty() && (one.front() == ' ' || one.front() == '\t')) one.remove_prefix(1);
    while (!one.empty() && (one.back() == ' ' || one.back() == '\t')) one.remove_suffix(1);
    if (one.starts_with("W/")) one.remove_prefix(2);
    if (one == etag || one == "*") return true;
  }
  return false;
}

Response Serve(const Asset& asset, const Request& request) {
  Response response;
  response.content_type = std::string(asset.content_type);
  response.headers = {
      {"ETag", asset.etag},
      {"Cache-Control", "no-cache"},
      {"X-Content-Type-Options", "nosniff"},
      {"Referrer-Policy", "no-referrer"},
      {"Content-Security-Policy",
       "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
       "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
  };
  if (HoldsEtag(request.if_none_match, asset.etag)) {
    response.status = 304;
  } else {
    response.body = std::string(asset.bytes);
  }
  return response;
}

}  // namespace

void AddWebAssets(Router& router) {
  auto assets = std::make_shared<std::map<std::string_view, Asset>>();
  for (const EmbeddedFile& file : EmbeddedFiles()) {
    assets->emplace(file.name, Asset{file.bytes, ContentType(file.name), MakeEtag(file.bytes)});
  }
  MOESERVE_CHECK(assets->contains("index.html"), "the page was not built in");
  router.Add("GET", "/", Access::Open(), Work::kQuick, [assets](const Request& request) -> Handled {
    return Serve(assets->at("index.html"), request);
  });
  router.Add("GET", "/dashboard/*", Access::Open(), Work::kQuick,
             [assets](const Request& request) -> Handled {
               const auto it = assets->find(std::string_view(request.path).substr(kFolder.size()));
               // The page's relative addresses are right at "/" alone.
               if (it == assets->end() || it->first == "index.html") {
                 return ProtocolError(404, "", Concat("there is no ", Printable(request.path, 64)));
               }
               return Serve(it->second, request);
             });
}

}  // namespace moeserve::server::http
