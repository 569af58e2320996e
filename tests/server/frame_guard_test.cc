#include "server/rpc/frame_guard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "server/base/api_error.h"

namespace moeserve::server::rpc {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum : uint8_t { kData, kHeaders, kPriority, kReset, kSettings, kPush, kPing, kGoAway, kWindow };
constexpr uint8_t kContinuation = 9;
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload = "") {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame += static_cast<char>(payload.size() >> shift);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift);
  return frame + payload;
}

std::string Reset(uint32_t stream, char code = 8) {
  return Frame(kReset, 0, stream, {0, 0, 0, code});
}

std::string Open(uint32_t stream) { return Frame(kHeaders, kEndHeaders, stream, "head"); }

class FrameGuardTest : public ::testing::Test {
 protected:
  // Sends bytes of the client, in pieces of `piece` bytes.
  absl::Status Client(std::string_view bytes, size_t piece = 1 << 20) {
    while (!bytes.empty()) {
      std::string_view part = bytes.substr(0, piece);
      bytes.remove_prefix(part.size());
      if (absl::Status status = guard_.CheckClient(part, now_); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status Server(const std::string& bytes) { return guard_.CheckServer(bytes, now_); }
  void Begin() {
    ASSERT_TRUE(Server(Frame(kSettings, 0, 0)).ok());
    ASSERT_TRUE(
        Client(std::string(kPreface) + Frame(kSettings, 0, 0) + Frame(kSettings, 1, 0)).ok());
  }
  // Ends a stream as the server does.
  void End(uint32_t stream) {
    ASSERT_TRUE(Server(Frame(kHeaders, kEndHeaders | kEndStream, stream, "trailers")).ok());
  }

  FrameLimits limits_;
  const std::shared_ptr<MemoryBudget> memory_ = std::make_shared<MemoryBudget>(64 << 20);
  FrameGuard::Time now_ = FrameGuard::Time() + std::chrono::hours(1);
  FrameGuard guard_{limits_, memory_, now_};
};

bool Says(const absl::Status& status, std::string_view text) {
  return !status.ok() && status.message().find(std::string(text)) != std::string::npos;
}

TEST_F(FrameGuardTest, ReaderFindsFramesHoweverTheyAreCut) {
  const std::vector<std::string> frames = {Frame(kData, 1, 5, "payload"), Reset(7, 11),
                                           Frame(kPing, 0, 0, "12345678"), Frame(kReset, 0, 9, "x"),
                                           Frame(kSettings, 1, 0)};
  std::string all;
  for (const std::string& frame : frames) all += frame;
  for (size_t piece = 1; piece <= all.size(); ++piece) {
    FrameReader reader;
    std::vector<FrameHeader> found;
    for (size_t at = 0; at < all.size(); at += piece) {
      std::string_view bytes = std::string_view(all).substr(at, piece);
      for (FrameHeader frame; reader.Next(bytes, frame);) found.push_back(frame);
      EXPECT_TRUE(bytes.empty());
    }
    ASSERT_EQ(found.size(), frames.size()) << piece;
    EXPECT_TRUE(reader.between_frames());
    EXPECT_EQ(found[0].stream, 5u);
    EXPECT_EQ(found[0].length, 7u);
    EXPECT_EQ(found[1].error, 11u);
    EXPECT_EQ(found[2].type, kPing);
    EXPECT_EQ(found[3].error, 0u);
    EXPECT_EQ(found[4].flags, 1);
  }
}

TEST_F(FrameGuardTest, PrefaceAndSettingsComeFirst) {
  EXPECT_TRUE(Says(Client("GET / HTTP/1.1\r\n\r\n"), "does not speak HTTP/2"));
  FrameGuard early(limits_, memory_, now_);
  std::string bytes = std::string(kPreface) + Open(1);
  std::string_view view = bytes;
  EXPECT_TRUE(Says(early.CheckClient(view, now_), "first frame"));
}

TEST_F(FrameGuardTest, PrefaceMayArriveInPieces) {
  EXPECT_TRUE(Client(std::string(kPreface) + Frame(kSettings, 0, 0) + Open(1), 1).ok());
  EXPECT_EQ(guard_.open_streams(), 1u);
}

TEST_F(FrameGuardTest, LatePrefaceAndUnacknowledgedSettings) {
  now_ += limits_.preface_timeout;
  EXPECT_TRUE(guard_.CheckTime(now_).ok());
  now_ += std::chrono::milliseconds(1);
  EXPECT_TRUE(Says(guard_.CheckTime(now_), "preface"));

  FrameGuard silent(limits_, memory_, now_);
  std::string bytes = std::string(kPreface) + Frame(kSettings, 0, 0);
  std::string_view view = bytes;
  ASSERT_TRUE(silent.CheckClient(view, now_).ok());
  ASSERT_TRUE(silent.CheckServer(Frame(kSettings, 0, 0), now_).ok());
  EXPECT_TRUE(silent.CheckTime(now_ + limits_.settings_timeout).ok());
  EXPECT_TRUE(Says(silent.CheckTime(now_ + limits_.settings_timeout * 2), "acknowledge"));
  bytes = Frame(kSettings, 1, 0);
  view = bytes;
  ASSERT_TRUE(silent.CheckClient(view, now_).ok());
  EXPECT_TRUE(silent.CheckTime(now_ + limits_.settings_timeout * 2).ok());
}

TEST_F(FrameGuardTest, LimitsOpenStreamsEvenBeforeTheClientKnowsTheLimit) {
  ASSERT_TRUE(Client(std::string(kPreface) + Frame(kSettings, 0, 0)).ok());
  uint32_t stream = 1;
  for (size_t i = 0; i < limits_.max_streams; ++i, stream += 2) {
    ASSERT_TRUE(Client(Open(stream)).ok()) << i;
  }
  End(1);
  EXPECT_TRUE(Client(Open(stream)).ok());
  EXPECT_TRUE(Says(Client(Open(stream + 2)), "open streams"));
}

TEST_F(FrameGuardTest, CallsThatEndAreWithoutLimit) {
  Begin();
  for (uint32_t stream = 1; stream < 200000; stream += 2) {
    ASSERT_TRUE(Client(Open(stream) + Frame(kData, kEndStream, stream, "message")).ok());
    End(stream);
    // gRPC resets a stream whose client has not ended its side.
    ASSERT_TRUE(Server(stream % 3 == 0 ? Reset(stream, 0) : "").ok());
  }
  EXPECT_EQ(memory_->used(), 0u);
}

TEST_F(FrameGuardTest, RapidResetsEndTheConnection) {
  Begin();
  absl::Status status;
  int resets = 0;
  for (uint32_t stream = 1; status.ok() && resets < 100000; stream += 2, ++resets) {
    status = Client(Open(stream) + Reset(stream));
  }
  EXPECT_TRUE(Says(status, "reset"));
  EXPECT_LE(resets, limits_.reset_burst + 1);
  // They hold memory until gRPC has given it back.
  EXPECT_GT(guard_.held_bytes(), 0u);
}

TEST_F(FrameGuardTest, SomeCancelledCallsASecondAreAllowed) {
  Begin();
  for (uint32_t stream = 1; stream < 20000; stream += 2) {
    ASSERT_TRUE(Client(Open(stream) + Reset(stream)).ok()) << stream;
    now_ += std::chrono::milliseconds(25);
  }
  EXPECT_LE(guard_.held_bytes(), limits_.stream_bytes * 100);
  EXPECT_TRUE(guard_.CheckTime(now_ + limits_.reset_linger).ok());
  EXPECT_EQ(memory_->used(), 0u);
}

TEST_F(FrameGuardTest, ResetsThatTheClientMakesTheServerSendCount) {
  Begin();
  absl::Status status;
  int resets = 0;
  for (uint32_t stream = 1; status.ok() && resets < 100000; stream += 2, ++resets) {
    ASSERT_TRUE(Client(Open(stream) + Frame(kWindow, 0, stream, std::string(4, '\0'))).ok());
    status = Server(Reset(stream, 1));
  }
  EXPECT_TRUE(Says(status, "reset"));
}

TEST_F(FrameGuardTest, HeaderBlocksHaveLimits) {
  Begin();
  const std::string part = Frame(kContinuation, 0, 1, std::string(1000, 'x'));
  ASSERT_TRUE(Client(Frame(kHeaders, 0, 1, "head") + part).ok());
  absl::Status status;
  int parts = 0;
  while (status.ok() && parts < 1000) {
    status = Client(part);
    ++parts;
  }
  EXPECT_TRUE(Says(status, "too long"));
  EXPECT_LE(parts, 32);
}

TEST_F(FrameGuardTest, HeaderBlocksAreNotInterrupted) {
  Begin();
  ASSERT_TRUE(Client(Frame(kHeaders, 0, 1, "head")).ok());
  EXPECT_TRUE(Says(Client(Frame(kPing, 0, 0, "12345678")), "interrupted"));
}

TEST_F(FrameGuardTest, EmptyContinuationsCountToo) {
  Begin();
  ASSERT_TRUE(Client(Frame(kHeaders, 0, 1, "head")).ok());
  absl::Status status;
  for (int i = 0; i <= limits_.max_continuations && status.ok(); ++i) {
    status = Client(Frame(kContinuation, 0, 1));
  }
  EXPECT_TRUE(Says(status, "too long"));
}

TEST_F(FrameGuardTest, FramesWithoutContentHaveALimit) {
  for (const std::string& frame :
       {Frame(kPing, 0, 0, "12345678"), Frame(kSettings, 0, 0), Frame(kData, 0, 1),
        Frame(kWindow, 0, 0, std::string(4, '\1')), Frame(kPriority, 0, 3, std::string(5, '\0')),
        Frame(99, 0, 0, "unknown"), Reset(99), Frame(kData, 0, 77, "closed")}) {
    FrameGuard guard(limits_, memory_, now_);
    std::string bytes = std::string(kPreface) + Frame(kSettings, 0, 0) + Open(1);
    for (int i = 0; i < 2 * limits_.control_burst; ++i) bytes += frame;
    std::string_view view = bytes;
    EXPECT_TRUE(Says(guard.CheckClient(view, now_), "without content")) << int{frame[3]};
  }
}

TEST_F(FrameGuardTest, FramesThatAnswerTheServerAreAllowed) {
  Begin();
  ASSERT_TRUE(Client(Open(1)).ok());
  for (int i = 0; i < 4 * limits_.control_burst; ++i) {
    ASSERT_TRUE(Server(Frame(kData, 0, 1, "token")).ok());
    ASSERT_TRUE(Client(Frame(kWindow, 0, 0, "1234") + Frame(kWindow, 0, 1, "1234")).ok()) << i;
  }
}

TEST_F(FrameGuardTest, MemoryIsChargedAndTheRestIsCheckedAfterwards) {
  Begin();
  ASSERT_TRUE(memory_->TryTake((64 << 20) - 40000, ChargeFor::kRunningRequest));
  const std::string bytes =
      Open(1) + Frame(kData, 0, 1, std::string(20000, 'x')) + Open(3) + Reset(3);
  std::string_view rest = bytes;
  // 16,384 for the stream and 20,000 of its data fit, and another stream does not.
  EXPECT_EQ(ApiCode(guard_.CheckClient(rest, now_)), "out_of_memory");
  EXPECT_EQ(guard_.open_streams(), 1u);
  EXPECT_EQ(ApiCode(guard_.CheckClient(rest, now_)), "out_of_memory");
  memory_->Give(100000);
  EXPECT_TRUE(guard_.CheckClient(rest, now_).ok());
  EXPECT_TRUE(rest.empty());
  EXPECT_EQ(guard_.held_bytes(), 2 * limits_.stream_bytes + 20000);
  End(1);
  EXPECT_EQ(guard_.held_bytes(), limits_.stream_bytes);  // the stream that was reset
  guard_.Release();
  EXPECT_EQ(guard_.held_bytes(), 0u);
}

}  // namespace
}  // namespace moeserve::server::rpc
