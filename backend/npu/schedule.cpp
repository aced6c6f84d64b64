// See schedule.h.
#include "schedule.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "ops/ops.h"
#include "run_state.h"

namespace tb::npu {

namespace {

constexpr uint32_t window = 6;      // phases back into which an op may still go
constexpr size_t most_recent = 128; // steps in them: bounds the time that a list of independent ops takes
constexpr uint64_t line = 128;

// Elementwise ops that an op does in the place of its result, in this order, and which of its operands the first one's
// becomes.
constexpr int most_fused = 2;
struct fusion {
    uint32_t code;
    int operand;
    uint32_t next[most_fused];
};
constexpr fusion fusions[] = {
    {TB_OP_MUL_MAT, 2, {TB_OP_ADD, TB_OP_NOP}},
    {TB_OP_RMS_NORM, 1, {TB_OP_MUL, TB_OP_NOP}},
    {TB_OP_NORM, 1, {TB_OP_MUL, TB_OP_ADD}},
};

uint64_t elements(const tb_tensor & t) {
    return uint64_t{t.ne[0]} * t.ne[1] * t.ne[2] * t.ne[3]; // checked ops only: no overflow
}

uint64_t round_up(uint64_t bytes) { return (bytes + line - 1) / line * line; }

// So little work that a barrier would cost more than the other threads could save.
bool is_tiny(const tb_op & op) {
    switch (op.code) {
    case TB_OP_MUL_MAT:
    case TB_OP_MUL_MAT_ID:
    case TB_OP_FLASH_ATTN:
    case TB_OP_SSM_SCAN:
    case TB_OP_GATED_DELTA_NET:
    case TB_OP_RWKV_WKV6:
    case TB_OP_RWKV_WKV7:
    case TB_OP_GATED_LINEAR_ATTN:
    case TB_OP_LIGHTNING_INDEXER:
        return false;
    case TB_OP_ROPE: // sines, exponentials
    case TB_OP_ROPE_BACK:
    case TB_OP_GLU:
    case TB_OP_SOFT_MAX:
        return elements(op.dst) <= 2048;
    case TB_OP_ARGSORT: // comparisons that no branch predictor foresees
    case TB_OP_TOP_K:
        return elements(op.src[0]) <= 512;
    case TB_OP_SET_ROWS: // dst is the whole cache, src0 the rows that move
        return elements(op.src[0]) <= 4096;
    default:
        return elements(op.dst) <= 4096;
    }
}

// The bytes of an operand.
struct reach {
    uint64_t space = 0, first = 0, last = 0;
    const tb_tensor * t = nullptr;
};

bool overlap(const reach & a, const reach & b) { return a.space == b.space && a.first < b.last && b.first < a.last; }

bool same_elements(const reach & a, const reach & b) {
    if (a.space != b.space || a.first != b.first || a.t->type != b.t->type) return false;
    for (int i = 0; i < 4; ++i) {
        if (a.t->ne[i] != b.t->ne[i] || (a.t->ne[i] > 1 && a.t->nb[i] != b.t->nb[i])) return false;
    }
    return true;
}

bool same_rows(const tb_tensor & a, const tb_tensor & b) {
    return a.ne[1] == b.ne[1] && a.ne[2] == b.ne[2] && a.ne[3] == b.ne[3];
}

// What is known of a step while later ones look for their place.
struct placed {
    reach write;  // .t == nullptr: memory that no other step has
    reach states; // written, too; .t == nullptr: none
    reach reads[TB_MAX_SRC];
    int n_reads = 0;
    const tb_tensor * shape = nullptr; // whose rows or runs the threads divide
    cut divided = cut::any;
    bool by_rows = false;
    bool tiny = false;
    int32_t thread = all_threads;
    uint32_t phase = 0;

