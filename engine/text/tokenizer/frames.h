// What a tokenizer's post-processor puts around one text or two, such as BOS or [CLS] and [SEP].
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/text/token_id.h"

namespace moeserve {

struct FramePart {
  std::optional<TokenId> token;  // unset: the ids of a text
  uint8_t type = 0;              // of the token or of all tokens of the text (`token_type_ids`)
  bool second = false;           // the text is the second one
};

using Frame = std::vector<FramePart>;

struct Frames {
  Frame single = {{}};
  // Unset: two texts cannot be joined.
  std::optional<Frame> pair = Frame{{}, {std::nullopt, 1, true}};
};

// Puts `before` and `after`, where given, around each text. The second text has type
// `second_type`.
inline Frames Enclosed(std::optional<TokenId> before, std::optional<TokenId> after,
                       uint8_t second_type = 1) {
  const auto add = [&](bool second, Frame* frame) {
    const uint8_t type = second ? second_type : 0;
    if (before.has_value()) frame->push_back({before, type});
    frame->push_back({std::nullopt, type, second});
    if (after.has_value()) frame->push_back({after, type});
  };
  Frames frames{.single = {}, .pair = Frame()};
  add(false, &frames.single);
  add(false, &*frames.pair);
  add(true, &*frames.pair);
  return frames;
}

// BERT's frames: [CLS] A [SEP] and [CLS] A [SEP] B [SEP], where the second part has type 1.
inline Frames BertFrames(TokenId cls, TokenId sep) {
  const Frame single = {{cls}, {}, {sep}};
  return {single, Frame{{cls}, {}, {sep}, {std::nullopt, 1, true}, {sep, 1}}};
}

// RoBERTa's frames: <s> A </s> and <s> A </s></s> B </s>, all of type 0.
inline Frames RobertaFrames(TokenId cls, TokenId sep) {
  const Frame single = {{cls}, {}, {sep}};
  return {single, Frame{{cls}, {}, {sep}, {sep}, {std::nullopt, 0, true}, {sep}}};
}

}  // namespace moeserve
