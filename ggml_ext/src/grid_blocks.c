// IQ1 to IQ3. A super-block of ggml has, for each 8 or 4 of its weights, the number of a point of a grid, and the
// weights' signs. A panel has the weights' own codes instead, of 2 to 4 bits: more memory, but a kernel needs sixteen
// values in a register, where up to 2048 points are read by their numbers, 8 or 4 weights of one column at a time.
#include "grid_blocks.h"

#include <stdatomic.h>

#include "half.h"
#include "tile.h"

// ---- grids: their points in order, a point being a number to the base of 3 or 8 whose lowest digit is its first
// weight. A character c of these texts says: the next point, c - ']' after the one that would follow; '~': 33 more.

static const char TERNARY_256[] =
    "]^^^^^^b^`^^^bb`^b^bhd^b`jzhh^n~_v^bf^b^`hf^bhb^`hjp^ft^nznb`^bh`^b^rtt~sf~~`^bfdnhb`jbhndf~kf~mbh`hp~e|~]j~~^^b"
    "nxv`~~^~i~g^brld^~md~k^~~j^bnj~cxp~~zth~k~~~w~o^bb`^bbd`f^bnnxd`tdtdfzbh~_lrf~w~~l^bn`~m~e`f~s|nb`b^~_btv~i~~`~~"
    "j^t~~d~a~efb|~w~w~~hbntz~c~sz~_`~~p^~i~~~~^~~~~~~l^bpxxhh~{~~b^b`jn~_|~]rpn~a~~l~~r~~dbhb~ir~c~u~mpf~~r~~~~~k~g~"
    "~~~j~]rz~~d~~z~~~~~~~}~k";
static const char TERNARY_512[] =
    "]^^^^^^^^^^^^`^^^^^^^`^b^^^`^`^f^^^^^^^^^^b^^^`^bb`^bn^^^`^bf^b`jdp^^^^^^^`^b^^^`^^`f^bn^^^`^bf^bfdx^bj`^xt^^^^^"
    "^b`b^bbhnd^^bnxbpnb~g`f^^^^^^^`^b^^^`^bd^^bn^^^`^bf^bnh^j^^`nn~_^^^`^bf^`^hbx^bn~qhr~k^b^lhpr`~i~~^~e^^^^^^^bf^b"
    "nnf^bnbl|p~]t`^bl^~qxf|hl~w`b^frpj~uhth~a`^p^^^^^^^`^b^^^^^^b`b^bn^^^`^bf^bn`ld^b^j^~q^^^`^`^f^bnhl^bhb~gfdrb~i^"
    "bn`dd~]fpbl|~~h^^^`^bb`^bnx^b`j^~oz~m^^bfdnfndb~kb~c|rdhld~]xf^~~~gt^bnhdhp^~~~_jzlj~~fn`~g~~r~o~m~{~]d~]^^^`^bd"
    "^^bn^r^^^^`nfb~an~_^lb`^b^^jnlpz~ip~axblrf^rd~~z~]bdf`^bnjltpx~~dpp`vbb~{~a^~g~~t~c~a~w|~_^`^fd~i~ib~]`^`pxn~_~c"
    "~~~~hppf^`~kbb~q^~i^~al";
