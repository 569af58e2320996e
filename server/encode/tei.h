// Requests and answers about texts in the form of Hugging Face's Text Embeddings Inference. A
// request becomes the body of one of this server's own routes, so that all limits and errors are
// the same.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "server/base/json.h"
#include "server/encode/encode_run.h"
#include "server/fields/request_fields.h"

namespace moeserve::server {

// The routes /embed, /embed_all, /predict, /rerank (with "texts") and /similarity.
enum class TeiRoute : uint8_t { kEmbed, kEmbedAll, kPredict, kRerank, kSimilarity };

struct TeiRequest {
  Json body;  // of `fields`
  FieldRoute fields = FieldRoute::kEmbeddings;
  bool batch = true;  // kPredict: whether the answer is a list of answers
};

// Translates a body. Fields that it does not know stay as they are. InvalidArgument naming the
// field that is missing or wrong.
Result<TeiRequest> FromTei(TeiRoute route, const Json& body);

// Returns an error of the translated request with the names of the fields that the client sent.
absl::Status TeiError(TeiRoute route, const absl::Status& error);

// Returns the body of the answer. The run must have all results; it loses them.
std::string TeiAnswer(EncodeRun& run, TeiRoute route, bool batch);

}  // namespace moeserve::server
