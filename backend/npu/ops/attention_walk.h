// The cells that the lines of an attention item see, made into tiles: rows with the same mask form a line
// (flash_attn.cpp has what an item is), and a mask's bits come 64 cells a word.
//   * cells that no line sees are not read;
//   * where most lines see most cells (a prompt that all sequences share, a causal prefill), the word's cells become
//     one tile for all lines;
//   * where lines see different cells (the tails of sequences that decode side by side in one unified cache), each
//     collects its own cells, over as many words as it takes to fill a tile, and runs them alone; lines with equal
//     words run together.
// So N samples of one prompt cost one pass over the prompt's cells plus their own tails.
// A tile of several lines may hold cells that some of them do not see: these weigh 0 there, which makes NaN of an
// infinity. A walk for one line alone meets no cell that it does not see.
#ifndef TILEBEAM_NPU_OPS_ATTENTION_WALK_H
#define TILEBEAM_NPU_OPS_ATTENTION_WALK_H

#include <algorithm>
#include <cstdint>

#include "ops/attention_plan.h"

namespace tb::npu {

// Cells waiting to become a tile, and per line which of them it sees.
struct pending_tile {
    int cells = 0;
    int32_t cell[attention_tile_cells];
    uint64_t visible[attention_tile_rows];
};

// Cells that will probably be read after those of a tile.
struct wanted_cells {
    const int32_t * cell;
    int n;
};

// `item` gets run_tile(lines, n, cell, cells, visible, wanted) for each tile: `visible` is indexed by line, nullptr
// says that each line sees all of the cells.
template <class Item> class cell_walk {
  public:
    // own: room for attention_tile_cells numbers for each line.
    cell_walk(Item & runs, int64_t cells, int32_t * own) : item(runs), n_kv(cells), own_cell(own) {}

    // Of each line, a bit for each cell that it sees; nullptr: it sees all.
    const uint64_t * bits[attention_tile_rows];

    // Begins with another item's lines, whose `bits` are set next.
    void open(int lines) {
        n_lines = lines;
        shared.cells = 0;
        std::fill_n(own_cells, n_lines, 0);
    }

    // Tiles of all cells of the words [first, last) that any line sees, or `lone`, if it is one.
    void run(int64_t first, int64_t last, int lone = -1) {
        only = lone;
        for (int64_t w = first; w < last; w++) {
            add_word(w);
        }
        flush_shared();
        for (int line = 0; line < n_lines; line++) {
            flush_own(line);
        }
    }

  private:
    Item & item;
    const int64_t n_kv;
    int32_t * const own_cell; // [lines][attention_tile_cells]
    int n_lines = 0;
    int only = -1; // -1: all lines
    pending_tile shared;
    int own_cells[attention_tile_rows];

    void add_word(int64_t w) {
        const int64_t first = w * word_cells;
        const int n = static_cast<int>(std::min(word_cells, n_kv - first));
        const uint64_t all = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
        uint64_t seen_by[attention_tile_rows];
        uint64_t seen = 0;
        int64_t pairs = 0;
        int active = 0;
        for (int line = 0; line < n_lines; line++) {
            seen_by[line] = only >= 0 && line != only ? 0 : bits[line] != nullptr ? bits[line][w] : all;
            seen |= seen_by[line];
            pairs += __builtin_popcountll(seen_by[line]);
            active += seen_by[line] != 0;
        }
        if (seen == 0) {
            return;
        }
        if (active > 1 && 2 * pairs < static_cast<int64_t>(active) * __builtin_popcountll(seen)) {
            add_apart(first, seen_by);
            return;
        }
        // One tile for all lines. Nearly full words keep their cells in place, so that bits need no moving; a cell
        // that nobody sees is replaced by one that somebody does, because its memory may hold anything.
        const int span = 64 - __builtin_clzll(seen);
        if (__builtin_popcountll(seen) >= span - span / 4) {
            if (shared.cells + span > attention_tile_cells) {
                flush_shared();
            }
            const int at = shared.cells;
            for (int c = 0; c < span; c++) {
                shared.cell[at + c] = static_cast<int32_t>(first + c);
            }
            for (uint64_t unseen = ~seen & (all >> (n - span)); unseen != 0; unseen &= unseen - 1) {
                shared.cell[at + __builtin_ctzll(unseen)] = static_cast<int32_t>(first + __builtin_ctzll(seen));
            }
            for (int line = 0; line < n_lines; line++) {
                shared.visible[line] = (at == 0 ? 0 : shared.visible[line]) | (seen_by[line] << at);
            }
            shared.cells = at + span;
            return;
        }
        for (uint64_t left = seen; left != 0; left &= left - 1) {
            if (shared.cells == attention_tile_cells) {
                flush_shared();
            }
            const int c = __builtin_ctzll(left);
            const int at = shared.cells++;
            shared.cell[at] = static_cast<int32_t>(first + c);
            for (int line = 0; line < n_lines; line++) {
                shared.visible[line] = (at == 0 ? 0 : shared.visible[line]) | (((seen_by[line] >> c) & 1) << at);
            }
        }
    }

    // A word of which lines see different cells: lines with equal bits run together, others collect.
    void add_apart(int64_t first, const uint64_t * seen_by) {
        int left[attention_tile_rows]; // lines that see something and are not served yet
        int n_left = 0;
        for (int line = 0; line < n_lines; line++) {
            if (seen_by[line] != 0) {
                left[n_left++] = line;
            }
        }
        while (n_left > 0) {
            const uint64_t seen = seen_by[left[0]];
            int lines[attention_tile_rows];
            int n = 0;
            int others = 0;
            for (int i = 0; i < n_left; i++) {
                if (seen_by[left[i]] == seen) {
                    lines[n++] = left[i];
                } else {
                    left[others++] = left[i];
                }
            }
            n_left = others;
            if (n > 1) {
                int32_t cell[attention_tile_cells];
                int cells = 0;
                for (uint64_t b = seen; b != 0; b &= b - 1) {
                    cell[cells++] = static_cast<int32_t>(first + __builtin_ctzll(b));
                }
                run_words(lines, n, cell, cells, nullptr);
                continue;
            }
            const int line = lines[0];
            for (uint64_t b = seen; b != 0; b &= b - 1) {
                if (own_cells[line] == attention_tile_cells) {
                    flush_own(line);
                }
                own_cell[line * attention_tile_cells + own_cells[line]++] =
                    static_cast<int32_t>(first + __builtin_ctzll(b));
            }
        }
    }

    void flush_shared() {
        int lines[attention_tile_rows];
        int n = 0;
        for (int line = 0; line < n_lines && shared.cells > 0; line++) {
            if (shared.visible[line] != 0) {
                lines[n++] = line;
            }
        }
        if (n > 0) {
            run_words(lines, n, shared.cell, shared.cells, shared.visible);
        }
        shared.cells = 0;
    }

    void flush_own(int line) {
        if (own_cells[line] > 0) {
            // lines that collect side by side are full one after the other
            const int other = (line + 1) % n_lines;
            item.run_tile(&line, 1, own_cell + line * attention_tile_cells, own_cells[line], nullptr,
                          {own_cell + other * attention_tile_cells, other == line ? 0 : own_cells[other]});
        }
        own_cells[line] = 0;
    }

    // A tile of cells of words, which are followed by those of the next word.
    void run_words(const int * lines, int n, const int32_t * cell, int cells, const uint64_t * visible) {
        int32_t next[attention_tile_cells];
        int n_next = 0;
        for (int c = 0; c < cells && cell[c] + word_cells < n_kv; c++) {
            next[n_next++] = cell[c] + static_cast<int32_t>(word_cells);
        }
        item.run_tile(lines, n, cell, cells, visible, {next, n_next});
    }
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_OPS_ATTENTION_WALK_H
