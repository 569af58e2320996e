# What `cmake --install BUILD` installs: the program, its manual pages and completions, which the
# program itself writes, the systemd unit, the licence and the documents. FOLDER of
# `cmake --install BUILD --prefix FOLDER` is /usr/local unless given; DESTDIR is respected.
include(GNUInstallDirs)

# Where bash, zsh and fish look for completions below the prefix. Packages of a distribution install
# those of zsh in "vendor-completions".
set(MOESERVE_ZSH_COMPLETIONS ${CMAKE_INSTALL_DATADIR}/zsh/site-functions CACHE STRING
  "Folder of zsh's completions, relative to the prefix")
set(MOESERVE_SYSTEMD_UNITS lib/systemd/system CACHE STRING
  "Folder of systemd's units, relative to the prefix")

install(TARGETS moeserve RUNTIME)
# What --ranks mpi opens; it needs Open MPI. `cmake --install BUILD --component ranks` installs it.
if(TARGET moeserve_mpi)
  install(FILES $<TARGET_FILE:moeserve_mpi> DESTINATION lib/moeserve COMPONENT ranks EXCLUDE_FROM_ALL)
endif()

# A program for another machine cannot write its pages.
if(NOT CMAKE_CROSSCOMPILING)
  set(generated ${PROJECT_BINARY_DIR}/installed_texts)
  # The date of the manual pages is that of the sources.
  find_package(Git QUIET)
  set(date "")
  if(Git_FOUND)
    execute_process(COMMAND ${GIT_EXECUTABLE} log -1 --format=%cs
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE date OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET)
  endif()
  install(CODE "
    file(REMOVE_RECURSE ${generated})
    file(MAKE_DIRECTORY ${generated})
    set(program $<TARGET_FILE:moeserve>)
    execute_process(COMMAND \${program} man ${generated}/man1 --date \"${date}\"
      COMMAND_ERROR_IS_FATAL ANY)
    foreach(shell bash zsh fish)
      execute_process(COMMAND \${program} completion \${shell}
        OUTPUT_FILE ${generated}/completion.\${shell} COMMAND_ERROR_IS_FATAL ANY)
    endforeach()")
  install(DIRECTORY ${generated}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR})
  install(FILES ${generated}/completion.bash RENAME moeserve
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install(FILES ${generated}/completion.zsh RENAME _moeserve
    DESTINATION ${MOESERVE_ZSH_COMPLETIONS})
  install(FILES ${generated}/completion.fish RENAME moeserve.fish
    DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endif()

# The unit in the sources names the program where an administrator copies it.
set(unit ${PROJECT_BINARY_DIR}/installed_unit)
install(CODE "
  file(READ ${PROJECT_SOURCE_DIR}/deploy/systemd/moeserve.service text)
  string(REPLACE /usr/local/bin/moeserve \${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/moeserve
    text \"\${text}\")
  file(WRITE ${unit}/moeserve.service \"\${text}\")")
install(FILES ${unit}/moeserve.service DESTINATION ${MOESERVE_SYSTEMD_UNITS})

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md
  ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES ${PROJECT_SOURCE_DIR}/server/README.md RENAME server.md
  DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/README.md RENAME systemd.md
  DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/moeserve.yaml
  DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples)
install(FILES ${PROJECT_SOURCE_DIR}/proto/moeserve/v1/moeserve.proto
  DESTINATION ${CMAKE_INSTALL_DATADIR}/moeserve/proto/moeserve/v1)
