// Element types and status codes that both sides of the channel, the packer and Python share.
#ifndef TILEBEAM_TYPES_H
#define TILEBEAM_TYPES_H

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
// Values are part of the protocol and of repacked files' metadata: append, never renumber.
enum tb_type {
    TB_F32 = 0,
    TB_F16 = 1,
    TB_BF16 = 2,
    TB_I32 = 3,
    TB_I64 = 4,
    // plain ggml blocks, rows of K/32 blocks
    TB_Q4_0 = 5,
    TB_Q8_0 = 6,
    TB_IQ4_NL = 7,
    // tiles, `column` grouping
    TB_Q4_0_COL = 8,
    TB_Q8_0_COL = 9,
    TB_IQ4_NL_COL = 10,
    // tiles, `tile` (2x16) grouping
    TB_Q4_0_TILE = 11,
    TB_Q8_0_TILE = 12,
    TB_IQ4_NL_TILE = 13,
    TB_TYPE_COUNT = 14,
};

enum tb_status {
    TB_OK = 0,
    TB_E_UNSUPPORTED = 1, // the op, or this type or shape of it, is not one the executor has
    TB_E_SHAPE = 2,       // operands do not fit together, or a dimension overflows
    TB_E_BOUNDS = 3,      // a tensor, or an index read from one, lies outside its buffer
    TB_E_BUFFER = 4,      // no such buffer, or it is read-only
    TB_E_NOMEM = 5,       // allocation or mapping failed, or the session's memory limit is reached
    TB_E_PROTOCOL = 6,    // malformed message
    TB_E_VERSION = 7,     // the peer speaks another protocol or layout version
    TB_E_DEAD = 8,        // the peer is gone
    TB_E_DEADLINE = 9,    // the peer did not answer in time
    TB_E_INTERNAL = 10,   // a bug on the side that reports it
};

// Size of one element (or of one block of 32) in bytes, and elements per block; 0 for tiled or unknown types.
unsigned tb_type_size(unsigned type);
unsigned tb_type_block(unsigned type);
int tb_type_is_tiled(unsigned type);
const char * tb_type_name(unsigned type);
const char * tb_status_name(int status);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_TYPES_H
