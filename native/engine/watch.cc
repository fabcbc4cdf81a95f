#include "engine/watch.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/fs.h"
#include "engine/marks.h"
#include "engine/record.h"
#include "engine/scan.h"
#include "engine/tree.h"

namespace sv {
namespace {

// IN_MODIFY is needed beside IN_CLOSE_WRITE: databases never close their files. IN_DONT_FOLLOW must stay out: what is
// watched is a /proc/self/fd link to a directory that was opened without following anything.
constexpr std::uint32_t kMask = IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB | IN_CREATE | IN_DELETE | IN_MOVED_FROM |
                                IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF | IN_EXCL_UNLINK | IN_ONLYDIR;
constexpr std::size_t kReadBytes = 256 * 1024;
// How long the first half of a rename waits for the second, which the kernel queues right behind it.
constexpr double kRenameMs = 10;
// Directories that a walk keeps open; what lies deeper becomes a walk of its own.
constexpr std::size_t kMaxDepth = 64;
// Tries to find a new directory while the directories above it are being renamed.
constexpr int kOpenTries = 64;
constexpr std::size_t kRemovalsAtOnce = 256;

double monotonicMs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

bool gone(int err) { return err == ENOENT || err == ENOTDIR || err == ELOOP; }

std::exception_ptr closedError() { return std::make_exception_ptr(Error("CLOSED", "CLOSED: the watcher was closed")); }

// Lowers fs.inotify.max_queued_events around inotify_init1, which is when the kernel reads it. Nobody else does so
// meanwhile, in this process or another one: what is put back would be their value.
Fd makeInotify(unsigned maxQueuedEvents) {
  static std::mutex one;
  const std::lock_guard lock(one);
  Fd file;
  std::string before;
  if (maxQueuedEvents != 0) {
    file = Fd(open("/proc/sys/fs/inotify/max_queued_events", O_RDWR | O_CLOEXEC));
    char text[32];
    while (file.valid() && flock(file.get(), LOCK_EX) != 0 && errno == EINTR) continue;
    const ssize_t length = file.valid() ? pread(file.get(), text, sizeof text, 0) : -1;
    if (length > 0) {
      before.assign(text, static_cast<std::size_t>(length));
      const std::string value = std::to_string(maxQueuedEvents);
      if (pwrite(file.get(), value.data(), value.size(), 0) < 0) before.clear();
    }
  }
  Fd fd(inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  const int err = errno;
  if (!before.empty()) (void)!pwrite(file.get(), before.data(), before.size(), 0);
  if (!fd.valid()) throw errnoError(err, "inotify_init1");
  return fd;
}

struct Volume {
  std::uint32_t number = 0;
  std::uint16_t slot = 0;
  std::string root;
  std::shared_ptr<const Filter> filter;
  std::uint32_t node = kNoNode;
  std::uint64_t ino = 0;
  std::uint64_t dev = 0;
  bool known = false;  // ino and dev are
  bool adding = true;
  bool removed = false;
  bool fullQueued = false;  // a look at the whole structure is waiting
  std::uint64_t fullLooks = 0;  // such looks, waiting or under way
  Marks marks;
  double firstMs = -1;
  double lastMs = -1;
  std::uint64_t events = 0;
  std::uint64_t overflows = 0;
  std::uint64_t directories = 0;
  std::uint64_t watches = 0;
  std::uint64_t unwatched = 0;
  std::uint64_t pending = 0;  // directories that a walk still has to visit
  std::uint64_t deep = 0;     // walks that the first walk left behind
  int watchErrno = 0;
  bool rootLost = false;
};
using VolumePtr = std::shared_ptr<Volume>;

struct Task {
  enum class Type { kLook, kAdd, kAdded, kRemove, kRetried } type = Type::kLook;
  VolumePtr volume;
  NodeRef node;
  bool mark = false;      // mark the directory with all below once its watches are in place
  bool full = false;      // also go into directories whose watch is right already
  bool deep = false;      // counted in Volume::deep
  bool whole = false;     // counted in Volume::fullLooks
  bool stolen = false;    // another volume has the watch of a directory here: it is not taken back
  std::uint64_t sequence = 0;
  Watcher::Done done;
  Watcher::AddDone addDone;
};

}  // namespace

class Watcher::Engine {
 public:
  explicit Engine(Options options);
  ~Engine() { close(); }

  void add(std::uint32_t number, std::string_view root, std::shared_ptr<const Filter> filter, AddDone done);
  void remove(std::uint32_t number, Done done);
  State state(std::uint32_t number);
  std::string take(std::uint32_t number);
  void putBack(std::uint32_t number, std::string_view marks);
  void barrier(Done done);
  void retry(Done done);
  void close();
  std::size_t memory();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // The first half of a rename of a directory, or a directory whose place another one took.
  struct Limbo {
    std::uint64_t id;
    std::uint32_t cookie;  // 0: displaced
    NodeRef node;
    NodeRef parent;  // displaced from here
    std::string name;
    double deadline;
    std::uint64_t target;  // once past the deadline: bytes that were queued then
  };
  struct Barrier {
    std::uint64_t target;  // bytes
    std::uint64_t limbo = 0;
    std::uint64_t task = 0;
    int stage = 0;
    Done done;
  };
  struct Level {
    Fd fd;
    NodeRef node;
    std::int32_t wd;
    Filter::Cursor cursor;
    Listing listing;
    std::vector<std::uint32_t> order;  // by name
    std::size_t next = 0;
    bool fresh;
  };
  enum class Attached { kSame, kChanged, kUnwatched, kForeign };

  // ---- reader ----
  void readerLoop();
  void fold(const char* data, std::size_t length, double now);
  void event(const inotify_event& event, std::string_view name, double now);
  void directoryAppeared(std::uint32_t node, std::string_view name);
  void movedFrom(std::uint32_t node, std::string_view name, std::uint32_t cookie, double now);
  void movedTo(std::uint32_t node, std::string_view name, std::uint32_t cookie, double now);
  void displace(std::uint32_t node, std::string_view name, double now);
  void overflowed();
  void rootLost(Volume& volume);
  void expireLimbo(double now);
  int limboTimeout(double now) const;
  void advanceBarriers(std::vector<std::pair<Done, std::exception_ptr>>& ready);
  std::uint64_t queuedTotal();

  // ---- marks ----
  void markName(std::uint32_t node, std::string_view name, bool isDirectory, std::uint8_t bits);
  void markSubtree(std::uint32_t node, std::uint8_t bits);
  void touch(Volume& volume);
  void bound(Volume& volume);

