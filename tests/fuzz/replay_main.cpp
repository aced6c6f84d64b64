// Runs inputs that are kept: tilebeam-fuzz-replay FILE..; with --seeds FOLDER it writes the seeds there instead. Built
// by any compiler, so that the corpus is part of the ordinary tests.
#include <cstdio>
#include <cstring>
#include <string>

#include "unit.h"

namespace {

bool read_file(const char * path, std::vector<uint8_t> & bytes) {
    std::FILE * f = std::fopen(path, "rb");
    if (!f) {
        return false;
    }
    bytes.assign(1 << 20, 0);
    bytes.resize(std::fread(bytes.data(), 1, bytes.size(), f));
    std::fclose(f);
    return true;
}

int write_seeds(const std::string & folder) {
    int number = 0;
    for (const tb::fuzz::unit & u : tb::fuzz::seeds()) {
        const std::vector<uint8_t> bytes = tb::fuzz::serialize(u);
        const std::string path = folder + "/seed-" + std::to_string(number++);
        std::FILE * f = std::fopen(path.c_str(), "wb");
        if (!f || std::fwrite(bytes.data(), 1, bytes.size(), f) != bytes.size() || std::fclose(f) != 0) {
            std::fprintf(stderr, "%s cannot be written\n", path.c_str());
            return 1;
        }
    }
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 3 && std::strcmp(argv[1], "--seeds") == 0) {
        return write_seeds(argv[2]);
    }
    int refused = 0;
    for (const tb::fuzz::unit & u : tb::fuzz::good_seeds()) {
        const tb::fuzz::totals before = tb::fuzz::counted();
        tb::fuzz::run(u);
        const tb::fuzz::totals & after = tb::fuzz::counted();
        if (after.messages - before.messages != after.accepted - before.accepted) {
            tb_op op;
            std::memcpy(&op, u.messages[tb::fuzz::n_files].payload.data() + sizeof(tb_graph), sizeof op);
            std::fprintf(stderr, "a good seed is refused: %s %s\n", tb_op_name(op.code), op.name);
            ++refused;
        }
    }
    std::vector<uint8_t> bytes;
    for (int i = 1; i < argc; ++i) {
        if (!read_file(argv[i], bytes)) {
            std::fprintf(stderr, "%s cannot be read\n", argv[i]);
            return 1;
        }
        std::fprintf(stderr, "%s\n", argv[i]); // the last name printed is the one that crashed
        tb::fuzz::run(tb::fuzz::parse(bytes.data(), bytes.size()));
    }
    const tb::fuzz::totals & t = tb::fuzz::counted();
    std::printf("{\"seeds\": %zu, \"seeds_refused\": %d, \"inputs\": %d, \"messages\": %llu, \"accepted\": %llu, "
                "\"ops\": %llu, \"skipped\": %llu}\n",
                tb::fuzz::good_seeds().size(), refused, argc - 1, static_cast<unsigned long long>(t.messages),
                static_cast<unsigned long long>(t.accepted), static_cast<unsigned long long>(t.computed),
                static_cast<unsigned long long>(t.skipped));
    return 0;
}
