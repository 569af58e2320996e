#include "server/http/openapi/operations.h"

namespace moeserve::server::http {
namespace {

constexpr std::string_view kEvents = "text/event-stream";
constexpr std::string_view kLines = "application/x-ndjson";
constexpr std::string_view kText = "text/plain";
constexpr std::string_view kHtml = "text/html";
constexpr std::string_view kBytes = "application/octet-stream";

constexpr Tag kTags[] = {
    {"generation", "Requests that generate tokens"},
    {"texts", "Vectors, labels and scores of texts"},
    {"tokens", "Text to tokens and back"},
    {"models", "The models that are served"},
    {"experts", "Which experts computed how much"},
    {"inference", "The Open Inference Protocol, version 2, with Triton's extensions"},
    {"ollama", "The list, chat and generate routes of Ollama's API"},
    {"tei", "Routes of Text Embeddings Inference"},
    {"server", "Health, metrics and what the server tells about itself"},
    {"page", "The web page"},
};

// The schemas of an operation's body and answer, and the media type of another form of the answer.
struct Forms {
  std::string_view request = {};
  std::string_view answer = {};
  std::string_view other_type = {};
};

constexpr Operation Make(std::string_view method, std::string_view pattern, std::string_view tag,
                         const Forms& forms, std::string_view summary,
                         std::string_view parameters = {}) {
  return {.method = method,
          .pattern = pattern,
          .path = pattern,
          .tag = tag,
          .summary = summary,
          .parameters = parameters,
          .request = forms.request,
          .answer = forms.answer,
          .other_type = forms.other_type};
}

// A GET that answers with JSON.
constexpr Operation Get(std::string_view pattern, std::string_view tag, std::string_view answer,
                        std::string_view summary, std::string_view parameters = {}) {
  return Make("GET", pattern, tag, {.answer = answer}, summary, parameters);
}

constexpr Operation Post(std::string_view pattern, std::string_view tag, const Forms& forms,
                         std::string_view summary, std::string_view error = "Error") {
  Operation out = Make("POST", pattern, tag, forms, summary);
  out.error = error;
  return out;
}

// An operation whose path has parameters.
constexpr Operation At(std::string_view path, Operation operation) {
  operation.path = path;
  return operation;
}

// An operation of the Open Inference Protocol.
constexpr Operation Inference(std::string_view method, std::string_view pattern,
                              std::string_view path, const Forms& forms, std::string_view summary,
                              std::string_view parameters = {}) {
  Operation out = At(path, Make(method, pattern, "inference", forms, summary, parameters));
  out.error = "InferenceError";
  return out;
}

// A command of the Open Inference Protocol about the models that are served.
constexpr Operation Repository(std::string_view pattern, std::string_view path, const Forms& forms,
                               std::string_view summary, std::string_view parameters = {}) {
  Operation out = Inference("POST", pattern, path, forms, summary, parameters);
  out.optional_body = true;
  return out;
}

constexpr Operation kOperations[] = {
    Post("/v1/completions", "generation", {"CompletionRequest", "Completion", kEvents},
         "Continues one or several prompts"),
    Post("/v1/chat/completions", "generation", {"ChatRequest", "ChatCompletion", kEvents},
         "Answers a conversation"),
    Post("/v1/responses", "generation", {"ResponseRequest", "ResponseAnswer", kEvents},
         "Answers a conversation in the form of OpenAI's Responses"),
    Post("/v1/responses/input_tokens", "tokens", {"ResponseRequest", "ResponseCount"},
         "Counts the tokens of a conversation in the form of OpenAI's Responses"),
    Post("/v1/messages", "generation", {"MessageRequest", "MessageAnswer", kEvents},
         "Answers a conversation in the form of Anthropic's Messages", "MessageError"),
    Post("/v1/messages/count_tokens", "tokens", {"MessageCountRequest", "MessageCount"},
         "Counts the tokens of a conversation in the form of Anthropic's Messages", "MessageError"),
    Post("/v1/embeddings", "texts", {"EmbeddingRequest", "Embeddings"}, "Returns vectors of texts"),
    Post("/pooling", "texts", {"PoolingRequest", "Pooled"},
         "Returns vectors or scores of texts, or of their tokens"),
    Post("/classify", "texts", {"ClassifyRequest", "Classes"},
         "Returns the labels of texts, or their named parts"),
    Post("/v1/classify", "texts", {"ClassifyRequest", "Classes"}, "The same as /classify"),
    Post("/score", "texts", {"ScoreRequest", "Scores"},
         "Returns how similar, or relevant to each other, texts are"),
    Post("/v1/score", "texts", {"ScoreRequest", "Scores"}, "The same as /score"),
    Post("/rerank", "texts", {"AnyRerankRequest", "AnyRanking"},
         "Sorts documents by their relevance for a query"),
    Post("/v1/rerank", "texts", {"RerankRequest", "Ranking"},
         "The same as /rerank, without TEI's form"),
    Post("/v2/rerank", "texts", {"RerankRequest", "Ranking"},
         "The same as /rerank, by default without the documents' texts"),
    Post("/v1/fill-mask", "texts", {"FillMaskRequest", "FilledMasks"},
         "Returns tokens for the masks of a text"),
    Post("/embed", "tei", {"TeiTexts", "TeiVectors"}, "Returns vectors of texts, as TEI does"),
    Post("/embed_all", "tei", {"TeiTexts", "TeiVectors"},
         "Returns the vectors of the tokens of texts, as TEI does"),
    Post("/predict", "tei", {"TeiTexts", "TeiLabels"}, "Returns the labels of texts, as TEI does"),
    Post("/similarity", "tei", {"TeiSentences", "TeiScores"},
         "Compares a sentence with others, as TEI does"),
    Get("/info", "tei", "TeiInfo", "Describes a model, as TEI does", "model_query"),
    Post("/api/chat", "ollama", {"OllamaChatRequest", "OllamaAnswer", kLines},
         "Answers a conversation in the form of Ollama's API", "OllamaError"),
    Post("/api/generate", "ollama", {"OllamaGenerateRequest", "OllamaAnswer", kLines},
         "Answers a prompt in the form of Ollama's API", "OllamaError"),
    Post("/api/show", "ollama", {"OllamaShowRequest", "OllamaModel"}, "Describes a model",
         "OllamaError"),
    Get("/api/tags", "ollama", "OllamaModels", "Lists the models"),
    Get("/api/ps", "ollama", "OllamaModels", "Lists the models that are loaded"),
    Get("/api/version", "ollama", "OllamaVersion",
        "Returns the version of Ollama whose API this is"),
    Post("/tokenize", "tokens", {"TokenizeRequest", "Tokens"},
         "Returns the tokens of a text or a conversation"),
    Post("/detokenize", "tokens", {"DetokenizeRequest", "DetokenizedText"},
         "Returns the text of tokens"),
    Get("/tokenizer_info", "tokens", "TokenizerInfo", "Describes the tokenizer of a model",
        "model_query"),
    Get("/v1/models", "models", "ModelList", "Lists the models"),
    At("/v1/models/{model}", Get("/v1/models/*", "models", "Model", "Describes a model", "model")),
    Post("/v1/models/load", "models", {"LoadRequest", "ModelStatus"},
         "Loads a model, or replaces its running version (--model-control)"),
    Post("/v1/models/unload", "models", {"UnloadRequest", "ModelStatus"},
         "Ends serving a model (--model-control)"),
    Get("/v1/experts/stats", "experts", "ExpertStatistics", "Returns the statistics of all experts",
        "model_query stack window threshold"),
    Get("/v1/experts/layout", "experts", "ExpertLayout", "Describes the routed blocks of a model",
        "model_query stack"),
    Get("/v1/experts/tokens", "experts", "ExpertTokens",
        "Returns the tokens that are most associated with each expert of a block",
        "model_query stack layer block top min_count rank"),
    Get("/v1/experts/similarity", "experts", "ExpertSimilarity",
        "Compares the experts of a block by the tokens that chose them",
        "model_query stack layer block eps"),
    Get("/v1/experts/collapse", "experts", "ExpertCollapse",
        "Returns the representation collapse of the routed blocks (--hidden-samples)",
        "model_query stack optional_layer block"),
    Make("GET", "/v1/experts/profile", "experts", {.other_type = kBytes},
         "Returns the expert profile as a file", "model_query stack"),
    Inference("GET", "/v2", "/v2", {.answer = "InferenceServer"}, "Describes the server"),
    Inference("GET", "/v2/models/*", "/v2/models/{model}", {.answer = "InferenceModel"},
              "Describes the tensors of a model", "model"),
    Inference("GET", "/v2/models/*", "/v2/models/{model}/versions/{version}",
              {.answer = "InferenceModel"}, "Describes the tensors of a version of a model",
              "model version"),
    Inference("GET", "/v2/models/*", "/v2/models/{model}/ready", {.answer = "InferenceReady"},
              "Tells whether a model takes requests", "model"),
    Inference("POST", "/v2/models/*", "/v2/models/{model}/infer",
              {"InferRequest", "InferAnswer", kBytes}, "Generates; prompts and answers are tensors",
              "model inference_header"),
    Inference("POST", "/v2/models/*", "/v2/models/{model}/generate",
              {"GenerateRequest", "GenerateAnswer"},
              "Generates; prompts and answers are plain values", "model"),
    Inference("POST", "/v2/models/*", "/v2/models/{model}/generate_stream",
              {.request = "GenerateRequest", .other_type = kEvents},
              "Generates, and sends the answer in pieces", "model"),
    Repository("/v2/repository/index", "/v2/repository/index", {"IndexRequest", "RepositoryIndex"},
               "Lists the models and whether they are loaded"),
    Repository("/v2/repository/models/*", "/v2/repository/models/{model}/load",
               {"RepositoryCommand", "Empty"},
               "Loads a model, or replaces its running version (--model-control)", "model"),
    Repository("/v2/repository/models/*", "/v2/repository/models/{model}/unload",
               {"RepositoryCommand", "Empty"}, "Ends serving a model (--model-control)", "model"),
    Get("/health", "server", "Ready", "Tells whether the server takes requests"),
    Get("/health/ready", "server", "Ready", "Tells whether the server takes requests"),
    Get("/health/live", "server", "Live", "Tells whether the engines of all models run"),
    Get("/v2/health/ready", "inference", "Ready", "Tells whether the server takes requests"),
    Get("/v2/health/live", "inference", "Live", "Tells whether the engines of all models run"),
    Get("/ping", "server", "Ping", "Tells whether the server takes requests, as SageMaker asks"),
    Post("/ping", "server", {.answer = "Ping"},
         "Tells whether the server takes requests, as SageMaker asks"),
    Get("/version", "server", "Version", "Returns the version of the program"),
    Get("/server_info", "server", "ServerInfo",
        "Describes the server: models, limits and settings"),
    Make("GET", "/metrics", "server", {.other_type = kText}, "Returns the metrics for Prometheus"),
    Get("/v1/metrics/history", "server", "MetricsHistory",
        "Returns readings of some metrics in the last five minutes", "model_query"),
    Get("/openapi.json", "server", "OpenApi", "Returns this description"),
    Make("GET", "/", "page", {.other_type = kHtml}, "Returns the web page"),
    At("/dashboard/{file}", Make("GET", "/dashboard/*", "page", {.other_type = kText},
                                 "Returns a file of the web page", "file")),
};

}  // namespace

std::span<const Operation> Operations() { return kOperations; }
std::span<const Tag> Tags() { return kTags; }

}  // namespace moeserve::server::http
