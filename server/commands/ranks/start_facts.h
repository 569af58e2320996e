// What the ranks of a model compare before they compute anything.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"

namespace moeserve::server {

// What must be equal on all ranks: names, such as "version", and values, in an order that all ranks
// have in common.
using StartFacts = std::vector<std::pair<std::string, std::string>>;

// What a rank tells the leader: an error that it has met, or its facts.
struct StartReport {
  absl::Status status;
  std::string host;
  StartFacts facts;
};

// Returns a report as bytes, and the report of these bytes. InvalidArgument if they are no report.
std::string Serialize(const StartReport& report);
Result<StartReport> ParseStartReport(std::string_view bytes);

// The name of the fact whose value is an instruction set of --cpu-isa.
inline constexpr std::string_view kInstructionSetFact = "instruction set";

// Compares the reports of ranks 0, 1, .... Returns the first error of a rank, with its number and
// host; or FailedPrecondition, with rank, host, field and both values, for the first difference
// from rank 0. Of different instruction sets, it also names one that all ranks have.
absl::Status CompareReports(std::span<const StartReport> reports);

}  // namespace moeserve::server
