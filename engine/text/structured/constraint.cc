#include "engine/text/structured/constraint.h"

namespace moeserve {

absl::Status OverworkedError() {
  return absl::InvalidArgumentError(
      "the structured output takes too much work per token, because its text can be read in too "
      "many ways; use fewer parts, alternatives or repetitions that can match the same text");
}

}  // namespace moeserve
