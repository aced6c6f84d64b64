// The comparison kernels in one object, for bench/hvx_packets.py to disassemble: the table keeps the compiler from
// leaving out what nothing else calls.
#include "exponents.h"
#include "layouts.h"

namespace tb::bench {

struct counted_kernels {
    void (*columns[3])(const uint8_t * blocks, uint32_t stride, uint16_t * out);
    void (*tiles[3])(const uint8_t * blocks, uint32_t tiles, uint16_t * out);
    void (*exponents[2])(const uint16_t * x, uint32_t n, uint16_t * out);
};

extern const counted_kernels counted;
const counted_kernels counted = {{conventional_one, conventional_arithmetic, conventional_tuned},
                                 {tile_groups, super_blocks, copy_quants},
                                 {exp2_fp16_polynomial, exp2_fp32_polynomial}};

} // namespace tb::bench