static const char TERNARY_1024[] =
    "]^^^^^^^^^^^^`^^^^^^^`^^^^^^^`^b``^^^^^^^^`^b^^^`^^^^`^`^b^^b^b^^^`^bd^^^^^`j```dd^^^^^^^`^^^^^^^^^^^^^^^b^^^^`^"
    "`^b^^^^^^^^^`^`^^^^^^^`^b^^^`^bf^^^^`j`^`^bf^bn^^^`^^^^``^^^^^^^^`^b`dj^^b^^^`d`^`^bfdnf^d`^f~]h^^^^^^^`^^`^^^`^"
    "^^^^^^`^^``^`^b^^^^^^^^^^^^`^^^^^^^`^b^^^`^l^`^`b^b`b^l^bn^^^`^^^^`^`^^^^^^^`^b^^^`^bf^^^^^^^`^b^^^`^bf^bn`^`^bf"
    "^bnv^^^^^`^`d^^^`^bf^t^^^`^bf^blrfbnj~c^^^`^^^^``^^b^^dbd`j^^b^^bd^^b^bf^bndh`^`bt^l`^^^^`^`^b^^^`^bf^bn`^`^bf^b"
    "j`x^bnl~a`b^l^bvn^^b~urhxh^p^^^^^^^^^^^`^^^^^^^^^^^b^b`^`^b^^^`^^^^^^b^^^^^^^`^b^^^`^bf^b^^^bb`^`^bf^t^^^^^^^^^^"
    "^^`^^^^^^^`^b^^^`^bf^^^^^^^`^b^^^`^bd^^bn^^^`^bf^bnrb^`^^^^`^b^^^`^bhbn^^^`^bf^bnjj^bn~q^^^`^^^^^^^`^^^^^^^`^b^^"
    "^`^l^^^^^^^`^b^^^`^bf^bn`^`^bf^bl^x^^^^^^^`^b^^^`^bf^bn^^^`^bf^bnx^bj`~q^^^`^bf^bdfx^bn~ql~ep`^^`^^^`^b`^`^bhbn^"
    "^^`^bf^bnljbnj|d`^`^bf^bnx^bndljl~}l^b~cphv~~n~gd^^^`^`^`b^b^^^`d`b^l^`^^^^`^b^^^`^l^bl^``^^l^b~i^^^^^^^`d^^^`^b"
    "f^bn^^^`^bf^bndp^bl^~q`b^l^b~ad^tr~or^hnd^`^^^^bb^^^`^bf^bn`b^l^bd~a^bn~m`^^^`^bf^bnjj^bn~e`d|l~]^bj`~o^~]`~~~cn"
    "```db^^b~abxr~]bh`^z`^l`^bn~]jbl~~~_~ol~m~ipx^f^`~_p";
