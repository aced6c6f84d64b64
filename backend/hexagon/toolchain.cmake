# clang for Hexagon v66 with 128-byte HVX vectors, and ld.lld called directly: Debian has no Hexagon C library for a
# compiler driver to find.
set(CMAKE_SYSTEM_NAME Generic)
set(CMAKE_SYSTEM_PROCESSOR hexagon)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_C_COMPILER ${TILEBEAM_HEXAGON_CLANG})
set(CMAKE_CXX_COMPILER ${TILEBEAM_HEXAGON_CLANG})
set(CMAKE_C_COMPILER_WORKS TRUE)
set(CMAKE_CXX_COMPILER_WORKS TRUE)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TILEBEAM_HEXAGON_CLANG TILEBEAM_HEXAGON_LLD)
string(JOIN " " TILEBEAM_HEXAGON_FLAGS
    --target=hexagon-unknown-none-elf -mv66 -mhvx=v66 -mhvx-length=128B
    -nostdlibinc -ffunction-sections -fdata-sections -ffp-contract=off -fno-math-errno)
set(CMAKE_C_FLAGS_INIT "${TILEBEAM_HEXAGON_FLAGS}")
set(CMAKE_CXX_FLAGS_INIT "${TILEBEAM_HEXAGON_FLAGS} -x c++ -nostdinc++ -fno-exceptions -fno-rtti")
foreach(language C CXX)
    set(CMAKE_${language}_LINK_EXECUTABLE
        "${TILEBEAM_HEXAGON_LLD} -static --gc-sections -e _start -o <TARGET> <OBJECTS> <LINK_LIBRARIES>")
endforeach()
