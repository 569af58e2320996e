// The JSON of answers about texts.
#pragma once

#include <span>
#include <string>

#include "base/status.h"
#include "server/base/json.h"
#include "server/encode/encode_results.h"
#include "server/encode/encode_run.h"
#include "server/fields/request_fields.h"

namespace moeserve::server {

// Returns the body of the answer to a request to `route`. The run must have all results; it loses
// them. `id` is the response's.
Result<std::string> EncodeAnswer(EncodeRun& run, FieldRoute route, const std::string& id);

// Returns the usage: UsageJson() without what is about generated tokens.
OrderedJson EncodeUsageJson(const Usage& usage);

// Returns an entity's members.
OrderedJson EntityJson(const TextEntity& found);

// Appends a number that JSON readers turn into the same float.
void AppendFloat(float value, std::string& out);
// Appends a list of such numbers, in brackets.
void AppendFloats(std::span<const float> values, std::string& out);

}  // namespace moeserve::server
