// Products of a weight matrix and rows of activations: MUL_MAT, and what MUL_MAT_ID does with rows of one matrix.
//
// Four ways through, by weight type and row count:
//   integer  quantized weights. Activations become int8 groups, then panels run against groups. Tiles are read where
//            they lie; plain ggml rows and `tile` grouping are first turned into a few tiles at a time in scratch,
//            which all rows then use.
//   float    F32, F16, BF16 weights, and quantized ones under TB_FLAG_FP16. The same with float panels and groups.
//   matrix   quantized weights under TB_FLAG_FP16, for sets with a matrix unit. A panel's tiles become FP16 tiles in
//            scratch, and the unit sums over all of k before it rounds.
//   dot      F32, F16, BF16 weights, for as many rows as the set's kernel says.
//
// Rows of src1 that meet the same weight matrix (M, and the dimensions over which src0 broadcasts) count as one list of
// rows. Activations are converted first, shared by rows and k, once for all products of the same activations; then
// items of (matrix, panels, rows) are taken until none are left. What is added to the result (a bias, the residual
// stream: the executor's schedule decides) is added by item, while its results are in the cache.
#include <algorithm>
#include <cstring>

#include "ops/mul_mat.h"

namespace tb::npu {

namespace {

constexpr int64_t tile = TB_TILE_K;
constexpr int64_t piece = gemm_piece_tiles;
constexpr int64_t block_tiles = 96;        // k tiles of a block of activations at most
constexpr int64_t block_bytes = 512 << 10; // of a block of activations: half of L2
constexpr int64_t stage_k = 256;           // k of staged float panels: 32 KiB
constexpr int64_t block_rows = mul_mat_stage_bytes / (TB_TILE_N * static_cast<int64_t>(sizeof(float))); // 288
constexpr int64_t convert_k = 256; // activations converted at a time: a block of the longest types

static_assert(run_elements % convert_k == 0 && convert_k % TB_K_BLOCK == 0, "a run is converted in whole pieces");
static_assert(stage_k * TB_TILE_N * static_cast<int64_t>(sizeof(float)) <= mul_mat_stage_bytes,
              "stages share their scratch");

// Row r of a matrix's rows, in src1 or dst. MUL_MAT_ID's src1 may have one row for all experts of a token.
uint8_t * row_of_matrix(const mul_mat_plan & p, const view & v, const view & weights, int64_t matrix, int64_t r) {
    if (p.picked) {
        const int64_t i1 = p.picked[r].i1;
        return v.at<uint8_t>(i1 < v.ne(1) ? i1 : i1 % v.ne(1), p.picked[r].i2);
    }
    const int64_t i02 = matrix % weights.ne(2), i03 = matrix / weights.ne(2);
    const int64_t i1 = r % v.ne(1), batch = r / v.ne(1);
    return v.at<uint8_t>(i1, i02 * p.r2 + batch % p.r2, i03 * p.r3 + batch / p.r2);
}

// Floats [first, first + n) of a row of src1: where they are, or converted into `buffer`.
const float * activations(const op_context & ctx, const uint8_t * row, int64_t first, int64_t n, float * buffer) {
    if (ctx.src[1].type() == TB_F32) return reinterpret_cast<const float *>(row) + first;
    ctx.kernels->vec.to_f32[TB_F16](n, row + 2 * first, buffer);
    return buffer;
}

// k [first, first + n) of a row becomes its part of its group.
void convert_piece(const op_context & ctx, const mul_mat_plan & p, int64_t matrix, int64_t r, int64_t first,
                   int64_t n) {
    const gemm_kernels & kernels = ctx.kernels->gemm;
    const int64_t big = p.longer_groups, size = p.group_size; // the first `big` groups have one more row
    const int64_t g = r < big * (size + 1) ? r / (size + 1) : big + (r - big * (size + 1)) / size;
    const int rows = p.group_rows(g), in_group = static_cast<int>(r - p.group_start(g));
    uint8_t * group = ctx.prepared + p.group_offset(matrix, g);
    float buffer[convert_k];
    const float * x = activations(ctx, row_of_matrix(p, ctx.src[1], ctx.src[0], matrix, r), first, n, buffer);
    if (p.k_quant) {
        kernels.quantize_k(x, n / tile, group + record_offset(p, first / tile, rows), rows, in_group);
        return;
    }
    if (p.is_integer()) {
        kernels.quantize(x, n / tile, kernels.int8[p.format].offset, group + record_offset(p, first / tile, rows), rows,
                         in_group);
        return;
    }
    if (p.path == mul_mat_way::matrix) {
        uint16_t * tiles = reinterpret_cast<uint16_t *>(group + first / tile * gemm_fp16_tile_bytes);
        kernels.fp16.activations(x, n / tile, tiles, in_group);
        return;
    }
    if (p.fp16) {
        if (x != buffer) std::memcpy(buffer, x, static_cast<size_t>(n) * sizeof(float));
        kernels.round_fp16(n, buffer);
        x = buffer;
    }
    float * out = reinterpret_cast<float *>(group) + first * rows + in_group;
    for (int64_t i = 0; i < n; i++)
        out[i * rows] = x[i];
}

// Where a group's results go: straight into dst, or through a buffer where dst has fewer than 32 columns left.
struct outputs {
    alignas(64) float buffer[gemm_most_rows][TB_TILE_N];
    float * at[gemm_most_rows];
    float * dst[gemm_most_rows];
    int rows;
    size_t partial; // bytes of a row if they go through the buffer, else 0

