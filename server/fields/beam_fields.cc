#include "server/fields/beam_fields.h"

#include <string>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/generation/beam_params.h"

namespace moeserve::server {
namespace {

Result<EarlyStopping> ParseEarlyStopping(const Json& body) {
  const Json* const field = FindField(body, "early_stopping");
  if (field == nullptr) return EarlyStopping::kFalse;
  if (*field == true) return EarlyStopping::kTrue;
  if (*field == false) return EarlyStopping::kFalse;
  if (*field == "never") return EarlyStopping::kNever;
  return InvalidValue("early_stopping", "'early_stopping' must be true, false or \"never\"");
}

}  // namespace

absl::Status ParseBeamFields(const Json& body, const RequestRules& rules, GenerationParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(const auto use, BoolField(body, "use_beam_search"));
  MOESERVE_ASSIGN_OR_RETURN(const auto beams, IntField(body, "num_beams", 1, kMaxBeams));
  MOESERVE_ASSIGN_OR_RETURN(const auto penalty, NumberField(body, "length_penalty",
                                                            -kMaxLengthPenalty, kMaxLengthPenalty));
  MOESERVE_ASSIGN_OR_RETURN(const EarlyStopping early, ParseEarlyStopping(body));
  BeamParams beam;
  if (!use.value_or(false)) {
    const auto needs = [](const char* name) {
      return InvalidValue(name, Concat("'", name, "' needs 'use_beam_search': true"));
    };
    if (beams.value_or(1) != 1) return needs("num_beams");
    if (penalty.value_or(1.0) != 1.0) return needs("length_penalty");
    if (early != EarlyStopping::kFalse) return needs("early_stopping");
    return absl::OkStatus();
  }
  const bool has_n = FindField(body, "n") != nullptr;
  beam.num_beams = static_cast<int>(beams.value_or(has_n ? out.n : kDefaultBeams));
  beam.length_penalty = penalty.value_or(beam.length_penalty);
  beam.early_stopping = early;
  out.sampling.beam = beam;
  if (out.best > 0) {
    return InvalidValue("best_of",
                        "'best_of' cannot be combined with 'use_beam_search': the answer has the "
                        "'n' best of 'num_beams' texts");
  }
  return ResolveBeams(
      {.asked = "use_beam_search", .beams = "num_beams", .sampling = ""},
      [&](const char* name) { return FindField(body, name) != nullptr; }, rules, out);
}

}  // namespace moeserve::server
