// Memory that both sides of the channel map: an anonymous file (memfd) that nobody can shrink under the other's feet.
#include "shm.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fork.h"
#include "huge_pages.h"
#include "numa.h"

namespace tb::session {

shared_memory::shared_memory() : made_in(fork_count()) {}

std::unique_ptr<shared_memory> shared_memory::create(const char * name, uint64_t size, std::string & why) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    if (size == 0 || size > INT64_MAX - page) {
        why = "shared memory of " + std::to_string(size) + " bytes cannot be made";
        return nullptr;
    }
    const uint64_t rounded = (size + page - 1) / page * page;
    const auto failed = [&](const char * what) {
        why = std::string(what) + " of " + std::to_string(size) + " bytes of shared memory failed: ";
        why += std::strerror(errno);
        return nullptr;
    };
    std::unique_ptr<shared_memory> m(new shared_memory);
    m->file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (m->file < 0) {
        return failed("creation");
    }
    if (ftruncate(m->file, static_cast<off_t>(rounded)) != 0) {
        return failed("sizing");
    }
    // A page that vanished would be a SIGBUS for whoever reads it next.
    if (fcntl(m->file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return failed("sealing");
    }
    void * base = map_shared(m->file, 0, rounded, PROT_READ | PROT_WRITE);
    if (base == MAP_FAILED) {
        return failed("mapping");
    }
    if (rounded >= huge_page) { // weights and caches; what is smaller stays in a CPU's cache
        if (const std::vector<int> nodes = nodes_to_spread(); !nodes.empty()) spread_pages(base, rounded, nodes);
    }
    madvise(base, rounded, MADV_HUGEPAGE); // fewer TLB misses where the system allows it for shared memory
    madvise(base, rounded, MADV_DONTFORK);
    m->base = base;
    m->bytes = rounded;
    return m;
}

shared_memory::~shared_memory() {
    if (base && made_in == fork_count()) { // a child may have something else there
        munmap(base, bytes);
    }
    if (file >= 0) {
        close(file);
    }
}

} // namespace tb::session
