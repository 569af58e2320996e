# Writes a C++ source file that contains the bytes of other files:
#
#   cmake -DOUT=FILE -DFOLDER=FOLDER -DNAMES=a.js,b.css -P embed.cmake
#
# It defines server::http::EmbeddedFiles() of server/http/routes/web_assets.h.
string(REPLACE "," ";" names "${NAMES}")
set(arrays "")
set(entries "")
set(index 0)
foreach(name IN LISTS names)
  file(READ "${FOLDER}/${name}" bytes HEX)
  string(LENGTH "${bytes}" digits)
  math(EXPR size "${digits} / 2")
  string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  string(APPEND arrays "constexpr unsigned char kFile${index}[${size}] = {\n${bytes}};\n")
  string(APPEND entries "      {\"${name}\", View(kFile${index}, ${size})},\n")
  math(EXPR index "${index} + 1")
endforeach()
file(WRITE "${OUT}.tmp" "#include \"server/http/routes/web_assets.h\"

namespace moeserve::server::http {
namespace {

${arrays}
std::string_view View(const unsigned char* bytes, size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

}  // namespace

std::span<const EmbeddedFile> EmbeddedFiles() {
  static const EmbeddedFile files[] = {
${entries}  };
  return files;
}

}  // namespace moeserve::server::http
")
file(COPY_FILE "${OUT}.tmp" "${OUT}")
file(REMOVE "${OUT}.tmp")
