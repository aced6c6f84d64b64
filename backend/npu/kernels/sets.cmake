# The kernel sets: for each architecture the folders beside this file, and the compiler's options for each folder. Which
# of them a CPU can run, and in which order they are tried, says dispatch.cpp. portable/ is in all of them.
set(KERNEL_SETS_x86_64 amx avx512bf16 avx512vnni avxvnni avx2)
set(KERNEL_SETS_aarch64 i8mm neon)
set(KERNEL_SETS_hexagon hvx)

set(KERNEL_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(KERNEL_FLAGS_avxvnni ${KERNEL_FLAGS_avx2} -mavxvnni)
# gcc 12 warns about its own _mm512_undefined()
set(KERNEL_FLAGS_avx512vnni ${KERNEL_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
    -Wno-uninitialized -Wno-maybe-uninitialized)
set(KERNEL_FLAGS_avx512bf16 ${KERNEL_FLAGS_avx512vnni} -mavx512bf16)
set(KERNEL_FLAGS_amx ${KERNEL_FLAGS_avx512bf16} -mamx-tile -mamx-int8)

# gcc's first scheduling pass hoists loads until a kernel's sums no longer fit into the registers
set(KERNEL_UNSCHEDULED $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
set(KERNEL_FLAGS_neon -march=armv8.2-a+dotprod+fp16 ${KERNEL_UNSCHEDULED})
set(KERNEL_FLAGS_i8mm -march=armv8.2-a+dotprod+fp16+i8mm ${KERNEL_UNSCHEDULED})

# hexagon: all of that build is compiled for the vector unit
set(KERNEL_FLAGS_hvx "")

# kernel_sources(<variable> <architecture>): the sources of its sets and of portable/, each with its options.
function(kernel_sources variable architecture)
    set(here ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
    file(GLOB sources CONFIGURE_DEPENDS ${here}/*.cpp ${here}/portable/*.cpp)
    foreach(isa IN LISTS KERNEL_SETS_${architecture})
        file(GLOB of_set CONFIGURE_DEPENDS ${here}/${isa}/*.cpp)
        if(NOT of_set)
            message(FATAL_ERROR "kernel set ${isa} has no sources in ${here}")
        endif()
        set_source_files_properties(${of_set} PROPERTIES COMPILE_OPTIONS "${KERNEL_FLAGS_${isa}}")
        list(APPEND sources ${of_set})
    endforeach()
    set(${variable} ${sources} PARENT_SCOPE)
endfunction()
