# cmake -DSOURCE=FOLDER -DOUTPUT=FILE -P write_commit.cmake
#
# Writes the value of kCommit: the git commit of FOLDER, followed by "-dirty" if files have
# uncommitted changes. The value is empty if FOLDER is not the top folder of a git clone, for
# example an unpacked archive inside another project's repository.
cmake_minimum_required(VERSION 3.25)

set(commit "")
set(ENV{GIT_OPTIONAL_LOCKS} 0)
find_program(git git)
if(git)
  execute_process(COMMAND ${git} rev-parse --show-toplevel WORKING_DIRECTORY ${SOURCE}
    OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(REAL_PATH "${SOURCE}" here)
  if(top STREQUAL here)
    execute_process(COMMAND ${git} describe --always --dirty --abbrev=40 --exclude=*
      WORKING_DIRECTORY ${SOURCE}
      OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
if(NOT commit MATCHES "^[0-9a-f]+(-dirty)?$")
  set(commit "")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "constexpr std::string_view kCommit = \"@commit@\";\n" @ONLY)