static const char TERNARY_2048[] =
    "]^^^^^_a^`^ab^^da^`^aa^`^`]b^^^]ab`^`^`^^^]cb^^da^`^aa^`^abba`^^`^^__^^`^g^^dbbb``]kbbb^]]d^^d^``]]^]]^^^^^^^e_^"
    "^^^]]^j`h^b^^^_]`^bb^`g^`^aa^`^ab`da^`^aa^`^ab^`a]bd]_b^`h^^^ba^`^aa^`^abb__a^^^^aa^`^f]^`a]b^b`^`^]_h^^a_b^^^^^"
    "^^`^`b`]]]]]]^^`dd^b^l^^daa^`^^^`^db^^db`^a]^]_`a_]]^^^]]^`^^b`^_]^]]^^]_`^`^^]]^^^^^^^^]]a]]]]^]^^]]^^^]]^^]]^]"
    "]^]]^^b^]]d]]^^``^]]^^^_]]]_^]^]]b__^d`h`db^^^^`^^]]^^^bb^fj^^`^_c]]^`^]]^]]``d_]^^``^ecc^c^^^^^^``^bb`_f^`^aa^^"
    "^^abb__a^`^aa^^^^ab^`bc]`b^^^^]]daa^bba^^_a^`^ab`^bba^^_a^`^ad^^bd]]^`^^^bdb^`__hbbb^`^`^]_`^^f^_]^^^^^^ba^abbbb"
    "a]ba^`df^`^aa^`^ab^fa^`^f^`^d_^`bf^`^b^^^baa^a]a^`^f^`^ab`^ba^`^aa^`^ab`dh`^^^^^^l`_``]^^^`^]]^^`^b^^^^]]^]a^^^^"
    "^`^^a]]gb^^dbf^```eafbh_eb^^^^]]a]^^^^`^^^^a]b_]^`^^]]^^``^^]]^^]^]]]]_^]]^`]]^`^]]^]a^^^__a]^^^^`^^^^_]]^]^`^^`"
    "_``]b^^db_`aca^`^`^^^bb^^^bb_]_]_]^`^^```^]]]]^^^^]_b^`^]]`^^^ll^^b^^``jfb^]]^`^`^^`^`^`^]]^b^d^b^_]`^b^]]^^]]]]"
    "^`]]^^^]]^^]]]]]]]]^^]]^`^b^]]^^``^`b^`^^d^`^^]]^`^ea^^_]`e]b^]]]]__^^^^]]^]]]^]]]]]^]]]]^^b^^^]]^_^]`^]]]]^^]]]"
    "]]^]^^]]^^]]]]]]]^]]]]]]]]]]^]]]]]^^]_]]]^]]]]_^]]^^]]]^]]_^]^]^]]]]]]]__]]]]]]]]]]]]]^^]_`^]]]]^_`_^]]]a]]^^`^`"
    "ca^^^^]]]]^^]]ca^^^^`b_]^`^^]]^bb^]]^^]]]]]]]]^^]]^____^]]]]bd_c`]`]^b^]__]]]`^^^^c_^]]^^hd^^bdb`]]^^^^^_idb^^^`"
    "^b]_^b___]^b]_`a_^b`^h`^g]`d]]_ib`dk]^]_^`^^^^^^^^]]^]]^^d]_^^]]]]^^^`b^^^_]^j]]^^]^]]^_^]]^c^]^_]^]_^]]aabaa]]^"
    "`^^^^]]]^]`^_^^``^]]^_^_k^bbf^`^bbbada^b`b^^^^]_]]`^]]^^``_]aab^]_h`]i^`^`^^`]_cc_^b`^`^f^`^aa]^^^ba^`^aa^`^ab^^"
    "^bb^`^^^]]]a^^b_a^^ba^`^aa^`^g^`ba^`^aa^`^i`h^c_`^^`j`hb`^`b^^]_^`^]]^]a]]^^^^^^^^^dj`^bb^`]]`_]^`_abc`b^`^aa^`^"
    "^_b^`b_^^`^aa^`^a]a^^db^^^^^^`^^ff^ba^`^aa^`^ab^^i^`^aa^`^ab`]]bb`^b^^d]ab^^^bb^^^^`^^^^^^^`a]^]]^`^d^b^^`^^^bb^"
    "`bd^^^^^^d^bd^g_^^``^d`d^^]]]]^]]^d^b]]^`b^`^^]]^]]^___]^^]]^^]]]]]]]]^^]]^__^`]]]]^]]^^^^^^b`_^a^b^]_]^]^b^a]`]"
    "_]]d^^bf^bb``^^]_`]eb`^bd^^^^^^^]]^^`^^^^^^]]^`^]_^^b^^`^`deed^^^`^`hb^]]i^`^aa^`^ab^^^g^`^aa^`^a__^^^]k^__^^^^f"
    "a^_^i`^]c``^ab`^ba^`^aa^`^mbb^b_]^^^_]]]bx^^^^^d^`^b^]]^b`^^]]^`^^lb`_^_d^__^]]_^h``]^_^^`^`^f^`^g^^^g^`^aa^`^ad"
    "`__bd``^`^gai^`^f^`^g^^i^`^aa^`^";
static const char OCTAL_256[] =
    "]^^a^`]^ceu^`^a^c`_^cghd^^ac^c^`fbj`b]^g~^opagh^`bol~nsp`^qjl^a^c^a^^g]t^cc^~j^a^cc~]b^jeilg`~^~c`noh~~gj|^c^a^`"
    "_e{^^_^ccw`]d^cb]^i]ipc`~g`}jtpfw~~_^gsxc^c^qiab^jeg^w^aiqlkn~xkobbhw{nq~cqpgj^h`~~gpk]lbmz{~`g}jq~~g_^j~mssdbls"
    "{j|d~dyg`~^ds~~i~gj~ml^jy|z~`~_b~~`}~`~l~cj~m^^]nl~gf~ewarijq}l{^n~~^";
