// Reads the file of --api-key-file. Its first character that is not white space decides the form: a
// '{' starts JSON, anything else a list of keys, one per line. No error contains a key.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/keys/api_key.h"

namespace moeserve::server {

// Reads the text of a key file. `place` names the file in errors.
//
// A list has one key with all rights per line; blank lines and lines starting with '#' are skipped.
// server/keys/README.md describes the JSON form. InvalidArgument, naming the entry, the field, the
// expected and the found value, for anything that the form does not allow, and for a file without
// keys, because it would leave the server open to everybody by accident.
Result<std::vector<KeySpec>> ParseKeyFile(std::string_view text, std::string_view place);

// Reads a key file. NotFound if it cannot be read; otherwise the errors of ParseKeyFile().
Result<std::vector<KeySpec>> ReadKeyFile(const std::filesystem::path& file);

// Returns the first key of a key file as text, for a program that sends it.
Result<std::string> ReadFirstKey(const std::filesystem::path& file);

// Returns whether users other than the owner and the group may read the file.
bool ReadableByOthers(const std::filesystem::path& file);

}  // namespace moeserve::server
