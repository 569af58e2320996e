#include "server/tracing/trace_context.h"

#include <algorithm>
#include <cstdint>
#include <random>

#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

constexpr size_t kHeaderSize = 55;  // of version 00

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

bool IsKeyChar(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '*' ||
         c == '/';
}

// Returns whether `key` is a key of `tracestate`: NAME, or TENANT@SYSTEM.
bool IsStateKey(std::string_view key) {
  constexpr size_t kMaxBytes = 256;
  const size_t at = key.find('@');
  if (key.empty() || key.size() > kMaxBytes) return false;
  if (!IsKeyChar(key.front()) || at + 1 == key.size()) return false;
  for (size_t i = 0; i < key.size(); ++i) {
    if (!IsKeyChar(key[i]) && i != at) return false;
  }
  return true;
}

bool IsStateValue(std::string_view value) {
  constexpr size_t kMaxBytes = 256;
  if (value.empty() || value.size() > kMaxBytes || value.back() == ' ') return false;
  return std::all_of(value.begin(), value.end(),
                     [](char c) { return c >= ' ' && c <= '~' && c != '='; });
}

int Digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

// Decides by the trace's id, so that all servers with the same ratio decide alike.
bool IsSampled(std::string_view trace_id, double ratio) {
  constexpr int kDigits = 13;  // 52 bits, which a double holds exactly
  double value = 0.0;
  for (const char c : trace_id.substr(trace_id.size() - kDigits)) value = 16.0 * value + Digit(c);
  return value < ratio * static_cast<double>(uint64_t{1} << (4 * kDigits));
}

}  // namespace

std::optional<TraceParent> ParseTraceParent(std::string_view header) {
  if (header.size() < kHeaderSize) return std::nullopt;
  const std::string_view version = header.substr(0, 2);
  const std::string_view trace_id = header.substr(3, 32);
  const std::string_view parent_id = header.substr(36, 16);
  const std::string_view flags = header.substr(53, 2);
  if (header[2] != '-' || header[35] != '-' || header[52] != '-') return std::nullopt;
  if (!IsHex(version) || !IsHex(trace_id) || !IsHex(parent_id) || !IsHex(flags)) {
    return std::nullopt;
  }
  if (version == "ff" || IsZero(trace_id) || IsZero(parent_id)) return std::nullopt;
  if (header.size() > kHeaderSize && (version == "00" || header[kHeaderSize] != '-')) {
    return std::nullopt;
  }
  return TraceParent{.trace_id = std::string(trace_id),
                     .parent_id = std::string(parent_id),
                     .sampled = (Digit(flags[1]) & 1) != 0};
}

std::optional<std::string> ParseTraceState(std::string_view header) {
  constexpr size_t kMaxBytes = 512;
  constexpr int kMaxMembers = 32;
  std::string out;
  int members = 0;
  while (!header.empty()) {
    const size_t comma = header.find(',');
    const std::string_view member = Trimmed(header.substr(0, comma));
    header.remove_prefix(comma == std::string_view::npos ? header.size() : comma + 1);
    if (member.empty()) continue;
    const size_t equals = member.find('=');
    if (equals == std::string_view::npos || !IsStateKey(member.substr(0, equals)) ||
        !IsStateValue(member.substr(equals + 1)) || ++members > kMaxMembers) {
      return std::nullopt;
    }
    if (!out.empty()) out += ',';
    out += member;
    if (out.size() > kMaxBytes) return std::nullopt;
  }
  return out;
}

std::string TraceParentHeader(const TraceContext& trace) {
  return "00-" + trace.trace_id + '-' + trace.span_id + (trace.sampled ? "-01" : "-00");
}

TraceContext StartSpan(const std::optional<TraceParent>& parent, double ratio) {
  TraceContext out;
  out.span_id = RandomHex(16);
  if (parent) {
    out.trace_id = parent->trace_id;
    out.parent_id = parent->parent_id;
    out.sampled = parent->sampled;
  } else {
    out.trace_id = RandomHex(32);
    out.sampled = IsSampled(out.trace_id, ratio);
  }
  return out;
}

std::string RandomHex(int digits) {
  thread_local std::mt19937_64 generator = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  do {
    out.clear();
    uint64_t bits = 0;
    for (int i = 0; i < digits; ++i) {
      if (i % 16 == 0) bits = generator();
      out.push_back(kDigits[bits & 15]);
      bits >>= 4;
    }
  } while (IsZero(out));
  return out;
}

}  // namespace moeserve::server
