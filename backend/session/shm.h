// Memory that both sides of the channel map.
#ifndef TILEBEAM_SESSION_SHM_H
#define TILEBEAM_SESSION_SHM_H

#include <cstdint>
#include <memory>
#include <string>

namespace tb::session {

// Memory that both sides map (a memfd). Sealed against shrinking; unmapped and closed on destruction. A forked child
// does not have it.
class shared_memory {
  public:
    static std::unique_ptr<shared_memory> create(const char * name, uint64_t size, std::string & why);
    ~shared_memory();
    void * data() const { return base; }
    uint64_t size() const { return bytes; }
    int fd() const { return file; }

  private:
    shared_memory();
    void * base = nullptr;
    uint64_t bytes = 0;
    int file = -1;
    const uint32_t made_in; // fork_count() then
};

} // namespace tb::session

#endif // TILEBEAM_SESSION_SHM_H
