// The Open Inference Protocol, version 2: its requests as tensors, and its routes over HTTP.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/steady_clock.h"
#include "base/strict_json.h"
#include "server/base/api_error.h"
#include "server/open_inference/infer_json.h"
#include "server/open_inference/infer_request.h"
#include "server/open_inference/tensor_bytes.h"
#include "tests/server/http_fixture.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;
using testing::Get;
using testing::HttpTest;
using testing::Post;
using testing::RawResponse;

template <typename T>
std::string RawBytes(const std::vector<T>& values) {
  std::string out(values.size() * sizeof(T), '\0');
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

std::string TextBytes(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) {
    out += RawBytes<uint32_t>({static_cast<uint32_t>(text.size())}) + text;
  }
  return out;
}

InferTensor Tensor(const std::string& datatype, std::vector<int64_t> shape) {
  InferTensor out;
  out.name = "t";
  out.datatype = datatype;
  out.shape = std::move(shape);
  return out;
}

TEST(TensorBytes, AreReadByDataType) {
  const auto read = [](const std::string& datatype, const std::string& bytes) {
    InferTensor tensor = Tensor(datatype, {2});
    EXPECT_TRUE(ReadElements(bytes, tensor).ok()) << datatype;
    EXPECT_TRUE(CheckTensor(tensor).ok()) << datatype;
    return Json(tensor.data);
  };
  EXPECT_EQ(read("INT8", RawBytes<int8_t>({-1, 2})), Json({-1, 2}));
  EXPECT_EQ(read("UINT8", RawBytes<uint8_t>({255, 2})), Json({255, 2}));
  EXPECT_EQ(read("INT16", RawBytes<int16_t>({-300, 2})), Json({-300, 2}));
  EXPECT_EQ(read("UINT16", RawBytes<uint16_t>({65535, 2})), Json({65535, 2}));
  EXPECT_EQ(read("INT32", RawBytes<int32_t>({-70000, 2})), Json({-70000, 2}));
  EXPECT_EQ(read("UINT32", RawBytes<uint32_t>({4294967295u, 2})), Json({4294967295u, 2}));
  EXPECT_EQ(read("INT64", RawBytes<int64_t>({INT64_MIN, 2})), Json({INT64_MIN, 2}));
  EXPECT_EQ(read("UINT64", RawBytes<uint64_t>({UINT64_MAX, 2})), Json({UINT64_MAX, uint64_t{2}}));
  EXPECT_EQ(read("FP32", RawBytes<float>({0.5F, -2})), Json({0.5, -2.0}));
  EXPECT_EQ(read("FP64", RawBytes<double>({0.1, -2})), Json({0.1, -2.0}));
  EXPECT_EQ(read("BOOL", std::string("\0\1", 2)), Json({false, true}));
  EXPECT_EQ(read("BYTES", TextBytes({"", "text"})), Json({"", "text"}));
}

TEST(TensorBytes, MustFitTheShape) {
  for (const std::string datatype : {"INT32", "FP64", "BOOL", "BYTES"}) {
    InferTensor whole = Tensor(datatype, {2});
    const std::string bytes = datatype == "BYTES"  ? TextBytes({"a", "bc"})
                              : datatype == "BOOL" ? std::string(2, '\1')
                              : datatype == "FP64" ? RawBytes<double>({1, 2})
                                                   : RawBytes<int32_t>({1, 2});
    EXPECT_TRUE(ReadElements(bytes, whole).ok());
    for (size_t size = 0; size < bytes.size(); ++size) {
      InferTensor tensor = Tensor(datatype, {2});
      EXPECT_FALSE(ReadElements(bytes.substr(0, size), tensor).ok()) << datatype << ' ' << size;
    }
    InferTensor tensor = Tensor(datatype, {2});
    EXPECT_FALSE(ReadElements(bytes + "x", tensor).ok()) << datatype;
  }
  InferTensor huge = Tensor("BYTES", {int64_t{1} << 40, int64_t{1} << 40});
  EXPECT_FALSE(ReadElements("", huge).ok());
  InferTensor long_text = Tensor("BYTES", {1});
  EXPECT_FALSE(ReadElements(RawBytes<uint32_t>({UINT32_MAX}) + "text", long_text).ok());
}

TEST(TensorBytes, AreWrittenAsTheyAreRead) {
  InferTensor texts = Tensor("BYTES", {2});
  texts.data = {"a", ""};
  EXPECT_EQ(ElementBytes(texts), TextBytes({"a", ""}));
  InferTensor counts = Tensor("UINT32", {2});
  counts.data = {7, 4294967295u};
  EXPECT_EQ(ElementBytes(counts), RawBytes<uint32_t>({7, 4294967295u}));
}