    int64_t per_row() const { return (int64_t{shape->ne[0]} + run_elements - 1) / run_elements; }
    bool whole_rows() const { return by_rows || divided == cut::rows || per_row() == 1; }
};

bool touches(const placed & x, const reach & bytes) {
    if (x.write.t && overlap(x.write, bytes)) return true;
    return std::any_of(x.reads, x.reads + x.n_reads, [&](const reach & r) { return overlap(r, bytes); });
}

bool depends(const placed & x, const placed & y) {
    if ((x.states.t && touches(y, x.states)) || (y.states.t && touches(x, y.states))) return true;
    if (y.write.t) {
        if (x.write.t && overlap(x.write, y.write)) return true;
        for (int i = 0; i < x.n_reads; ++i)
            if (overlap(x.reads[i], y.write)) return true;
    }
    for (int i = 0; x.write.t && i < y.n_reads; ++i)
        if (overlap(x.write, y.reads[i])) return true;
    return false;
}

// Wherever x and y touch the same bytes, one of them writing: is it the same element, in the same row or run of both?
bool is_aligned(const placed & x, const placed & y, bool whole_rows) {
    const auto fits = [&](const reach & a, const reach & b) {
        return !overlap(a, b) ||
               (same_elements(a, b) && same_rows(*a.t, *x.shape) && (whole_rows || a.t->ne[0] == x.shape->ne[0]));
    };
    if (y.write.t) {
        if (x.write.t && !fits(x.write, y.write)) return false;
        for (int i = 0; i < x.n_reads; ++i)
            if (!fits(x.reads[i], y.write)) return false;
    }
    for (int i = 0; x.write.t && i < y.n_reads; ++i)
        if (!fits(x.write, y.reads[i])) return false;
    return true;
}

// How a step runs in the phase of those that it depends on, without a barrier between them.
struct bond {
    enum { unbound, barrier, thread, rows, runs } by = unbound; // unbound: it depends on none; barrier: it does not
    int32_t on = all_threads;                                   // by thread: the one that runs them all
};

bond bond_between(const placed & x, const placed & y) {
    if (y.thread != all_threads) return x.tiny ? bond{bond::thread, y.thread} : bond{bond::barrier};
    const bool whole = y.whole_rows();
    if (x.states.t || y.states.t) return {bond::barrier};
    const bool alike = x.divided != cut::any && y.divided != cut::any && same_rows(*x.shape, *y.shape);
    if (!alike || !is_aligned(x, y, whole)) return {bond::barrier};
    if (whole) return {bond::rows};
    // rows of several runs, divided as runs, go with runs of such rows only
    return {x.divided == cut::runs && x.shape->ne[0] == y.shape->ne[0] ? bond::runs : bond::barrier};
}

// Of a step with two others at once.
bond both(const bond & a, const bond & b) {
    if (a.by == bond::unbound) return b;
    return a.by == b.by && a.on == b.on ? a : bond{bond::barrier};
}

struct phase_use {
    uint32_t counters = 0;
    uint32_t alone = 0; // chains of steps that one thread runs
    uint64_t scratch = 0;
};

// A preparation that later ops can use: its operand still holds what it was made from.
struct shared_preparation {
    const op_preparation * kind;
    uint32_t index; // the op it was made for
    reach operand;
    uint32_t phase;
    size_t slot;
};

// Memory of a preparation, taken from its phase to the last one that uses it.
struct slot {
    uint64_t bytes;
    uint32_t first, last;
    uint64_t at = 0;
};

class scheduler {
  public:
    scheduler(const std::vector<tb_op> & all, const std::vector<region> & buffers, const kernel_table & set,
              int threads, bool fuses)
        : ops(all), regions(buffers), kernels(set), n_threads(threads), fuse(fuses) {}

    schedule run() {
        steps.reserve(ops.size() + ops.size() / 2);
        for (uint32_t i = 0; i < ops.size(); i += taken)
            add(i);
        return finish();
    }

