# Builds tilebeam-npud-hexagon, and with TILEBEAM_TESTS the programs of tests/hexagon, where clang for Hexagon, ld.lld and libc++'s headers
# are there; everything else does without them. See CMakeLists.txt beside this file.
option(TILEBEAM_HEXAGON "build tilebeam-npud-hexagon if the tools for it are there" ON)
if(NOT TILEBEAM_HEXAGON OR TILEBEAM_FUZZ)
    return()
endif()
find_program(TILEBEAM_HEXAGON_CLANG NAMES clang-19 DOC "clang with the Hexagon target; another release than 19 must be named by hand")
find_program(TILEBEAM_HEXAGON_LLD NAMES ld.lld-19 DOC "the linker of the same LLVM release")
set(missing "")
if(NOT TILEBEAM_HEXAGON_CLANG)
    list(APPEND missing clang-19)
endif()
if(NOT TILEBEAM_HEXAGON_LLD)
    list(APPEND missing lld-19)
endif()
if(TILEBEAM_HEXAGON_CLANG)
    execute_process(COMMAND ${TILEBEAM_HEXAGON_CLANG} -print-resource-dir OUTPUT_VARIABLE resources
                    OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT EXISTS ${resources}/../../../include/c++/v1/vector)
        list(APPEND missing libc++-19-dev)
    endif()
    execute_process(COMMAND ${TILEBEAM_HEXAGON_CLANG} -print-targets OUTPUT_VARIABLE targets ERROR_QUIET)
    if(NOT targets MATCHES "hexagon")
        list(APPEND missing "a clang with the Hexagon target")
    endif()
endif()
if(missing)
    list(JOIN missing ", " missing)
    message(STATUS "tilebeam-npud-hexagon is not built; missing: ${missing}")
    return()
endif()

include(ExternalProject)
ExternalProject_Add(tilebeam_hexagon
    SOURCE_DIR ${CMAKE_CURRENT_LIST_DIR}
    BINARY_DIR ${CMAKE_BINARY_DIR}/hexagon
    CMAKE_ARGS
        -DCMAKE_TOOLCHAIN_FILE=${CMAKE_CURRENT_LIST_DIR}/toolchain.cmake
        -DTILEBEAM_HEXAGON_CLANG=${TILEBEAM_HEXAGON_CLANG}
        -DTILEBEAM_HEXAGON_LLD=${TILEBEAM_HEXAGON_LLD}
        -DTILEBEAM_GENERATED=${CMAKE_BINARY_DIR}/generated
        -DTILEBEAM_WERROR=${TILEBEAM_WERROR}
        -DTILEBEAM_TESTS=${TILEBEAM_TESTS}
        -DOUT=${CMAKE_LIBRARY_OUTPUT_DIRECTORY}
    BUILD_ALWAYS TRUE # ninja finds out by itself what is left to do
    INSTALL_COMMAND ""
    DEPENDS tilebeam_build_id)
install(PROGRAMS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/tilebeam-npud-hexagon DESTINATION tilebeam/lib)
