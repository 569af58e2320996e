// All families. Each is defined in the file or folder of its name. registry.cc lists them.
#pragma once

#include "model_loaders/architectures/architecture.h"

namespace moeserve {

extern const Architecture kNativeArchitecture;

}  // namespace moeserve
