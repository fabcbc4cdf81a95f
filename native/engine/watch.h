// Watching trees with inotify: events of all volumes are folded into marks ("this name is dirty"). Events are hints;
// what is true is found by looking at stage time, so a mark too many costs a statx and a mark too few would cost data.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "engine/filter.h"

namespace sv {

class Watcher {
 public:
  struct Options {
    // For tests: capacity of the kernel's queue (0: the system's own), where the process may set it.
    unsigned maxQueuedEvents = 0;
    // For tests: a private ceiling on watches (0: the system's own) that acts like ENOSPC.
    unsigned maxWatches = 0;
    // Called from a thread of the watcher when a clean volume became dirty or lost its root. Must not call back.
    std::function<void()> onWake;
    // For tests: called by the reader before it reads, so that the queue can fill up.
    std::function<void()> beforeRead;
    // For tests: called by the scanner before it opens the directory that it is to look at.
    std::function<void()> beforeLook;
  };
  struct Added {
    std::uint64_t directories = 0;
    std::uint64_t dev = 0;
    std::uint64_t ino = 0;
  };
  struct State {
    std::uint64_t dirty = 0;
    double firstMs = -1;  // CLOCK_MONOTONIC, -1: nothing is dirty
    double lastMs = -1;
    std::uint64_t events = 0;
    bool rootLost = false;
    std::uint64_t overflows = 0;
    std::uint64_t watches = 0;
    std::uint64_t unwatched = 0;
    int watchErrno = 0;
    std::uint64_t pendingDirs = 0;
  };
  // Completions run on a thread of the watcher or, where nothing had to be waited for, inside the call. They must not
  // call back into the watcher. A null pointer is success; after close() the error's code is CLOSED.
  using Done = std::function<void(std::exception_ptr)>;
  using AddDone = std::function<void(std::exception_ptr, const Added&)>;

  // Throws with the errno of inotify_init1 (EMFILE: fs.inotify.max_user_instances).
  explicit Watcher(Options options);
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Watches every directory below `root` that the filter can reach. Done when all watches are in place: whoever scans
  // after that misses nothing. Throws EEXIST when the number is taken or the root overlaps with another volume's.
  void add(std::uint32_t volume, std::string_view root, std::shared_ptr<const Filter> filter, AddDone done);
  void remove(std::uint32_t volume, Done done);
  // Throws ENOENT for a volume that is not watched; so do take and putBack.
  State state(std::uint32_t volume) const;
  // Takes the marks, packed as docs/formats.md has them ("Marks").
  std::string take(std::uint32_t volume);
  // Gives marks back: dirty as of now. Wakes nobody. Throws FORMAT_INVALID.
  void putBack(std::uint32_t volume, std::string_view marks);
  // Done when every event that the kernel had queued at the time of the call is folded in, and the directories that
  // those events told of are watched and marked.
  void barrier(Done done);
  // Looks again at every directory of volumes that have unwatched ones.
  void retry(Done done);
  // Stops the threads; idempotent. What is pending is completed with CLOSED.
  void close();

  // Bytes of user memory that the tables hold (the kernel's own not counted).
  std::size_t memory() const;

 private:
  class Engine;
  std::unique_ptr<Engine> engine_;
};

}  // namespace sv
