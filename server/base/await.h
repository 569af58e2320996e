// How coroutines of Asio wait for an operation.
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace moeserve::server {

// With this completion token, co_await returns the error code with the results and does not throw.
inline constexpr auto kAwait = boost::asio::as_tuple(boost::asio::use_awaitable);

}  // namespace moeserve::server
