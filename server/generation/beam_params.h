// The rules for requests with beam search, for HTTP and gRPC.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/beam/beam_params.h"
#include "server/generation/generation_params.h"

namespace moeserve::server {

// How an interface spells what it asks of beam search, for error messages.
struct BeamNames {
  std::string_view asked;  // the field that asks for it: "use_beam_search"
  std::string_view beams;  // "num_beams"
  std::string sampling;    // what stands before the names of sampling fields: ""
};

// Sets the sampling fields that draw tokens, of which `is_given` says which the request has, to the
// API's defaults where it has none: those of the model are meant for drawing. InvalidArgument,
// naming the field, if the request has others, or if other parameters contradict beam search.
// params.sampling.beam, params.n and params.max_tokens are set.
absl::Status ResolveBeams(const BeamNames& names,
                          const std::function<bool(const char* field)>& is_given,
                          const RequestRules& rules, GenerationParams& params);

}  // namespace moeserve::server
