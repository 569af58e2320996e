#include "server/answers/answer_writer.h"

#include <utility>

#include "base/error_text.h"
#include "server/fields/routing_fields.h"

namespace moeserve::server {

// An event without a following [DONE] reports the error.
void AnswerWriter::AppendError(const HttpError& error, std::string& out) {
  out += Concat("data: ", ErrorBody(error), "\n\n");
}

std::string AnswerWriter::ErrorBody(const HttpError& error) const { return ErrorJson(error); }

void ChunkWriter::AppendEvents(int index, const Usage& sums, std::string& out) {
  const RoutingControl* const control = options_.routing.control.get();
  for (OrderedJson& chunk : TakeChunks(index)) {
    const bool first = !std::exchange(echoed_, true);
    if (first && control != nullptr) {
      chunk["routing_control"] = RoutingControlJson(control->change());
    }
    const bool report_timeout = timed_out() && !std::exchange(reported_timeout_, true);
    PutWarnings(first ? options_.warnings : std::vector<std::string>(), report_timeout, chunk);
    if (options_.include_usage) {
      chunk["usage"] = options_.continuous_usage ? UsageJson(sums) : OrderedJson(nullptr);
    }
    out += SseEvent(chunk);
  }
}

void ChunkWriter::AppendEnd(const Usage& sums, std::string& out) {
  if (options_.include_usage) {
    OrderedJson chunk = EmptyChunk();
    chunk["usage"] = UsageJson(sums);
    out += SseEvent(chunk);
  }
  out += kSseDone;
}

OrderedJson ChunkWriter::TakeAnswer(const Usage& sums) {
  OrderedJson answer = TakeWhole();
  if (const auto& control = options_.routing.control) {
    answer["routing_control"] = RoutingControlJson(control->change());
  }
  PutWarnings(options_.warnings, timed_out(), answer);
  answer["usage"] = UsageJson(sums);
  return answer;
}

}  // namespace moeserve::server
