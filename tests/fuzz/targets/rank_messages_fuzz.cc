// What ranks send to each other: announcements of steps and reports at the start. The first byte
// selects which one follows.

#include "engine/ranks/step_message.h"
#include "server/commands/ranks/start_facts.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  if (size == 0) return 0;
  const std::string_view input = testing::Text(data + 1, size - 1);
  if (data[0] % 2 == 1) {
    const auto report = server::ParseStartReport(input);
    if (!report.ok()) return 0;
    testing::CountAccepted();
    MOESERVE_CHECK(server::Serialize(*report) == input || !report->status.ok(),
                   "a report is written as it was read");
    const server::StartReport reports[] = {*report, *report};
    MOESERVE_CHECK(server::CompareReports(reports) == absl::OkStatus() || !report->status.ok(),
                   "a report agrees with itself");
    return 0;
  }
  const StepLimits limits{.tokens = 64, .sequences = 8, .pages = 32, .changes = 8};
  const auto message = ParseStepMessage(internal::WithHeader(input), limits);
  if (!message.ok()) return 0;
  testing::CountAccepted();
  const std::string bytes = Serialize(*message);
  const auto again = ParseStepMessage(bytes, limits);
  MOESERVE_CHECK(again.ok(), "a message that is written can be read");
  MOESERVE_CHECK(Serialize(*again) == bytes, "what is read is written as the same bytes");
  // Changes of page tables that fit once lead to tables within the limits.
  PageTables tables(message->tables);
  const std::vector<int64_t> num_pages(static_cast<size_t>(message->tables), 100);
  for (int step = 0; step < 2; ++step) {
    const auto next = tables.Apply(message->page_tables, num_pages);
    if (!next.ok()) break;
    for (const std::vector<int32_t>& table : **next) {
      MOESERVE_CHECK(std::ssize(table) <= limits.pages, "tables have at most the allowed length");
      for (const int32_t page : table) MOESERVE_CHECK(page < 100, "pages exist");
    }
  }
  return 0;
}