static const char OCTAL_512[] =
    "]]]_^]]]^^^]`ba^_^^^a^c__]]]^`]`__`^`ci`ab]`^]___`_`b_^^^i_db`_^c^_b`^i^`_g`^_bb_bkf^h^`ab`^kag_^jmkc^^h^`ai`p]]"
    "^`]^^^]^c_^j^_eb]^_^`ac_bc^jb^f_^]`bb_f_fc__]_bb]`ambg^a^i^c`^`qc_bc^k~b`_i^w^a^ch`mbd]^^^]^^^_^`]^c^^_^i]_^_^b_"
    "`__`_bct__f^ac^f`f_`^_`e^a^cbjgbe_c_`u_caei]gid^afx`p`i^gavc^^^_c^^a^_^fbd^^ca^ilf`^fbf^huc`a^`]e^`bjdba`cmb`ic^"
    "gaffioo|^i^g~^`bb`__cclfa^^cbabb`p^aa`fak_bha^a^c`~^^ng]uh^f}umptaggbub`bj`__hba^^ace|befabisa]kiahbb_hfh~_ho^~r"
    "|^j~r^^h^qllcyrnbgabdhak~pjkj_upqw~d^~p`_e^h^hblcgk^x_`b_cmut_jr`bat~el|s~b";

typedef struct {
    const char * text;
    uint32_t points, base, digits;
} grid_text;

enum { GRID_256, GRID_512, GRID_1024, GRID_2048, GRID_256_OF_4, GRID_512_OF_4, GRIDS };

static const grid_text TEXTS[GRIDS] = {
    {TERNARY_256, 256, 3, 8},   {TERNARY_512, 512, 3, 8}, {TERNARY_1024, 1024, 3, 8},
    {TERNARY_2048, 2048, 3, 8}, {OCTAL_256, 256, 8, 4},   {OCTAL_512, 512, 8, 4},
};

// Of each grid its points in ascending order, 16 bits each: eight digits of two bits, or four of four.
static _Atomic uint16_t grids[GRIDS][2048];
static atomic_int grids_ready;

// Two threads may both do it, and write the same: no lock that a fork could leave behind.
static const _Atomic uint16_t * open_grid(int which) {
    if (atomic_load_explicit(&grids_ready, memory_order_acquire)) return grids[which];
    for (int g = 0; g < GRIDS; g++) {
        const grid_text * t = &TEXTS[g];
        uint32_t point = 0, i = 0;
        for (const char * c = t->text; *c != 0; c++) {
            point += (uint32_t)(*c - (*c == '~' ? '~' - 33 : ']'));
            if (*c == '~') continue;
            uint32_t bits = 0, rest = point++;
            for (uint32_t digit = 0; digit < t->digits; digit++, rest /= t->base)
                bits |= rest % t->base << 16 / t->digits * digit;
            atomic_store_explicit(&grids[g][i++], (uint16_t)bits, memory_order_relaxed);
        }
    }
    atomic_store_explicit(&grids_ready, 1, memory_order_release);
    return grids[which];
}

static uint32_t point_at(const _Atomic uint16_t * grid, uint32_t i) {
    return atomic_load_explicit(&grid[i], memory_order_relaxed);
}

// The number of a point; of bits that are none, that of a neighbour.
static uint32_t number_of(const _Atomic uint16_t * grid, uint32_t points, uint32_t bits) {
    uint32_t first = 0;
    for (uint32_t step = points / 2; step > 0; step /= 2)
        first += point_at(grid, first + step) <= bits ? step : 0;
    return first;
}

// ---- where a super-block has its numbers (ggml-common.h): number x at bit at + four * (x / 4) + one * (x % 4)

typedef struct {
    uint16_t at, four;
    uint8_t one, width;
} field;

typedef struct {
    field index, high; // of points; bits above those of `index`
    field signs;       // of eight weights: all, or seven, of which the eighth makes the number of ones even; IQ1: one
                       // bit that lowers the eight
    field scales;
    field d; // in four parts of four bits
    uint8_t n_scales, grid, parts;
    const int8_t * values;
} grid_type;

static const int8_t IQ1[16] = {TB_IQ1_VALUES}, IQ2[16] = {TB_IQ2_VALUES};
static const int8_t IQ3_XXS[16] = {TB_IQ3_XXS_VALUES}, IQ3_S[16] = {TB_IQ3_S_VALUES};

