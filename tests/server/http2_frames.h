// Frames and header blocks for the tests of server/rpc/http2 and of the frame guard.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/rpc/http2/frame_reader.h"
#include "server/rpc/http2/header_block.h"
#include "server/rpc/http2/refusal.h"

namespace moeserve::server::rpc {

using Fields = std::vector<std::pair<std::string, std::string>>;

inline const Fields kCall = {{":method", "POST"}, {":scheme", "http"},
                             {":path", "/a.B/C"}, {":authority", "localhost"},
                             {"te", "trailers"},  {"content-type", "application/grpc"}};

inline std::string Block(const Fields& fields) {
  std::string block;
  for (const auto& [name, value] : fields) AppendField(name, value, block);
  return block;
}

struct FoundFrame {
  FrameHeader header;
  std::string payload;
};

inline std::vector<FoundFrame> Frames(std::string_view bytes) {
  std::vector<FoundFrame> found;
  FrameReader reader;
  std::string_view payload;
  while (true) {
    switch (reader.Next(bytes, payload)) {
      case FrameReader::Event::kNone:
        return found;
      case FrameReader::Event::kBegin:
        found.push_back({reader.frame(), ""});
        break;
      case FrameReader::Event::kPayload:
        found.back().payload += payload;
        break;
      case FrameReader::Event::kEnd:
        break;
    }
  }
}

// Returns the fields of one block.
inline HeaderFields Decoded(const std::string& block) {
  HeaderDecoder decoder(1 << 20);
  EXPECT_TRUE(decoder.Decode(block, true).ok());
  return decoder.Take();
}

inline std::string ValueOf(const HeaderFields& fields, std::string_view name) {
  for (const auto& [found, value] : fields) {
    if (found == name) return value;
  }
  return "";
}

}  // namespace moeserve::server::rpc
