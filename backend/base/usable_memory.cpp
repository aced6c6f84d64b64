// See usable_memory.h. Linux.
#include "usable_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <unistd.h>
#include <vector>

namespace tb {

namespace {

using strings = std::vector<std::string>;

strings lines_of(const std::string & path) {
    strings lines;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        lines.push_back(line);
    }
    return lines;
}

strings split(const std::string & text, char at) {
    strings parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, at);) {
        parts.push_back(part);
    }
    return parts;
}

bool contains(const strings & list, const std::string & what) {
    return std::find(list.begin(), list.end(), what) != list.end();
}

// The number in a file of one; false for "max", or without such a file.
bool read_number(const std::string & path, uint64_t & value) {
    std::ifstream file(path);
    return static_cast<bool>(file >> value);
}

// The number behind a key at the beginning of a line ("key 12", "Key:   12 kB"); 0 if there is no such line.
uint64_t number_of(const strings & lines, const std::string & key) {
    for (const std::string & line : lines) {
        std::istringstream stream(line);
        std::string name;
        uint64_t value = 0;
        if (stream >> name >> value && name == key) {
            return value;
        }
    }
    return 0;
}

// What the two versions of control groups call the same things.
struct version {
    const char * limit;
    const char * used;
    strings reclaimable; // lines of memory.stat
};

// A group, and where its hierarchy is mounted: in a container often at the container's own group.
struct group {
    const version * names;
    std::string mount;
    std::string path; // below it
};

// Of a line of mountinfo: "id parent device root mount-point options .. - type source super-options".
bool find_mount(const strings & mounts, const std::string & type, const std::string & option, const std::string & path,
                group & found) {
    for (const std::string & line : mounts) {
        const strings fields = split(line, ' ');
        const auto dash = std::find(fields.begin(), fields.end(), "-");
        if (fields.size() < 5 || fields.end() - dash < 4 || dash[1] != type ||
            (!option.empty() && !contains(split(dash[3], ','), option))) {
            continue;
        }
        const std::string top = fields[3] == "/" ? "" : fields[3];
        found.mount = fields[4];
        // A group that the mount does not show counts as the one that it shows first.
        const bool shown = path.compare(0, top.size(), top) == 0 && path.find("/..") == std::string::npos;
        found.path = shown ? path.substr(top.size()) : "";
        return true;
    }
    return false;
}

std::vector<group> groups_of_process(const std::string & root) {
    static const version one = {
        "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
    static const version two = {"memory.max", "memory.current", {"inactive_file", "active_file", "slab_reclaimable"}};
    const strings mounts = lines_of(root + "/proc/self/mountinfo");
    std::vector<group> groups;
    for (const std::string & line : lines_of(root + "/proc/self/cgroup")) { // "4:memory:/path", "0::/path"
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool is_two = controllers.empty();
        group g{is_two ? &two : &one, "", ""};
        if ((is_two || contains(split(controllers, ','), "memory")) &&
            find_mount(mounts, is_two ? "cgroup2" : "cgroup", is_two ? "" : "memory", line.substr(second + 1), g)) {
            groups.push_back(g);
        }
    }
    return groups;
}

void apply_limit(const version & names, const std::string & folder, memory_size & memory) {
    uint64_t limit = 0;
    uint64_t used = 0;
    if (!read_number(folder + "/" + names.limit, limit) || !read_number(folder + "/" + names.used, used)) {
        return;
    }
    const strings stat = lines_of(folder + "/memory.stat");
    for (const std::string & key : names.reclaimable) {
        used -= std::min(used, number_of(stat, key));
    }
    memory.total = std::min(memory.total, limit);
    memory.available = std::min(memory.available, limit > used ? limit - used : 0);
}

} // namespace

memory_size usable_memory(const std::string & root) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const strings info = lines_of(root + "/proc/meminfo");
    memory_size memory{number_of(info, "MemTotal:") * 1024, number_of(info, "MemAvailable:") * 1024};
    if (memory.total == 0) {
        memory.total = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page;
    }
    if (memory.available == 0 || memory.available > memory.total) {
        memory.available = static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
    }
    for (const group & g : groups_of_process(root)) {
        for (std::string path = g.path;; path.erase(path.rfind('/'))) {
            apply_limit(*g.names, root + g.mount + path, memory);
            if (path.empty() || path.rfind('/') == std::string::npos) {
                break;
            }
        }
    }
    return memory;
}

} // namespace tb