  // ---- tree ----
  Volume& volumeOf(std::uint32_t node) { return *slots_[tree_[node].volume]; }
  Volume& find(std::uint32_t number);
  std::uint32_t makeNode(std::uint32_t parent, std::string_view name, Volume& volume);
  void drop(std::uint32_t node);
  void dropChildren(std::uint32_t node);
  void loseWatch(std::uint32_t node, bool removeFromKernel);
  void setUnwatched(std::uint32_t node, int err);
  void clearUnwatched(std::uint32_t node);
  Attached attach(std::uint32_t node, int fd, bool mayTake);

  // ---- scanner ----
  void enqueue(Task task);
  void look(std::uint32_t node, bool mark, bool full);
  void scannerLoop();
  void removeWatches(Lock& lock);
  void run(Task& task);
  void walk(Task& task);
  bool openTop(Task& task, Level& level, Attached& outcome);
  bool watchedAs(std::uint32_t node, int fd);
  static bool samePlace(int fd, int directory, const std::string& path);
  bool fillLevel(Level& level);
  void syncReader();
  void finish(Task& task, std::exception_ptr failure);
  void abandonLevel(Task& task, Level& level);
  void callBack(std::vector<std::pair<Done, std::exception_ptr>>& ready);
  void wakeIfNeeded(Lock& lock);

  Options options_;
  Fd inotify_;
  Fd wakeup_;
  std::thread reader_;
  std::thread scanner_;

  std::mutex io_;            // read(2) and `total_`
  std::uint64_t total_ = 0;  // bytes read so far

  std::mutex mutex_;  // all below
  std::condition_variable work_;
  std::condition_variable folded_;
  bool stop_ = false;
  bool joined_ = false;
  bool wake_ = false;
  std::uint64_t processed_ = 0;  // bytes folded so far
  Tree tree_;
  std::map<std::uint32_t, VolumePtr> volumes_;
  std::vector<VolumePtr> slots_;
  std::vector<Limbo> limbo_;
  std::uint64_t limboCount_ = 0;
  std::vector<Barrier> barriers_;
  std::deque<Task> tasks_;
  std::uint64_t taskCount_ = 0;
  std::uint64_t tasksDone_ = 0;  // all tasks up to this number are done
  std::deque<std::int32_t> removals_;
};

// ---- construction ----

Watcher::Engine::Engine(Options options) : options_(std::move(options)) {
  inotify_ = makeInotify(options_.maxQueuedEvents);
  wakeup_ = Fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wakeup_.valid()) throwErrno("eventfd");
  // Signals are the main thread's.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    reader_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "sv-watch");
      readerLoop();
    });
    scanner_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "sv-watch-scan");
      scannerLoop();
    });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Watcher::Engine::close() {
  {
    const Lock lock(mutex_);
    if (joined_) return;
    joined_ = true;
    stop_ = true;
  }
  work_.notify_all();
  folded_.notify_all();
  const std::uint64_t one = 1;
  (void)!write(wakeup_.get(), &one, sizeof one);
  if (reader_.joinable()) reader_.join();
  if (scanner_.joinable()) scanner_.join();
  std::vector<std::pair<Done, std::exception_ptr>> ready;
  std::vector<AddDone> adds;
  {
    const Lock lock(mutex_);
    for (Barrier& barrier : barriers_) ready.emplace_back(std::move(barrier.done), closedError());
    barriers_.clear();
    for (Task& task : tasks_) {
      if (task.done) ready.emplace_back(std::move(task.done), closedError());
      if (task.addDone) adds.push_back(std::move(task.addDone));
    }
    tasks_.clear();
    inotify_.reset();
  }
  for (auto& [done, error] : ready) done(error);
  for (AddDone& done : adds) done(closedError(), Added{});
}

// ---- the JavaScript side ----

Volume& Watcher::Engine::find(std::uint32_t number) {
  const auto it = volumes_.find(number);
  if (it == volumes_.end()) throw Error("ENOENT", "ENOENT: no such volume is watched", ENOENT);
  return *it->second;
}

void Watcher::Engine::add(std::uint32_t number, std::string_view root, std::shared_ptr<const Filter> filter,
                          AddDone done) {
  const Lock lock(mutex_);
  if (stop_) throw Error("CLOSED", "CLOSED: the watcher was closed");
  while (root.size() > 1 && root.back() == '/') root.remove_suffix(1);
  if (root.empty() || root.front() != '/') throw errnoError(EINVAL, "watch", root);
  const auto inside = [](std::string_view a, std::string_view b) {
    return a == b || b == "/" || (a.size() > b.size() && a.starts_with(b) && a[b.size()] == '/');
  };
  for (const auto& [other, volume] : volumes_) {
    if (other == number || inside(root, volume->root) || inside(volume->root, root)) {
      throw errnoError(EEXIST, "watch", root);
    }
  }
  auto volume = std::make_shared<Volume>();
  volume->number = number;
  volume->root = root;
  volume->filter = std::move(filter);
  std::size_t slot = 0;
  while (slot < slots_.size() && slots_[slot] != nullptr) ++slot;
  if (slot > 0xffff) throw errnoError(EMFILE, "watch", root);
  if (slot == slots_.size()) slots_.emplace_back();
  slots_[slot] = volume;
  volume->slot = static_cast<std::uint16_t>(slot);
  volume->node = tree_.make(kNoNode, {}, volume->slot);
  volume->directories = 1;
  volumes_[number] = volume;
  Task task;
  task.type = Task::Type::kAdd;
  task.volume = volume;
  task.node = tree_.ref(volume->node);
  task.addDone = std::move(done);
  enqueue(std::move(task));
}

void Watcher::Engine::remove(std::uint32_t number, Done done) {
  const Lock lock(mutex_);
  if (stop_) throw Error("CLOSED", "CLOSED: the watcher was closed");
  Volume& volume = find(number);
  Task task;
  task.type = Task::Type::kRemove;
  task.volume = slots_[volume.slot];
  task.done = std::move(done);
  volume.removed = true;
  volumes_.erase(number);
  enqueue(std::move(task));
}

Watcher::State Watcher::Engine::state(std::uint32_t number) {
  const Lock lock(mutex_);
  const Volume& volume = find(number);
  State out;
  out.dirty = volume.marks.size();
  out.firstMs = volume.firstMs;
  out.lastMs = volume.lastMs;
  out.events = volume.events;
  out.rootLost = volume.rootLost;
  out.overflows = volume.overflows;
  out.watches = volume.watches;
  out.unwatched = volume.unwatched;
  out.watchErrno = volume.watchErrno;
  out.pendingDirs = volume.pending;
  return out;
}

