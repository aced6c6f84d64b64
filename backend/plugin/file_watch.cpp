// See file_watch.h.
#include "file_watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace tb::plugin {

file_watch::file_watch(const mapped_file & file) : fd(fcntl(file.fd, F_DUPFD_CLOEXEC, 0)), path(file.path) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
    was = file.stat;
    // llama.cpp gives ranges of its mapping back once it knows what it needs: only single pages may be replaced.
    try {
        guard = std::make_unique<tb::guarded_range>(file.mapping, file.mapping_size, PROT_READ,
                                                    tb::guarded_range::repair::page);
    } catch (...) {
        close(fd);
        throw;
    }
}

file_watch::~file_watch() { close(fd); }

void file_watch::unguard() { guard.reset(); }

bool file_watch::intact(std::string & why) const {
    struct stat now;
    if (fstat(fd, &now) != 0) {
        why = "the model file " + path + " can no longer be examined";
    } else if (now.st_size < was.st_size) {
        why = "the model file " + path + " was truncated while in use, from " + std::to_string(was.st_size) + " to " +
              std::to_string(now.st_size) + " bytes";
    } else if (now.st_size != was.st_size || now.st_mtim.tv_sec != was.st_mtim.tv_sec ||
               now.st_mtim.tv_nsec != was.st_mtim.tv_nsec) {
        why = "the model file " + path + " was written to while in use";
    } else if (guard && guard->hit()) {
        why = "the model file " + path + " can no longer be read: its disk fails, or it was truncated for a while";
    } else {
        return true;
    }
    return false;
}

} // namespace tb::plugin
