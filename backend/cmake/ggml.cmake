# ggml's headers come from the source distribution of the pinned llama-cpp-python, never from this repository: the
# backend vtables in ggml-backend-impl.h are positional and are not part of the wheel.
#
# Sets GGML_SOURCE_DIR (…/vendor/llama.cpp/ggml), GGML_SOURCE_VERSION, GGML_SOURCE_COMMIT and the target
# ggml-base-soname, an empty library that leaves only "needs libggml-base.so.0" in whoever links it: at run time the
# loader finds the copy that libllama has mapped, so that nothing of llama-cpp-python is needed to build.
set(TILEBEAM_GGML_SOURCE "" CACHE PATH "unpacked llama-cpp-python source distribution; empty: fetched with pip")

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/pyproject.toml) # has the pin
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/ggml_source.py --source "${TILEBEAM_GGML_SOURCE}"
            --cache ${CMAKE_SOURCE_DIR}/build/ggml-source
    OUTPUT_VARIABLE GGML_SOURCE_INFO OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE GGML_SOURCE_RESULT)
if(NOT GGML_SOURCE_RESULT EQUAL 0)
    message(FATAL_ERROR "Tilebeam could not get ggml's headers (see above).")
endif()
list(GET GGML_SOURCE_INFO 0 GGML_SOURCE_DIR)
list(GET GGML_SOURCE_INFO 1 GGML_SOURCE_VERSION)
list(GET GGML_SOURCE_INFO 2 GGML_SOURCE_COMMIT)
message(STATUS "ggml ${GGML_SOURCE_VERSION} (${GGML_SOURCE_COMMIT}) at ${GGML_SOURCE_DIR}")

file(WRITE ${CMAKE_BINARY_DIR}/ggml_base_soname.c "")
add_library(ggml-base-soname SHARED ${CMAKE_BINARY_DIR}/ggml_base_soname.c)
set_target_properties(ggml-base-soname PROPERTIES OUTPUT_NAME ggml-base SOVERSION 0
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/soname)
target_link_options(ggml-base-soname INTERFACE -Wl,--no-as-needed)