    const op_context & ctx;
    const mul_mat_plan & p;
    int64_t matrix;
    uint8_t * first = nullptr; // where dst's rows lie at equal distances: row 0

    outputs(const op_context & c, const mul_mat_plan & of, int64_t m) : ctx(c), p(of), matrix(m) {
        if (!p.picked && p.rows <= ctx.dst.ne(1)) first = row_of_matrix(p, ctx.dst, ctx.src[0], matrix, 0);
    }
    void open(int64_t g, int64_t panel, bool add) {
        rows = p.group_rows(g);
        const int64_t start = p.group_start(g);
        const int64_t n0 = panel * TB_TILE_N, cols = std::min<int64_t>(TB_TILE_N, p.n - n0);
        partial = cols < TB_TILE_N ? static_cast<size_t>(cols) * sizeof(float) : 0;
        for (int m = 0; m < rows; m++) {
            uint8_t * row =
                first ? first + (start + m) * ctx.dst.nb(1) : row_of_matrix(p, ctx.dst, ctx.src[0], matrix, start + m);
            dst[m] = reinterpret_cast<float *>(row) + n0;
            at[m] = partial ? buffer[m] : dst[m];
            if (partial && add) std::memcpy(buffer[m], dst[m], partial);
        }
    }
    void close() {
        if (!partial) return;
        for (int m = 0; m < rows; m++)
            std::memcpy(dst[m], buffer[m], partial);
    }
    void round() {
        for (int m = 0; m < rows; m++)
            ctx.kernels->gemm.round_fp16(TB_TILE_N, at[m]);
    }
};

const uint8_t * weights_of(const op_context & ctx, const mul_mat_plan & p, int64_t matrix) {
    const view & w = ctx.src[0];
    matrix += p.expert;
    return w.data + matrix % w.ne(2) * w.nb(2) + matrix / w.ne(2) * w.nb(3);
}

const uint8_t * group_of(const op_context & ctx, const mul_mat_plan & p, int64_t matrix, int64_t g) {
    return ctx.prepared + p.group_offset(matrix, g);
}

void run_integer(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & r) {
    const int64_t k_tiles = p.k / tile, panel_bytes = k_tiles * static_cast<int64_t>(tb_tile_bytes(p.type));
    const uint8_t * weights = weights_of(ctx, p, r.matrix);
    outputs out(ctx, p, r.matrix);
    for (int64_t g = r.group; g < r.last_group; g++) {
        const uint8_t * group = group_of(ctx, p, r.matrix, g);
        for (int64_t panel = r.panel; panel < r.last_panel; panel++) {
            out.open(g, panel, false);
            ctx.kernels->gemm.int8[p.format].run(
                {weights + panel * panel_bytes, group, k_tiles, out.rows, false, out.at});
            out.close();
        }
    }
}

// Tiles [t, t + n) of a panel, in the form that the kernel of p.format reads.
void stage_tiles_of(const op_context & ctx, const mul_mat_plan & p, const uint8_t * weights, int64_t panel, int64_t t,
                    int64_t n, uint8_t * stage) {
    if (tb_type_is_tiled(p.type)) {
        const int64_t bytes = static_cast<int64_t>(tb_tile_bytes(p.type));
        const uint8_t * from = weights + (panel * (p.k / tile) + t) * bytes;
        ctx.kernels->gemm.prepare(p.type, from, n, stage);
        return;
    }
    const int64_t n0 = panel * TB_TILE_N, stride = ctx.src[0].nb(1);
    tb_pack_panel(tb_tiled_column(p.type), static_cast<uint64_t>(n * tile),
                  static_cast<uint32_t>(std::min<int64_t>(TB_TILE_N, p.n - n0)),
                  weights + n0 * stride + t * tile / tb_type_block(p.type) * tb_type_size(p.type),
                  static_cast<size_t>(stride), stage);
}

// Sums of a block of rows, 32 columns each and one after the other: in the cache, while rows of dst, a power of two
// apart as they often are, would push each other out of it.
void load_sums(outputs & out, int64_t panel, int64_t group, int64_t last_group, float * sums) {
    for (int64_t g = group; g < last_group; g++, sums += out.rows * TB_TILE_N) {
        out.open(g, panel, true);
        for (int m = 0; m < out.rows; m++)
            std::memcpy(sums + m * TB_TILE_N, out.at[m], TB_TILE_N * sizeof(float));
    }
}

void store_sums(outputs & out, int64_t panel, int64_t group, int64_t last_group, const float * sums) {
    for (int64_t g = group; g < last_group; g++, sums += out.rows * TB_TILE_N) {
        out.open(g, panel, false);
        for (int m = 0; m < out.rows; m++)
            std::memcpy(out.at[m], sums + m * TB_TILE_N, TB_TILE_N * sizeof(float));
        out.close();
    }
}

// Blocks of rows and k whose activations stay in L2 while the item's panels pass; of each panel a piece at a time is
// staged in L1, and all rows of the block meet it there.
void run_integer_staged(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & r, uint8_t * stage) {
    const uint8_t * weights = weights_of(ctx, p, r.matrix);
    const auto run = ctx.kernels->gemm.int8[p.format].run;
    const int64_t k_tiles = p.k / tile, blocks = divide_up(k_tiles, block_tiles);
    const int64_t k_block = divide_up(divide_up(k_tiles, blocks), piece) * piece;
    const int64_t row_bytes = std::min(k_block, k_tiles) * static_cast<int64_t>(gemm_record_bytes(1));
    const int64_t most_rows = std::min(block_bytes / row_bytes, block_rows);
    const int64_t groups = std::max<int64_t>(1, most_rows / std::max<int64_t>(1, p.group_rows(r.group)));
    float * sums = reinterpret_cast<float *>(stage + mul_mat_stage_bytes);
    outputs out(ctx, p, r.matrix);
    for (int64_t group = r.group; group < r.last_group; group += groups) {
        const int64_t last_group = std::min(group + groups, r.last_group);
        for (int64_t begin = 0; begin < k_tiles; begin += k_block) {
            const int64_t end = std::min(begin + k_block, k_tiles);
            for (int64_t panel = r.panel; panel < r.last_panel; panel++) {
                if (begin > 0) load_sums(out, panel, group, last_group, sums);
                for (int64_t t = begin; t < end; t += piece) {
                    const int64_t n = std::min(piece, end - t);
                    stage_tiles_of(ctx, p, weights, panel, t, n, stage);
                    float * at[gemm_most_rows];
                    float * next = sums;
                    for (int64_t g = group; g < last_group; g++) {
                        const int rows = p.group_rows(g);
                        for (int m = 0; m < rows; m++, next += TB_TILE_N)
                            at[m] = next;
                        const uint8_t * group_at = group_of(ctx, p, r.matrix, g) + record_offset(p, t, rows);
                        run({stage, group_at, n, rows, t > 0, at});
                    }
                }
                store_sums(out, panel, group, last_group, sums);
            }
        }
    }
}

// Tiles of any type to floats [k][32] rounded to FP16. Few types have kernels for it: nobody stores the others for a
// matrix unit of FP16, and the reference is good enough to compare numerics.
void dequantize(const gemm_kernels & kernels, uint32_t type, const uint8_t * tiles, int64_t k_tiles, float * out) {
    if (has_all_numerics(type)) return kernels.dequantize(type, tiles, k_tiles, out);
    float rows[TB_TILE_N * TB_K_BLOCK];
    const int64_t k = tb_tile_k(type), block = static_cast<int64_t>(tb_tile_bytes(type)) * (k / tile);
    for (int64_t t = 0; t < k_tiles; t += k / tile, tiles += block, out += k * TB_TILE_N) {
        tb_dequantize_panel(type, static_cast<uint64_t>(k), TB_TILE_N, tiles, rows);
        for (int64_t i = 0; i < k; i++) {
            for (int64_t n = 0; n < TB_TILE_N; n++)
                out[i * TB_TILE_N + n] = rows[n * k + i];
        }
        kernels.round_fp16(k * TB_TILE_N, out);
    }
}

// k [first, first + n) of a panel as floats [n][32].
void stage_floats_of(const op_context & ctx, const mul_mat_plan & p, const uint8_t * weights, int64_t panel,
                     int64_t first, int64_t n, float * stage, uint8_t * tiles) {
    const gemm_kernels & kernels = ctx.kernels->gemm;
    const int64_t n0 = panel * TB_TILE_N, stride = ctx.src[0].nb(1);
    const int cols = static_cast<int>(std::min<int64_t>(TB_TILE_N, p.n - n0));
    if (is_float(p.type)) {
        kernels.pack(p.type, weights + n0 * stride + first * tb_type_size(p.type), stride, cols, n, stage);
        if (p.fp16 && p.type != TB_F16) kernels.round_fp16(n * TB_TILE_N, stage);
    } else if (tb_type_is_tiled(p.type)) {
        const int64_t bytes = static_cast<int64_t>(tb_tile_bytes(p.type));
        dequantize(kernels, p.type, weights + (panel * (p.k / tile) + first / tile) * bytes, n / tile, stage);
    } else {
        stage_tiles_of(ctx, p, weights, panel, first / tile, n / tile, tiles);
        dequantize(kernels, tb_tiled_column(p.type), tiles, n / tile, stage);
    }
}

void run_floats(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & r, uint8_t * scratch) {
    const uint8_t * weights = weights_of(ctx, p, r.matrix);
    float * stage = reinterpret_cast<float *>(scratch);
    outputs out(ctx, p, r.matrix);
    for (int64_t panel = r.panel; panel < r.last_panel; panel++) {
        for (int64_t first = 0; first < p.k; first += stage_k) {
            const int64_t n = std::min(stage_k, p.k - first);
            stage_floats_of(ctx, p, weights, panel, first, n, stage, scratch + mul_mat_stage_bytes);
            for (int64_t g = r.group; g < r.last_group; g++) {
                out.open(g, panel, first > 0);
                const float * group = reinterpret_cast<const float *>(group_of(ctx, p, r.matrix, g)) + first * out.rows;
                ctx.kernels->gemm.f32.run({stage, group, n, out.rows, first > 0, out.at});
                if (p.fp16 && first + n == p.k) out.round();
                out.close();
            }
        }
    }
}

void run_matrix(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & r, uint8_t * stage) {
    const gemm_fp16 & unit = ctx.kernels->gemm.fp16;
    const uint8_t * weights = weights_of(ctx, p, r.matrix);
    const int64_t k_tiles = p.k / tile;
    uint16_t * tiles = reinterpret_cast<uint16_t *>(stage);
    uint8_t * packed = stage + k_tiles * gemm_fp16_tile_bytes;
    outputs out(ctx, p, r.matrix);
    for (int64_t panel = r.panel; panel < r.last_panel; panel++) {
        if (tb_type_is_tiled(p.type)) {
            const int64_t bytes = static_cast<int64_t>(tb_tile_bytes(p.type));
            unit.dequantize(p.type, weights + panel * k_tiles * bytes, k_tiles, tiles);
        } else {
            stage_tiles_of(ctx, p, weights, panel, 0, k_tiles, packed);
            unit.dequantize(tb_tiled_column(p.type), packed, k_tiles, tiles);
        }
        for (int64_t g = r.group; g < r.last_group; g++) {
            out.open(g, panel, false);
            const uint16_t * group = reinterpret_cast<const uint16_t *>(group_of(ctx, p, r.matrix, g));
            unit.run({tiles, group, k_tiles, out.rows, out.at});
            out.close();
        }
    }
}

void run_dot(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & r, uint8_t * scratch) {
    const int64_t stride = ctx.src[0].nb(1), n = r.panel * TB_TILE_N, last = std::min(p.n, r.last_panel * TB_TILE_N);
    const uint8_t * weights = weights_of(ctx, p, r.matrix) + n * stride;
    const float * x[mul_mat_dot_rows];
    float * out[mul_mat_dot_rows];
    const int64_t parts = divide_up(p.rows, mul_mat_dot_rows); // that differ by one row at most
    for (int64_t i = 0; i < parts; i++) {
        const int64_t first = p.rows * i / parts;
        const int rows = static_cast<int>(p.rows * (i + 1) / parts - first);
        for (int m = 0; m < rows; m++) {
            const int64_t row = first + m;
            x[m] = ctx.src[1].type() == TB_F32
                       ? reinterpret_cast<const float *>(row_of_matrix(p, ctx.src[1], ctx.src[0], r.matrix, row))
                       : reinterpret_cast<const float *>(ctx.prepared + (r.matrix * p.rows + row) * p.row_bytes);
            out[m] = reinterpret_cast<float *>(row_of_matrix(p, ctx.dst, ctx.src[0], r.matrix, row)) + n;
        }
        ctx.kernels->gemm.dot[float_of(p.type)].run(
            {weights, stride, static_cast<int>(last - n), rows, p.k, x, out, scratch});
    }
}

// Columns of an item's rows += src2, of which rows repeat.
void add_to_item(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & r) {
    const view & b = ctx.src[2];
    const int64_t n0 = r.panel * TB_TILE_N, cols = std::min(p.n, r.last_panel * TB_TILE_N) - n0;
    const int64_t i02 = r.matrix % ctx.src[0].ne(2), i03 = r.matrix / ctx.src[0].ne(2);
    for (int64_t row = p.group_start(r.group); row < p.group_start(r.last_group); row++) {
        const int64_t i1 = row % ctx.dst.ne(1), batch = row / ctx.dst.ne(1);
        const int64_t i2 = i02 * p.r2 + batch % p.r2, i3 = i03 * p.r3 + batch / p.r2;
        float * out = ctx.dst.at<float>(i1, i2, i3) + n0;
        ctx.kernels->vec.add(cols, out, b.at<const float>(i1 % b.ne(1), i2 % b.ne(2), i3 % b.ne(3)) + n0, out);
    }
}

} // namespace

int64_t record_offset(const mul_mat_plan & p, int64_t t, int rows) {
    if (p.k_quant) return t / gemm_k_tiles * static_cast<int64_t>(gemm_k_record_bytes(rows));
    return t * static_cast<int64_t>(gemm_record_bytes(rows));
}

bool converts_activations(const tb_op & op, const mul_mat_plan & p) {
    return p.path != mul_mat_way::dot || op.src[1].type != TB_F32;
}

// This thread's share of (matrix, row, run of k); with one matrix these are the runs of src1. A cache line of a group
// holds a few k of all its rows, which may be several threads': each goes through k once, all its rows at a time, and
// threads begin at different places.
void convert_activations(const op_context & ctx, const mul_mat_plan & p) {
    const int64_t runs = divide_up(p.k, run_elements), pieces = divide_up(p.k, convert_k);
    const auto [begin, end] = p.matrices == 1 ? ctx.share_runs(ctx.src[1]) : ctx.share(p.matrices * p.rows * runs);
    if (begin >= end) return;
    const int64_t first_row = begin / runs, last_row = (end - 1) / runs;
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t first = (i + pieces * ctx.thread / ctx.n_threads) % pieces * convert_k;
        const int64_t run = first / run_elements, n = std::min(convert_k, p.k - first);
        for (int64_t row = first_row; row <= last_row; row++) {
            const int64_t item = row * runs + run;
            if (item >= begin && item < end) convert_piece(ctx, p, row / p.rows, row % p.rows, first, n);
        }
    }
}

