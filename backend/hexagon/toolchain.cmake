# clang for Hexagon, and ld.lld called directly: Debian has no Hexagon C library for a compiler driver to find. The
# flags are in CMakeLists.txt, where a change of them reaches build folders that are there already.
set(CMAKE_SYSTEM_NAME Generic)
set(CMAKE_SYSTEM_PROCESSOR hexagon)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_C_COMPILER ${TILEBEAM_HEXAGON_CLANG})
set(CMAKE_CXX_COMPILER ${TILEBEAM_HEXAGON_CLANG})
set(CMAKE_C_COMPILER_WORKS TRUE)
set(CMAKE_CXX_COMPILER_WORKS TRUE)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TILEBEAM_HEXAGON_CLANG TILEBEAM_HEXAGON_LLD)
foreach(language C CXX)
    set(CMAKE_${language}_LINK_EXECUTABLE
        "${TILEBEAM_HEXAGON_LLD} -static --gc-sections -e _start -o <TARGET> <OBJECTS> <LINK_LIBRARIES>")
endforeach()
