// Both ends of the channel: the shared control region, the doorbells, the waiting, and descriptors on their way.
//
// Everything in the region is written by the other side at any time, by accident or on purpose: each side keeps its
// own copy of what it must rely on, and reads a shared word once.
#ifndef TILEBEAM_SESSION_CHANNEL_H
#define TILEBEAM_SESSION_CHANNEL_H

#include <cstddef>
#include <cstdint>
#include <functional>

#include "tilebeam/protocol.h"

namespace tb::session {

// Where the payload starts, and the size of a region that holds the largest message. Only pages that are touched cost
// memory.
constexpr uint64_t payload_offset = 4096;
constexpr uint64_t payload_capacity = sizeof(tb_graph) + uint64_t{TB_MAX_GRAPH_OPS} * sizeof(tb_patch);
constexpr uint64_t region_bytes = (payload_offset + payload_capacity + 65535) / 65536 * 65536;
static_assert(sizeof(tb_channel) <= payload_offset, "the header has a page of its own");

constexpr uint32_t abi_bytes = sizeof(tb_channel) + sizeof(tb_op);

// A greeting of this build with default options; its digest (checksum.h) comes last, when all fields are set.
tb_cpu_hello make_cpu_hello(uint64_t region_size);

inline uint32_t load_word(const uint32_t * word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
inline void store_word(uint32_t * word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_SEQ_CST); }

// How a wait spends its time. All in nanoseconds from its start.
struct wait_plan {
    int64_t sleep_until = 0;  // sleep at first: the answer is not expected before
    int64_t spin_until = 0;   // then spin until here, then sleep
    int64_t slice = 20000000; // longest time between two looks at the peer
};

enum class wake_reason { seen_spinning, seen_sleeping, stopped };

// Wait until *word != old. `sleeping` tells the other side that a wake-up call is needed. `keep_waiting` is asked once
// per slice: false ends the wait.
wake_reason wait_word(const uint32_t * word, uint32_t old, uint32_t * sleeping, const wait_plan & plan,
                      const std::function<bool()> & keep_waiting);

// Store a new value and wake the other side if it sleeps.
void ring(uint32_t * word, uint32_t value, const uint32_t * sleeping);

// Descriptors travel over a socket pair beside the region, tagged with the number of the request they belong to.
bool make_socket_pair(int sockets[2]);
bool send_descriptor(int socket, uint32_t seq, int fd);
int receive_descriptor(int socket, uint32_t seq); // -1: none for this request
bool peer_hung_up(int socket);

} // namespace tb::session

#endif // TILEBEAM_SESSION_CHANNEL_H
