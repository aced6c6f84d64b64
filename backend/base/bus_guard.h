// A mapped file can lose pages at any time: somebody truncates it, or its disk fails. Touching such a page raises
// SIGBUS, which ends the process. A guarded range gives zeros instead and remembers it, so that whoever computed with
// them throws the result away and says why. The first one installs the handler, for good.
#ifndef TILEBEAM_BASE_BUS_GUARD_H
#define TILEBEAM_BASE_BUS_GUARD_H

#include <cstddef>
#include <memory>

namespace tb {

class guarded_range {
  public:
    // What becomes zeros at the first touch: that page alone, or (for a mapping that is nobody else's) all from there
    // to the end of the range.
    enum class repair { page, rest };

    guarded_range(const void * base, size_t size, int protection, repair how);
    ~guarded_range(); // before the range is unmapped
    guarded_range(const guarded_range &) = delete;
    guarded_range & operator=(const guarded_range &) = delete;

    bool hit() const; // pages were missing, and zeros were read in their place

    struct node;

  private:
    node * self;
};

// Has any range of this process ever been hit? Cheap, for the common case.
bool any_range_hit();

// Could the file behind fd lose pages? Not a memory file that is sealed against shrinking.
bool can_shrink(int fd);

} // namespace tb

#endif // TILEBEAM_BASE_BUS_GUARD_H
