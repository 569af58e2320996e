#include "server/commands/ranks/start_facts.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

constexpr uint32_t kMostFacts = 1000;

// The instruction sets of each family of processors. Each contains those that follow it.
constexpr std::string_view kX86[] = {"amx_bf16", "avx512_bf16", "avx512_vnni",
                                     "avx512",   "avx2",        "plain"};
constexpr std::string_view kArm[] = {"neon_bf16", "neon_i8mm", "neon_dot", "neon", "plain"};

void AppendNumber(std::string& bytes, uint32_t value) {
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i) & 255);
}

void AppendText(std::string& bytes, std::string_view text) {
  AppendNumber(bytes, static_cast<uint32_t>(text.size()));
  bytes += text;
}

std::optional<uint32_t> TakeNumber(std::string_view& bytes) {
  if (bytes.size() < 4) return std::nullopt;
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  bytes.remove_prefix(4);
  return value;
}

std::optional<std::string> TakeText(std::string_view& bytes) {
  const std::optional<uint32_t> size = TakeNumber(bytes);
  if (!size.has_value() || *size > bytes.size()) return std::nullopt;
  std::string text(bytes.substr(0, *size));
  bytes.remove_prefix(*size);
  return text;
}

// Returns the best set that all ranks have; empty if a name is unknown.
std::string CommonInstructionSet(std::span<const StartReport> reports) {
  const auto common = [&](std::span<const std::string_view> family) {
    size_t worst = 0;
    for (const StartReport& report : reports) {
      for (const auto& [name, value] : report.facts) {
        if (name != kInstructionSetFact) continue;
        const auto found = std::find(family.begin(), family.end(), value);
        worst = std::max(worst, static_cast<size_t>(found - family.begin()));
      }
    }
    return worst < family.size() ? std::string(family[worst]) : std::string();
  };
  const std::string x86 = common(kX86);
  return x86.empty() ? common(kArm) : x86;
}

std::string RankOn(size_t rank, const StartReport& report) {
  return Concat("rank ", rank, " on ", Printable(report.host));
}

}  // namespace

std::string Serialize(const StartReport& report) {
  std::string bytes;
  AppendNumber(bytes, static_cast<uint32_t>(report.status.raw_code()));
  const std::string message(report.status.message());
  AppendText(bytes, message);
  AppendText(bytes, report.host);
  AppendNumber(bytes, static_cast<uint32_t>(report.facts.size()));
  for (const auto& [name, value] : report.facts) {
    AppendText(bytes, name);
    AppendText(bytes, value);
  }
  return bytes;
}

Result<StartReport> ParseStartReport(std::string_view bytes) {
  const auto broken = [] {
    return absl::InvalidArgumentError("a rank has sent something else than its report");
  };
  StartReport report;
  const std::optional<uint32_t> code = TakeNumber(bytes);
  const std::optional<std::string> message = TakeText(bytes);
  std::optional<std::string> host = TakeText(bytes);
  const std::optional<uint32_t> count = TakeNumber(bytes);
  if (!code || !message || !host || !count || *count > kMostFacts) return broken();
  if (*code != 0) report.status = absl::Status(static_cast<absl::StatusCode>(*code), *message);
  report.host = *std::move(host);
  for (uint32_t i = 0; i < *count; ++i) {
    std::optional<std::string> name = TakeText(bytes);
    std::optional<std::string> value = TakeText(bytes);
    if (!name || !value) return broken();
    report.facts.emplace_back(*std::move(name), *std::move(value));
  }
  if (!bytes.empty()) return broken();
  return report;
}

absl::Status CompareReports(std::span<const StartReport> reports) {
  for (size_t r = 0; r < reports.size(); ++r) {
    if (!reports[r].status.ok()) {
      return Prefixed(RankOn(r, reports[r]) + ": ", reports[r].status);
    }
  }
  const StartFacts& expected = reports.front().facts;
  for (size_t r = 1; r < reports.size(); ++r) {
    const StartFacts& found = reports[r].facts;
    for (size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
      const auto name = [i](const StartFacts& facts) {
        return i < facts.size() ? facts[i].first : std::string("nothing");
      };
      const std::string who = RankOn(r, reports[r]);
      if (name(expected) != name(found)) {
        return absl::FailedPreconditionError(
            Concat(who, ": expected the field ", name(expected), " as rank 0 on ",
                   Printable(reports.front().host), ", found ", name(found)));
      }
      if (expected[i].second == found[i].second) continue;
      std::string message =
          Concat(who, ": ", expected[i].first, ": expected ", Printable(expected[i].second, 300),
                 " as rank 0 on ", Printable(reports.front().host), ", found ",
                 Printable(found[i].second, 300));
      if (expected[i].first == kInstructionSetFact) {
        const std::string common = CommonInstructionSet(reports);
        if (!common.empty()) message += Concat("; all have --cpu-isa ", common);
      }
      return absl::FailedPreconditionError(message);
    }
  }
  return absl::OkStatus();
}

}  // namespace moeserve::server
