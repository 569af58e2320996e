// The members of a specification, one by one, for tests that must not miss any.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "engine/spec/spec.h"

namespace moeserve::testing {

// The members of each structure of a specification. The bindings do not compile if a structure gets
// another member; a member that is added here takes part in every test that uses these functions.
template <typename T, typename Struct>
concept Is = std::same_as<std::remove_const_t<T>, Struct>;

template <Is<NormSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h] = s;
  return std::tie(a, b, c, d, e, f, g, h);
}
template <Is<RopeScaling> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j, k, l] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k, l);
}
template <Is<PositionSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j, k] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k);
}
template <Is<QueryScaleSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c] = s;
  return std::tie(a, b, c);
}
template <Is<LayerInputSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e] = s;
  return std::tie(a, b, c, d, e);
}
template <Is<RelativeBias> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d] = s;
  return std::tie(a, b, c, d);
}
template <Is<SplitSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f] = s;
  return std::tie(a, b, c, d, e, f);
}
template <Is<ScoreSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j);
}
template <Is<SelectSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j);
}
template <Is<ExpertSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j);
}
template <Is<NullExperts> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d] = s;
  return std::tie(a, b, c, d);
}
template <Is<RoutedLayerSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m);
}
template <Is<LatentSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f] = s;
  return std::tie(a, b, c, d, e, f);
}
template <Is<AttentionSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, t, u, v, w, x, y, z, aa, ab, ac, ad,
         ae] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, t, u, v, w, x, y, z, aa, ab,
                  ac, ad, ae);
}
template <Is<FeedForwardSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i] = s;
  return std::tie(a, b, c, d, e, f, g, h, i);
}
template <Is<ShortConvolutionSpec> T>
auto MembersOf(T& s) {
  auto& [a, b] = s;
  return std::tie(a, b);
}
template <Is<DeltaSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j, k] = s;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k);
}
template <Is<StateSpaceSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i] = s;
  return std::tie(a, b, c, d, e, f, g, h, i);
}
template <Is<CrossAttentionSpec> T>
auto MembersOf(T& s) {
  auto& [a] = s;
  return std::tie(a);
}
template <Is<ResidualSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c] = s;
  return std::tie(a, b, c);
}
template <Is<BlockSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d] = s;
  return std::tie(a, b, c, d);
}
template <Is<HeadLayerSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c] = s;
  return std::tie(a, b, c);
}
template <Is<HeadSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e] = s;
  return std::tie(a, b, c, d, e);
}
template <Is<DenseSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c] = s;
  return std::tie(a, b, c);
}
template <Is<PoolingSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c] = s;
  return std::tie(a, b, c);
}
template <Is<ModelSpec> T>
auto MembersOf(T& s) {
  auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, t, u, v, w, x, y, z, aa, ab, ac,
         ad] = s;
  // Files have none of the others: the stack, the encoder and the prediction layers.
  return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, t, u, v, w, x, y, ab, ac);
}

template <typename T>
concept Structure = requires(T& s) {
  MembersOf(s);
};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <typename T>
struct IsVariant : std::false_type {};
template <typename... T>
struct IsVariant<std::variant<T...>> : std::true_type {};
template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

// Whether all members are equal.
template <typename T>
bool Same(const T& a, const T& b) {
  if constexpr (Is<const T, ModelSpec>) {
    if (a.stack != b.stack || (a.encoder == nullptr) != (b.encoder == nullptr)) return false;
    if (a.encoder != nullptr && !Same(*a.encoder, *b.encoder)) return false;
    if ((a.prediction == nullptr) != (b.prediction == nullptr)) return false;
    if (a.prediction != nullptr && !Same(*a.prediction, *b.prediction)) return false;
  }
  if constexpr (Structure<const T>) {
    const auto of_a = MembersOf(a);
    const auto of_b = MembersOf(b);
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return (Same(std::get<i>(of_a), std::get<i>(of_b)) && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<decltype(of_a)>>());
  } else if constexpr (IsOptional<T>::value) {
    return a.has_value() == b.has_value() && (!a.has_value() || Same(*a, *b));
  } else if constexpr (IsVariant<T>::value) {
    if (a.index() != b.index()) return false;
    return std::visit(
        [&](const auto& x) { return Same(x, std::get<std::decay_t<decltype(x)>>(b)); }, a);
  } else if constexpr (IsVector<T>::value) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const auto& x, const auto& y) { return Same(x, y); });
  } else {
    return a == b;
  }
}

