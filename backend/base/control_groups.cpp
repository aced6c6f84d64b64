// See control_groups.h.
#include "control_groups.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace tb {

namespace {

bool contains(const strings & list, const std::string & what) {
    return std::find(list.begin(), list.end(), what) != list.end();
}

// A group, and where its hierarchy is mounted: in a container often at the container's own group.
struct place {
    std::string mount;
    std::string path; // below it
};

// Is `path` the group `top`, or below it?
bool is_within(const std::string & path, const std::string & top) {
    const bool begins = path.compare(0, top.size(), top) == 0 && path.find("/..") == std::string::npos;
    return begins && (path.size() == top.size() || top.empty() || path[top.size()] == '/');
}

// Of a line of mountinfo: "id parent device root mount-point options .. - type source super-options".
bool find_mount(const strings & mounts, const std::string & type, const std::string & option, const std::string & path,
                place & found) {
    for (const std::string & line : mounts) {
        const strings fields = split(line, ' ');
        const auto dash = std::find(fields.begin(), fields.end(), "-");
        if (fields.size() < 5 || fields.end() - dash < 4 || dash[1] != type ||
            (!option.empty() && !contains(split(dash[3], ','), option))) {
            continue;
        }
        const std::string top = fields[3] == "/" ? "" : fields[3];
        // A group that the mount does not show counts as the one that it shows first.
        found = {fields[4], is_within(path, top) ? path.substr(top.size()) : ""};
        return true;
    }
    return false;
}

} // namespace

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

bool read_number(const std::string & path, uint64_t & value) {
    std::ifstream file(path);
    return static_cast<bool>(file >> value);
}

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

std::vector<control_group> control_groups(const std::string & controller, const std::string & root) {
    const strings mounts = lines_of(root + "/proc/self/mountinfo");
    std::vector<control_group> groups;
    for (const std::string & line : lines_of(root + "/proc/self/cgroup")) { // "4:memory:/path", "0::/path"
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool is_v2 = controllers.empty();
        place at;
        if ((!is_v2 && !contains(split(controllers, ','), controller)) ||
            !find_mount(mounts, is_v2 ? "cgroup2" : "cgroup", is_v2 ? "" : controller, line.substr(second + 1), at)) {
            continue;
        }
        for (std::string path = at.path;; path.erase(path.rfind('/'))) {
            groups.push_back({root + at.mount + path, is_v2});
            if (path.rfind('/') == std::string::npos) {
                break;
            }
        }
    }
    return groups;
}

} // namespace tb
