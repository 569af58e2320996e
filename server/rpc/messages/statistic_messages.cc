#include "server/rpc/messages/statistic_messages.h"

#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/check.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/reflection.h"

namespace moeserve::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

// Sets a field. Protobuf's reflection stops the process if the field has another type than T.
template <typename T>
void SetField(Message& to, const FieldDescriptor* field, const T& value) {
  const Reflection* reflection = to.GetReflection();
  if constexpr (IsVector<T>::value) {
    auto repeated = reflection->GetMutableRepeatedFieldRef<typename T::value_type>(&to, field);
    for (const auto& element : value) repeated.Add(element);
  } else if constexpr (std::is_same_v<T, std::string>) {
    reflection->SetString(&to, field, value);
  } else if constexpr (std::is_same_v<T, double>) {
    reflection->SetDouble(&to, field, value);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    reflection->SetUInt64(&to, field, value);
  } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32) {
    reflection->SetUInt32(&to, field, static_cast<uint32_t>(value));
  } else {
    reflection->SetInt64(&to, field, value);
  }
}

template <typename Stats>
void Set(Message& to, std::span<const Statistic<Stats>> list, const Stats& stats,
         const StatisticOptions& options) {
  for (const Statistic<Stats>& statistic : list) {
    if (statistic.proto.empty()) continue;
    const FieldDescriptor* field =
        to.GetDescriptor()->FindFieldByName(std::string(statistic.proto));
    MOESERVE_CHECK(field != nullptr, "the message has a field for the statistic");
    std::visit([&](const auto& value) { SetField(to, field, value); },
               statistic.value(stats, options));
  }
}

}  // namespace

void SetStatistics(Message& to, std::span<const BlockStatistic> list, const BlockExpertStats& block,
                   const StatisticOptions& options) {
  Set(to, list, block, options);
}

void SetStatistics(Message& to, std::span<const ModelStatistic> list, const ExpertStats& stats,
                   const StatisticOptions& options) {
  Set(to, list, stats, options);
}

}  // namespace moeserve::server
