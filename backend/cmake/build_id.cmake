# Writes OUT, a header with a digest of all sources that decide what a message means: a tilebeam-npud from other sources
# than its program is refused in the handshake. Run as a script: cmake -DROOT=.. -DOUT=.. -P build_id.cmake
file(GLOB_RECURSE sources RELATIVE ${ROOT}
    ${ROOT}/ggml_ext/include/*.h ${ROOT}/ggml_ext/src/*.[ch]
    ${ROOT}/backend/base/*.cpp ${ROOT}/backend/base/*.h ${ROOT}/backend/npu/*.cpp ${ROOT}/backend/npu/*.h
    ${ROOT}/backend/session/*.cpp ${ROOT}/backend/session/*.h ${ROOT}/backend/npud/*.cpp)
list(SORT sources)
set(all "")
foreach(source IN LISTS sources)
    file(SHA256 ${ROOT}/${source} digest)
    string(APPEND all "${source} ${digest}\n")
endforeach()
string(SHA256 digest "${all}")
string(SUBSTRING ${digest} 0 32 text) # TB_BUILD_ID_BYTES
string(REGEX REPLACE "(..)" "0x\\1, " bytes ${text})
file(WRITE ${OUT} "// Made by backend/cmake/build_id.cmake.\n#define TILEBEAM_BUILD_ID \"${text}\"\n#define TILEBEAM_BUILD_ID_BYTES ${bytes}\n")
