// Stands in for clang's header of this name where HVX kernels are compiled for the host: see hvx_hexagon_protos.h.
#ifndef TILEBEAM_TESTS_HVX_EMULATED_TYPES_H
#define TILEBEAM_TESTS_HVX_EMULATED_TYPES_H

using HVX_Vector = int __attribute__((vector_size(128), may_alias));
using HVX_VectorPred = HVX_Vector; // a byte of ones for each byte that is set
using HVX_VectorPair = int __attribute__((vector_size(256), may_alias));
using HVX_UVector = int __attribute__((vector_size(128), aligned(1), may_alias));

#endif // TILEBEAM_TESTS_HVX_EMULATED_TYPES_H