std::string Watcher::Engine::take(std::uint32_t number) {
  const Lock lock(mutex_);
  Volume& volume = find(number);
  std::string out;
  const auto append = [&out](std::uint8_t type, std::uint8_t bits, std::string_view directory, std::string_view name) {
    ItemWriter item(out);
    item.u8(type);
    item.u8(bits);
    item.u16(0);
    const bool both = !directory.empty() && !name.empty();
    item.u32(static_cast<std::uint32_t>(directory.size() + name.size() + (both ? 1 : 0)));
    item.raw(directory);
    if (both) item.u8('/');
    item.raw(name);
  };
  std::string path;
  for (const auto& [node, directory] : volume.marks.directories()) {
    // Half-way through a rename: the marks of its old and its new place tell all.
    const bool placed = tree_.path(node, path);
    tree_[node].subtree = false;
    if (!placed) continue;
    std::uint8_t entries = directory.children ? directory.childrenBits : std::uint8_t{0};
    directory.names.each([&](std::string_view name, std::uint8_t bits) {
      entries = static_cast<std::uint8_t>(entries | bits);
      append(mark::kPath, bits, path, name);
    });
    if (directory.children) append(mark::kDirectory, directory.childrenBits, path, {});
    if (directory.subtree) append(mark::kSubtree, directory.subtreeBits, path, {});
    // Entries that came or went changed the directory's own mtime, and no event tells of that.
    if (!directory.marked() && (entries & (mark::kCreated | mark::kDeleted)) != 0) {
      append(mark::kPath, mark::kAttributes, path, {});
    }
  }
  for (const auto& [loose, bits] : volume.marks.paths()) append(Marks::typeOf(loose), bits, Marks::pathOf(loose), {});
  volume.marks.clear();
  volume.firstMs = volume.lastMs = -1;
  return out;
}

void Watcher::Engine::putBack(std::uint32_t number, std::string_view marks) {
  const Lock lock(mutex_);
  Volume& volume = find(number);
  std::vector<std::tuple<std::string_view, std::uint8_t, std::uint8_t>> list;
  for (ByteReader in(marks); !in.empty();) {
    ByteReader item = in.item();
    const std::uint8_t type = item.u8();
    const std::uint8_t bits = item.u8();
    item.skip(2);
    const std::string_view path = item.sized();
    if (type < mark::kPath || type > mark::kSubtree) throwFormat("unknown type of mark");
    if (!item.empty()) throwFormat("there are bytes after a mark");
    list.emplace_back(path, type, bits);
  }
  if (list.empty()) return;
  for (const auto& [path, type, bits] : list) volume.marks.addPath(path, type, bits);
  bound(volume);
  volume.lastMs = monotonicMs();
  if (volume.firstMs < 0) volume.firstMs = volume.lastMs;
}

void Watcher::Engine::barrier(Done done) {
  std::vector<std::pair<Done, std::exception_ptr>> ready;
  {
    const Lock lock(mutex_);
    if (stop_) {
      ready.emplace_back(std::move(done), closedError());
    } else {
      Barrier barrier;
      barrier.target = queuedTotal();
      barrier.done = std::move(done);
      barriers_.push_back(std::move(barrier));
      advanceBarriers(ready);
    }
  }
  callBack(ready);
}

void Watcher::Engine::retry(Done done) {
  const Lock lock(mutex_);
  if (stop_) throw Error("CLOSED", "CLOSED: the watcher was closed");
  for (const auto& [number, volume] : volumes_) {
    if (volume->unwatched > 0 && !volume->rootLost) look(volume->node, false, true);
  }
  Task task;
  task.type = Task::Type::kRetried;
  task.done = std::move(done);
  enqueue(std::move(task));
}

std::size_t Watcher::Engine::memory() {
  const Lock lock(mutex_);
  return tree_.memory();
}

// ---- reader ----

// Bytes that the kernel had handed out or queued so far. inotify's FIONREAD is the sum of exactly the sizes that read(2)
// will give, in order; an event that is merged into the last unread one adds nothing. So once that many bytes are
// folded, every event of before is.
std::uint64_t Watcher::Engine::queuedTotal() {
  const std::lock_guard lock(io_);
  int unread = 0;
  if (ioctl(inotify_.get(), FIONREAD, &unread) != 0) unread = 0;
  return total_ + static_cast<std::uint64_t>(unread);
}

void Watcher::Engine::readerLoop() {
  const std::unique_ptr<char[]> buffer(new char[kReadBytes]);
  int timeout = -1;
  for (;;) {
    pollfd fds[2] = {{inotify_.get(), POLLIN, 0}, {wakeup_.get(), POLLIN, 0}};
    (void)poll(fds, 2, timeout);
    if (options_.beforeRead) options_.beforeRead();
    ssize_t got;
    {
      const std::lock_guard lock(io_);
      got = read(inotify_.get(), buffer.get(), kReadBytes);
      if (got > 0) total_ += static_cast<std::uint64_t>(got);
    }
    std::vector<std::pair<Done, std::exception_ptr>> ready;
    {
      Lock lock(mutex_);
      if (stop_) return;
      const double now = monotonicMs();
      if (got > 0) {
        fold(buffer.get(), static_cast<std::size_t>(got), now);
        processed_ += static_cast<std::uint64_t>(got);
      }
      expireLimbo(now);
      advanceBarriers(ready);
      timeout = limboTimeout(now);
      wakeIfNeeded(lock);
    }
    folded_.notify_all();
    callBack(ready);
  }
}

void Watcher::Engine::fold(const char* data, std::size_t length, double now) {
  for (std::size_t at = 0; at + sizeof(inotify_event) <= length;) {
    inotify_event head;
    std::memcpy(&head, data + at, sizeof head);
    const char* const text = data + at + sizeof head;
    at += sizeof head + head.len;
    if (at > length) return;
    event(head, {text, strnlen(text, head.len)}, now);
  }
}

