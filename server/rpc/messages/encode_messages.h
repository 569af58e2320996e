// Converts between the messages of Encode and the types of server/encode.
#pragma once

#include "base/status.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/encode/encode_job.h"
#include "server/encode/encode_run.h"

namespace moeserve::server::rpc {

// Reads a request. An error names the field.
Result<EncodeJob> ParseEncode(const v1::EncodeRequest& request, const RequestRules& rules,
                              const EncodeModel& model);

// Writes the answer. The run must have all results; it loses them.
void FillEncoded(EncodeRun& run, v1::EncodeResponse& to);

}  // namespace moeserve::server::rpc
