// Tile layout, version 2: types whose blocks hold 256 k. Where each field of a block panel is.
//
// A block panel is 32 columns x 256 k: its quants, then its scales, each field with its 32 columns side by side, so
// that one load gives one field of 8, 16 or 32 columns. It has the very bytes of 32 ggml super-blocks, as a GGUF needs
// it; of grid types (IQ1 to IQ3) it is larger, and made while a model loads. Block panel (kb, nt) of a matrix has index
// nt * (K/256) + kb.
//
// clang-format off
//   Q4_K     nibbles | scales and minima six(8) | d f16[32] | dmin f16[32]                w = d s q - dmin m
//   Q5_K     nibbles | single bits (16) | scales and minima six(8) | d | dmin             w = d s q - dmin m
//   Q6_K     nibbles | pairs of bits (16) | scales i8[16][32] | d                         w = d s (q - 32)
//   Q2_K     pairs of bits (1) | scales, and minima above, u8[16][32] | d | dmin          w = d s q - dmin m
//   Q3_K     pairs of bits (1) | single bits (4) | scales six(8) | d                      w = d (s - 32) (q - 4)
//   IQ4_XS   nibbles | scales six(4) | d                                                  w = d (s - 32) value[q]
//   TQ2_0    pairs of bits (1) | d                                                        w = d (q - 1)
//   TQ1_0    digits | d                                                                   w = d (q - 1)
//   IQ2_XXS  pairs of bits (1) | single bits (4) | four(8) | d                            w = d/8 (2s + 1) iq2[q]
//   IQ2_XS, IQ2_S      the same with four(16)                                             w = d/8 (2s + 1) iq2[q]
//   IQ3_XXS, IQ3_S     nibbles | four(8) | d                                              w = d/4, d (2s + 1) iq3[q]
//   IQ1_S    pairs of bits (1) | four(8), bit 3 not of s, but b | d                       w = d/8 (2s + 1) iq1[q + 4b]
//   IQ1_M    pairs of bits (1) | single bits (4) | four(16) | d                           w = d/8 (2s + 1) iq1[q]
// clang-format on
//
//   nibbles         eight quad-order tiles of 4 bits (layout.h)
//   pairs of bits   eight times 256 bytes; of tile t: byte 128 (j >> 2) + 4n + (the byte's place in its quad),
//                   bits 2 (j & 3) and the next = quad j (k 4j .. 4j + 3); (v): what the lower of them counts in q
//   single bits     eight times 128 bytes; of tile t: byte 4n + (place in its quad), bit j = quad j
//   digits          u8[13][128], each row a quad of bytes: 4n + (the byte's place). Digit i of byte b, to the base of
//                   3, is (b * 3^i mod 256) * 3 >> 8; five in a byte. Digit i of rows 0 to 7: k 32 i on; of rows 8 to
//                   11: k 160 + 16 i on; of row 12, which has four: k 240 + 4 i on.
//   six(h)          2h numbers of six bits in u8[h][32], u8[h / 2][32]. The first h / 2 of the numbers, the second, the
//                   third and the fourth have their low bits in: the low nibbles of the first h / 2 bytes, of the
//                   second, the high nibbles of the first, of the second; and their top two bits in the bytes of the
//                   second array, at bits 0, 2, 4, 6. Q4_K, Q5_K: scales of the tiles, then minima.
//   four(n)         n numbers of four bits in u8[n / 2][32]: the first half in low nibbles, the second in high ones
//   scales          one for each tile, or, 16 of them, [2t] for quads 0 to 3 of tile t, [2t + 1] for quads 4 to 7
#ifndef TILEBEAM_K_PANELS_H
#define TILEBEAM_K_PANELS_H

#define TB_K_BLOCK 256          // k of a block
#define TB_K_NIBBLES 4096       // bytes of a panel's nibbles,
#define TB_K_PAIRS 2048         // of its pairs of bits,
#define TB_K_ONES 1024          // of its single bits,
#define TB_K_HALVES 64          // of f16[32],
#define TB_K_SIX(h) (48 * (h))  // of six(h)
#define TB_K_FOUR(n) (16 * (n)) // of four(n)

// Where scales begin, where d begins, and all bytes.
#define TB_Q4_K_FIELDS TB_K_NIBBLES
#define TB_Q4_K_HALVES (TB_Q4_K_FIELDS + TB_K_SIX(8))
#define TB_Q4_K_PANEL (TB_Q4_K_HALVES + 2 * TB_K_HALVES)
#define TB_Q5_K_FIELDS (TB_K_NIBBLES + TB_K_ONES)
#define TB_Q5_K_HALVES (TB_Q5_K_FIELDS + TB_K_SIX(8))
#define TB_Q5_K_PANEL (TB_Q5_K_HALVES + 2 * TB_K_HALVES)
#define TB_Q6_K_FIELDS (TB_K_NIBBLES + TB_K_PAIRS)
#define TB_Q6_K_HALVES (TB_Q6_K_FIELDS + 16 * 32)
#define TB_Q6_K_PANEL (TB_Q6_K_HALVES + TB_K_HALVES)
#define TB_Q2_K_FIELDS TB_K_PAIRS
#define TB_Q2_K_HALVES (TB_Q2_K_FIELDS + 16 * 32)
#define TB_Q2_K_PANEL (TB_Q2_K_HALVES + 2 * TB_K_HALVES)
#define TB_Q3_K_FIELDS (TB_K_PAIRS + TB_K_ONES)
#define TB_Q3_K_HALVES (TB_Q3_K_FIELDS + TB_K_SIX(8))
#define TB_Q3_K_PANEL (TB_Q3_K_HALVES + TB_K_HALVES)
#define TB_IQ4_XS_FIELDS TB_K_NIBBLES
#define TB_IQ4_XS_HALVES (TB_IQ4_XS_FIELDS + TB_K_SIX(4))
#define TB_IQ4_XS_PANEL (TB_IQ4_XS_HALVES + TB_K_HALVES)
#define TB_TQ2_0_HALVES TB_K_PAIRS
#define TB_TQ2_0_PANEL (TB_TQ2_0_HALVES + TB_K_HALVES)
#define TB_TQ1_0_HALVES (13 * 128)
#define TB_TQ1_0_PANEL (TB_TQ1_0_HALVES + TB_K_HALVES)
#define TB_IQ2_FIELDS (TB_K_PAIRS + TB_K_ONES) // IQ1_M, too
#define TB_IQ2_XXS_HALVES (TB_IQ2_FIELDS + TB_K_FOUR(8))
#define TB_IQ2_XXS_PANEL (TB_IQ2_XXS_HALVES + TB_K_HALVES)
#define TB_IQ2_XS_HALVES (TB_IQ2_FIELDS + TB_K_FOUR(16)) // IQ2_S and IQ1_M, too
#define TB_IQ2_XS_PANEL (TB_IQ2_XS_HALVES + TB_K_HALVES)
#define TB_IQ3_FIELDS TB_K_NIBBLES
#define TB_IQ3_HALVES (TB_IQ3_FIELDS + TB_K_FOUR(8))
#define TB_IQ3_PANEL (TB_IQ3_HALVES + TB_K_HALVES)
#define TB_IQ1_S_FIELDS TB_K_PAIRS
#define TB_IQ1_S_HALVES (TB_IQ1_S_FIELDS + TB_K_FOUR(8))
#define TB_IQ1_S_PANEL (TB_IQ1_S_HALVES + TB_K_HALVES)

#endif // TILEBEAM_K_PANELS_H
