// The configuration of a model in a GGUF file.
#pragma once

#include <memory>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// Reads the architecture from the metadata of `file`. `weights` contains the tensors of `file` and
// of the other parts of a split file; some settings follow from them: whether projections and
// routers have a bias, whether queries and keys have a norm, and the factors of rotary frequencies.
// InvalidArgument, with the file, the key, the
// expected and the found value, for architectures and settings that the engine cannot compute, and
// for keys of the architecture that this server does not know. The keys `ignored` are read as if
// the file did not have them. `predictions`: StoredNames::predictions.
ConfigResult ReadGgufConfig(const GgufFile& file, const WeightFiles& weights,
                            const std::vector<std::string>& ignored = {}, bool predictions = false);

}  // namespace moeserve
