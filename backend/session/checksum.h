// A digest of messages, so that a scribbled control page is noticed and not computed. It guards against accidents and
// faults, not against somebody who can compute it too: what a valid message may do is limited by the NPU's own checks.
#ifndef TILEBEAM_SESSION_CHECKSUM_H
#define TILEBEAM_SESSION_CHECKSUM_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tilebeam/protocol.h"

namespace tb::session {

inline uint64_t mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}

// Four independent chains, because one multiplication waits for the one before it.
inline uint64_t checksum(uint64_t seed, const void * data, size_t size) {
    const auto * p = static_cast<const uint8_t *>(data);
    uint64_t h[4] = {seed, seed + 1, seed + 2, seed + 3};
    size_t i = 0;
    for (; i + 32 <= size; i += 32) {
        for (int lane = 0; lane < 4; ++lane) {
            uint64_t word;
            std::memcpy(&word, p + i + 8 * lane, sizeof word);
            h[lane] = mix(h[lane], word);
        }
    }
    for (; i < size; i += 8) {
        uint64_t word = 0;
        std::memcpy(&word, p + i, size - i < 8 ? size - i : 8);
        h[0] = mix(h[0], word);
    }
    return mix(mix(mix(mix(size, h[0]), h[1]), h[2]), h[3]);
}

inline uint64_t request_check(uint32_t seq, const tb_request & r, const void * payload) {
    return checksum(mix(mix(seq, r.kind), r.payload_offset), payload, r.payload_size);
}

inline uint64_t hello_check(const tb_cpu_hello & h) {
    return checksum(TB_PROTOCOL_MAGIC, &h, offsetof(tb_cpu_hello, check));
}

inline uint64_t hello_check(const tb_npu_hello & h) {
    return checksum(TB_PROTOCOL_MAGIC, &h, offsetof(tb_npu_hello, check));
}

inline uint64_t reply_check(uint32_t seq, const tb_reply & r) { return checksum(seq, &r, offsetof(tb_reply, check)); }

} // namespace tb::session

#endif // TILEBEAM_SESSION_CHECKSUM_H
