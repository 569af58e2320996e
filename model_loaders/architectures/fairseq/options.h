// The options with which fairseq built a model. A checkpoint has them as Python objects; here they
// become one flat JSON object.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/torch/pickle.h"
#include "nlohmann/json.hpp"

namespace moeserve {

// The options that name the languages of a translator, as its dictionaries are called.
inline constexpr char kSourceLanguage[] = "source_lang";
inline constexpr char kTargetLanguage[] = "target_lang";

struct FairseqOptions {
  // An object from names to values, without nulls. Texts are printable ASCII: other bytes are
  // escaped as in Printable().
  nlohmann::json values;
  // What contains the options, for error messages: "args", "cfg.model" or "config.json".
  std::string_view place;
  // What was decided about them, for CheckpointConfig::decisions.
  std::vector<std::string> decisions;
};

// Returns the options in `root`, the dict that fairseq saved: those of "args" (older versions), or
// else those of the model in "cfg". Each may be a Namespace, a dict or a container of OmegaConf.
// nullopt if `root` has neither. InvalidArgument, with the place, the expected and the found value,
// if they are of another kind or too many.
Result<std::optional<FairseqOptions>> ReadFairseqOptions(const PickleValue& root);

// Returns `nested`, an object, without nulls and with the members of objects in it as members of
// its own: {"decoder": {"layers": 6}} becomes {"decoder_layers": 6}. InvalidArgument if two members
// get the same name and have different values.
Result<nlohmann::json> FlattenOptions(const nlohmann::json& nested);

}  // namespace moeserve
