// fork() copies memory and one thread: the child has neither the NPU's threads nor its process, and shares with its
// parent what is mapped shared. Three things keep the two apart.
//
// - What drives an NPU has a `home`, the process that made it. A child asks it before it takes any lock of such an
//   object, because the thread that held it when fork() was called does not exist there.
// - What a whole process uses (counters, lists) is guarded by fork_locks, which a child finds free.
// - Memory that the NPU maps as well does not exist in a child (session/shm.h).
//
// vfork() and posix_spawn() need none of this: their children run no code of this program.
#ifndef TILEBEAM_BASE_FORK_H
#define TILEBEAM_BASE_FORK_H

#include <cstdint>
#include <mutex>

namespace tb {

// What a child says of its parent's NPU.
constexpr const char forked_text[] = "the NPU belongs to the process that forked this one: load the model again here";

// How many calls of fork() this process descends from, since the library was loaded.
uint32_t fork_count();

class home {
  public:
    bool is_here() const { return made_in == fork_count(); }

  private:
    uint32_t made_in = fork_count();
};

// A mutex for std::lock_guard that outlives fork(); one that is never destroyed.
//   waits    fork() waits until it is free, so what it guards is whole in the child. Held for moments only, and no
//            other lock is taken meanwhile.
//   renewed  held for as long as it takes; the child gets a new one. It guards no memory, only turns.
class fork_lock {
  public:
    enum class at_fork { waits, renewed };
    explicit fork_lock(at_fork what = at_fork::waits);
    fork_lock(const fork_lock &) = delete;
    fork_lock & operator=(const fork_lock &) = delete;
    void lock() { mutex.lock(); }
    void unlock() { mutex.unlock(); }

  private:
    friend struct fork_handlers;
    std::mutex mutex;
    const at_fork kind;
    fork_lock * next = nullptr; // of all, which only become more
};

} // namespace tb

#endif // TILEBEAM_BASE_FORK_H
