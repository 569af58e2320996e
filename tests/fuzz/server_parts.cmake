# The parts of the server that read untrusted bytes, for the fuzz targets. They need no backend, no
# calls and no sockets, so they build in a small part of the time that the whole server takes.
# Objects that a target does not use are left out of its program. If a target lacks a symbol, the file
# that defines it is missing here.
set(parts
  engine/weights/packed_cache.cc
  engine/tiers/packed_file.cc
  engine/routes/route_layout.cc
  engine/routes/routing_control.cc
  engine/routes/routing_record.cc
  engine/statistics/expert_profile.cc
  engine/statistics/expert_stats.cc
  engine/statistics/expert_recorder.cc
  engine/statistics/measures/activated.cc
  engine/statistics/measures/agreement.cc
  engine/statistics/measures/collapse.cc
  engine/statistics/measures/load_balance.cc
  engine/statistics/measures/macs.cc
  engine/statistics/measures/route_trace.cc
  engine/statistics/measures/router_losses.cc
  engine/statistics/measures/symmetric_eigen.cc
  engine/statistics/measures/token_affinity.cc
  engine/statistics/statistic_list.cc
  engine/statistics/token_expert_counts.cc
  engine/validate_request.cc
  kernels/cpu/weights/packed_bank.cc
  kernels/cpu/thread_pool.cc
  kernels/cpu/weights/weight_memory.cc
  model_loaders/profiles/npy_writer.cc
  model_loaders/profiles/profile_file.cc
  server/base/api_error.cc
  server/base/json_fields.cc
  server/base/json_text.cc
  server/base/memory_budget.cc
  server/base/request_id.cc
  server/base/status_conversion.cc
  server/base/text_values.cc
  server/base/utf8.cc
  server/chat/chat_conversation.cc
  server/chat/chat_format.cc
  server/chat/chat_message.cc
  server/chat/chat_request.cc
  server/chat/history_form.cc
  server/encode/encode_answer.cc
  server/encode/encode_fields.cc
  server/encode/encode_job.cc
  server/encode/encode_results.cc
  server/encode/entities.cc
  server/encode/label_scores.cc
  server/encode/prepare_texts.cc
  server/encode/tei.cc
  server/generation/beam_params.cc
  server/generation/constraint_compiler.cc
  server/generation/generation_params.cc
  server/generation/generation_request.cc
  server/generation/routing_params.cc
  server/generation/task_check.cc
  server/generation/token_text.cc
  server/http/checks/head_check.cc
  server/http/checks/host_check.cc
  server/http/encoding/content_coding.cc
  server/http/encoding/gzip.cc
  server/http/error_response.cc
  server/http/request_parser.cc
  server/http/url.cc
  server/keys/api_key.cc
  server/keys/key_file.cc
  server/keys/scopes.cc
  server/keys/token_bucket.cc
  server/anthropic/message_request.cc
  server/metrics/prometheus.cc
  server/ollama/ollama_options.cc
  server/ollama/ollama_request.cc
  server/open_inference/infer_json.cc
  server/open_inference/infer_request.cc
  server/open_inference/tensor_bytes.cc
  server/answers/answer.cc
  server/completions/completion_request.cc
  server/fields/beam_fields.cc
  server/fields/request_fields.cc
  server/fields/routing_fields.cc
  server/fields/sampling_fields.cc
  server/fields/shared_fields.cc
  server/fields/structural_tag.cc
  server/fields/structured_fields.cc
  server/responses/response_request.cc
  server/rpc/error_details.cc
  server/rpc/http2/frame_guard.cc
  server/rpc/http2/frame_reader.cc
  server/rpc/http2/header_block.cc
  server/rpc/http2/message_reader.cc
  server/rpc/http2/refusal.cc
  server/rpc/http2/request_head.cc
  server/rpc/inference/infer_messages.cc
  server/rpc/messages/messages.cc
  server/rpc/messages/statistic_messages.cc
  server/tools/answer_splitter.cc
  server/tools/call_elements.cc
  server/tools/call_syntax.cc
  server/tools/channel_splitter.cc
  server/tools/generic_tools.cc
  server/tools/tool_constraint.cc
  server/tools/tool_definitions.cc
  server/tools/tool_parameters.cc
  server/tracing/otlp_options.cc
  server/tracing/trace_context.cc)
list(TRANSFORM parts PREPEND ${PROJECT_SOURCE_DIR}/)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(Boost 1.81 REQUIRED)
find_package(ZLIB REQUIRED)
find_library(NGHTTP2_LIBRARY nghttp2 REQUIRED)
add_library(moeserve_fuzz_server STATIC ${parts})
target_compile_definitions(moeserve_fuzz_server PUBLIC MOESERVE_VERSION="${PROJECT_VERSION}"
  MOESERVE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
target_include_directories(moeserve_fuzz_server SYSTEM PUBLIC ${Boost_INCLUDE_DIRS})
target_link_libraries(moeserve_fuzz_server PUBLIC
  moeserve_flags moeserve_chat moeserve_structured moeserve_loaders moeserve_messages
  nlohmann_json::nlohmann_json absl::status absl::statusor absl::time
  gRPC::grpc++ ZLIB::ZLIB ${NGHTTP2_LIBRARY} Threads::Threads)
moeserve_precompile(moeserve_fuzz_server)