void Watcher::Engine::event(const inotify_event& ev, std::string_view name, double now) {
  if ((ev.mask & IN_Q_OVERFLOW) != 0) {
    overflowed();
    return;
  }
  const std::uint32_t node = tree_.byWd(ev.wd);
  if (node == kNoNode) return;  // queued before its watch was taken away
  const bool root = tree_[node].root;
  const bool isDirectory = (ev.mask & IN_ISDIR) != 0;

  if ((ev.mask & IN_IGNORED) != 0) {  // the kernel took the watch away: the directory is no more
    loseWatch(node, false);
    if (root) {
      rootLost(volumeOf(node));
      return;
    }
    const std::uint32_t parent = tree_[node].parent;
    if (parent != kNoNode) {
      const std::string own(tree_.name(node));
      markName(parent, own, true, mark::kDeleted);
    }
    if (!tree_[node].queued) drop(node);
    return;
  }
  if ((ev.mask & (IN_UNMOUNT | IN_DELETE_SELF | IN_MOVE_SELF)) != 0) {
    if (root) {
      rootLost(volumeOf(node));
    } else if ((ev.mask & IN_MOVE_SELF) != 0) {
      // Its old and new parent tell of it, unless the old one has no watch.
      const std::uint32_t parent = tree_[node].parent;
      if (parent != kNoNode && tree_[parent].unwatched) look(parent, true, true);
    }
    return;
  }
  if (name.empty()) {  // the directory itself; its parent has an event of its own
    if ((ev.mask & IN_ATTRIB) != 0 && root) {
      Volume& volume = volumeOf(node);
      volume.marks.addPath({}, mark::kPath, mark::kAttributes);
      touch(volume);
    }
    return;
  }
  if ((ev.mask & (IN_MODIFY | IN_CLOSE_WRITE)) != 0) {
    markName(node, name, isDirectory, mark::kContent);
  } else if ((ev.mask & IN_ATTRIB) != 0) {
    markName(node, name, isDirectory, mark::kAttributes);
    if (isDirectory) {
      const std::uint32_t child = tree_.child(node, name);
      if (child != kNoNode && tree_[child].unwatched) look(child, true, true);
    }
  } else if ((ev.mask & IN_CREATE) != 0) {
    markName(node, name, isDirectory, mark::kCreated);
    if (isDirectory) directoryAppeared(node, name);
  } else if ((ev.mask & IN_DELETE) != 0) {
    markName(node, name, isDirectory, mark::kDeleted);
    if (isDirectory) {
      const std::uint32_t child = tree_.child(node, name);
      if (child != kNoNode) drop(child);
    }
  } else if ((ev.mask & IN_MOVED_FROM) != 0) {
    markName(node, name, isDirectory, mark::kDeleted);
    if (isDirectory) movedFrom(node, name, ev.cookie, now);
  } else if ((ev.mask & IN_MOVED_TO) != 0) {
    markName(node, name, isDirectory, mark::kCreated | mark::kContent);
    if (isDirectory) movedTo(node, name, ev.cookie, now);
  }
}

void Watcher::Engine::directoryAppeared(std::uint32_t node, std::string_view name) {
  Volume& volume = volumeOf(node);
  if (!volume.filter->everything()) {
    std::string path;
    if (!tree_.path(node, path)) return;
    if (!path.empty()) path.push_back('/');
    path += name;
    if (!volume.filter->reaches(path)) return;
  }
  std::uint32_t child = tree_.child(node, name);
  if (child == kNoNode) child = makeNode(node, name, volume);
  look(child, true, false);
}

void Watcher::Engine::movedFrom(std::uint32_t node, std::string_view name, std::uint32_t cookie, double now) {
  for (Limbo& limbo : limbo_) {
    if (limbo.cookie == 0 && limbo.parent.id == node && limbo.parent.epoch == tree_[node].epoch && limbo.name == name) {
      limbo.cookie = cookie;  // the second half of an exchange
      limbo.deadline = now + kRenameMs;
      limbo.target = 0;
      return;
    }
  }
  const std::uint32_t child = tree_.child(node, name);
  if (child == kNoNode) return;
  const bool arrived = tree_[child].arrived;
  tree_.detach(child);
  limbo_.push_back({++limboCount_, cookie, tree_.ref(child), {}, {}, now + kRenameMs, 0});
  // An exchange reports both arrivals before the second departure is through: what arrived here may be here still, and
  // what leaves may be a directory that was never heard of.
  if (arrived) directoryAppeared(node, name);
}

// An exchange, whose other half comes next, or an empty directory that was replaced.
void Watcher::Engine::displace(std::uint32_t node, std::string_view name, double now) {
  const std::uint32_t there = tree_.child(node, name);
  if (there == kNoNode) return;
  tree_.detach(there);
  limbo_.push_back({++limboCount_, 0, tree_.ref(there), tree_.ref(node), std::string(name), now + kRenameMs, 0});
}

void Watcher::Engine::movedTo(std::uint32_t node, std::string_view name, std::uint32_t cookie, double now) {
  const auto from = std::find_if(limbo_.begin(), limbo_.end(), [&](const Limbo& limbo) {
    return limbo.cookie == cookie && tree_.alive(limbo.node);
  });
  const auto arrive = [&] {
    directoryAppeared(node, name);
    const std::uint32_t child = tree_.child(node, name);
    if (child != kNoNode) tree_[child].arrived = true;
  };
  if (from == limbo_.end()) {
    displace(node, name, now);
    arrive();
    return;
  }
  const std::uint32_t moved = from->node.id;
  limbo_.erase(from);
  Volume& volume = volumeOf(node);
  bool reached = tree_[moved].volume == tree_[node].volume;
  if (reached && !volume.filter->everything()) {
    std::string path;
    reached = tree_.path(node, path);
    if (!path.empty()) path.push_back('/');
    path += name;
    reached = reached && volume.filter->reaches(path);
  }
  if (!reached) {
    drop(moved);
    displace(node, name, now);
    arrive();
    return;
  }
  for (std::uint32_t at = node; at != kNoNode; at = tree_[at].parent) {
    if (at != moved) continue;
    // By the table it moved into itself: a walk that saw the tree of some renames later had put this directory below
    // it already. All below it is looked at anew.
    drop(moved);
    if (!volume.rootLost && !volume.fullQueued) {
      volume.fullQueued = true;
      look(volume.node, false, true);
    }
    return;
  }
  displace(node, name, now);
  tree_.link(moved, node, name);
  tree_[moved].arrived = true;
  // While the whole structure is looked at, a directory that moves may come to a place where the look has been already,
  // and what an overflow hid below it would stay hidden.
  const bool full = volume.fullLooks > 0 || volume.deep > 0 || !volume.filter->everything();
  look(moved, true, full);
}

