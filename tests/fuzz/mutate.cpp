// How inputs change: by the meaning of their fields. Random bytes alone would hardly ever get past the checks of an op
// with six operands; here a dimension changes in all operands that have it, strides follow, and values come from near
// the limits that the code knows. libFuzzer's own mutations are used now and then, on an op, a message or the whole.
#include <algorithm>
#include <cstring>
#include <random>

#include "unit.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t most);

namespace tb::fuzz {

namespace {

using generator = std::minstd_rand;

constexpr size_t most_ops = 24;

uint32_t below(generator & r, size_t n) { return static_cast<uint32_t>(r() % n); }
bool one_in(generator & r, uint32_t n) { return r() % n == 0; }

template <class T, size_t N> T pick(generator & r, const T (&values)[N]) { return values[r() % N]; }

const std::vector<tb_op> & catalogue() {
    static const std::vector<tb_op> ops = valid_ops();
    return ops;
}

uint64_t odd_number(generator & r) {
    static const uint64_t edges[] = {0,   1,   2,   3,   4,   7,   8,    15,   16,   17,   18,   31,   32,
                                     33,  34,  63,  64,  65,  95,  96,   97,   127,  128,  129,  255,  256,
                                     257, 511, 512, 576, 577, 700, 1023, 1024, 1025, 1088, 2048, 4096, 5000};
    const uint32_t way = below(r, 8);
    if (way < 5) {
        return pick(r, edges);
    }
    const uint64_t power = uint64_t{1} << below(r, 64);
    return way == 5 ? power : way == 6 ? power - 1 : ~uint64_t{0} - below(r, 3);
}

int32_t odd_param(generator & r) {
    static const float floats[] = {0.0f, 1.0f, -1.0f, 0.5f, 1e-6f, 1e30f, -1e30f, 30.0f, 10000.0f, 1e-40f};
    static const int32_t patterns[] = {0x7f800000, INT32_MIN, 0x7fc00000, -1, INT32_MAX};
    int32_t value;
    switch (below(r, 3)) {
    case 0: {
        const float x = pick(r, floats);
        std::memcpy(&value, &x, sizeof value);
        return value;
    }
    case 1:
        return pick(r, patterns);
    default:
        return static_cast<int32_t>(odd_number(r));
    }
}

tb_tensor & operand(generator & r, tb_op & op) {
    const uint32_t i = below(r, std::min<uint32_t>(op.n_src, TB_MAX_SRC) + 1u);
    return i == 0 ? op.dst : op.src[i - 1];
}

// A dimension gets another size in all operands that have it, and their strides follow.
void resize(generator & r, tb_op & op) {
    const uint32_t old = operand(r, op).ne[below(r, 4)];
    uint32_t size = static_cast<uint32_t>(odd_number(r));
    if (one_in(r, 2)) {
        size = one_in(r, 2) ? old + 1 : one_in(r, 2) ? old * 2 : old - 1;
    }
    const bool block = one_in(r, 2);
    const auto change = [&](tb_tensor & t) {
        for (uint32_t & n : t.ne) {
            if (n == old) {
                n = block ? size / 32 * 32 : size;
            }
        }
        set_dense(t);
    };
    change(op.dst);
    for (tb_tensor & t : op.src) {
        change(t);
    }
}

// A dimension in which all operands stay where they are: no bytes, however many elements.
void pile_up(generator & r, tb_op & op) {
    const uint32_t i = below(r, 4);
    const uint32_t old = operand(r, op).ne[i];
    const auto size = static_cast<uint32_t>(odd_number(r));
    const auto change = [&](tb_tensor & t) {
        if (t.ne[i] == old) {
            t.ne[i] = size;
            t.nb[i] = one_in(r, 4) ? 4 : 0;
        }
    };
    change(op.dst);
    for (tb_tensor & t : op.src) {
        change(t);
    }
}

// To the very end of its buffer, or a little beyond.
void move_to_end(generator & r, tb_tensor & t) {
    int empty;
    const uint64_t span = tb_tensor_span(&t, &empty);
    const uint64_t size = file_bytes[t.buffer % n_files];
    t.offset = size - std::min(size, span);
    if (one_in(r, 2)) {
        t.offset = t.offset / 64 * 64;
    } else if (one_in(r, 2)) {
        t.offset += uint64_t{1} << below(r, 7);
    }
}

void mutate_tensor(generator & r, tb_op & op, tb_tensor & t) {
    switch (below(r, 10)) {
    case 0:
        t.buffer = one_in(r, 4) ? static_cast<uint32_t>(odd_number(r)) : one_in(r, 4) ? TB_NO_BUFFER : below(r, 4);
        break;
    case 1:
        t.type = below(r, TB_TYPE_COUNT + 1u);
        if (one_in(r, 2)) {
            set_dense(t);
        }
        break;
    case 2:
        t.offset = one_in(r, 2) ? odd_number(r) : below(r, 256) * 64u;
        break;
    case 3:
        move_to_end(r, t);
        break;
    case 4:
        t.ne[below(r, 4)] = static_cast<uint32_t>(odd_number(r));
        break;
    case 5:
        t.nb[below(r, 4)] = odd_number(r);
        break;
    case 6: { // gaps between rows, or rows that share bytes
        const uint32_t i = below(r, 4);
        t.nb[i] = one_in(r, 3) ? t.nb[i] / 2 : t.nb[i] + (uint64_t{2} << below(r, 6));
        break;
    }
    case 7: {
        const uint32_t i = below(r, 4), j = below(r, 4);
        std::swap(t.ne[i], t.ne[j]);
        if (one_in(r, 2)) {
            std::swap(t.nb[i], t.nb[j]);
        }
        break;
    }
    case 8:
        t = operand(r, op);
        break;
    default:
        set_dense(t);
        break;
    }
}

void mutate_op(generator & r, tb_op & op) {
    switch (below(r, 18)) {
    case 0:
        op.code = one_in(r, 8) ? static_cast<uint32_t>(odd_number(r)) : below(r, TB_OP_COUNT + 1u);
        break;
    case 1:
        op.flags = one_in(r, 2) ? op.flags ^ TB_FLAG_FP16 : static_cast<uint32_t>(odd_number(r));
        break;
    case 2:
        op.n_src = below(r, TB_MAX_SRC + 2u);
        break;
    case 3:
    case 4:
        op.params[below(r, 16)] = odd_param(r);
        break;
    case 5:
    case 6:
        op = catalogue()[below(r, catalogue().size())];
        break;
    case 7:
    case 8:
    case 9:
        resize(r, op);
        break;
    case 10:
        pile_up(r, op);
        break;
    case 11:
        LLVMFuzzerMutate(reinterpret_cast<uint8_t *>(&op), sizeof op, sizeof op);
        break;
    default:
        mutate_tensor(r, op, operand(r, op));
        break;
    }
}

void mutate_graph(generator & r, message & m) {
    if (m.payload.size() < sizeof(tb_graph)) {
        return;
    }
    const op_list list = ops_of(m);
    tb_graph head;
    std::memcpy(&head, m.payload.data(), sizeof head);
    const uint32_t way = below(r, 20);
    if (way == 0) {
        head.slot = one_in(r, 4) ? static_cast<uint32_t>(odd_number(r)) : below(r, TB_MAX_GRAPHS + 1u);
    } else if (way == 1) {
        head.serial = below(r, 4);
    } else if (way == 2) {
        head.n_ops = static_cast<uint32_t>(odd_number(r));
    } else if (way == 3 && list.count < most_ops) {
        const tb_patch p{below(r, 8), 0, catalogue()[below(r, catalogue().size())]};
        const bool patch = m.head.kind == TB_REQ_PATCH;
        const auto * bytes = patch ? reinterpret_cast<const uint8_t *>(&p) : reinterpret_cast<const uint8_t *>(&p.op);
        m.payload.resize(sizeof head + list.count * list.step);
        m.payload.insert(m.payload.end(), bytes, bytes + list.step);
        head.n_ops = static_cast<uint32_t>(list.count) + 1;
    } else if (way == 4 && list.count > 0) {
        const auto at = m.payload.begin() + static_cast<ptrdiff_t>(sizeof head + below(r, list.count) * list.step);
        m.payload.erase(at, at + static_cast<ptrdiff_t>(list.step));
        head.n_ops = static_cast<uint32_t>(list.count) - 1;
    } else if (list.count > 0) {
        uint8_t * at = m.payload.data() + list.first + below(r, list.count) * list.step;
        tb_op op;
        std::memcpy(&op, at, sizeof op);
        mutate_op(r, op);
        std::memcpy(at, &op, sizeof op);
        if (m.head.kind == TB_REQ_PATCH && one_in(r, 4)) {
            const uint32_t index = below(r, 8);
            std::memcpy(at - offsetof(tb_patch, op), &index, sizeof index);
        }
        return;
    }
    std::memcpy(m.payload.data(), &head, sizeof head);
}

message fresh_message(generator & r) {
    message m{};
    m.head.kind = static_cast<uint8_t>(below(r, TB_REQ_COUNT + 1u));
    const auto put = [&m](const void * data, size_t size) {
        const auto * bytes = static_cast<const uint8_t *>(data);
        m.payload.insert(m.payload.end(), bytes, bytes + size);
    };
    switch (m.head.kind) {
    case TB_REQ_MAP:
    case TB_REQ_UNMAP: {
        const uint32_t buffer = below(r, 6);
        const uint64_t offset = one_in(r, 4) ? 4096 : 0;
        const tb_map map{buffer, below(r, 2), offset, one_in(r, 4) ? odd_number(r) : file_bytes[buffer % n_files]};
        put(&map, sizeof map);
        break;
    }
    case TB_REQ_TRACE: {
        const tb_map map{one_in(r, 4) ? TB_NO_BUFFER : below(r, 6), 0, 0, 0};
        put(&map, sizeof map);
        break;
    }
    case TB_REQ_COMPUTE:
        return make_compute({catalogue()[below(r, catalogue().size())]}, below(r, 3), below(r, 3));
    case TB_REQ_PATCH:
    case TB_REQ_THREADS: {
        const tb_graph g{below(r, 3), m.head.kind == TB_REQ_PATCH ? 0 : below(r, 5), below(r, 3)};
        put(&g, sizeof g);
        break;
    }
    default: {
        m.head.kind = kind_poke;
        const poke_head at{below(r, n_files), below(r, 64) * 64u};
        const auto value = static_cast<int32_t>(one_in(r, 2) ? below(r, 5) : odd_number(r));
        const int32_t values[4] = {value, value, 0, value};
        put(&at, sizeof at);
        put(values, sizeof values);
    }
    }
    return m;
}

void mutate_bytes(std::vector<uint8_t> & bytes, size_t grow) {
    const size_t size = bytes.size();
    bytes.resize(std::min(size + grow, most_payload));
    bytes.resize(LLVMFuzzerMutate(bytes.data(), size, bytes.size()));
}

void mutate_unit(generator & r, unit & u) {
    const size_t n = u.messages.size();
    const uint32_t way = below(r, 32);
    if (way == 0) {
        auto * head = reinterpret_cast<uint8_t *>(&u.head);
        head[below(r, 5)] = static_cast<uint8_t>(below(r, 16));
    } else if (n == 0 || way == 1) {
        if (n < most_messages) {
            u.messages.insert(u.messages.begin() + below(r, n + 1), fresh_message(r));
        }
    } else if (way == 2) {
        u.messages.erase(u.messages.begin() + below(r, n));
    } else if (way == 3 && n < most_messages) {
        u.messages.push_back(u.messages[below(r, n)]);
    } else if (way == 4) {
        std::swap(u.messages[below(r, n)], u.messages[below(r, n)]);
    } else if (way == 5) {
        u.messages[below(r, n)].head.damage = static_cast<uint8_t>(below(r, damage_count));
    } else if (way == 6) {
        u.messages[below(r, n)].head.kind = static_cast<uint8_t>(below(r, TB_REQ_COUNT + 1u));
    } else if (way == 7) {
        mutate_bytes(u.messages[below(r, n)].payload, 16);
    } else {
        const size_t start = below(r, n);
        for (size_t i = 0; i < n; ++i) {
            message & m = u.messages[(start + i) % n];
            if (ops_of(m).count > 0) {
                mutate_graph(r, m);
                return;
            }
        }
        u.messages.push_back(fresh_message(r));
    }
}

size_t store(const unit & u, uint8_t * data, size_t most) {
    const std::vector<uint8_t> bytes = serialize(u);
    const size_t size = std::min(bytes.size(), most);
    std::memcpy(data, bytes.data(), size);
    return size;
}

} // namespace

} // namespace tb::fuzz

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t most, unsigned seed) {
    using namespace tb::fuzz;
    generator r(seed);
    if (one_in(r, 64)) {
        return LLVMFuzzerMutate(data, size, most);
    }
    unit u = parse(data, size);
    do {
        mutate_unit(r, u);
    } while (!one_in(r, 3));
    return store(u, data, most);
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t * data1, size_t size1, const uint8_t * data2, size_t size2,
                                            uint8_t * out, size_t most, unsigned seed) {
    using namespace tb::fuzz;
    generator r(seed);
    unit u = parse(data1, size1);
    const unit other = parse(data2, size2);
    for (const message & m : other.messages) {
        if (ops_of(m).count > 0 && u.messages.size() < most_messages / 2 && one_in(r, 2)) {
            u.messages.insert(u.messages.begin() + below(r, u.messages.size() + 1), m);
        }
    }
    return store(u, out, most);
}
