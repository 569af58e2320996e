// The headers that name content codings.
#pragma once

#include <string_view>

namespace moeserve::server::http {

// The one coding that is accepted and produced, as the value of a header.
inline constexpr std::string_view kGzip = "gzip";

enum class ContentCoding { kIdentity, kGzip, kOther };

// Reads the header Content-Encoding; empty: identity.
ContentCoding ParseContentEncoding(std::string_view header);

// Returns whether a client with this header Accept-Encoding takes gzip, and prefers nothing else
// that it names. False without the header.
bool PrefersGzip(std::string_view accept_encoding);

// Returns whether bodies of this type get smaller by compression.
bool IsCompressible(std::string_view content_type);

}  // namespace moeserve::server::http