bool same_integers(const mul_mat_plan & p, const mul_mat_plan & q, const kernel_table & kernels) {
    return p.is_integer() && q.is_integer() && p.k_quant == q.k_quant &&
           kernels.gemm.int8[p.format].offset == kernels.gemm.int8[q.format].offset;
}

void convert_rows(const op_context & ctx, const mul_mat_plan & p) {
    for (int64_t first = 0; first < p.k; first += convert_k) {
        for (int64_t row = 0; row < p.rows; row++)
            convert_piece(ctx, p, 0, row, first, std::min(convert_k, p.k - first));
    }
}

namespace {

// Item i of a product, found by a thread whose i only grow.
class items {
  public:
    items(const mul_mat_plan & plan, int n_threads)
        : p(plan), shares(2 * n_threads), panel_items(divide_up(p.panels, p.panels_per_item)),
          group_items(divide_up(p.groups, p.groups_per_item)) {}

    // False: there is none.
    bool find(int64_t i, mul_mat_item & r) { return p.shrinking ? shrunk(i, r) : of_one_size(i, r); }

  private:
    bool of_one_size(int64_t i, mul_mat_item & r) const {
        r.matrix = i / (panel_items * group_items);
        r.panel = i / group_items % panel_items * p.panels_per_item;
        r.last_panel = std::min(p.panels, r.panel + p.panels_per_item);
        r.group = i % group_items * p.groups_per_item;
        r.last_group = std::min(p.groups, r.group + p.groups_per_item);
        return r.matrix < p.matrices;
    }

