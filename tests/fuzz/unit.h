// What one fuzz input is: a way to start the NPU side, and messages to send it one after the other.
//
// On disk an input is its bytes as they are used: unit_head, then for every message a message_head and its payload,
// which is the protocol's own (tb_map, tb_graph with ops ..). Any bytes are an input: what is missing at the end counts
// as absent. So libFuzzer's own mutations work on it too, and a crash file can be read with a hex dump.
#ifndef TILEBEAM_TESTS_FUZZ_UNIT_H
#define TILEBEAM_TESTS_FUZZ_UNIT_H

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tilebeam/protocol.h"

namespace tb::fuzz {

struct unit_head {
    uint8_t threads; // 0..5: one worker; 6: two; 7: three (modulo 8)
    uint8_t isa;     // 0: the best kernel set; else kernel_isas()[(isa - 1) % n]
    uint8_t fill;    // what the buffers hold at first: enum fill (modulo)
    uint8_t limit;   // memory limit in pages, 0 = none
    uint8_t hello;   // what is wrong with the handshake: enum hello (modulo), nearly always nothing
    uint8_t reserved[3];
};

enum fill { fill_zero, fill_small, fill_bytes, fill_ones, fill_count };

enum hello {
    hello_good,
    hello_magic,
    hello_protocol,
    hello_layout,
    hello_abi,
    hello_region,
    hello_threads,
    hello_isa,
    hello_count
};

struct message_head {
    uint8_t kind;   // enum tb_request_kind, or anything else; kind_poke is not sent but done
    uint8_t damage; // enum damage (modulo), nearly always none
    uint16_t size;  // bytes of payload that follow
};

// Not a request: the CPU side writes into a shared buffer. Payload: poke_head, then the bytes.
constexpr uint8_t kind_poke = 0xf0;
struct poke_head {
    uint32_t file;
    uint32_t offset;
};

enum damage {
    damage_none,
    damage_digest,      // the digest does not match
    damage_low_offset,  // the payload begins inside the header
    damage_far_offset,  // .. or behind the region
    damage_large_size,  // .. or ends behind it
    damage_descriptor,  // a map request without its descriptor
    damage_not_a_file,  // .. or with a socket
    damage_two_at_once, // two descriptors for one request
    damage_count
};

// The files that map requests can ask for: file number = tb_map.buffer % n_files. Sizes in bytes; one ends within a
// page, so that a range up to its end does.
constexpr uint32_t n_files = 4;
constexpr uint32_t file_bytes[n_files] = {16384, 65536, 5000, 32768};

constexpr size_t most_messages = 32;
constexpr size_t most_payload = 32768;

struct message {
    message_head head;
    std::vector<uint8_t> payload;
};

struct unit {
    unit_head head{};
    std::vector<message> messages;
};

unit parse(const uint8_t * data, size_t size);
std::vector<uint8_t> serialize(const unit & u);

// The ops of a COMPUTE or PATCH payload: where op i begins. 0 ops for every other message.
struct op_list {
    size_t first; // offset of op 0 in the payload
    size_t step;  // bytes from op to op
    size_t count;
};
op_list ops_of(const message & m);

// ---- seeds.cpp: inputs that do something sensible

std::vector<unit> good_seeds(); // each op code with many types and shapes; every message is accepted
std::vector<unit> seeds();      // these, and some that are refused

// Strides of a tensor without gaps, of any type.
void set_dense(tb_tensor & t);

// ---- npu_side.cpp

struct totals {
    uint64_t messages = 0; // answered
    uint64_t accepted = 0; // of these with TB_OK
    uint64_t graphs = 0;   // of these COMPUTE and PATCH, whatever became of them
    uint64_t computed = 0; // ops in graphs that ran to their end
    uint64_t skipped = 0;  // not sent: more arithmetic than a fuzz run has time for
};

// Run one input. Ends the program (abort, or a sanitizer's report) if the NPU side does what it must not.
void run(const unit & u);
const totals & counted();

} // namespace tb::fuzz

#endif // TILEBEAM_TESTS_FUZZ_UNIT_H