// clang-format off
#define WHOLE {0, 16, 4, 4}
static const grid_type TYPES[] = {
    [TB_IQ2_XXS] = {{16, 64, 8, 8}, {0}, {48, 64, 7, 7}, {76, 256, 64, 4}, WHOLE, 8, GRID_256, TB_IQ2_PARTS, IQ2},
    [TB_IQ2_XS] = {{16, 64, 16, 9}, {0}, {25, 64, 16, 7}, {528, 16, 4, 4}, WHOLE, 16, GRID_512, TB_IQ2_PARTS, IQ2},
    [TB_IQ2_S] = {{16, 32, 8, 8}, {528, 8, 2, 2}, {272, 32, 8, 8}, {592, 16, 4, 4}, WHOLE,
                  16, GRID_1024, TB_IQ2_PARTS, IQ2},
    [TB_IQ3_XXS] = {{16, 32, 8, 8}, {0}, {528, 32, 7, 7}, {556, 128, 32, 4}, WHOLE,
                    8, GRID_256_OF_4, TB_IQ3_XXS_PARTS, IQ3_XXS},
    [TB_IQ3_S] = {{16, 32, 8, 8}, {528, 4, 1, 1}, {592, 32, 8, 8}, {848, 16, 4, 4}, WHOLE,
                  8, GRID_512_OF_4, TB_IQ3_S_PARTS, IQ3_S},
    [TB_IQ1_S] = {{16, 32, 8, 8}, {272, 16, 3, 3}, {287, 16, 0, 1}, {284, 64, 16, 3}, WHOLE,
                  8, GRID_2048, TB_IQ1_PARTS, IQ1},
    [TB_IQ1_M] = {{0, 32, 8, 8}, {256, 16, 4, 3}, {259, 16, 4, 1}, {384, 16, 3, 3}, {396, 64, 16, 4},
                  16, GRID_2048, TB_IQ1_PARTS, IQ1},
};
// clang-format on

static const grid_type * grid_type_of(uint32_t type) {
    const uint32_t source = tb_tiled_source(type);
    const int known = source < sizeof(TYPES) / sizeof(TYPES[0]) && TYPES[source].n_scales != 0;
    return known ? &TYPES[source] : NULL;
}

#define PADDED 128 // a super-block, and what is read past its last field

static uint32_t get(const uint8_t * b, field f, uint32_t x) {
    const uint32_t at = f.at + f.four * (x / 4) + f.one * (x % 4);
    return load32(b + at / 8) >> at % 8 & ((1u << f.width) - 1);
}

// Into bits that are zero, or the same.
static void put(uint8_t * b, field f, uint32_t x, uint32_t value) {
    const uint32_t at = f.at + f.four * (x / 4) + f.one * (x % 4);
    store32(b + at / 8, load32(b + at / 8) | (value & ((1u << f.width) - 1)) << at % 8);
}

// Bits, pairs or nibbles of a number to a byte each, the lowest first, and back: four of eight move, two of four, one.
static uint64_t spread(uint64_t x, int width) {
    static const uint64_t every[] = {0x0101010101010101u, 0x0001000100010001u, 0x0000000100000001u};
    for (int i = 2; i >= 0; i--)
        x = (x | x << ((8 - width) << i)) & every[i] * ((1u << (width << i)) - 1);
    return x;
}

static uint32_t gather(uint64_t x, int width) {
    uint32_t all = 0;
    for (int i = 0; i < 8; i++)
        all |= (uint32_t)(x >> 8 * i & ((1u << width) - 1)) << width * i;
    return all;
}

static int is_iq1(const grid_type * t) { return t->grid == GRID_2048; }

// IQ1_S: its bits that lower weights are beside the scales, one for 32.
static int with_scales(const grid_type * t) { return is_iq1(t) && t->signs.one == 0; }

static int quarters(const grid_type * t) { return t->grid >= GRID_256_OF_4; } // points of four weights