// Converts the JSON of an `infer` request to the body of a completions request, or to the name of
// the field in the error.
Json Converted(const std::string& text, Pieces pieces = Pieces::kNever) {
  const auto json = ParseStrictJson(text);
  EXPECT_TRUE(json.ok()) << text;
  const auto request = ParseInfer(*json, "");
  if (!request.ok()) return ApiParam(request.status());
  InferSettings settings;
  const auto body = CompletionBody(*request, pieces, settings);
  return body.ok() ? *body : Json(ApiParam(body.status()));
}

const std::string kText =
    R"({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]})";

std::string WithInputs(const std::string& inputs, const std::string& parameters = "{}") {
  return R"({"inputs": [)" + kText + (inputs.empty() ? "" : ", ") + inputs +
         R"(], "parameters": )" + parameters + "}";
}

TEST(InferRequest, BecomesACompletion) {
  EXPECT_EQ(Converted(WithInputs("")), Json({{"prompt", "x"}, {"echo", true}, {"stream", false}}));
  const Json all = Converted(WithInputs(
      R"({"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [[5]]},
         {"name": "temperature", "datatype": "FP32", "shape": [], "data": [0.5]},
         {"name": "stop", "datatype": "BYTES", "shape": [1], "data": ["."]},
         {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1],
          "data": ["{\"top_p\": 0.5}"]},
         {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [true]})",
      R"({"seed": 3, "n": 2, "timeout": 1000, "sequence_id": 0, "binary_data_output": true})"));
  EXPECT_EQ(all, Json({{"prompt", "x"},
                       {"max_tokens", 5},
                       {"temperature", 0.5},
                       {"stop", {"."}},
                       {"top_p", 0.5},
                       {"seed", 3},
                       {"n", 2},
                       {"echo", false},
                       {"stream", false}}));
  EXPECT_EQ(Converted(R"({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2, 1],
                          "data": [["x"], ["y"]]}]})")["prompt"],
            Json({"x", "y"}));
}

