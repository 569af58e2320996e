// The four normalization forms of Unicode, with the Unicode version of Hugging Face's tables.
#pragma once

#include <string>
#include <string_view>

#include "engine/text/tokenizer/normalizers/normalizer.h"

namespace moeserve {

class UnicodeFormNormalizer : public Normalizer {
 public:
  // NFC: composes. NFD: neither. NFKC: composes and is compatible. NFKD: is compatible.
  UnicodeFormNormalizer(bool composes, bool compatible)
      : composes_(composes), compatible_(compatible) {}

  absl::StatusOr<std::string> Apply(std::string_view text,
                                    NormalizeContext* context) const override;
  bool IsUnchanged(std::string_view text) const override;

 private:
  bool composes_;
  bool compatible_;
};

}  // namespace moeserve