  private:
    const std::vector<tb_op> & ops;
    const std::vector<region> & regions;
    const kernel_table & kernels;
    const int n_threads;
    const bool fuse;

    std::vector<step> steps;
    std::vector<size_t> slot_of; // per step, of what it makes or uses; or none
    std::vector<placed> recent;  // of the phases from `first_open` on
    uint32_t first_open = 0;
    std::vector<phase_use> phases;
    std::vector<shared_preparation> shared;
    std::vector<slot> slots;
    uint32_t taken = 1; // ops that became the last step

    static constexpr size_t none = SIZE_MAX;

    view see(const tb_tensor & t) const {
        view v;
        if (t.buffer != TB_NO_BUFFER) {
            v.t = &t;
            v.data = regions[t.buffer].base + t.offset;
        }
        return v;
    }

    reach reach_of(const tb_tensor & t) const {
        int empty;
        const region & r = regions[t.buffer];
        const uint64_t first = r.at + t.offset;
        return {r.space, first, first + tb_tensor_span(&t, &empty), &t};
    }

    bool is_idle(const tb_op & op) const { return op.code == TB_OP_NOP || elements(op.dst) == 0; }

    // Is `op` the elementwise op that follows on `first`, in the place of its result? Then `other` is its other
    // operand: floats, of which rows repeat.
    bool follows(const tb_op & op, uint32_t code, const tb_tensor & first, const tb_tensor ** other) const {
        if (op.code != code || is_idle(op)) return false;
        const reach result = reach_of(first);
        if (!same_elements(reach_of(op.dst), result)) return false;
        const int at = same_elements(reach_of(op.src[0]), result) ? 0 : 1;
        const tb_tensor & b = op.src[1 - at];
        if (at == 1 && !same_elements(reach_of(op.src[1]), result)) return false;
        *other = &b;
        return b.type == TB_F32 && b.ne[0] == first.ne[0] && b.nb[0] == sizeof(float) && !overlap(reach_of(b), result);
    }

    // How many of the ops behind op `index` it can do, too; their other operands go behind its own.
    uint8_t fuse_next(uint32_t index, step & s) const {
        const tb_op & op = ops[index];
        const auto * f = std::find_if(std::begin(fusions), std::end(fusions),
                                      [&op](const fusion & candidate) { return candidate.code == op.code; });
        if (f == std::end(fusions)) return 0;
        uint8_t n = 0;
        const tb_tensor * other = nullptr;
        while (n < most_fused && f->next[n] != TB_OP_NOP && index + n + 1 < ops.size() &&
               follows(ops[index + n + 1], f->next[n], op.dst, &other)) {
            s.src[f->operand + n++] = see(*other);
        }
        return n;
    }

    void add(uint32_t index) {
        const tb_op & op = ops[index];
        taken = 1;
        if (is_idle(op)) return;
        const op_entry & entry = op_table(op.code);
        step s;
        s.run = entry.run;
        s.index = index;
        s.dst = see(op.dst);
        for (uint32_t i = 0; i < op.n_src; ++i)
            s.src[i] = see(op.src[i]);
        s.by_count = entry.by_count;
        placed at;
        at.shape = &op.dst;
        at.divided = entry.divided;
        at.tiny = is_tiny(op);

        s.fused = fuse ? fuse_next(index, s) : 0;
        taken += s.fused;
        uint32_t earliest = first_open;
        size_t used = none;
        const op_preparation * const prepare = entry.prepare;
        const uint64_t prepared_bytes = prepare ? prepare->bytes(op, n_threads, kernels) : 0;
        if (prepared_bytes != 0) used = preparation(index, *prepare, prepared_bytes, &earliest);
        for (int i = 0; i < TB_MAX_SRC; ++i) {
            const bool is_read = s.src[i] && (used == none || i != prepare->operand || prepare->reads_operand);
            if (is_read) at.reads[at.n_reads++] = reach_of(*s.src[i].t);
        }
        at.write = reach_of(op.dst);
        if (const int written = tb_op_written(&op); written >= 0) at.states = reach_of(op.src[written]);
        place(at, earliest, entry.takes_chunks);
        if (entry.scratch_bytes) {
            uint64_t & end = phases[at.phase].scratch;
            s.scratch = end;
            end += round_up(entry.scratch_bytes(op, at.thread == all_threads ? n_threads : 1, kernels));
        }
        if (used != none) slots[used].last = std::max(slots[used].last, at.phase);
        append(s, at, used, entry.takes_chunks);
        // What was made from bytes that are overwritten now serves no later op.
        const auto is_stale = [&](const shared_preparation & p) {
            return overlap(p.operand, at.write) || (at.states.t && overlap(p.operand, at.states));
        };
        shared.erase(std::remove_if(shared.begin(), shared.end(), is_stale), shared.end());
    }