template <typename T>
constexpr const char* StructureName() {
  if constexpr (Is<T, NormSpec>) return "NormSpec";
  if constexpr (Is<T, ResidualSpec>) return "ResidualSpec";
  if constexpr (Is<T, RopeScaling>) return "RopeScaling";
  if constexpr (Is<T, PositionSpec>) return "PositionSpec";
  if constexpr (Is<T, LayerInputSpec>) return "LayerInputSpec";
  if constexpr (Is<T, RelativeBias>) return "RelativeBias";
  if constexpr (Is<T, SplitSpec>) return "SplitSpec";
  if constexpr (Is<T, ScoreSpec>) return "ScoreSpec";
  if constexpr (Is<T, SelectSpec>) return "SelectSpec";
  if constexpr (Is<T, ExpertSpec>) return "ExpertSpec";
  if constexpr (Is<T, NullExperts>) return "NullExperts";
  if constexpr (Is<T, RoutedLayerSpec>) return "RoutedLayerSpec";
  if constexpr (Is<T, LatentSpec>) return "LatentSpec";
  if constexpr (Is<T, QueryScaleSpec>) return "QueryScaleSpec";
  if constexpr (Is<T, AttentionSpec>) return "AttentionSpec";
  if constexpr (Is<T, FeedForwardSpec>) return "FeedForwardSpec";
  if constexpr (Is<T, ShortConvolutionSpec>) return "ShortConvolutionSpec";
  if constexpr (Is<T, DeltaSpec>) return "DeltaSpec";
  if constexpr (Is<T, StateSpaceSpec>) return "StateSpaceSpec";
  if constexpr (Is<T, CrossAttentionSpec>) return "CrossAttentionSpec";
  if constexpr (Is<T, BlockSpec>) return "BlockSpec";
  if constexpr (Is<T, HeadLayerSpec>) return "HeadLayerSpec";
  if constexpr (Is<T, HeadSpec>) return "HeadSpec";
  if constexpr (Is<T, DenseSpec>) return "DenseSpec";
  if constexpr (Is<T, PoolingSpec>) return "PoolingSpec";
  if constexpr (Is<T, ModelSpec>) return "ModelSpec";
}

// Calls visit(name, member) for every member that is no structure, such as "NormSpec.1"; members
// count from 0. Also visits the members of optional structures, and of the first layer.
template <typename T, typename Visit>
void ForMembers(T& structure, const Visit& visit) {
  const auto members = MembersOf(structure);
  const auto one = [&]<size_t i>() {
    auto& member = std::get<i>(members);
    using Member = std::remove_reference_t<decltype(member)>;
    if constexpr (Structure<Member>) {
      ForMembers(member, visit);
    } else {
      visit(std::string(StructureName<T>()) + "." + std::to_string(i), member);
      if constexpr (IsOptional<Member>::value) {
        if constexpr (Structure<typename Member::value_type>) {
          if (member.has_value()) ForMembers(*member, visit);
        }
      } else if constexpr (std::is_same_v<Member, std::vector<BlockSpec>>) {
        for (BlockSpec& block : member) {
          if (block.layer > 0) break;
          std::visit([&](auto& mixer) { ForMembers(mixer, visit); }, block.mixer);
          ForMembers(block.residual, visit);
        }
      }
    }
  };
  [&]<size_t... i>(std::index_sequence<i...>) { (one.template operator()<i>(), ...); }
  (std::make_index_sequence<std::tuple_size_v<decltype(members)>>());
}

}  // namespace moeserve::testing