TEST(InferRequest, RefusesWhatItCannotDo) {
  const auto with = [](const std::string& name, const std::string& type, const std::string& data) {
    return Converted(WithInputs(R"({"name": ")" + name + R"(", "datatype": ")" + type +
                                R"(", "shape": [1], "data": [)" + data + "]}"));
  };
  EXPECT_EQ(Converted(R"({"inputs": []})"), "text_input");
  EXPECT_EQ(Converted("{}"), "inputs");
  EXPECT_EQ(with("text_input", "BYTES", R"("again")"), "text_input");
  EXPECT_EQ(with("stream", "BOOL", "true"), "stream");
  EXPECT_EQ(with("prompt", "BYTES", R"("other")"), "prompt");
  EXPECT_EQ(with("model", "BYTES", R"("other")"), "model");
  EXPECT_EQ(with("logprobs", "INT32", "1"), "logprobs");
  EXPECT_EQ(with("max_tokens", "INT32", "1.5"), "max_tokens");
  EXPECT_EQ(with("max_tokens", "UINT32", "-1"), "max_tokens");
  EXPECT_EQ(with("max_tokens", "FP16", "1"), "max_tokens");
  EXPECT_EQ(with("max_tokens", "INT32", "1, 2"), "max_tokens");
  EXPECT_EQ(with("max_tokens", "INT32", "{}"), "max_tokens");
  EXPECT_EQ(with("sampling_parameters", "BYTES", R"("[]")"), "sampling_parameters");
  EXPECT_EQ(with("sampling_parameters", "BYTES", R"("{\"prompt\": 1}")"), "prompt");
  const auto parameters = [](const std::string& text) { return Converted(WithInputs("", text)); };
  EXPECT_EQ(parameters(R"({"sequence_id": 7})"), "sequence_id");
  EXPECT_EQ(parameters(R"({"sequence_start": true})"), "sequence_start");
  EXPECT_EQ(parameters(R"({"timeout": -1})"), "timeout");
  EXPECT_EQ(parameters(R"({"timeout": "1"})"), "timeout");
  // Twice, in two ways.
  EXPECT_EQ(
      Converted(WithInputs(R"({"name": "seed", "datatype": "INT64", "shape": [1], "data": [1]})",
                           R"({"seed": 1})")),
      "seed");
  std::string many = "{";
  for (int i = 0; i < 300; ++i) many += "\"p" + std::to_string(i) + "\": 1, ";
  EXPECT_EQ(parameters(many + "\"last\": 1}"), "parameters");
}

TEST(InferRequest, DecidesAboutPieces) {
  const auto streams = [](const std::string& value, Pieces pieces) {
    const std::string input =
        value.empty()
            ? ""
            : R"({"name": "stream", "datatype": "BOOL", "shape": [1], "data": [)" + value + "]}";
    return Converted(WithInputs(input), pieces)["stream"].get<bool>();
  };
  EXPECT_FALSE(streams("", Pieces::kNever));
  EXPECT_FALSE(streams("false", Pieces::kNever));
  EXPECT_FALSE(streams("", Pieces::kOnRequest));
  EXPECT_TRUE(streams("true", Pieces::kOnRequest));
  EXPECT_TRUE(streams("", Pieces::kByDefault));
  EXPECT_FALSE(streams("false", Pieces::kByDefault));
  // The text of the prompt is not a part of pieces.
  EXPECT_EQ(Converted(WithInputs(""), Pieces::kByDefault)["echo"], false);
}

TEST(InferRequest, LimitsElements) {
  InferRequest request;
  InferTensor tensor = Tensor("INT8", {kMaxTensorElements});
  tensor.data.assign(kMaxTensorElements, Json(1));
  EXPECT_TRUE(request.Add(tensor).ok());
  EXPECT_FALSE(request.Add(std::move(tensor)).ok());
  EXPECT_FALSE(ElementCount("t", {kMaxTensorElements + 1}).ok());
  EXPECT_FALSE(ElementCount("t", {2, -1}).ok());
  EXPECT_EQ(*ElementCount("t", {}), 1);
  EXPECT_EQ(*ElementCount("t", {0, INT64_MAX}), 0);
}

class OpenInference : public HttpTest {
 protected:
  RawResponse Infer(const std::string& body, const std::string& headers = "",
                    const std::string& path = "/v2/models/tiny/infer") {
    return Exchange(Post(path, body, headers));
  }
  static std::string Message(const RawResponse& response) {
    const Json body = Json::parse(response.body, nullptr, false);
    EXPECT_TRUE(body.is_object() && body["error"].is_string()) << response.body;
    return body.value("error", "");
  }
};

TEST_F(OpenInference, DescribesServerAndModels) {
  Start();
  const Json server = Json::parse(Exchange(Get("/v2")).body);
  EXPECT_EQ(server["name"], "moeserve");
  const Json model = Json::parse(Exchange(Get("/v2/models/tiny")).body);
  EXPECT_EQ(model["versions"], Json({"1"}));
  EXPECT_EQ(model["inputs"][0]["name"], "text_input");
  EXPECT_EQ(model["outputs"][0]["name"], "text_output");
  EXPECT_EQ(Exchange(Get("/v2/models/tiny/versions/1")).status, 200);
  EXPECT_EQ(Json::parse(Exchange(Get("/v2/models/tiny/ready")).body)["ready"], true);
  EXPECT_EQ(Exchange(Get("/v2/models/tiny/versions/2/ready")).status, 404);
  for (const char* path : {"/v2/models/none", "/v2/models/none/ready", "/v2/models/tiny/infer",
                           "/v2/models/tiny/versions/", "/v2/models/%zz"}) {
    const RawResponse response = Exchange(Get(path));
    EXPECT_EQ(response.status, 404) << path;
    EXPECT_FALSE(Message(response).empty());
  }
  // KServe's client reads these members.
  EXPECT_EQ(Json::parse(Exchange(Get("/v2/health/live")).body)["live"], true);
  EXPECT_EQ(Json::parse(Exchange(Get("/v2/health/ready")).body)["ready"], true);
  const Json index = Json::parse(Exchange(Post("/v2/repository/index", "{}")).body);
  EXPECT_EQ(index, Json::parse(R"([{"name": "tiny", "version": "1", "state": "READY"}])"));
}

TEST_F(OpenInference, AnswersWithTensors) {
  Start();
  const RawResponse response =
      Infer(R"({"id": "42", "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2],
                "data": ["ab", "c"]}], "parameters": {"max_tokens": 20}})");
  ASSERT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(Json::parse(response.body),
            Json::parse(R"({"model_name": "tiny", "model_version": "1", "id": "42", "outputs": [
      {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["abhello", "chello"]},
      {"name": "finish_reason", "datatype": "BYTES", "shape": [2], "data": ["stop", "stop"]},
      {"name": "num_input_tokens", "datatype": "UINT32", "shape": [2], "data": [2, 1]},
      {"name": "num_output_tokens", "datatype": "UINT32", "shape": [2], "data": [6, 6]}]})"));
}

