// See unit.h.
#include "unit.h"

#include <algorithm>
#include <cstring>

#include "tilebeam/layout.h"

namespace tb::fuzz {

unit parse(const uint8_t * data, size_t size) {
    unit u;
    std::memcpy(&u.head, data, std::min(size, sizeof u.head));
    size_t at = std::min(size, sizeof u.head);
    while (size - at >= sizeof(message_head) && u.messages.size() < most_messages) {
        message m;
        std::memcpy(&m.head, data + at, sizeof m.head);
        at += sizeof m.head;
        const size_t n = std::min({size_t{m.head.size}, size - at, most_payload});
        m.payload.assign(data + at, data + at + n);
        at += n;
        u.messages.push_back(std::move(m));
    }
    return u;
}

std::vector<uint8_t> serialize(const unit & u) {
    std::vector<uint8_t> out(sizeof u.head);
    std::memcpy(out.data(), &u.head, sizeof u.head);
    for (const message & m : u.messages) {
        message_head head = m.head;
        head.size = static_cast<uint16_t>(std::min(m.payload.size(), most_payload));
        const auto * bytes = reinterpret_cast<const uint8_t *>(&head);
        out.insert(out.end(), bytes, bytes + sizeof head);
        out.insert(out.end(), m.payload.begin(), m.payload.begin() + head.size);
    }
    return out;
}

op_list ops_of(const message & m) {
    op_list list{sizeof(tb_graph), sizeof(tb_op), 0};
    if (m.head.kind == TB_REQ_PATCH) {
        list.first += offsetof(tb_patch, op);
        list.step = sizeof(tb_patch);
    } else if (m.head.kind != TB_REQ_COMPUTE) {
        return list;
    }
    if (m.payload.size() > sizeof(tb_graph)) {
        list.count = (m.payload.size() - sizeof(tb_graph)) / list.step;
    }
    return list;
}

void set_dense(tb_tensor & t) {
    if (t.type >= TB_TYPE_COUNT) {
        return;
    }
    if (tb_type_is_tiled(t.type)) {
        t.nb[0] = t.nb[1] = 0;
        t.nb[2] = tb_tiled_bytes(t.type, t.ne[0], t.ne[1]);
    } else {
        t.nb[0] = tb_type_size(t.type);
        t.nb[1] = t.nb[0] * (t.ne[0] / tb_type_block(t.type));
        t.nb[2] = t.nb[1] * t.ne[1];
    }
    t.nb[3] = t.nb[2] * t.ne[2];
}

} // namespace tb::fuzz
