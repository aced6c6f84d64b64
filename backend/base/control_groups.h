// The control groups of this process: its own (a container's, a service's, a job's) and all above it, whose limits hold
// as well. Linux, versions 1 and 2, both at a time too. And how the files are read in which the system tells such
// things.
#ifndef TILEBEAM_BASE_CONTROL_GROUPS_H
#define TILEBEAM_BASE_CONTROL_GROUPS_H

#include <cstdint>
#include <string>
#include <vector>

namespace tb {

using strings = std::vector<std::string>;

struct control_group {
    std::string folder; // that has its files
    bool is_v2;         // which names these have
};

// Groups that may limit what `controller` ("memory", "cpu", "cpuset") stands for, from the process's own upwards. A
// version 2 group is among them whether or not it has the controller. `root`: where proc/ and sys/ are, for tests.
std::vector<control_group> control_groups(const std::string & controller, const std::string & root);

// Lines of a file; none of one that is missing.
strings lines_of(const std::string & path);

// Parts of a text between separators.
strings split(const std::string & text, char at);

// The number that a file begins with; false for another word ("max"), or without such a file.
bool read_number(const std::string & path, uint64_t & value);

// The number behind a key at the beginning of a line ("key 12", "Key:   12 kB"); 0 if there is no such line.
uint64_t number_of(const strings & lines, const std::string & key);

} // namespace tb

#endif // TILEBEAM_BASE_CONTROL_GROUPS_H
