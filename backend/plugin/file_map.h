// From a pointer to the file behind it: llama.cpp maps a model and hands over an address; the NPU side needs the file.
#ifndef TILEBEAM_PLUGIN_FILE_MAP_H
#define TILEBEAM_PLUGIN_FILE_MAP_H

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "manifest.h"

namespace tb::plugin {

struct mapped_file {
    int fd = -1;         // read-only; the caller closes it
    uint64_t offset = 0; // in the file, of the pointer
    file_id id;
    std::string path;
    struct stat stat = {};          // when it was opened
    const void * mapping = nullptr; // all of the mapping that the pointer lies in
    size_t mapping_size = 0;
};

// Find and open the file of which [ptr, ptr + size) is a mapping. `hint` is a path to try if the recorded one does not
// lead there any more; may be empty. A file that no path leads to is found among the program's open descriptors. False:
// `why` says what is wrong.
bool find_mapped_file(const void * ptr, size_t size, const std::string & hint, mapped_file & out, std::string & why);

// Give back the whole pages in [ptr, ptr + size) of a file that is mapped shared and read-only: what lay there has been
// copied, and who reads it again (a row of embeddings that are the output matrix, too) gets it from the file. Nothing
// happens to other memory, nor to pages that are locked.
void release_file_pages(const void * ptr, size_t size);

// Does the file begin as a GGUF whose architecture is that of repacked files?
bool says_repacked(int fd);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_FILE_MAP_H