int grid_from_block(uint32_t type, const uint8_t * block, panel_column * c) {
    const grid_type * t = grid_type_of(type);
    if (t == NULL) return 0;
    const _Atomic uint16_t * grid = open_grid(t->grid);
    uint8_t b[PADDED] = {0};
    memcpy(b, block, tb_type_size(tb_tiled_source(type)));
    c->d = c->dmin = 0;
    for (uint32_t i = 0; i < 4; i++)
        c->d |= (uint16_t)(get(b, t->d, i) << 4 * i);
    memset(c->scales, 0, sizeof(c->scales));
    for (uint32_t i = 0, half = t->n_scales / 2u; i < t->n_scales; i++) {
        const uint32_t lower = with_scales(t) ? get(b, t->signs, 4 * i) << 3 : 0;
        c->scales[i % half] |= (uint8_t)((get(b, t->scales, i) | lower) << i / half * 4);
    }
    const int points = quarters(t) ? 2 : 1, width = quarters(t) ? 4 : 2;
    for (uint32_t o = 0; o < TB_K_BLOCK / 8; o++) {
        uint32_t bits = 0;
        for (int p = 0; p < points; p++) {
            const uint32_t x = o * (uint32_t)points + (uint32_t)p;
            bits |= point_at(grid, get(b, t->index, x) | get(b, t->high, x) << t->index.width) << 16 * p;
        }
        uint32_t signs = with_scales(t) ? 0 : get(b, t->signs, o);
        if (t->signs.width == 7) signs |= (0x6996u >> ((signs ^ signs >> 4) & 15) & 1u) << 7;
        if (t->signs.width == 1) signs *= 0xff;
        store64(c->q + 8 * o, spread(bits, width) | spread(signs, 1) << (quarters(t) ? 3 : 2));
    }
    return 1;
}

int grid_to_block(uint32_t type, const panel_column * c, uint8_t * block) {
    const grid_type * t = grid_type_of(type);
    if (t == NULL) return 0;
    const _Atomic uint16_t * grid = open_grid(t->grid);
    uint8_t b[PADDED] = {0};
    for (uint32_t i = 0; i < 4; i++)
        put(b, t->d, i, c->d >> 4 * i & 15u);
    for (uint32_t i = 0, half = t->n_scales / 2u; i < t->n_scales; i++) {
        const uint32_t nibble = c->scales[i % half] >> i / half * 4 & 15u;
        put(b, t->scales, i, nibble);
        if (with_scales(t)) put(b, t->signs, 4 * i, nibble >> 3);
    }
    const int points = quarters(t) ? 2 : 1, width = quarters(t) ? 4 : 2, sign = quarters(t) ? 3 : 2;
    for (uint32_t o = 0; o < TB_K_BLOCK / 8; o++) {
        const uint64_t q = load64(c->q + 8 * o);
        const uint32_t bits = gather(q & ~(0x0101010101010101u << sign), width);
        for (int p = 0; p < points; p++) {
            const uint32_t x = o * (uint32_t)points + (uint32_t)p;
            const uint32_t i = number_of(grid, TEXTS[t->grid].points, bits >> 16 * p & 0xffff);
            put(b, t->index, x, i);
            put(b, t->high, x, i >> t->index.width);
        }
        if (!with_scales(t)) put(b, t->signs, o, gather(q >> sign, 1));
    }
    memcpy(block, b, tb_type_size(tb_tiled_source(type)));
    return 1;
}

// Exact, in whatever order: FP16's 11 bits times 5 times 6.
int grid_values(uint32_t type, const panel_column * c, float * out) {
    const grid_type * t = grid_type_of(type);
    if (t == NULL) return 0;
    const float d = tb_half_to_float(c->d) / (float)t->parts;
    for (uint32_t i = 0, half = t->n_scales / 2u, n = TB_K_BLOCK / t->n_scales; i < t->n_scales; i++) {
        const uint32_t nibble = c->scales[i % half] >> i / half * 4 & 15u;
        const uint32_t lower = with_scales(t) ? nibble >> 3 << 2 : 0, s = is_iq1(t) ? nibble & 7 : nibble;
        for (uint32_t k = n * i; k < n * (i + 1); k++)
            out[k] = d * (float)(2 * s + 1) * (float)t->values[c->q[k] | lower];
    }
    return 1;
}
