// What ranks send to each other: announcements of steps, reports at the start, and what processes
// tell when they meet. The first byte selects which one follows.

#include "engine/ranks/step_message.h"
#include "kernels/exchange/tcp/meeting_messages.h"
#include "server/commands/ranks/start_facts.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve {
namespace {

// Messages of a meeting come from anybody; a proof is checked only after they were parsed.
void ReadMeetingMessages(std::string_view input) {
  const std::string nonce(kNonceBytes, 'n');
  const auto hello = ParseHello(input);
  if (hello.ok()) {
    testing::CountAccepted();
    MOESERVE_CHECK(!HelloIsProven(input, "key", nonce), "nobody guesses a proof");
    const auto again = ParseHello(SerializeHello(*hello, "key", nonce));
    MOESERVE_CHECK(again.ok() && again->host == hello->host && again->rank == hello->rank,
                   "a greeting that is written can be read");
  }
  const auto size = AnswerBytes(input);
  MOESERVE_CHECK(!size.ok() || *size <= kMostAnswerText + kAnswerHeaderBytes + kProofBytes,
                 "answers are bounded");
  const auto answer = ParseAnswer(input, "key", nonce);
  MOESERVE_CHECK(!answer.ok() || answer->other_key, "nobody guesses a proof");
  static_cast<void>(ParseChallenge(input));
  for (const size_t count : {size_t{0}, size_t{1}, size_t{3}}) {
    const auto addresses = ParseAddresses(input, count);
    if (!addresses.ok()) continue;
    testing::CountAccepted();
    MOESERVE_CHECK(addresses->size() == count, "an address for each rank");
  }
}

}  // namespace
}  // namespace moeserve

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  if (size == 0) return 0;
  const std::string_view input = testing::Text(data + 1, size - 1);
  if (data[0] == 2) {
    ReadMeetingMessages(input);
    return 0;
  }
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