TEST_F(OpenInference, TakesAndSendsBytesAfterTheJson) {
  Start();
  const std::string text = TextBytes({"ab"});
  const std::string tokens = RawBytes<int32_t>({20});
  const std::string json =
      R"({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1],
          "parameters": {"binary_data_size": )" +
      std::to_string(text.size()) +
      R"(}}, {"name": "max_tokens", "datatype": "INT32", "shape": [1],
          "parameters": {"binary_data_size": 4}}],
          "outputs": [{"name": "text_output", "parameters": {"binary_data": true}},
                      {"name": "finish_reason"}]})";
  const std::string size = std::to_string(json.size());
  const std::string headers = "Inference-Header-Content-Length: " + size + "\r\n";
  const RawResponse response = Infer(json + text + tokens, headers);
  ASSERT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(response.headers.at("content-type"), "application/octet-stream");
  const size_t head = std::stoul(response.headers.at("inference-header-content-length"));
  ASSERT_LT(head, response.body.size());
  EXPECT_EQ(response.body.substr(head), TextBytes({"abhello"}));
  const Json answer = Json::parse(response.body.substr(0, head));
  EXPECT_EQ(answer["outputs"][0]["parameters"]["binary_data_size"], 11);
  EXPECT_EQ(answer["outputs"][1]["data"], Json({"stop"}));

  // Every other size of the JSON or of the bytes is refused.
  EXPECT_EQ(Infer(json + text, headers).status, 400);
  EXPECT_EQ(Infer(json + text + tokens + "x", headers).status, 400);
  for (const char* wrong : {"1", "0", "-1", "x", "99999999", "18446744073709551616"}) {
    const RawResponse refused = Infer(
        json + text + tokens, std::string("Inference-Header-Content-Length: ") + wrong + "\r\n");
    EXPECT_EQ(refused.status, 400) << wrong;
    EXPECT_FALSE(Message(refused).empty());
  }
}

TEST_F(OpenInference, GeneratesAndStreams) {
  Start();
  const RawResponse whole = Infer(R"({"text_input": "ab", "parameters": {"max_tokens": 20}})", "",
                                  "/v2/models/tiny/generate");
  ASSERT_EQ(whole.status, 200) << whole.body;
  EXPECT_EQ(Json::parse(whole.body)["text_output"], "abhello");
  EXPECT_EQ(Infer(R"({"text_input": "ab", "stream": true})", "", "/v2/models/tiny/generate").status,
            400);
  const RawResponse stream =
      Infer(R"({"text_input": "ab", "max_tokens": 20})", "", "/v2/models/tiny/generate_stream");
  std::string text;
  int last = 0;
  for (const Json& event : testing::Events(stream.body)) {
    text += event["text_output"].get<std::string>();
    last += event["triton_final_response"].get<bool>() ? 1 : 0;
  }
  EXPECT_EQ(text, "hello");
  EXPECT_EQ(last, 1);
  EXPECT_EQ(Infer(R"({"text_input": ["a", "b"]})", "", "/v2/models/tiny/generate_stream").status,
            400);
}

TEST_F(OpenInference, ReportsErrorsAsText) {
  Start();
  for (const char* body :
       {"", "[]", "{", "{}", R"({"inputs": 1})", R"({"inputs": [1]})",
        R"({"inputs": [{"name": "text_input"}]})",
        R"({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}],
            "outputs": [{"name": "none"}]})",
        R"({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}],
            "parameters": {"temperature": 99}})",
        R"({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"],
            "parameters": {"shared_memory_region": "r"}}]})"}) {
    const RawResponse response = Infer(body);
    EXPECT_EQ(response.status, 400) << body;
    EXPECT_FALSE(Message(response).empty());
  }
  EXPECT_EQ(Infer("{}", "", "/v2/models/none/infer").status, 404);
  EXPECT_EQ(Infer("{}", "", "/v2/models/tiny/versions/9/infer").status, 404);
  EXPECT_EQ(Infer("{}", "", "/v2/models/tiny/other").status, 404);
  EXPECT_NE(Message(Exchange(Post("/v2/repository/models/tiny/load", ""))).find("--model-control"),
            std::string::npos);
}

TEST_F(OpenInference, PassesItsTimeoutOn) {
  Start();
  const absl::Time before = SteadyNow();
  EXPECT_EQ(Infer(R"({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1],
                      "data": ["x"]}], "parameters": {"timeout": 7000000}})")
                .status,
            200);
  const absl::Time deadline = engine_->submitted().front().deadline;
  EXPECT_GE(deadline, before + absl::Seconds(7));
  EXPECT_LE(deadline, SteadyNow() + absl::Seconds(7));
}

// A page of another site can send a body without JSON without asking, so it must not reach a route.
TEST_F(OpenInference, PagesMustSendJson) {
  Start();
  const std::string path = "/v2/repository/index";
  const auto with = [&](const std::string& headers) {
    return Exchange("POST " + path + " HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n" + headers +
                    "\r\n{}")
        .status;
  };
  EXPECT_EQ(with(""), 200);
  EXPECT_EQ(with("Content-Type: application/octet-stream\r\n"), 200);
  EXPECT_EQ(with("Origin: http://a\r\nContent-Type: application/json\r\n"), 200);
  EXPECT_EQ(with("Origin: http://a\r\n"), 415);
  EXPECT_EQ(with("Origin: http://a\r\nContent-Type: text/plain\r\n"), 415);
}

}  // namespace
}  // namespace moeserve::server
