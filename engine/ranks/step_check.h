// What every rank tells the leader after a step.
#pragma once

#include <cstdint>

namespace moeserve {

// Sent as it is: all ranks run the same program.
struct StepCheck {
  uint64_t number = 0;    // StepMessage::number
  uint64_t checksum = 0;  // of the residual stream after the last block
  int32_t code = 0;       // absl::StatusCode of the rank
  uint32_t prepared = 0;  // MovingExperts::ready()
  uint64_t reserved = 0;
};
static_assert(sizeof(StepCheck) == 32);

}  // namespace moeserve
