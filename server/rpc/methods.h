// The rights that the calls of the gRPC interface need.
#pragma once

#include <string_view>

#include "server/keys/scopes.h"

namespace moeserve::server::rpc {

struct Method {
  std::string_view service;  // with its package
  std::string_view name;
  ScopeSet scopes;  // on a server with keys, the call needs a key with one of these
};

inline constexpr std::string_view kInference = "moeserve.v1.Inference";
inline constexpr ScopeSet kAnyScope = ScopeSet::All();

// Every call has its row; GrpcServer::Start() fails if the service has a call without one.
// Many clients read the model's description before they generate.
inline constexpr Method kGenerate = {kInference, "Generate", {Scope::kGenerate}};
inline constexpr Method kScore = {kInference, "Score", {Scope::kGenerate}};
inline constexpr Method kEncode = {kInference, "Encode", {Scope::kGenerate}};
inline constexpr Method kTokenize = {kInference, "Tokenize", {Scope::kGenerate}};
inline constexpr Method kDetokenize = {kInference, "Detokenize", {Scope::kGenerate}};
inline constexpr Method kGetExpertStats = {kInference, "GetExpertStats", {Scope::kStatistics}};
inline constexpr Method kGetModelInfo = {
    kInference, "GetModelInfo", {Scope::kStatistics, Scope::kGenerate}};
inline constexpr std::string_view kOpenInference = "inference.GRPCInferenceService";
inline constexpr ScopeSet kModelScopes = {Scope::kStatistics, Scope::kGenerate};
inline constexpr Method kServerLive = {kOpenInference, "ServerLive", kAnyScope};
inline constexpr Method kServerReady = {kOpenInference, "ServerReady", kAnyScope};
inline constexpr Method kServerMetadata = {kOpenInference, "ServerMetadata", kAnyScope};
inline constexpr Method kModelReady = {kOpenInference, "ModelReady", kModelScopes};
inline constexpr Method kModelMetadata = {kOpenInference, "ModelMetadata", kModelScopes};
inline constexpr Method kModelInfer = {kOpenInference, "ModelInfer", {Scope::kGenerate}};
inline constexpr Method kModelStreamInfer = {
    kOpenInference, "ModelStreamInfer", {Scope::kGenerate}};
inline constexpr Method kRepositoryIndex = {kOpenInference, "RepositoryIndex", kModelScopes};
inline constexpr Method kRepositoryModelLoad = {
    kOpenInference, "RepositoryModelLoad", {Scope::kAdmin}};
inline constexpr Method kRepositoryModelUnload = {
    kOpenInference, "RepositoryModelUnload", {Scope::kAdmin}};
// Reflection describes the interface, which is public. It needs a key so that strangers cannot
// hold streams open.
inline constexpr Method kReflectionV1Alpha = {"grpc.reflection.v1alpha.ServerReflection",
                                              "ServerReflectionInfo", kAnyScope};
inline constexpr Method kReflectionV1 = {"grpc.reflection.v1.ServerReflection",
                                         "ServerReflectionInfo", kAnyScope};

// Health checks need no key, so they have no row in kMethods.
inline constexpr std::string_view kHealth = "grpc.health.v1.Health";
inline constexpr Method kHealthCheck = {kHealth, "Check", kAnyScope};
inline constexpr Method kHealthWatch = {kHealth, "Watch", kAnyScope};

inline constexpr const Method* kMethods[] = {&kGenerate,
                                             &kScore,
                                             &kEncode,
                                             &kTokenize,
                                             &kDetokenize,
                                             &kGetExpertStats,
                                             &kGetModelInfo,
                                             &kServerLive,
                                             &kServerReady,
                                             &kServerMetadata,
                                             &kModelReady,
                                             &kModelMetadata,
                                             &kModelInfer,
                                             &kModelStreamInfer,
                                             &kRepositoryIndex,
                                             &kRepositoryModelLoad,
                                             &kRepositoryModelUnload,
                                             &kReflectionV1Alpha,
                                             &kReflectionV1};

}  // namespace moeserve::server::rpc
