// The queue of output between the engine and the writer of an answer.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "server/base/api_error.h"
#include "server/generation/generation.h"

namespace moeserve::server {
namespace {

ChoiceEvent Text(std::string text, bool finished = false) {
  ChoiceEvent event;
  event.delta.text = std::move(text);
  event.delta.finished = finished;
  return event;
}

TEST(EventChannelTest, WakesOnceForEventsThatWait) {
  int wakes = 0;
  EventChannel channel(1 << 20, nullptr, [&] { ++wakes; });
  channel.Push(Text("a"));
  channel.Push(Text("b"));
  EXPECT_EQ(wakes, 1);
  EXPECT_EQ(channel.Take().size(), 2);
  channel.Push(Text("c"));
  EXPECT_EQ(wakes, 2);
}

// An answer without a part of its text would be wrong, so what follows a lost event is not taken.
TEST(EventChannelTest, ALostEventEndsTheQueue) {
  int wakes = 0;
  EventChannel channel(1 << 20, nullptr, [&] { ++wakes; });
  channel.Push(Text("a"));
  channel.LoseEvent();
  EXPECT_EQ(wakes, 2) << "although an event waits";
  channel.Push(Text("c", true));
  EXPECT_TRUE(channel.overflowed());
  EXPECT_EQ(ApiCode(channel.overflow()), "out_of_memory");
  const std::vector<ChoiceEvent> events = channel.Take();
  ASSERT_EQ(events.size(), 1);
  EXPECT_EQ(events[0].delta.text, "a");
}

TEST(EventChannelTest, TheFirstErrorStays) {
  EventChannel channel(1 << 20, nullptr, [] {});
  channel.End(absl::UnavailableError("gone"));
  channel.LoseEvent();
  EXPECT_EQ(channel.overflow().message(), "gone");
}

}  // namespace
}  // namespace moeserve::server
