# The headers of Boost and gRPC, precompiled once for the server, its clients and the code that is
# generated from proto files: parsing them takes longer than compiling most files. All of that code
# is compiled with -O1: what it does for a request takes far less time than the model, so that -O2
# does not measurably lower the processor time of a request.
set(network_options -O1)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(Boost 1.81 REQUIRED)
moeserve_header_set(moeserve_network_headers OPTIONS ${network_options} HEADERS
  <boost/asio.hpp> <boost/asio/ssl.hpp> <boost/beast/core.hpp> <boost/beast/http.hpp>
  <grpcpp/grpcpp.h> ${MOESERVE_JSON_HEADERS})
target_include_directories(moeserve_network_headers SYSTEM PRIVATE ${Boost_INCLUDE_DIRS})
target_link_libraries(moeserve_network_headers PRIVATE gRPC::grpc++ OpenSSL::SSL)
