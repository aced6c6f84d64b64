// Is a mapped model file still the file that was mapped? Somebody may truncate it or write into it while a model uses
// it. Pages that are gone read as zeros then (bus_guard.h), for llama.cpp's own look-ups in the mapping too, so the
// question is asked after every graph, and before its results are used.
#ifndef TILEBEAM_PLUGIN_FILE_WATCH_H
#define TILEBEAM_PLUGIN_FILE_WATCH_H

#include <sys/stat.h>

#include <memory>
#include <string>

#include "bus_guard.h"
#include "file_map.h"

namespace tb::plugin {

class file_watch {
  public:
    explicit file_watch(const mapped_file & file); // has a descriptor of its own
    ~file_watch();
    file_watch(const file_watch &) = delete;
    file_watch & operator=(const file_watch &) = delete;

    // False: `why` names the file and says what became of it.
    bool intact(std::string & why) const;

    void unguard(); // the mapping is about to go

  private:
    const int fd;
    const std::string path;
    struct stat was = {};
    std::unique_ptr<tb::guarded_range> guard;
};

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_FILE_WATCH_H
