// Decides which calls a pickle may contain.
//
// Calls are never executed, so this rule does not protect moeserve. It protects the people who
// share its models: other programs execute a pickle, and no checkpoint needs a call of anything
// but a data type. A file with another call was made to run code, or is not a checkpoint. Such a
// file is refused as a whole.
#pragma once

#include <string>
#include <string_view>

namespace moeserve {

// Returns whether a checkpoint may contain a call of module.name:
//  - anything in the packages of data types and their rebuild functions (AllowedPackages()), unless
//    `name` has a dot: such a name reaches through an attribute into another module;
//  - the containers and numbers of `builtins` (in Python 2 `__builtin__`), and `type`, which
//    describes a type;
//  - the functions by which Python itself pickles objects, bytes and generic types:
//    copyreg._reconstructor, copyreg.__newobj__, copyreg.__newobj_ex__, _codecs.encode and
//    operator.getitem.
bool MayCall(std::string_view module, std::string_view name);

// Returns the packages, separated by commas, for error messages.
std::string AllowedPackages();

}  // namespace moeserve