void Watcher::Engine::overflowed() {
  for (const auto& [number, volume] : volumes_) {
    ++volume->overflows;
    // All of it may have changed, and nothing is known of deletions.
    volume->marks.addDirectory(volume->node, mark::kSubtree, mark::kContent | mark::kAttributes | mark::kCreated);
    tree_[volume->node].subtree = true;
    touch(*volume);
    if (!volume->rootLost && !volume->fullQueued) {
      volume->fullQueued = true;
      look(volume->node, false, true);
    }
  }
}

void Watcher::Engine::rootLost(Volume& volume) {
  if (volume.rootLost || volume.removed) return;
  volume.rootLost = true;
  wake_ = true;
}

// A rename whose second half does not come went out of all watched trees.
void Watcher::Engine::expireLimbo(double now) {
  for (std::size_t i = 0; i < limbo_.size();) {
    Limbo& limbo = limbo_[i];
    bool over = !tree_.alive(limbo.node);
    if (!over && now >= limbo.deadline) {
      if (limbo.target == 0) limbo.target = queuedTotal();
      over = processed_ >= limbo.target;
    }
    if (!over) {
      ++i;
      continue;
    }
    const NodeRef node = limbo.node;
    limbo_.erase(limbo_.begin() + static_cast<std::ptrdiff_t>(i));
    if (tree_.alive(node)) drop(node.id);
  }
}

int Watcher::Engine::limboTimeout(double now) const {
  if (limbo_.empty()) return -1;
  double wait = kRenameMs;
  for (const Limbo& limbo : limbo_) wait = std::min(wait, limbo.deadline - now);
  return wait <= 0 ? 0 : static_cast<int>(wait) + 1;
}