    // The slot of what op `index` wants to be prepared: of an earlier op, or a new step's. The op follows it.
    size_t preparation(uint32_t index, const op_preparation & kind, uint64_t bytes, uint32_t * earliest) {
        const tb_op & op = ops[index];
        const tb_tensor & operand = op.src[kind.operand];
        const reach read = reach_of(operand);
        for (const shared_preparation & p : shared) {
            if (p.kind == &kind && same_elements(p.operand, read) && kind.same(ops[p.index], op, n_threads, kernels)) {
                *earliest = std::max(*earliest, p.phase + 1);
                return p.slot;
            }
        }
        step s;
        s.run = kind.run;
        s.index = index;
        s.is_op = false;
        s.dst = see(op.dst);
        for (uint32_t i = 0; i < op.n_src; ++i)
            s.src[i] = see(op.src[i]);
        placed at;
        at.shape = &operand;
        at.divided = kind.divided(op);
        at.tiny = elements(operand) <= 4096;
        at.reads[at.n_reads++] = read;
        place(at, first_open, false);
        const size_t made = slots.size();
        slots.push_back({round_up(bytes), at.phase, at.phase});
        append(s, at, made, false);
        if (fuse) shared.push_back({&kind, index, read, at.phase, made});
        *earliest = std::max(*earliest, at.phase + 1);
        return made;
    }

    uint32_t last_phase() const { return static_cast<uint32_t>(phases.size()); } // one past

    // Find x's phase, thread and division. One thread needs no barriers: each step is a phase of its own.
    void place(placed & x, uint32_t earliest, bool takes_chunks) {
        if (n_threads == 1 || !fuse) {
            x.phase = last_phase();
            x.thread = n_threads == 1 || x.tiny ? 0 : all_threads;
            phases.emplace_back();
            return;
        }
        uint32_t phase = std::max(earliest, first_open);
        for (const placed & y : recent)
            if (y.phase >= phase && depends(x, y)) phase = y.phase;
        bond tied;
        for (const placed & y : recent)
            if (y.phase == phase && depends(x, y)) tied = both(tied, bond_between(x, y));
        if (tied.by == bond::barrier) ++phase;
        while (phase < last_phase() && takes_chunks && phases[phase].counters == most_counters)
            ++phase;
        if (phase == last_phase()) open_phase();
        x.phase = phase;
        x.thread = tied.on;
        x.by_rows = tied.by == bond::rows && x.divided == cut::runs;
        if (x.tiny && (tied.by == bond::unbound || tied.by == bond::barrier)) {
            x.thread = static_cast<int32_t>(phases[phase].alone++ % static_cast<uint32_t>(n_threads));
        }
    }

    void open_phase() {
        phases.emplace_back();
        if (last_phase() <= first_open + window) return;
        first_open = last_phase() - window;
        const auto is_closed = [this](const placed & y) { return y.phase < first_open; };
        recent.erase(std::remove_if(recent.begin(), recent.end(), is_closed), recent.end());
    }

