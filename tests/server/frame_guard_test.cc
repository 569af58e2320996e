#include "server/rpc/http2/frame_guard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/api_error.h"
#include "tests/server/http2_frames.h"

namespace moeserve::server::rpc {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr uint8_t kResetStream = kRstStream;
constexpr uint8_t kWindow = kWindowUpdate;

std::string Reset(uint32_t stream, char code = 8) {
  return Frame(kResetStream, 0, stream, std::string{0, 0, 0, code});
}

std::string Open(uint32_t stream, const Fields& more = {}) {
  return Frame(kHeaders, kEndHeaders, stream, Block(kCall) + Block(more));
}

// Returns a message of gRPC.
std::string MessageFrame(const std::string& text, char flag = 0) {
  return std::string{flag, 0, 0, static_cast<char>(text.size() >> 8),
                     static_cast<char>(text.size())} +
         text;
}

// What gRPC has got of a stream.
struct Data {
  std::string before;  // before RST_STREAM
  std::string after;
  bool reset = false;
  bool ended = false;
};

Data DataOf(const std::vector<FoundFrame>& frames) {
  Data data;
  for (const FoundFrame& frame : frames) {
    EXPECT_FALSE(frame.header.Has(kPadded));
    data.reset |= frame.header.type == kResetStream;
    if (frame.header.type != kData) continue;
    data.ended |= frame.header.Has(kEndStream);
    (data.reset ? data.after : data.before) += frame.payload;
  }
  return data;
}

class FrameGuardTest : public ::testing::Test {
 protected:
  // Sends bytes of the client, in pieces of `piece` bytes.
  absl::Status Client(std::string_view bytes, size_t piece = 1 << 20) {
    while (!bytes.empty()) {
      std::string_view part = bytes.substr(0, piece);
      bytes.remove_prefix(part.size());
      if (absl::Status status = guard_->CheckClient(part, now_, sent_); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  // Returns the frames that gRPC has got since the last call.
  std::vector<FoundFrame> Sent() { return Frames(std::exchange(sent_, {})); }
  // Returns the frames with which the guard has answered the client since the last call.
  std::vector<FoundFrame> Answers() { return Frames(guard_->TakeForClient()); }
  // Returns the fields with which the guard has answered a call.
  HeaderFields Answer() {
    const std::vector<FoundFrame> frames = Answers();
    if (frames.empty() || frames[0].header.type != kHeaders) return {};
    EXPECT_TRUE(frames[0].header.Has(kEndStream) && frames[0].header.Has(kEndHeaders));
    return Decoded(frames[0].payload);
  }
  absl::Status Server(const std::string& bytes) { return guard_->CheckServer(bytes, now_, shown_); }
  void Begin() {
    ASSERT_TRUE(Server(Frame(kSettings, 0, 0)).ok());
    ASSERT_TRUE(
        Client(std::string(kPreface) + Frame(kSettings, 0, 0) + Frame(kSettings, 1, 0)).ok());
    sent_.clear();
  }
  // Ends a stream as the server does.
  void End(uint32_t stream) {
    ASSERT_TRUE(Server(Frame(kHeaders, kEndHeaders | kEndStream, stream, "trailers")).ok());
  }

  FrameLimits limits_;
  const std::shared_ptr<MemoryBudget> memory_ = std::make_shared<MemoryBudget>(64 << 20);
  FrameGuard::Time now_ = FrameGuard::Time() + std::chrono::hours(1);
  std::unique_ptr<FrameGuard> guard_ = std::make_unique<FrameGuard>(limits_, memory_, now_);
  std::string sent_;   // to gRPC
  std::string shown_;  // of gRPC's frames to the client
};

bool Says(const absl::Status& status, std::string_view text) {
  return !status.ok() && status.message().find(std::string(text)) != std::string::npos;
}

TEST_F(FrameGuardTest, ReaderFindsFramesHoweverTheyAreCut) {
  const std::vector<std::string> frames = {Frame(kData, 1, 5, "payload"), Reset(7, 11),
                                           Frame(kPing, 0, 0, "12345678"),
                                           Frame(kResetStream, 0, 9, "x"), Frame(kSettings, 1, 0)};
  std::string all;
  for (const std::string& frame : frames) all += frame;
  for (size_t piece = 1; piece <= all.size(); ++piece) {
    FrameReader reader;
    std::vector<std::string> found;
    for (size_t at = 0; at < all.size(); at += piece) {
      std::string_view bytes = std::string_view(all).substr(at, piece);
      std::string_view payload;
      while (true) {
        const FrameReader::Event event = reader.Next(bytes, payload);
        if (event == FrameReader::Event::kNone) break;
        const FrameHeader& frame = reader.frame();
        if (event == FrameReader::Event::kBegin) found.emplace_back();
        if (event == FrameReader::Event::kPayload) found.back() += payload;
        if (event != FrameReader::Event::kEnd) continue;
        EXPECT_EQ(found.back().size(), frame.length);
        found.back() = rpc::Frame(frame.type, frame.flags, frame.stream, found.back());
      }
      EXPECT_TRUE(bytes.empty());
    }
    EXPECT_EQ(found, frames) << piece;
    EXPECT_TRUE(reader.between_frames());
  }
}

TEST_F(FrameGuardTest, PrefaceAndSettingsComeFirst) {
  EXPECT_TRUE(Says(Client("GET / HTTP/1.1\r\n\r\n"), "does not speak HTTP/2"));
  FrameGuard early(limits_, memory_, now_);
  std::string bytes = std::string(kPreface) + Open(1);
  std::string_view view = bytes;
  EXPECT_TRUE(Says(early.CheckClient(view, now_, sent_), "first frame"));
}

TEST_F(FrameGuardTest, PrefaceMayArriveInPieces) {
  EXPECT_TRUE(Client(std::string(kPreface) + Frame(kSettings, 0, 0) + Open(1), 1).ok());
  EXPECT_EQ(guard_->open_streams(), 1u);
}

TEST_F(FrameGuardTest, LatePrefaceAndUnacknowledgedSettings) {
  now_ += limits_.preface_timeout;
  EXPECT_TRUE(guard_->CheckTime(now_).ok());
  now_ += std::chrono::milliseconds(1);
  EXPECT_TRUE(Says(guard_->CheckTime(now_), "preface"));

  FrameGuard silent(limits_, memory_, now_);
  std::string bytes = std::string(kPreface) + Frame(kSettings, 0, 0);
  std::string_view view = bytes;
  ASSERT_TRUE(silent.CheckClient(view, now_, sent_).ok());
  ASSERT_TRUE(silent.CheckServer(Frame(kSettings, 0, 0), now_, shown_).ok());
  EXPECT_TRUE(silent.CheckTime(now_ + limits_.settings_timeout).ok());
  EXPECT_TRUE(Says(silent.CheckTime(now_ + limits_.settings_timeout * 2), "acknowledge"));
  bytes = Frame(kSettings, 1, 0);
  view = bytes;
  ASSERT_TRUE(silent.CheckClient(view, now_, sent_).ok());
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
    ASSERT_TRUE(Client(Open(stream) + Frame(kData, kEndStream, stream, MessageFrame("x"))).ok());
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
  EXPECT_GT(guard_->held_bytes(), 0u);
}

TEST_F(FrameGuardTest, SomeCancelledCallsASecondAreAllowed) {
  Begin();
  for (uint32_t stream = 1; stream < 20000; stream += 2) {
    ASSERT_TRUE(Client(Open(stream) + Reset(stream)).ok()) << stream;
    now_ += std::chrono::milliseconds(25);
  }
  EXPECT_LE(guard_->held_bytes(), limits_.stream_bytes * 100);
  EXPECT_TRUE(guard_->CheckTime(now_ + limits_.reset_linger).ok());
  EXPECT_EQ(memory_->used(), 0u);
}

TEST_F(FrameGuardTest, ResetsThatTheClientMakesTheServerSendCount) {
  Begin();
  absl::Status status;
  int resets = 0;
  for (uint32_t stream = 1; status.ok() && resets < 100000; stream += 2, ++resets) {
    ASSERT_TRUE(Client(Open(stream) + Frame(kWindow, 0, stream, "\1\1\1\1")).ok());
    status = Server(Reset(stream, 1));
  }
  EXPECT_TRUE(Says(status, "reset"));
}

TEST_F(FrameGuardTest, HeaderBlocksHaveLimits) {
  Begin();
  const std::string part = Frame(kContinuation, 0, 1, Block({{"x", std::string(1000, 'x')}}));
  ASSERT_TRUE(Client(Frame(kHeaders, 0, 1, Block(kCall)) + part).ok());
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
  ASSERT_TRUE(Client(Frame(kHeaders, 0, 1, Block(kCall))).ok());
  EXPECT_TRUE(Says(Client(Frame(kPing, 0, 0, "12345678")), "interrupted"));
}

TEST_F(FrameGuardTest, EmptyContinuationsCountToo) {
  Begin();
  ASSERT_TRUE(Client(Frame(kHeaders, 0, 1, Block(kCall))).ok());
  absl::Status status;
  for (int i = 0; i <= limits_.max_continuations && status.ok(); ++i) {
    status = Client(Frame(kContinuation, 0, 1));
  }
  EXPECT_TRUE(Says(status, "too long"));
}

TEST_F(FrameGuardTest, FramesWithoutContentHaveALimit) {
  for (const std::string& frame :
       {Frame(kPing, 0, 0, "12345678"), Frame(kSettings, 0, 0), Frame(kData, 0, 3),
        Frame(kWindow, 0, 0, std::string("\0\0\0\1", 4)),
        Frame(kPriority, 0, 3, std::string(5, '\0')), Frame(99, 0, 0, "unknown"), Reset(1),
        Frame(kData, 0, 1, "closed"), Open(1)}) {
    FrameGuard guard(limits_, memory_, now_);
    std::string bytes =
        std::string(kPreface) + Frame(kSettings, 0, 0) + Open(1) + Reset(1) + Open(3);
    for (int i = 0; i < 2 * limits_.control_burst; ++i) bytes += frame;
    std::string_view view = bytes;
    EXPECT_TRUE(Says(guard.CheckClient(view, now_, sent_), "without content")) << int{frame[3]};
  }
}

TEST_F(FrameGuardTest, FramesThatAnswerTheServerAreAllowed) {
  Begin();
  ASSERT_TRUE(Client(Open(1)).ok());
  for (int i = 0; i < 4 * limits_.control_burst; ++i) {
    ASSERT_TRUE(Server(Frame(kData, 0, 1, "token")).ok());
    const std::string size("\0\0\0\5", 4);
    ASSERT_TRUE(Client(Frame(kWindow, 0, 0, size) + Frame(kWindow, 0, 1, size)).ok()) << i;
  }
}

TEST_F(FrameGuardTest, MemoryIsChargedAndTheRestIsCheckedAfterwards) {
  Begin();
  ASSERT_TRUE(memory_->TryTake((32 << 20) - 40000, ChargeFor::kRunningRequest));
  const std::string bytes =
      Open(1) + Frame(kData, 0, 1, MessageFrame(std::string(19995, 'x'))) + Open(3) + Reset(3);
  std::string_view rest = bytes;
  // 16,384 for the stream and 20,000 of its data fit, and another stream does not.
  EXPECT_EQ(ApiCode(guard_->CheckClient(rest, now_, sent_)), "out_of_memory");
  EXPECT_EQ(guard_->open_streams(), 1u);
  EXPECT_EQ(ApiCode(guard_->CheckClient(rest, now_, sent_)), "out_of_memory");
  memory_->Give(100000);
  EXPECT_TRUE(guard_->CheckClient(rest, now_, sent_).ok());
  EXPECT_TRUE(rest.empty());
  EXPECT_EQ(guard_->held_bytes(), 2 * limits_.stream_bytes + 20000);
  End(1);
  EXPECT_EQ(guard_->held_bytes(), limits_.stream_bytes);  // the stream that was reset
  guard_->Release();
  EXPECT_EQ(guard_->held_bytes(), 0u);
}

// A stream may have messages without end: those before the last one have been taken.
TEST_F(FrameGuardTest, EarlierMessagesOfAStreamAreNotCharged) {
  Begin();
  ASSERT_TRUE(Client(Open(1)).ok());
  const std::string message = MessageFrame(std::string(16000, 'x'));
  const size_t most = limits_.stream_bytes + limits_.window_bytes + message.size();
  size_t held = 0;
  for (int i = 0; i < 10000; ++i) {  // 160 MB
    ASSERT_TRUE(Client(Frame(kData, 0, 1, message)).ok()) << i;
    held = std::max(held, guard_->held_bytes());
    sent_.clear();
  }
  EXPECT_LE(held, most);
  EXPECT_GT(held, limits_.window_bytes);
  EXPECT_EQ(memory_->used(), guard_->held_bytes());
  // All of a large message is charged.
  const uint32_t length = 8 << 20;
  ASSERT_TRUE(
      Client(Frame(kData, 0, 1, std::string{0, 0, static_cast<char>(length >> 16), 0, 0})).ok());
  for (uint32_t i = 0; i < length; i += 16000) {
    ASSERT_TRUE(Client(Frame(kData, 0, 1, std::string(std::min(16000u, length - i), 'x'))).ok());
    sent_.clear();
  }
  EXPECT_GE(guard_->held_bytes(), length);
  End(1);
  EXPECT_EQ(memory_->used(), 0u);
}

TEST_F(FrameGuardTest, HeadersReachTheServerAsTheyWereMeant) {
  Begin();
  // Padded, with a priority, cut into three frames, and with an entry of the table.
  const std::string block = Block(kCall) + std::string("\x40\1a\1b\xbe", 6);
  const std::string padded = std::string("\4\0\0\0\0\0", 6) + block.substr(0, 30) + "pppp";
  ASSERT_TRUE(Client(Frame(kHeaders, kPadded | kPrioritized | kEndStream, 1, padded) +
                         Frame(kContinuation, 0, 1, block.substr(30, 9)) +
                         Frame(kContinuation, kEndHeaders, 1, block.substr(39)),
                     1)
                  .ok());
  // The table is kept for the next block.
  ASSERT_TRUE(Client(Frame(kHeaders, kEndHeaders, 3, Block(kCall) + "\xbe")).ok());
  const std::vector<FoundFrame> frames = Sent();
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0].header.flags, kEndHeaders | kEndStream);
  EXPECT_EQ(frames[1].header.flags, kEndHeaders);
  HeaderFields expected(kCall.begin(), kCall.end());
  expected.insert(expected.end(), 2, {"a", "b"});
  EXPECT_EQ(Decoded(frames[0].payload), expected);
  expected.pop_back();
  EXPECT_EQ(Decoded(frames[1].payload), expected);
  EXPECT_TRUE(Answers().empty());
}

TEST_F(FrameGuardTest, LongHeadersAreSentInSeveralFrames) {
  limits_.max_header_list_bytes = 1 << 20;
  FrameGuard guard(limits_, memory_, now_);
  const std::string bytes =
      std::string(kPreface) + Frame(kSettings, 0, 0) +
      Open(1, {{"a", std::string(12000, 'a')}, {"b", std::string(12000, 'b')}});
  std::string_view view = bytes;
  ASSERT_TRUE(guard.CheckClient(view, now_, sent_).ok());
  const std::vector<FoundFrame> frames = Frames(std::string_view(sent_).substr(kPreface.size()));
  ASSERT_EQ(frames.size(), 3u);
  EXPECT_EQ(frames[1].header.flags, 0);
  EXPECT_EQ(frames[2].header.type, kContinuation);
  EXPECT_EQ(frames[2].header.flags, kEndHeaders);
  EXPECT_EQ(Decoded(frames[1].payload + frames[2].payload).size(), kCall.size() + 2);
}

// 4 KiB in the table, and thousands of references to them in one block.
TEST_F(FrameGuardTest, ExpandingHeaderBlocksAreRefused) {
  Begin();
  std::string block = Block(kCall) + std::string("\x40\1a\x7f\xd1\x1e", 6) + std::string(4000, 'v');
  block += std::string(10000, '\xbe');
  ASSERT_TRUE(Client(Frame(kHeaders, kEndHeaders | kEndStream, 1, block)).ok());
  EXPECT_EQ(ValueOf(Answer(), "grpc-status"), "8");
  EXPECT_TRUE(Sent().empty());
  EXPECT_EQ(guard_->open_streams(), 0u);
  // The table is as the client expects.
  ASSERT_TRUE(Client(Frame(kHeaders, kEndHeaders, 3, Block(kCall) + "\xbe")).ok());
  ASSERT_EQ(Sent().size(), 1u);
}

TEST_F(FrameGuardTest, BlocksThatCannotBeDecodedEndTheConnection) {
  for (const std::string& block : {std::string("\xff\xff\xff\xff\xff\xff"), Block(kCall) + "\xbe",
                                   Block(kCall) + "\1", std::string("\x3f\xe1\xff\x7f")}) {
    FrameGuard guard(limits_, memory_, now_);
    const std::string bytes =
        std::string(kPreface) + Frame(kSettings, 0, 0) + Frame(kHeaders, kEndHeaders, 1, block);
    std::string_view view = bytes;
    EXPECT_TRUE(Says(guard.CheckClient(view, now_, sent_), "cannot be decoded"));
    EXPECT_EQ(guard.error(), Http2Error::kCompressionError);
  }
}

TEST_F(FrameGuardTest, RefusalsTellEverythingToTheClientAndNothingToTheServer) {
  Begin();
  ASSERT_TRUE(Client(Open(1, {{"grpc-encoding", "snappy"}, {"x-request-id", "mine"}})).ok());
  const std::vector<FoundFrame> frames = Answers();
  ASSERT_EQ(frames.size(), 2u);
  const HeaderFields answer = Decoded(frames[0].payload);
  EXPECT_EQ(ValueOf(answer, "grpc-accept-encoding"), "identity, deflate, gzip");
  EXPECT_EQ(ValueOf(answer, "x-request-id"), "mine");
  EXPECT_EQ(ValueOf(answer, "x-error-code"), "unsupported_encoding");
  // The client need not send the rest.
  EXPECT_EQ(frames[1].header.type, kResetStream);
  EXPECT_EQ(frames[1].payload, std::string(4, '\0'));
  EXPECT_TRUE(Sent().empty());
  EXPECT_EQ(guard_->open_streams(), 0u);
  // What the client has sent before it knows is passed on, so that gRPC gives back its window.
  ASSERT_TRUE(Client(Frame(kData, kEndStream, 1, MessageFrame("x"))).ok());
  EXPECT_EQ(Sent().size(), 1u);
  EXPECT_TRUE(Answers().empty());
}

TEST_F(FrameGuardTest, MessagesAreChecked) {
  struct Case {
    std::string data;
    bool end;
    std::string code;
    std::string text;
  };
  const std::vector<Case> cases = {
      {MessageFrame("abc") + MessageFrame("") + MessageFrame("x"), true, "", ""},
      {MessageFrame("x", 2), false, "13", "flag"},
      {MessageFrame("x", 1), false, "13", "grpc-encoding"},
      {std::string("\0\1\0\0\1", 5), false, "8", "16777216"},
      {std::string("\0\xff\xff\xff\xff", 5), false, "8", "4294967295"},
      {MessageFrame("abc").substr(0, 7), true, "13", "within a message"},
      {MessageFrame("abc") + std::string(3, '\0'), true, "13", "within a message"}};
  uint32_t stream = 1;
  for (const Case& c : cases) {
    for (const size_t piece : {1, 3, 1000}) {
      guard_ = std::make_unique<FrameGuard>(limits_, memory_, now_);
      Begin();
      ASSERT_TRUE(Client(Open(stream)).ok());
      Sent();
      ASSERT_TRUE(Client(Frame(kData, c.end ? kEndStream : 0, stream, c.data), piece).ok());
      const Data data = DataOf(Sent());
      const HeaderFields answer = Answer();
      EXPECT_EQ(ValueOf(answer, "grpc-status"), c.code) << c.text;
      EXPECT_NE(ValueOf(answer, "grpc-message").find(c.text), std::string::npos);
      // gRPC gets all bytes, which it takes from the client's window, but not as a part of the
      // call.
      EXPECT_EQ(data.before + data.after, c.data);
      EXPECT_EQ(data.reset, !c.code.empty());
      EXPECT_EQ(data.ended, c.code.empty());
      if (c.text == "flag") {
        EXPECT_LT(data.before.size(), 5u);
      }
    }
  }
}

TEST_F(FrameGuardTest, ALateRefusalIsATrailer) {
  Begin();
  ASSERT_TRUE(Client(Open(1, {{"grpc-encoding", "gzip"}})).ok());
  ASSERT_TRUE(Client(Frame(kData, 0, 1, MessageFrame("x", 1) + MessageFrame("y"))).ok());
  ASSERT_TRUE(Server(Frame(kHeaders, kEndHeaders, 1, "fields") + Frame(kData, 0, 1, "x")).ok());
  ASSERT_TRUE(Client(Frame(kData, 0, 1, MessageFrame("x", 7))).ok());
  const HeaderFields answer = Answer();
  EXPECT_EQ(ValueOf(answer, ":status"), "");
  EXPECT_EQ(ValueOf(answer, "grpc-status"), "13");
}

// gRPC answers RST_STREAM with fields that need no table.
TEST_F(FrameGuardTest, AStreamIsAnsweredOnce) {
  Begin();
  ASSERT_TRUE(Client(Open(1) + Open(3)).ok());
  ASSERT_TRUE(Client(Frame(kData, 0, 1, MessageFrame("x", 7))).ok());
  EXPECT_EQ(ValueOf(Answer(), "grpc-status"), "13");
  shown_.clear();
  const std::string answer = Block({{":status", "200"}, {"grpc-status", "1"}});
  const std::string other = Frame(kHeaders, kEndHeaders | kEndStream, 3, answer);
  ASSERT_TRUE(Server(Frame(kHeaders, kEndHeaders | kEndStream, 1, answer) + Reset(1) + other).ok());
  EXPECT_EQ(shown_, other);
  // The client must decode a block that fills its table.
  const std::string indexed = Frame(kHeaders, kEndHeaders | kEndStream, 1, "\x40\1a\1b");
  ASSERT_TRUE(Server(indexed).ok());
  EXPECT_EQ(shown_, other + indexed);
  EXPECT_FALSE(IsStateless(std::string("\0\1a", 3)));
  EXPECT_FALSE(IsStateless(answer.substr(0, answer.size() - 1)));
}

TEST_F(FrameGuardTest, FramesAreNotPutIntoTheServersHeaderBlocks) {
  Begin();
  ASSERT_TRUE(Client(Open(1)).ok());
  EXPECT_TRUE(guard_->server_between_frames());
  ASSERT_TRUE(Server(Frame(kHeaders, 0, 1, "fields")).ok());
  EXPECT_FALSE(guard_->server_between_frames());
  ASSERT_TRUE(Server(Frame(kContinuation, kEndHeaders, 1, "fields")).ok());
  EXPECT_TRUE(guard_->server_between_frames());
}

TEST_F(FrameGuardTest, PaddingOfDataIsRemovedAndItsWindowGivenBack) {
  Begin();
  ASSERT_TRUE(Client(Open(1)).ok());
  Sent();
  const std::string padded = std::string("\3", 1) + MessageFrame("abc") + "ppp";
  ASSERT_TRUE(Client(Frame(kData, kPadded, 1, padded), 1).ok());
  ASSERT_TRUE(Client(Frame(kData, kPadded | kEndStream, 1, padded)).ok());
  const Data data = DataOf(Sent());
  EXPECT_EQ(data.before, MessageFrame("abc") + MessageFrame("abc"));
  EXPECT_TRUE(data.ended);
  std::vector<uint32_t> streams;
  for (const FoundFrame& frame : Answers()) {
    EXPECT_EQ(frame.header.type, kWindow);
    EXPECT_EQ(frame.payload, std::string("\0\0\0\4", 4));
    streams.push_back(frame.header.stream);
  }
  EXPECT_EQ(streams, (std::vector<uint32_t>{0, 1, 0}));
  EXPECT_TRUE(Says(Client(Open(3) + Frame(kData, kPadded, 3, "\3ab")), "padding"));
}

TEST_F(FrameGuardTest, FramesThatMustNotBe) {
  const auto setting = [](char id, uint32_t value) {
    std::string bytes = {0, id};
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift);
    return Frame(kSettings, 0, 0, bytes);
  };
  const std::string window("\x7f\xff\xff\xff", 4);
  const std::vector<std::pair<std::string, Http2Error>> cases = {
      {Frame(kData, 0, 0, "x"), Http2Error::kProtocolError},
      {Frame(kData, 0, 99, "x"), Http2Error::kProtocolError},
      {Frame(kData, 0, 2, "x"), Http2Error::kProtocolError},
      {Open(2), Http2Error::kProtocolError},
      {Reset(99), Http2Error::kProtocolError},
      {Reset(0), Http2Error::kProtocolError},
      {Frame(kResetStream, 0, 1, "x"), Http2Error::kFrameSizeError},
      {Frame(kPing, 0, 0, "x"), Http2Error::kFrameSizeError},
      {Frame(kPing, 0, 1, "12345678"), Http2Error::kProtocolError},
      {Frame(kPriority, 0, 1, "x"), Http2Error::kFrameSizeError},
      {Frame(kGoAway, 0, 0, "x"), Http2Error::kFrameSizeError},
      {Frame(kGoAway, 0, 1, "12345678"), Http2Error::kProtocolError},
      {Frame(kPushPromise, 0, 1, "12345678"), Http2Error::kProtocolError},
      {Frame(kSettings, 0, 1), Http2Error::kProtocolError},
      {Frame(kSettings, 0, 0, "12345"), Http2Error::kFrameSizeError},
      {Frame(kSettings, kAck, 0, "123456"), Http2Error::kFrameSizeError},
      {setting(2, 2), Http2Error::kProtocolError},
      {setting(4, 0x80000000), Http2Error::kFlowControlError},
      {setting(5, 16383), Http2Error::kProtocolError},
      {setting(5, 1 << 24), Http2Error::kProtocolError},
      {Frame(kWindow, 0, 0, std::string(4, '\0')), Http2Error::kProtocolError},
      {Frame(kWindow, 0, 0, window), Http2Error::kFlowControlError},
      {Frame(kWindow, 0, 99, window), Http2Error::kProtocolError},
      {Frame(kWindow, 0, 1, std::string("\0\0\xff\xff", 4)) + setting(4, 0x7fffffff),
       Http2Error::kFlowControlError},
      {Frame(kContinuation, kEndHeaders, 1), Http2Error::kProtocolError},
      {Frame(kHeaders, kPadded, 3, "\xff"), Http2Error::kProtocolError}};
  for (size_t i = 0; i < cases.size(); ++i) {
    FrameGuard guard(limits_, memory_, now_);
    std::string bytes = std::string(kPreface) + Frame(kSettings, 0, 0) + Open(1);
    std::string_view view = bytes;
    ASSERT_TRUE(guard.CheckClient(view, now_, sent_).ok());
    bytes = cases[i].first + Frame(kHeaders, kEndHeaders, 3, Block(kCall));
    view = bytes;
    EXPECT_FALSE(guard.CheckClient(view, now_, sent_).ok()) << i;
    EXPECT_EQ(guard.error(), cases[i].second) << i;
  }
}

TEST_F(FrameGuardTest, FramesThatEndOneStream) {
  const std::string window("\x7f\xff\xff\xff", 4);
  for (const auto& [frame, error] : std::vector<std::pair<std::string, char>>{
           {Frame(kWindow, 0, 1, std::string(4, '\0')), 1},
           {Frame(kWindow, 0, 1, window), 3},
           {Frame(kHeaders, kEndHeaders, 1, Block(kCall)), 1},
           {Frame(kHeaders, kEndHeaders | kEndStream, 1, Block(kCall)), 1}}) {
    guard_ = std::make_unique<FrameGuard>(limits_, memory_, now_);
    Begin();
    ASSERT_TRUE(Client(Open(1)).ok());
    Sent();
    ASSERT_TRUE(Client(frame + Open(3)).ok());
    const std::vector<FoundFrame> answers = Answers();
    ASSERT_EQ(answers.size(), 1u);
    EXPECT_EQ(answers[0].header.stream, 1u);
    EXPECT_EQ(answers[0].payload, std::string({0, 0, 0, error}));
    EXPECT_EQ(guard_->open_streams(), 1u);
  }
}

TEST_F(FrameGuardTest, TheServersDataMakesRoomInWindows) {
  Begin();
  ASSERT_TRUE(Client(Open(1)).ok());
  const std::string most = std::string("\x7f\xff", 2) + std::string(2, '\0');  // 2^31 - 65536
  ASSERT_TRUE(Client(Frame(kWindow, 0, 0, most) + Frame(kWindow, 0, 1, most)).ok());
  ASSERT_TRUE(Server(Frame(kData, 0, 1, "12345")).ok());
  const std::string five("\0\0\0\5", 4);
  ASSERT_TRUE(Client(Frame(kWindow, 0, 0, five) + Frame(kWindow, 0, 1, five)).ok());
  EXPECT_TRUE(Answers().empty());
  EXPECT_FALSE(Client(Frame(kWindow, 0, 0, five)).ok());
}

TEST_F(FrameGuardTest, TrailersOfAClientEndItsSide) {
  Begin();
  ASSERT_TRUE(Client(Open(1) + Frame(kData, 0, 1, MessageFrame("x"))).ok());
  Sent();
  ASSERT_TRUE(Client(Frame(kHeaders, kEndHeaders | kEndStream, 1, Block({{"a", "b"}}))).ok());
  const std::vector<FoundFrame> sent = Sent();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].header.type, kData);
  EXPECT_TRUE(sent[0].header.Has(kEndStream));
  EXPECT_TRUE(Answers().empty());
}

TEST_F(FrameGuardTest, ManyRefusalsEndTheConnection) {
  Begin();
  absl::Status status;
  int calls = 0;
  for (uint32_t stream = 1; status.ok() && calls < 100000; stream += 2, ++calls) {
    status = Client(Open(stream, {{"grpc-encoding", "snappy"}}));
  }
  EXPECT_TRUE(Says(status, "reset"));
  EXPECT_LE(calls, limits_.reset_burst + 1);
}

}  // namespace
}  // namespace moeserve::server::rpc
