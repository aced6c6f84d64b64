// Tile layout, version 2: the K-quants, whose blocks hold 256 k. Where each field of a block panel is.
//
// A block panel is 32 columns x 256 k: eight quad-order quant tiles of 4 bits (layout.h), then what each of the types
// adds, with its 32 columns side by side, so that one load gives one field of 8, 16 or 32 columns. It has the very
// bytes of 32 ggml super-blocks, as a GGUF needs it. Block panel (kb, nt) of a matrix has index nt * (K/256) + kb.
//
// clang-format off
//   Q4_K   quants 8 x 512 | scales and minima u8[8][32], u8[4][32] | d f16[32] | dmin f16[32]    w = d s q - dmin m
//   Q5_K   quants 8 x 512 | fifth bits 8 x 128 | scales and minima, d, dmin as Q4_K              w = d s q - dmin m
//   Q6_K   quants 8 x 512 | bits 4, 5: 8 x 256 | scales i8[16][32] | d f16[32]                   w = d s (q - 32)
// clang-format on
//
//   fifth bits   of tile t: byte 4n + (the byte's place in its quad), bit j = quad j (k 4j .. 4j + 3)
//   bits 4, 5    of tile t: byte 128 (j >> 2) + 4n + (place in its quad), bits 2 (j & 3) and the next = quad j
//   scales       Q4_K, Q5_K, six bits each, and a minimum, for each tile t: in byte t of the first array the low four
//                bits of the scale and, above them, of the minimum. In byte r of the second, from bit 0 on, two bits
//                each: top of scale r, of scale r + 4, of minimum r, of minimum r + 4.
//                Q6_K: [2t] of quads 0 to 3 of tile t, [2t + 1] of quads 4 to 7
#ifndef TILEBEAM_K_PANELS_H
#define TILEBEAM_K_PANELS_H

#define TB_K_BLOCK 256                                         // k of a block
#define TB_K_QUANTS 4096                                       // bytes of the 4-bit quants, in every type
#define TB_Q5_K_PLANE 128                                      // bytes of a tile's fifth bits
#define TB_Q6_K_PLANE 256                                      // bytes of a tile's bits 4 and 5
#define TB_K_LOW 256                                           // bytes of u8[8][32]: low bits of scales and minima
#define TB_K_HIGH 128                                          // bytes of u8[4][32]: their top bits
#define TB_Q6_K_SCALES 512                                     // bytes of i8[16][32]
#define TB_K_HALVES 64                                         // bytes of f16[32]
#define TB_Q4_K_FIELDS TB_K_QUANTS                             // where scales begin
#define TB_Q5_K_FIELDS (TB_K_QUANTS + 8 * TB_Q5_K_PLANE)       // where scales begin
#define TB_Q6_K_FIELDS (TB_K_QUANTS + 8 * TB_Q6_K_PLANE)       // where scales begin
#define TB_Q4_K_HALVES (TB_Q4_K_FIELDS + TB_K_LOW + TB_K_HIGH) // where d begins
#define TB_Q5_K_HALVES (TB_Q5_K_FIELDS + TB_K_LOW + TB_K_HIGH) // where d begins
#define TB_Q6_K_HALVES (TB_Q6_K_FIELDS + TB_Q6_K_SCALES)       // where d begins
#define TB_Q4_K_PANEL (TB_Q4_K_HALVES + 2 * TB_K_HALVES)       // 4608 bytes
#define TB_Q5_K_PANEL (TB_Q5_K_HALVES + 2 * TB_K_HALVES)       // 5632
#define TB_Q6_K_PANEL (TB_Q6_K_HALVES + TB_K_HALVES)           // 6720

#endif // TILEBEAM_K_PANELS_H