    void append(step & s, const placed & at, size_t used, bool takes_chunks) {
        s.phase = at.phase;
        s.thread = at.thread;
        s.by_rows = at.by_rows;
        if (takes_chunks) s.counter = static_cast<uint8_t>(phases[at.phase].counters++);
        steps.push_back(s);
        slot_of.push_back(used);
        if (n_threads == 1 || !fuse) return;
        recent.push_back(at);
        if (recent.size() == most_recent) {
            first_open = last_phase();
            recent.clear();
        }
    }

    // Memory of preparations that are never needed at the same time may be the same.
    uint64_t assign_slots() {
        std::vector<size_t> order(slots.size()), active;
        for (size_t i = 0; i < order.size(); ++i)
            order[i] = i;
        std::sort(order.begin(), order.end(), [this](size_t a, size_t b) {
            return slots[a].first != slots[b].first ? slots[a].first < slots[b].first : a < b;
        });
        uint64_t end = 0;
        for (const size_t i : order) {
            slot & s = slots[i];
            const auto is_over = [&](size_t a) { return slots[a].last < s.first; };
            active.erase(std::remove_if(active.begin(), active.end(), is_over), active.end());
            for (const size_t a : active) { // by address
                if (slots[a].at >= s.at + s.bytes) break;
                s.at = std::max(s.at, slots[a].at + slots[a].bytes);
            }
            active.insert(std::find_if(active.begin(), active.end(), [&](size_t a) { return slots[a].at > s.at; }), i);
            end = std::max(end, s.at + s.bytes);
        }
        return end;
    }

    static void find_solos(std::vector<step> & all) {
        for (size_t first = 0, last = 0; first < all.size(); first = last) {
            const step & head = all[first];
            bool is_one = head.thread != all_threads;
            for (; last < all.size() && all[last].phase == head.phase; ++last)
                is_one = is_one && all[last].thread == head.thread;
            if (is_one && first > 0 && last - first <= UINT16_MAX) {
                all[first - 1].solo = static_cast<uint16_t>(last - first);
            }
        }
    }

    // Steps by phase; within one those of single threads first and those that hand out chunks last, so that whoever was
    // busy with the former takes fewer of the latter.
    schedule finish() {
        schedule out;
        out.prepared_bytes = assign_slots();
        const auto group = [this](const step & s) {
            return size_t{s.phase} * 3 + (s.thread != all_threads                               ? 0
                                          : op_table(ops[s.index].code).takes_chunks && s.is_op ? 2
                                                                                                : 1);
        };
        std::vector<size_t> starts(phases.size() * 3 + 1);
        for (const step & s : steps)
            ++starts[group(s) + 1];
        for (size_t i = 1; i < starts.size(); ++i)
            starts[i] += starts[i - 1];
        out.steps.resize(steps.size());
        for (size_t i = 0; i < steps.size(); ++i) {
            step & s = out.steps[starts[group(steps[i])]++];
            s = steps[i];
            if (slot_of[i] != none) s.prepared = slots[slot_of[i]].at;
        }
        for (size_t i = 0; i + 1 < out.steps.size(); ++i) {
            step & s = out.steps[i];
            s.meet = s.phase != out.steps[i + 1].phase;
            s.n_counters = static_cast<uint8_t>(phases[s.phase].counters);
        }
        if (n_threads > 1 && fuse) find_solos(out.steps);
        for (const step & s : out.steps)
            out.threads = std::max(out.threads, s.thread == all_threads ? n_threads : s.thread + 1);
        for (const phase_use & p : phases)
            out.scratch_bytes = std::max(out.scratch_bytes, p.scratch);
        return out;
    }
};

} // namespace

schedule make_schedule(const std::vector<tb_op> & ops, const std::vector<region> & regions,
                       const kernel_table & kernels, int n_threads, bool fuse) {
    return scheduler(ops, regions, kernels, n_threads, fuse).run();
}

} // namespace tb::npu
