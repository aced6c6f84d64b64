# ggml's headers come from source distributions of llama-cpp-python, never from this repository: the backend vtables in
# ggml-backend-impl.h are positional and are not part of the wheel.
#
# add_plugin(TARGET RELEASE) makes the plugin for one release, and the target ggml-base-soname is an empty library that
# leaves only "needs libggml-base.so.0" in whoever links it: at run time the loader finds the copy that libllama has
# mapped, so that nothing of llama-cpp-python is needed to build.
set(TILEBEAM_GGML_SOURCE "" CACHE PATH "an unpacked source distribution of llama-cpp-python, or a folder with several \
(llama_cpp_python-VERSION); empty: fetched with pip")
set(TILEBEAM_SOURCE_CACHE ${CMAKE_SOURCE_DIR}/build/ggml-source CACHE PATH "where fetched ones are kept")
set(TILEBEAM_RELEASE "" CACHE STRING "release of llama-cpp-python to build the plugin for; empty: the newest known")
set(TILEBEAM_RELEASES "" CACHE STRING "others to build it for, too, or: all")

set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/pyproject.toml) # has the releases
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter)
set(GGML_SOURCE_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/ggml_source.py)

# What ggml_release.h asks: name, header, and what it holds where the name is true.
set(GGML_DIFFERENCES
    OPTIMIZE_PARAMS src/ggml-backend-impl.h "ggml_backend_graph_optimize_params"
    MMAP_SUPPORT include/ggml-backend.h "bool mmap_support"
    SCAN_SNAPSHOTS include/ggml.h "ids,[ \n]*int64_t +K"
    LIGHTNING_INDEXER include/ggml.h "GGML_OP_LIGHTNING_INDEXER"
    GATED_HYPER_CONNECTIONS include/ggml.h "ggml_dsv4_hc_pre_gated")

function(add_plugin TARGET RELEASE)
    set(SOURCE "")
    if(TILEBEAM_GGML_SOURCE AND EXISTS "${TILEBEAM_GGML_SOURCE}/llama_cpp_python-${RELEASE}")
        set(SOURCE ${TILEBEAM_GGML_SOURCE}/llama_cpp_python-${RELEASE})
    elseif("${TARGET}" STREQUAL "ggml-tilebeam")
        set(SOURCE ${TILEBEAM_GGML_SOURCE})
    endif()
    execute_process(
        COMMAND ${Python3_EXECUTABLE} ${GGML_SOURCE_SCRIPT} --release "${RELEASE}" --source "${SOURCE}"
                --cache ${TILEBEAM_SOURCE_CACHE}
        OUTPUT_VARIABLE INFO OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE RESULT)
    if(NOT RESULT EQUAL 0)
        message(FATAL_ERROR "Tilebeam could not get ggml's headers (see above).")
    endif()
    list(GET INFO 0 DIR)
    list(GET INFO 1 VERSION)
    list(GET INFO 2 COMMIT)
    message(STATUS "llama-cpp-python ${RELEASE}: ggml ${VERSION} (${COMMIT}) at ${DIR}")
    add_library(${TARGET} MODULE ${PLUGIN_SOURCES})
    target_include_directories(${TARGET} PRIVATE plugin)
    target_include_directories(${TARGET} SYSTEM PRIVATE ${DIR}/include ${DIR}/src)
    target_compile_definitions(${TARGET} PRIVATE TILEBEAM_GGML_VERSION="${VERSION}" TILEBEAM_GGML_COMMIT="${COMMIT}")
    set(LEFT ${GGML_DIFFERENCES})
    while(LEFT)
        list(POP_FRONT LEFT NAME HEADER PATTERN)
        file(READ ${DIR}/${HEADER} TEXT)
        if(TEXT MATCHES "${PATTERN}")
            target_compile_definitions(${TARGET} PRIVATE TB_GGML_HAS_${NAME})
        endif()
    endwhile()
    target_link_libraries(${TARGET} PRIVATE tilebeam_flags tilebeam_session ggml-base-soname)
endfunction()

execute_process(COMMAND ${Python3_EXECUTABLE} ${GGML_SOURCE_SCRIPT} --list OUTPUT_VARIABLE TILEBEAM_KNOWN_RELEASES
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT TILEBEAM_RELEASE)
    list(GET TILEBEAM_KNOWN_RELEASES -1 TILEBEAM_RELEASE)
endif()
if(TILEBEAM_RELEASES STREQUAL "all")
    set(TILEBEAM_RELEASES ${TILEBEAM_KNOWN_RELEASES})
endif()
list(REMOVE_ITEM TILEBEAM_RELEASES ${TILEBEAM_RELEASE})

file(WRITE ${CMAKE_BINARY_DIR}/ggml_base_soname.c "")
add_library(ggml-base-soname SHARED ${CMAKE_BINARY_DIR}/ggml_base_soname.c)
set_target_properties(ggml-base-soname PROPERTIES OUTPUT_NAME ggml-base SOVERSION 0
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/soname)
target_link_options(ggml-base-soname INTERFACE -Wl,--no-as-needed)