void Watcher::Engine::advanceBarriers(std::vector<std::pair<Done, std::exception_ptr>>& ready) {
  for (std::size_t i = 0; i < barriers_.size();) {
    Barrier& barrier = barriers_[i];
    if (barrier.stage == 0 && processed_ >= barrier.target) {
      barrier.stage = 1;
      barrier.limbo = limboCount_;
    }
    if (barrier.stage == 1 && std::none_of(limbo_.begin(), limbo_.end(), [&](const Limbo& limbo) {
          return limbo.id <= barrier.limbo;
        })) {
      barrier.stage = 2;
      barrier.task = taskCount_;
    }
    if (barrier.stage == 2 && tasksDone_ >= barrier.task) {
      ready.emplace_back(std::move(barrier.done), nullptr);
      barriers_.erase(barriers_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void Watcher::Engine::callBack(std::vector<std::pair<Done, std::exception_ptr>>& ready) {
  for (auto& [done, error] : ready) done(error);
  ready.clear();
}

void Watcher::Engine::wakeIfNeeded(Lock& lock) {
  const bool wake = std::exchange(wake_, false);
  if (!wake) return;
  lock.unlock();
  if (options_.onWake) options_.onWake();
  lock.lock();
}

// ---- marks ----

void Watcher::Engine::touch(Volume& volume) {
  ++volume.events;
  volume.lastMs = monotonicMs();
  if (volume.firstMs < 0) {
    volume.firstMs = volume.lastMs;
    wake_ = true;
  }
}

void Watcher::Engine::bound(Volume& volume) {
  if (!volume.marks.overflowing()) return;
  for (const auto& [node, directory] : volume.marks.directories()) tree_[node].subtree = false;
  volume.marks.clear();
  volume.marks.addDirectory(volume.node, mark::kSubtree, mark::kContent | mark::kAttributes | mark::kCreated);
  tree_[volume.node].subtree = true;
}

void Watcher::Engine::markName(std::uint32_t node, std::string_view name, bool isDirectory, std::uint8_t bits) {
  Volume& volume = volumeOf(node);
  if (volume.removed) return;
  if (volume.marks.has(node, name, bits)) {  // known, so the filter keeps it
    touch(volume);
    return;
  }
  bool covered = false;
  if (!tree_.attached(node, &covered)) return;  // half-way through a rename: the new place is marked as a whole
  if (!volume.filter->everything()) {
    std::string path;
    (void)tree_.path(node, path);
    if (!path.empty()) path.push_back('/');
    path += name;
    if (volume.filter->match(path, isDirectory) == Verdict::kNone) return;
  }
  touch(volume);
  if (covered && (bits & mark::kDeleted) == 0) return;
  volume.marks.addName(node, name, bits);
  bound(volume);
}

void Watcher::Engine::markSubtree(std::uint32_t node, std::uint8_t bits) {
  Volume& volume = volumeOf(node);
  if (volume.removed || !tree_.attached(node)) return;
  volume.marks.addDirectory(node, mark::kSubtree, bits);
  tree_[node].subtree = true;
  touch(volume);
  bound(volume);
}

// ---- tree ----

std::uint32_t Watcher::Engine::makeNode(std::uint32_t parent, std::string_view name, Volume& volume) {
  ++volume.directories;
  return tree_.make(parent, name, volume.slot);
}

void Watcher::Engine::loseWatch(std::uint32_t node, bool removeFromKernel) {
  const std::int32_t wd = tree_[node].wd;
  if (wd < 0) return;
  tree_.setWd(node, -1);
  --volumeOf(node).watches;
  if (!removeFromKernel) return;
  removals_.push_back(wd);
  if (removals_.size() == 1) work_.notify_one();
}

void Watcher::Engine::setUnwatched(std::uint32_t node, int err) {
  Volume& volume = volumeOf(node);
  volume.watchErrno = err;
  if (tree_[node].unwatched) return;
  tree_[node].unwatched = true;
  ++volume.unwatched;
}

void Watcher::Engine::clearUnwatched(std::uint32_t node) {
  if (!tree_[node].unwatched) return;
  tree_[node].unwatched = false;
  Volume& volume = volumeOf(node);
  if (--volume.unwatched == 0) volume.watchErrno = 0;
}

// Takes a node with all below out of the table. The kernel's watches go later, on the scanner's thread.
void Watcher::Engine::drop(std::uint32_t top) {
  tree_.detach(top);
  std::uint32_t at = top;
  for (;;) {
    while (tree_[at].first != kNoNode) at = tree_[at].first;
    const std::uint32_t parent = tree_[at].parent;
    Volume& volume = volumeOf(at);
    loseWatch(at, true);
    clearUnwatched(at);
    volume.marks.forget(at);
    --volume.directories;
    tree_.release(at);
    if (at == top) return;
    at = parent;
  }
}

void Watcher::Engine::dropChildren(std::uint32_t node) {
  while (tree_[node].first != kNoNode) drop(tree_[node].first);
}

// Watches the opened directory as `node`. A watch belongs to an inode: the same number as before means that the node is
// right, the number of another node means that the directory has moved and events of that are still to come.
Watcher::Engine::Attached Watcher::Engine::attach(std::uint32_t node, int fd, bool mayTake) {
  std::int32_t wd = -1;
  int err = 0;
  if (options_.maxWatches != 0 && tree_[node].wd < 0 && tree_.watches() >= options_.maxWatches) {
    err = ENOSPC;
  } else {
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    wd = inotify_add_watch(inotify_.get(), link.c_str(), kMask);
    if (wd < 0) err = errno;
  }
  if (wd < 0) {
    loseWatch(node, true);
    setUnwatched(node, err);
    return Attached::kUnwatched;
  }
  if (tree_[node].wd == wd) {
    clearUnwatched(node);
    return Attached::kSame;
  }
  const std::uint32_t other = tree_.byWd(wd);
  if (other != kNoNode) {
    const bool foreign = tree_[other].volume != tree_[node].volume;
    if (tree_[other].root || (foreign && !mayTake)) {  // two volumes on one tree, by a bind mount
      setUnwatched(node, EEXIST);
      return Attached::kForeign;
    }
    loseWatch(other, false);
    // Where it was, something else or nothing is now.
    look(other, true, true);
    tasks_.back().stolen = foreign;
  }
  if (tree_[node].wd >= 0) {
    loseWatch(node, true);
    dropChildren(node);
  }
  tree_.setWd(node, wd);
  ++volumeOf(node).watches;
  clearUnwatched(node);
  return Attached::kChanged;
}

// ---- scanner ----

void Watcher::Engine::enqueue(Task task) {
  task.sequence = ++taskCount_;
  if (task.volume != nullptr) ++task.volume->pending;
  tasks_.push_back(std::move(task));
  work_.notify_one();
}

void Watcher::Engine::look(std::uint32_t node, bool mark, bool full) {
  if (tree_[node].queued && mark && !full) return;
  if (mark) tree_[node].queued = true;
  Task task;
  task.volume = slots_[tree_[node].volume];
  task.node = tree_.ref(node);
  task.mark = mark;
  task.full = full;
  task.whole = full && tree_[node].root;
  if (task.whole) ++task.volume->fullLooks;
  enqueue(std::move(task));
}

void Watcher::Engine::removeWatches(Lock& lock) {
  while (!removals_.empty() && !stop_) {
    for (std::size_t i = 0; i < kRemovalsAtOnce && !removals_.empty(); ++i) {
      const std::int32_t wd = removals_.front();
      removals_.pop_front();
      // The same directory may be watched again meanwhile, under the same number.
      if (tree_.byWd(wd) == kNoNode) (void)inotify_rm_watch(inotify_.get(), wd);
    }
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
}

void Watcher::Engine::scannerLoop() {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stop_ || !tasks_.empty() || !removals_.empty(); });
    removeWatches(lock);
    if (stop_) return;
    if (tasks_.empty()) continue;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    const std::uint64_t sequence = task.sequence;
    run(task);
    std::vector<std::pair<Done, std::exception_ptr>> ready;
    lock.lock();
    tasksDone_ = sequence;
    advanceBarriers(ready);
    wakeIfNeeded(lock);
    if (!ready.empty()) {
      lock.unlock();
      callBack(ready);
      lock.lock();
    }
  }
}

void Watcher::Engine::run(Task& task) {
  switch (task.type) {
    case Task::Type::kLook:
    case Task::Type::kAdd: {
      try {
        walk(task);
      } catch (...) {
        // Out of memory or out of descriptors in the middle: all that the walk has not reached is dirty and unwatched.
        Lock lock(mutex_);
        if (tree_.alive(task.node) && !task.volume->removed) {
          setUnwatched(task.volume->node, ENOMEM);
          markSubtree(task.volume->node, mark::kContent | mark::kAttributes | mark::kCreated);
        }
      }
      finish(task, nullptr);
      return;
    }
    case Task::Type::kAdded:
      finish(task, nullptr);
      return;
    case Task::Type::kRemove: {
      {
        Lock lock(mutex_);
        drop(task.volume->node);
        for (std::size_t i = 0; i < limbo_.size();) {
          if (!tree_.alive(limbo_[i].node) || tree_[limbo_[i].node.id].volume != task.volume->slot) {
            ++i;
            continue;
          }
          const std::uint32_t node = limbo_[i].node.id;
          limbo_.erase(limbo_.begin() + static_cast<std::ptrdiff_t>(i));
          drop(node);
        }
        slots_[task.volume->slot] = nullptr;
        removeWatches(lock);
      }
      finish(task, nullptr);
      return;
    }
    case Task::Type::kRetried:
      finish(task, nullptr);
      return;
  }
}

void Watcher::Engine::finish(Task& task, std::exception_ptr failure) {
  Added added;
  AddDone addDone;
  {
    Lock lock(mutex_);
    if (task.volume != nullptr) {
      Volume& volume = *task.volume;
      if (volume.pending > 0) --volume.pending;
      if (task.deep && volume.deep > 0) --volume.deep;
      if (task.whole && volume.fullLooks > 0) --volume.fullLooks;
      if (task.addDone) {
        if (stop_ || volume.removed) {
          failure = closedError();
        } else if (!volume.known) {
          // The root could not be opened: there is no such volume.
          const int err = volume.watchErrno != 0 ? volume.watchErrno : ENOENT;
          failure = std::make_exception_ptr(errnoError(err, "open", volume.root));
          drop(volume.node);
          volume.removed = true;
          slots_[volume.slot] = nullptr;
          volumes_.erase(volume.number);
        } else if (volume.deep > 0) {
          Task again;
          again.type = Task::Type::kAdded;
          again.volume = task.volume;
          again.addDone = std::move(task.addDone);
          enqueue(std::move(again));
          return;
        }
        volume.adding = false;
        added = {volume.directories, volume.dev, volume.ino};
        addDone = std::move(task.addDone);
      }
    }
  }
  if (addDone) addDone(failure, failure ? Added{} : added);
  if (task.done) task.done(failure);
}

// Waits until the reader has folded what is queued now.
void Watcher::Engine::syncReader() {
  Lock lock(mutex_);
  const std::uint64_t target = queuedTotal();
  folded_.wait(lock, [&] { return stop_ || processed_ >= target; });
}

// Opens the directory that a walk starts at and watches it. It is found through the directory that its node hangs in,
// known by its watch: while directories above are renamed, the path alone may lead to one of the same name elsewhere.
bool Watcher::Engine::openTop(Task& task, Level& level, Attached& outcome) {
  Volume& volume = *task.volume;
  const bool isRoot = task.node.id == volume.node;
  {
    Lock lock(mutex_);
    if (tree_.alive(task.node)) tree_[task.node.id].queued = false;
    if (isRoot && task.full) volume.fullQueued = false;
  }
  for (int tries = 0; tries < kOpenTries;) {
    std::string path;
    std::uint64_t version;
    {
      Lock lock(mutex_);
      if (stop_ || volume.removed || !tree_.alive(task.node)) return false;
      if (!tree_.path(task.node.id, path)) {
        // It, or a directory above it, is half-way through a rename: that is over in a moment.
        folded_.wait_for(lock, std::chrono::milliseconds(2));
        continue;
      }
      version = tree_.version();
    }
    ++tries;
    if (options_.beforeLook) options_.beforeLook();
    int err = 0;
    Fd fd;
    Fd root;
    Fd above;
    Stat rootStat;
    try {
      root = openRoot(volume.root);
      rootStat = statFd(root.get());
    } catch (const Error& error) {
      err = error.err;
    }
    if (err == 0 && !isRoot && !volume.filter->reaches(path, &level.cursor)) {
      Lock lock(mutex_);
      // Renamed meanwhile: then it is queued again.
      if (tree_.alive(task.node) && !tree_[task.node.id].queued) drop(task.node.id);
      return false;
    }
    if (err == 0 && isRoot) level.cursor = volume.filter->root();
    Lock lock(mutex_);
    if (stop_ || volume.removed || !tree_.alive(task.node)) return false;
    if (err == 0 && !volume.known) {
      volume.ino = rootStat.ino;
      volume.dev = rootStat.dev;
      volume.known = true;
    }
    if (gone(err) || (err == 0 && (rootStat.ino != volume.ino || rootStat.dev != volume.dev))) {
      if (volume.known) {
        rootLost(volume);
      } else {
        volume.watchErrno = err;
      }
      return false;
    }
    const std::size_t slash = path.rfind('/');
    const std::string own = path.substr(slash == std::string::npos ? 0 : slash + 1);
    if (err == 0) {
      lock.unlock();
      if (slash != std::string::npos) {
        above = tryOpenBeneath(root.get(), std::string_view(path).substr(0, slash), O_RDONLY | O_DIRECTORY, 0, true);
        if (!above.valid()) err = errno;
      }
      const int directory = slash == std::string::npos ? root.get() : above.get();
      if (err == 0) {
        fd = tryOpenBeneath(directory, own, O_RDONLY | O_DIRECTORY, 0, true);
        if (!fd.valid()) err = errno;
      }
      lock.lock();
      if (stop_ || volume.removed || !tree_.alive(task.node)) return false;
    }
    if (err != 0 && !gone(err)) {
      if (err == EXDEV) {  // something is mounted there
        if (!tree_[task.node.id].queued) drop(task.node.id);
      } else {
        setUnwatched(task.node.id, err);
        if (task.mark) markSubtree(task.node.id, mark::kCreated);
      }
      return false;
    }
    std::string now;
    if (err == 0 && tree_.path(task.node.id, now) && now == path) {
      const int directory = above.valid() ? above.get() : root.get();
      if (!isRoot && !watchedAs(tree_[task.node.id].parent, directory)) {
        if (tries >= kOpenTries) look(tree_[task.node.id].parent, true, true);
      } else {
        outcome = attach(task.node.id, fd.get(), !task.stolen);
        // From here on a rename makes an event that finds this node; one of before shows in the directory above.
        if (outcome != Attached::kChanged || isRoot || samePlace(fd.get(), directory, own)) {
          level.fd = std::move(fd);
          level.node = task.node;
          level.wd = tree_[task.node.id].wd;
          level.fresh = task.mark || task.type == Task::Type::kAdd || outcome == Attached::kChanged;
          return true;
        }
        loseWatch(task.node.id, true);
      }
    }
    // Not there, or renamed meanwhile: then events of that are on their way.
    lock.unlock();
    syncReader();
    lock.lock();
    if (err != 0 && !isRoot && tree_.alive(task.node) && !tree_[task.node.id].queued && tree_.version() == version) {
      // All events of before are folded, and by them it should be there: nothing is. That says something of this
      // directory only if the one above is where the table has it; else that one is looked at, with all below.
      const std::uint32_t parent = tree_[task.node.id].parent;
      if (slash != std::string::npos && !(above.valid() && tree_[parent].wd >= 0 && watchedAs(parent, above.get()))) {
        look(parent, task.mark, true);
        return false;
      }
      const std::string name(tree_.name(task.node.id));
      drop(task.node.id);
      markName(parent, name, true, mark::kDeleted);
      return false;
    }
  }
  // Directories above it are renamed all the time: later.
  Lock lock(mutex_);
  if (!stop_ && !volume.removed && tree_.alive(task.node) && !tree_[task.node.id].queued) {
    look(task.node.id, task.mark, true);
  }
  return false;
}

// Whether an opened directory is the one that `node` stands for. A node without a watch cannot tell: it waits for a look
// of its own, which goes into what is below, or is named as unwatched.
bool Watcher::Engine::watchedAs(std::uint32_t node, int fd) {
  const std::int32_t own = tree_[node].wd;
  if (own < 0) return true;
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const std::int32_t wd = inotify_add_watch(inotify_.get(), link.c_str(), kMask);
  if (wd == own) return true;
  if (wd >= 0 && tree_.byWd(wd) == kNoNode) removals_.push_back(wd);
  return false;
}

// Whether the opened directory is (still) what `path` names.
bool Watcher::Engine::samePlace(int fd, int directory, const std::string& path) {
  try {
    const Stat opened = statFd(fd);
    const Stat named = statBeneath(directory, path);
    return named.kind == Kind::kDirectory && named.ino == opened.ino && named.dev == opened.dev;
  } catch (const Error&) {
    return false;
  }
}

// Reads the names of a watched directory, and forgets nodes below it that are not there any more.
bool Watcher::Engine::fillLevel(Level& level) {
  int err = 0;
  try {
    level.listing = readListing(level.fd.get(), true);
  } catch (const Error& error) {
    err = error.err != 0 ? error.err : EIO;
  }
  Lock lock(mutex_);
  if (!tree_.alive(level.node)) return false;
  Volume& volume = volumeOf(level.node.id);
  if (err != 0) {
    loseWatch(level.node.id, true);
    setUnwatched(level.node.id, err);
    return false;
  }
  lock.unlock();
  for (std::uint32_t i = 0; i < level.listing.entries.size(); ++i) {
    Filter::Cursor below;
    (void)volume.filter->step(level.cursor, level.listing.name(level.listing.entries[i]), true, &below);
    if (below.reaches) level.order.push_back(i);
  }
  const auto name = [&](std::uint32_t i) { return level.listing.name(level.listing.entries[i]); };
  std::sort(level.order.begin(), level.order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return name(a) < name(b); });
  lock.lock();
  if (!tree_.alive(level.node)) return false;
  std::vector<std::uint32_t> missing;
  for (std::uint32_t child = tree_[level.node.id].first; child != kNoNode; child = tree_[child].next) {
    if (tree_[child].queued) continue;  // it came after the listing and will be looked at
    const std::string_view own = tree_.name(child);
    const auto at = std::lower_bound(level.order.begin(), level.order.end(), own,
                                     [&](std::uint32_t i, std::string_view value) { return name(i) < value; });
    if (at == level.order.end() || name(*at) != own) missing.push_back(child);
  }
  for (const std::uint32_t child : missing) {
    const std::string own(tree_.name(child));
    markName(level.node.id, own, true, mark::kDeleted);
    drop(child);
  }
  volume.pending += level.order.size();
  return true;
}

void Watcher::Engine::abandonLevel(Task& task, Level& level) {
  const std::size_t rest = level.order.size() - level.next;
  task.volume->pending -= std::min<std::uint64_t>(task.volume->pending, rest);
}

void Watcher::Engine::walk(Task& task) {
  Volume& volume = *task.volume;
  const bool adding = task.type == Task::Type::kAdd || (task.deep && !task.mark);
  std::vector<NodeRef> fresh;  // the upper ends of what has to be marked
  std::vector<Level> levels;
  Level top;
  Attached outcome = Attached::kSame;
  if (!openTop(task, top, outcome)) return;
  if (task.mark || (outcome == Attached::kChanged && !adding)) fresh.push_back(task.node);
  const bool descend = outcome != Attached::kForeign && (outcome != Attached::kSame || task.full || adding);
  if (descend && fillLevel(top)) levels.push_back(std::move(top));
  while (!levels.empty()) {
    Level& level = levels.back();
    if (level.next == level.order.size()) {
      levels.pop_back();
      continue;
    }
    const std::string_view name = level.listing.name(level.listing.entries[level.order[level.next]]);
    Fd fd = tryOpenBeneath(level.fd.get(), name, O_RDONLY | O_DIRECTORY, 0, true);
    const int err = fd.valid() ? 0 : errno;
    Level below;
    below.fresh = level.fresh;
    bool enter = false;
    {
      Lock lock(mutex_);
      if (stop_) return;
      if (!tree_.alive(level.node) || tree_[level.node.id].wd != level.wd) {
        // It went away or got another place meanwhile: whatever did that will have it looked at again.
        abandonLevel(task, level);
        levels.pop_back();
        continue;
      }
      ++level.next;
      if (volume.pending > 0) --volume.pending;
      std::uint32_t child = tree_.child(level.node.id, name);
      if (gone(err) || err == EXDEV) {
        if (child != kNoNode && !tree_[child].queued) {
          markName(level.node.id, name, true, mark::kDeleted);
          drop(child);
        }
        continue;
      }
      if (child == kNoNode) child = makeNode(level.node.id, name, volume);
      if (err != 0) {
        loseWatch(child, true);
        setUnwatched(child, err);
        continue;
      }
      const Attached how = attach(child, fd.get(), !task.stolen);
      if (how == Attached::kForeign) continue;
      if (how == Attached::kChanged && !samePlace(fd.get(), level.fd.get(), std::string(name))) {
        // Renamed or removed since it was opened. If the event of that is folded already, nobody else drops the node.
        loseWatch(child, true);
        if (!tree_[child].queued) drop(child);
        continue;
      }
      below.node = tree_.ref(child);
      below.wd = tree_[child].wd;
      if (how == Attached::kChanged && !below.fresh && !adding) {
        fresh.push_back(below.node);
        below.fresh = true;
      }
      enter = how != Attached::kSame || task.full || below.fresh;
      if (enter && levels.size() >= kMaxDepth) {
        enter = false;
        Task deeper;
        deeper.volume = task.volume;
        deeper.node = below.node;
        deeper.mark = !adding && below.fresh;
        deeper.full = true;
        deeper.stolen = task.stolen;
        deeper.deep = true;
        tree_[child].queued = tree_[child].queued || deeper.mark;
        ++volume.deep;
        enqueue(std::move(deeper));
      }
    }
    if (!enter) continue;
    (void)volume.filter->step(level.cursor, name, true, &below.cursor);
    below.fd = std::move(fd);
    if (fillLevel(below)) levels.push_back(std::move(below));
  }
  if (fresh.empty()) return;
  Lock lock(mutex_);
  for (const NodeRef node : fresh) {
    if (tree_.alive(node)) markSubtree(node.id, mark::kCreated);
  }
  wakeIfNeeded(lock);
}

// ---- the public face ----

Watcher::Watcher(Options options) : engine_(std::make_unique<Engine>(std::move(options))) {}
Watcher::~Watcher() = default;
void Watcher::add(std::uint32_t volume, std::string_view root, std::shared_ptr<const Filter> filter, AddDone done) {
  engine_->add(volume, root, std::move(filter), std::move(done));
}
void Watcher::remove(std::uint32_t volume, Done done) { engine_->remove(volume, std::move(done)); }
Watcher::State Watcher::state(std::uint32_t volume) const { return engine_->state(volume); }
std::string Watcher::take(std::uint32_t volume) { return engine_->take(volume); }
void Watcher::putBack(std::uint32_t volume, std::string_view marks) { engine_->putBack(volume, marks); }
void Watcher::barrier(Done done) { engine_->barrier(std::move(done)); }
void Watcher::retry(Done done) { engine_->retry(std::move(done)); }
void Watcher::close() { engine_->close(); }
std::size_t Watcher::memory() const { return engine_->memory(); }

}  // namespace sv