    bool shrunk(int64_t i, mul_mat_item & r) {
        for (; item < i; item++)
            panel += panels_at(panel);
        r = {0, panel, panel + panels_at(panel), 0, p.groups};
        return panel < p.panels;
    }

    int64_t panels_at(int64_t first) const {
        const int64_t left = p.panels - first;
        return std::min(left, std::max(p.panels_per_item, left / shares));
    }

    const mul_mat_plan & p;
    const int64_t shares, panel_items, group_items;
    int64_t item = 0, panel = 0; // where the last one began
};

} // namespace

void multiply(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & item, uint8_t * stage) {
    switch (p.path) {
    case mul_mat_way::integer:
        return run_integer(ctx, p, item);
    case mul_mat_way::integer_staged:
        return run_integer_staged(ctx, p, item, stage);
    case mul_mat_way::floats:
        return run_floats(ctx, p, item, stage);
    case mul_mat_way::matrix:
        return run_matrix(ctx, p, item, stage);
    case mul_mat_way::dot:
        return run_dot(ctx, p, item, stage);
    }
}

namespace {

void run(const op_context & ctx) {
    const mul_mat_plan p = plan_mul_mat(*ctx.op, ctx.n_threads, *ctx.kernels);
    items all(p, ctx.n_threads);
    mul_mat_item item;
    while (all.find(ctx.next_chunk(), item)) {
        multiply(ctx, p, item, ctx.scratch + ctx.thread * p.stage);
        if (ctx.src[2]) add_to_item(ctx, p, item);
    }
}

uint64_t scratch_bytes(const tb_op & op, int n_threads, const kernel_table & kernels) {
    return static_cast<uint64_t>(n_threads * plan_mul_mat(op, n_threads, kernels).stage);
}

void run_conversion(const op_context & ctx) {
    convert_activations(ctx, plan_mul_mat(*ctx.op, ctx.n_threads, *ctx.kernels));
}

uint64_t conversion_bytes(const tb_op & op, int n_threads, const kernel_table & kernels) {
    const mul_mat_plan p = plan_mul_mat(op, n_threads, kernels);
    return converts_activations(op, p) ? static_cast<uint64_t>(p.converted_bytes()) : 0;
}

bool same_conversion(const tb_op & a, const tb_op & b, int n_threads, const kernel_table & kernels) {
    const mul_mat_plan p = plan_mul_mat(a, n_threads, kernels), q = plan_mul_mat(b, n_threads, kernels);
    const bool same_way = p.is_integer() || q.is_integer() ? same_integers(p, q, kernels) : p.path == q.path;
    return same_way && p.fp16 == q.fp16 && p.max_rows == q.max_rows && p.matrices == q.matrices && p.rows == q.rows &&
           p.r2 == q.r2;
}

cut conversion_cut(const tb_op & op) { return op.src[0].ne[2] == 1 && op.src[0].ne[3] == 1 ? cut::runs : cut::any; }

} // namespace

const op_preparation mul_mat_conversion = {run_conversion, 1, conversion_bytes, same_conversion, conversion_cut};
const op_entry mul_mat_entry = {run, scratch_bytes, cut::any, true, &mul_mat_conversion};

} // namespace tb::npu
