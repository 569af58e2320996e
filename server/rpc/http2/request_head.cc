#include "server/rpc/http2/request_head.h"

#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>

#include "base/error_text.h"
#include "server/base/request_id.h"

namespace moeserve::server::rpc {
namespace {

using Code = grpc::StatusCode;

const uint8_t* Bytes(std::string_view text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

Refusal Malformed() { return {.reset = Http2Error::kProtocolError, .reason = {}, .message = {}}; }

Refusal Invalid(std::string message) {
  return {.reason = "invalid_header", .message = std::move(message)};
}

bool IsBinary(std::string_view name) { return name.ends_with("-bin"); }

// Returns whether the value of a binary field is sent as it is, which gRPC's C library does to
// servers that allow it. Such a value begins with a zero byte.
bool IsRaw(std::string_view value) { return value.starts_with('\0'); }

bool IsBase64(std::string_view text) {
  for (int i = 0; i < 2 && text.ends_with('='); ++i) text.remove_suffix(1);
  if (text.size() % 4 == 1) return false;
  int digit = 0;
  for (const char c : text) {
    if (c >= 'A' && c <= 'Z') {
      digit = c - 'A';
    } else if (c >= 'a' && c <= 'z') {
      digit = c - 'a' + 26;
    } else if (c >= '0' && c <= '9') {
      digit = c - '0' + 52;
    } else if (c == '+' || c == '/') {
      digit = c == '+' ? 62 : 63;
    } else {
      return false;
    }
  }
  // The bits of the last digit that belong to no byte are zero.
  const int unused = text.size() % 4 == 2 ? 15 : text.size() % 4 == 3 ? 3 : 0;
  return (digit & unused) == 0;
}

// Returns whether the field may be part of a message of HTTP/2 (RFC 9113, section 8.2).
bool IsWellFormed(std::string_view name, std::string_view value) {
  constexpr std::string_view kOfConnections[] = {"connection", "keep-alive", "proxy-connection",
                                                 "transfer-encoding", "upgrade"};
  if (nghttp2_check_header_name(Bytes(name), name.size()) == 0) return false;
  if (std::ranges::find(kOfConnections, name) != std::end(kOfConnections)) return false;
  if (name == "te" && value != "trailers") return false;
  if (IsBinary(name) && IsRaw(value)) return true;
  // gRPC lets metadata have spaces around the value.
  while (value.starts_with(' ') || value.starts_with('\t')) value.remove_prefix(1);
  while (value.ends_with(' ') || value.ends_with('\t')) value.remove_suffix(1);
  return nghttp2_check_header_value_rfc9113(Bytes(value), value.size()) != 0;
}

// Returns whether the value is one to eight digits and a unit.
bool IsTimeout(std::string_view value) {
  constexpr size_t kMaxDigits = 8;
  if (value.size() < 2 || value.size() > kMaxDigits + 1) return false;
  if (std::string_view("HMSmun").find(value.back()) == std::string_view::npos) return false;
  value.remove_suffix(1);
  return std::ranges::all_of(value, [](char c) { return c >= '0' && c <= '9'; });
}

bool IsGrpc(std::string_view content_type) {
  constexpr std::string_view kGrpc = "application/grpc";
  if (!content_type.starts_with(kGrpc)) return false;
  content_type.remove_prefix(kGrpc.size());
  content_type = content_type.substr(0, content_type.find(';'));
  return content_type.empty() || content_type == "+proto";
}

// The fields of a request that gRPC's protocol defines. Values refer to the fields.
struct Known {
  std::map<std::string_view, std::string_view> pseudo;
  std::map<std::string_view, std::string_view> other;
  std::string_view repeated;  // a field of `other` that occurs twice
};

// Collects the fields, or returns false if they are no request (RFC 9113, section 8.3).
bool Collect(const HeaderFields& fields, Known& known) {
  constexpr std::string_view kPseudo[] = {":method", ":scheme", ":path", ":authority"};
  constexpr std::string_view kOnce[] = {"content-type", "te", "host", "grpc-timeout",
                                        "grpc-encoding"};
  bool regular = false;
  for (const auto& [name, value] : fields) {
    if (!IsWellFormed(name, value)) return false;
    if (name.starts_with(':')) {
      if (regular || std::ranges::find(kPseudo, name) == std::end(kPseudo)) return false;
      if (!known.pseudo.emplace(name, value).second) return false;
      continue;
    }
    regular = true;
    if (name == "x-request-id") known.other.emplace(name, value);
    if (std::ranges::find(kOnce, name) == std::end(kOnce)) continue;
    if (!known.other.emplace(name, value).second) known.repeated = name;
  }
  return known.pseudo.contains(":method") && known.pseudo.contains(":scheme") &&
         known.pseudo.contains(":path") && known.pseudo[":path"].starts_with('/');
}

std::optional<Refusal> CheckKnown(const Known& known, RequestHead& head) {
  const auto other = [&](std::string_view name) -> std::optional<std::string_view> {
    const auto found = known.other.find(name);
    if (found == known.other.end()) return std::nullopt;
    return found->second;
  };
  Refusal refusal = Invalid("");
  if (const std::string_view method = known.pseudo.at(":method"); method != "POST") {
    refusal.http_status = 405;
    refusal.code = Code::UNIMPLEMENTED;
    refusal.message = Concat("expected the method POST, found ", Quoted(method));
    return refusal;
  }
  const std::string_view type = other("content-type").value_or("");
  if (!IsGrpc(type)) {
    refusal.http_status = 415;
    refusal.message = Concat("expected the content-type application/grpc, found ", Quoted(type));
    return refusal;
  }
  if (!known.repeated.empty()) return Invalid(Concat("more than one header ", known.repeated));
  if (!known.pseudo.contains(":authority") && !other("host")) {
    refusal.http_status = 400;
    refusal.message = "expected the header :authority or host, found neither";
    return refusal;
  }
  if (!other("te")) {
    return Invalid("expected the header \"te: trailers\"; a proxy may have removed it");
  }
  if (const std::string_view scheme = known.pseudo.at(":scheme");
      scheme != "http" && scheme != "https") {
    return Invalid(Concat("expected the scheme http or https, found ", Quoted(scheme)));
  }
  if (const auto timeout = other("grpc-timeout"); timeout && !IsTimeout(*timeout)) {
    return Invalid(
        Concat("expected a grpc-timeout of at most eight digits and one of H, M, S, m, "
               "u, n, found ",
               Quoted(*timeout)));
  }
  const std::string_view encoding = other("grpc-encoding").value_or("identity");
  head.compressed = encoding == "gzip" || encoding == "deflate";
  if (!head.compressed && encoding != "identity") {
    refusal.code = Code::UNIMPLEMENTED;
    refusal.reason = "unsupported_encoding";
    refusal.message =
        Concat("expected the grpc-encoding identity, deflate or gzip, found ", Quoted(encoding));
    return refusal;
  }
  return std::nullopt;
}

// Splits lists of binary values, and checks the values.
std::optional<Refusal> SplitBinary(HeaderFields& fields) {
  HeaderFields out;
  for (auto& [name, value] : fields) {
    if (!IsBinary(name) || IsRaw(value)) {
      out.emplace_back(std::move(name), std::move(value));
      continue;
    }
    std::string_view rest = value;
    while (true) {
      const size_t comma = rest.find(',');
      std::string_view part = rest.substr(0, comma);
      while (part.starts_with(' ')) part.remove_prefix(1);
      while (part.ends_with(' ')) part.remove_suffix(1);
      if (!IsBase64(part)) {
        return Invalid(Concat("the header ", Quoted(name), " is not base64"));
      }
      out.emplace_back(name, part);
      if (comma == std::string_view::npos) break;
      rest.remove_prefix(comma + 1);
    }
  }
  fields = std::move(out);
  return std::nullopt;
}

}  // namespace

std::optional<Refusal> CheckRequestHead(HeaderFields& fields, RequestHead& head) {
  Known known;
  if (!Collect(fields, known)) return Malformed();
  if (const auto id = known.other.find("x-request-id");
      id != known.other.end() && IsValidRequestId(id->second)) {
    head.request_id = id->second;
  }
  std::optional<Refusal> refusal = CheckKnown(known, head);
  if (!refusal) refusal = SplitBinary(fields);  // `known` refers to the fields before
  if (refusal) refusal->request_id = head.request_id;
  return refusal;
}

std::optional<Refusal> CheckTrailers(const HeaderFields& fields) {
  const bool valid = std::ranges::all_of(fields, [](const auto& field) {
    return !field.first.starts_with(':') && IsWellFormed(field.first, field.second);
  });
  if (valid) return std::nullopt;
  return Malformed();
}

}  // namespace moeserve::server::rpc
