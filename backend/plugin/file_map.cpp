// Look-up in /proc/self/maps. See file_map.h.
#include "file_map.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace tb::plugin {

namespace {

// One line of /proc/self/maps, as far as it matters here.
struct region {
    uint64_t begin = 0, end = 0, offset = 0;
    bool read_only = false; // and shared
    std::string device;     // text such as "08:01"
    uint64_t inode = 0;
    std::string path;
};

bool parse_region(const std::string & line, region & r) {
    char perms[8], device[32];
    int path_at = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %31s %" SCNu64 " %n", &r.begin, &r.end,
                    perms, &r.offset, device, &r.inode, &path_at) != 6) {
        return false;
    }
    r.read_only = perms[1] == '-' && perms[3] == 's';
    r.device = device;
    r.path = path_at > 0 ? line.substr(static_cast<size_t>(path_at)) : "";
    // The kernel writes a newline in a path as \012.
    for (size_t at; (at = r.path.find("\\012")) != std::string::npos;)
        r.path.replace(at, 4, "\n");
    return true;
}

// The file mapping that covers all of [begin, end), which may lie in several neighbouring regions.
bool find_region(uint64_t begin, uint64_t end, region & found) {
    std::ifstream maps("/proc/self/maps");
    uint64_t reached = begin;
    for (std::string line; std::getline(maps, line);) {
        region r;
        if (!parse_region(line, r) || r.end <= reached) continue;
        if (r.begin > reached || r.inode == 0) return false;
        if (reached == begin) {
            found = r;
        } else if (r.inode != found.inode || r.device != found.device ||
                   r.offset - found.offset != r.begin - found.begin) {
            return false;
        }
        found.read_only = found.read_only && r.read_only;
        reached = r.end;
        if (reached >= end) return true;
    }
    return false;
}

// Does `next` go on where `r` ends, in memory and in the file?
bool follows(const region & next, const region & r) {
    return next.begin == r.end && next.inode == r.inode && next.device == r.device &&
           next.offset - r.offset == next.begin - r.begin;
}

// All of the mapping of which `at` is an address.
region whole_mapping(uint64_t at) {
    std::ifstream maps("/proc/self/maps");
    region all;
    for (std::string line; std::getline(maps, line);) {
        region r;
        if (!parse_region(line, r)) continue;
        if (follows(r, all)) {
            all.end = r.end;
        } else if (all.end > at) {
            break;
        } else {
            all = r;
        }
    }
    return all;
}

// Is fd a regular file, and the very one of region `r`? The kernel is asked in its own words, by mapping a page of fd
// and comparing the lines: on stacked file systems the device that stat() reports is not the one that the line shows.
bool same_file(int fd, const region & r) {
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return false;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void * p = mmap(nullptr, page, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return false;
    region own;
    const uint64_t at = reinterpret_cast<uintptr_t>(p);
    const bool same = find_region(at, at + page, own) && own.inode == r.inode && own.device == r.device;
    munmap(p, page);
    return same;
}

// A descriptor that can only read, of what `fd` has open; -1 if there is no way to get one.
int reopened(int fd) {
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const int fresh = open(link.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    // The file's mode may not allow it: then the descriptor itself will do, if nobody can write through it.
    if (fresh >= 0 || (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY) return fresh;
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

// The program's own descriptors of regular files, those with this inode number first.
std::vector<int> open_files(uint64_t inode) {
    std::vector<int> likely, others;
    DIR * folder = opendir("/proc/self/fd");
    if (!folder) return likely;
    while (const dirent * entry = readdir(folder)) {
        char * end = nullptr;
        const long fd = std::strtol(entry->d_name, &end, 10);
        struct stat st;
        if (*end != '\0' || end == entry->d_name || fstat(static_cast<int>(fd), &st) != 0 || !S_ISREG(st.st_mode)) {
            continue;
        }
        (st.st_ino == inode ? likely : others).push_back(static_cast<int>(fd));
    }
    closedir(folder);
    likely.insert(likely.end(), others.begin(), others.end());
    return likely;
}

// Open the file of region `r`: by its path, by `hint`, or, if no path leads there (it was deleted or replaced, or never
// had a name), by way of the descriptor that the loader still has. -1: none does.
int open_region(const region & r, const std::string & hint, std::string & path) {
    for (const std::string & name : {r.path, hint}) {
        if (name.empty() || name[0] == '[') continue;
        const int fd = open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0) continue;
        path = name;
        if (same_file(fd, r)) return fd;
        close(fd);
    }
    path = r.path;
    for (const int candidate : open_files(r.inode)) {
        if (!same_file(candidate, r)) continue;
        if (const int fd = reopened(candidate); fd >= 0) return fd;
    }
    return -1;
}

} // namespace

bool find_mapped_file(const void * ptr, size_t size, const std::string & hint, mapped_file & out, std::string & why) {
    const uint64_t begin = reinterpret_cast<uintptr_t>(ptr);
    region r;
    if (size == 0 || !find_region(begin, begin + size, r)) {
        why = "the memory is not a mapping of one file";
        return false;
    }
    std::string path;
    const int fd = open_region(r, hint, path);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        if (fd >= 0) close(fd);
        why = "the mapped file " + path + " can no longer be opened, and the program has no descriptor of it";
        return false;
    }
    out.offset = r.offset + (begin - r.begin);
    if (out.offset + size > static_cast<uint64_t>(st.st_size)) {
        close(fd);
        why = path + " is shorter than its mapping: it was truncated";
        return false;
    }
    out.fd = fd;
    out.id.device = st.st_dev;
    out.id.inode = st.st_ino;
    out.path = path;
    out.stat = st;
    const region all = whole_mapping(begin);
    out.mapping = reinterpret_cast<const void *>(all.begin);
    out.mapping_size = static_cast<size_t>(all.end - all.begin);
    return true;
}

void release_file_pages(const void * ptr, size_t size) {
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(ptr);
    const uintptr_t first = (begin + page - 1) / page * page, last = (begin + size) / page * page;
    region r; // looked up each time: where a file was mapped, memory may lie that has no other copy
    if (first < last && find_region(first, last, r) && r.read_only) {
        madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED); // refused for locked pages
    }
}

bool says_repacked(int fd) {
    // A string record: the key's length and text, type 8, the value's length and text.
    static constexpr char record[] = "\x14\0\0\0\0\0\0\0general.architecture\x8\0\0\0\x8\0\0\0\0\0\0\0tilebeam";
    std::vector<char> head(1 << 16); // nearly all files begin with this key
    const ssize_t n = pread(fd, head.data(), head.size(), 0);
    return n >= 4 && std::memcmp(head.data(), "GGUF", 4) == 0 &&
           memmem(head.data(), static_cast<size_t>(n), record, sizeof record - 1) != nullptr;
}

} // namespace tb::plugin
