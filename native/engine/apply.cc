#include "engine/apply.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <unordered_set>
#include <vector>

#include "engine/crash_point.h"
#include "engine/fs.h"
#include "engine/pack.h"
#include "engine/record.h"
#include "engine/size.h"

namespace sv {

namespace {

enum Op : std::uint8_t {
  kTake = 1,
  kRemove = 2,
  kRmdir = 3,
  kMkdir = 4,
  kPut = 5,
  kSymlink = 6,
  kLink = 7,
  kPatch = 8,
  kPatchCopy = 9,
  kMeta = 10,
};
constexpr std::uint8_t kKeepOld = 1;
constexpr std::size_t kMaxOp = 1 << 30;  // a record with the chunk list of a very large file

[[noreturn]] void invalid(const std::string& what) { throw Error("OPS_INVALID", "OPS_INVALID: " + what); }

// A path of the plan: no component that is empty, ".", ".." or too long, no NUL (a C string would end there). What the
// path leads through is openat2's business; this is for the last component, which is used by name.
void checkPath(std::string_view path, bool rootAllowed) {
  if (path.empty()) {
    if (!rootAllowed) invalid("an operation on the root");
    return;
  }
  if (path.size() > kMaxPathBytes || path.find('\0') != std::string_view::npos) invalid("a path that cannot be");
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t slash = std::min(path.find('/', at), path.size());
    const std::string_view name = path.substr(at, slash - at);
    if (name.empty() || name.size() > 255 || name == "." || name == "..") invalid("a path that cannot be");
    at = slash + 1;
  }
}

struct Operation {
  Op op;
  bool keepOld;
  std::uint64_t slot;
  std::string_view arg;
  RecordView record;
};

// Streams the operations of a file.
void forEach(const std::string& path, const std::function<void(const Operation&)>& body) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) throwErrno("open", path);
  std::string buffer;
  std::uint64_t at = 0;
  std::size_t begin = 0;
  const auto need = [&](std::size_t bytes) {
    if (buffer.size() - begin >= bytes) return true;
    buffer.erase(0, begin);
    begin = 0;
    const std::size_t had = buffer.size();
    const std::size_t want = std::max<std::size_t>(bytes - had, 256 * 1024);
    buffer.resize(had + want);
    const std::size_t n = preadFull(fd.get(), buffer.data() + had, want, at);
    at += n;
    buffer.resize(had + n);
    return buffer.size() >= bytes;
  };
  while (need(4)) {
    std::uint32_t length;
    std::memcpy(&length, buffer.data() + begin, sizeof length);
    if (length < 20 || length > kMaxOp || !need(length)) invalid("the plan is cut short");
    ByteReader in(std::string_view(buffer).substr(begin + 4, length - 4));
    Operation o;
    o.op = static_cast<Op>(in.u8());
    o.keepOld = (in.u8() & kKeepOld) != 0;
    in.skip(2);
    const std::uint32_t argLength = in.u32();
    o.slot = in.u64();
    o.arg = in.bytes(argLength);
    o.record = RecordView::parse(in.rest());
    if (o.op < kTake || o.op > kMeta) invalid("an unknown operation");
    checkPath(o.record.path(), o.op == kMeta || o.op == kMkdir);
    if (o.op == kLink) checkPath(o.arg, false);
    if (o.op == kSymlink) {
      const std::string_view text = o.record.target();
      if (text.empty() || text.size() > kMaxPathBytes - 1 || text.find('\0') != std::string_view::npos)
        invalid("a link text that cannot be");
    }
    body(o);
    begin += length;
  }
  if (buffer.size() != begin) invalid("the plan is cut short");
}

class Applier {
 public:
  explicit Applier(const ApplyOptions& options)
      : options_(options), root_(openRoot(options.root)), slots_(openRoot(options.slots)) {
    if (options.retired.empty()) return;
    retired_ = openRoot(options.retired);
    leaves_ = inProject(openBeneath(root_.get(), "", O_RDONLY | O_DIRECTORY).get());
  }

  ApplyResult run() {
    if (options_.phase == 1) {
      checkTakes();
      forEach(options_.ops, [&](const Operation& o) {
        if (o.op != kTake) return;
        take(o);
        ++result_.operations;
        crashPoint("apply.take.after");
      });
      endTakes();
      return result_;
    }
    if (options_.phase != 2) invalid("a phase that does not exist");
    check();
    crashPoint("apply.phase2.begin");
    forEach(options_.ops, [&](const Operation& o) {
      if (o.op == kTake) return;
      one(o);
      ++result_.operations;
    });
    crashPoint("apply.before_out");
    if (!options_.out.empty()) writeOut();
    crashPoint("apply.end");
    return result_;
  }

 private:
  void one(const Operation& o) {
    switch (o.op) {
      case kRemove: remove(o); break;
      case kRmdir: rmdir(o); break;
      case kMkdir: mkdir(o); break;
      case kPut: put(o); break;
      case kSymlink: symlink(o); break;
      case kLink: link(o); break;
      case kPatch: patch(o); break;
      case kPatchCopy: patchCopy(o); break;
      case kMeta: meta(o); break;
      case kTake: break;
    }
  }

  static std::uint64_t key(std::string_view path) {
    return static_cast<std::uint64_t>(std::hash<std::string_view>{}(path));
  }

  // Phase 1: every file that is to be taken is there, or has been taken.
  void checkTakes() {
    forEach(options_.ops, [&](const Operation& o) {
      if (o.op != kTake || statAt(slots_.get(), slotName(o.slot).c_str()).present()) return;
      if (statBeneath(root_.get(), o.record.path()).kind != Kind::kFile) throw errnoError(ENOENT, "renameat", o.record.path());
    });
  }

  // Phase 2, before anything is changed: what would stop it half-way, or what a redo could not repeat. Reads the plan
  // once and looks at what stands at the new names now. In a redo it refuses nothing that the first run accepted.
  void check() {
    std::unordered_set<std::uint64_t> removed;      // hashes of the paths of REMOVE
    std::unordered_set<std::uint64_t> directories;  // of RMDIR
    std::unordered_set<std::uint64_t> made;         // of MKDIR
    std::string goodParent;
    bool haveGoodParent = false;
    int before = 0;
    forEach(options_.ops, [&](const Operation& o) {
      const std::string path(o.record.path());
      const int rank = o.op == kTake                       ? 0
                       : o.op == kRemove || o.op == kRmdir ? 1
                       : o.op == kMkdir                    ? 2
                       : o.op == kMeta                     ? 4
                                                           : 3;
      if (rank < before) invalid("operations out of order at " + printablePath(path));
      before = rank;
      if (o.op == kRemove) removed.insert(key(path));
      if (o.op == kRmdir) directories.insert(key(path));
      if (rank < 2 || rank > 3) return;

      // The directory that it goes into.
      const std::size_t slash = path.rfind('/');
      const std::string parent = slash == std::string::npos ? std::string() : path.substr(0, slash);
      if (!parent.empty() && !(haveGoodParent && parent == goodParent)) {
        if (made.count(key(parent)) == 0) {
          const Kind there = statBeneath(root_.get(), parent).kind;
          if (there != Kind::kDirectory) throw errnoError(there == Kind::kAbsent ? ENOENT : ENOTDIR, "openat2", parent);
        }
        goodParent = parent;
        haveGoodParent = true;
      }

      const Stat there = statBeneath(root_.get(), path);
      if (o.op == kMkdir) {
        made.insert(key(path));
        if (there.present() && there.kind != Kind::kDirectory && removed.count(key(path)) == 0)
          throw errnoError(EEXIST, "mkdirat", path);
        return;
      }
      if (o.op == kPatch || o.op == kPatchCopy) {
        if (there.kind != Kind::kFile) throw errnoError(there.present() ? EINVAL : ENOENT, "openat2", path);
        if (!statAt(slots_.get(), slotName(o.slot).c_str()).present()) throw errnoError(ENOENT, "openat2", slotName(o.slot));
        return;
      }
      // A directory may stand here only if the plan removes it with all that is below it.
      if (there.kind == Kind::kDirectory) {
        if (directories.count(key(path)) == 0) throw errnoError(EISDIR, "renameat", path);
        onlyGone(path, [&](const std::string& below, bool directory) {
          return (directory ? directories : removed).count(key(below)) != 0;
        });
      }
      if (o.op != kPut) return;
      // Repeated, the removal would hit what the first run put there.
      if (removed.count(key(path)) != 0) invalid("removes and puts " + printablePath(path));
      if (!statAt(slots_.get(), slotName(o.slot).c_str()).present() &&
          !statAt(slots_.get(), putName(o.slot).c_str()).present() && !isPut(there, o.record))
        throw errnoError(ENOENT, "openat2", slotName(o.slot));
    });
  }

  // What stands at a path whose slot is gone is what the first run of a redo put there: the metadata was set before the
  // rename. (Some file systems keep whole seconds only.)
  static bool isPut(const Stat& there, const RecordView& record) {
    constexpr std::int64_t kSecond = 1'000'000'000;
    const bool time = there.mtimeNs == record.mtimeNs() ||
                      (there.mtimeNs % kSecond == 0 && there.mtimeNs / kSecond == record.mtimeNs() / kSecond);
    return there.kind == Kind::kFile && there.size == record.size() && time;
  }

  // A slot that was copied to its place, not renamed: kept, since the copy can be lost in a crash that this name outlives.
  static std::string putName(std::uint64_t slot) { return slotName(slot) + ".put"; }

  static bool sameContent(int a, int b) {
    std::vector<char> one(256 * 1024);
    std::vector<char> two(one.size());
    for (std::uint64_t at = 0;;) {
      const std::size_t n = preadFull(a, one.data(), one.size(), at);
      if (preadFull(b, two.data(), two.size(), at) != n || std::memcmp(one.data(), two.data(), n) != 0) return false;
      if (n < one.size()) return true;
      at += n;
    }
  }

  // Throws ENOTEMPTY with the path of the first entry below `path` that is not to be removed.
  void onlyGone(const std::string& path, const std::function<bool(const std::string&, bool)>& isGone) {
    std::vector<std::string> todo{path};
    while (!todo.empty()) {
      const std::string directory = std::move(todo.back());
      todo.pop_back();
      Fd fd = openBeneath(root_.get(), directory, O_RDONLY | O_DIRECTORY);
      const std::unique_ptr<DIR, int (*)(DIR*)> entries(fdopendir(fd.get()), closedir);
      if (entries == nullptr) throwErrno("fdopendir", directory);
      fd.release();
      for (;;) {
        errno = 0;
        const dirent* entry = readdir(entries.get());
        if (entry == nullptr) {
          if (errno != 0) throwErrno("readdir", directory);
          break;
        }
        const std::string_view name = entry->d_name;
        if (name == "." || name == "..") continue;
        const std::string below = directory + '/' + std::string(name);
        const bool isDirectory = statAt(dirfd(entries.get()), entry->d_name).kind == Kind::kDirectory;
        if (!isGone(below, isDirectory)) throw errnoError(ENOTEMPTY, "rmdir", below);
        if (isDirectory) todo.push_back(below);
      }
    }
  }

  // Keeps the old file at `name` in the retired folder: linked if its name goes on meaning something until another file
  // is renamed over it (so that the name is there at every moment, for readers and for a redo), else moved.
  void retire(const Operation& o, int parent, const std::string& name, bool livesOn) {
    if (!o.keepOld || !retired_.valid()) return;
    const Stat old = statAt(parent, name.c_str());
    if (!old.present() || old.kind == Kind::kDirectory) return;
    makeParents(retired_.get(), o.record.path());
    const auto [folder, base] = openParent(retired_.get(), o.record.path());
    // Kept already: by the first run of a redo, or by an operation before this one. The first is the right one.
    if (statAt(folder.get(), base.c_str()).present()) return;
    if (!livesOn) {
      (void)renameOrCopy(parent, name, folder.get(), base, o.record.path());
    } else if (linkat(parent, name.c_str(), folder.get(), base.c_str(), 0) != 0) {
      if (errno != EXDEV) throwErrno("linkat", o.record.path());
      copyAcross(parent, name, folder.get(), base, o.record.path());
    }
    if (leaves_ && old.kind == Kind::kFile) {
      const Fd kept = tryOpenBeneath(folder.get(), base, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
      if (kept.valid()) leaveTree(kept.get());
    }
    crashPoint("apply.retire.after");
  }

  void take(const Operation& o) {
    const std::string slot = slotName(o.slot);
    if (statAt(slots_.get(), slot.c_str()).present()) {
      crossed_ = true;  // perhaps: by a run that was cut off
      return;
    }
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    if (statAt(parent.get(), name.c_str()).kind != Kind::kFile) throw errnoError(ENOENT, "renameat", o.record.path());
    crashPoint("apply.take.before");
    retire(o, parent.get(), name, true);
    if (!renameOrCopy(parent.get(), name, slots_.get(), slot, o.record.path())) crossed_ = true;
  }

  // What could not be renamed into its slot was copied there. Its name goes once all of them are on the disk.
  void endTakes() {
    if (!crossed_) return;
    syncFs(options_.slots);
    crashPoint("apply.take.copied");
    forEach(options_.ops, [&](const Operation& o) {
      if (o.op != kTake) return;
      const auto [parent, name] = tryOpenParent(root_.get(), o.record.path());
      if (!parent.valid()) return;
      if (statAt(parent.get(), name.c_str()).kind == Kind::kFile && unlinkat(parent.get(), name.c_str(), 0) != 0)
        throwErrno("unlinkat", o.record.path());
    });
  }

  void remove(const Operation& o) {
    const auto [parent, name] = tryOpenParent(root_.get(), o.record.path());
    if (!parent.valid()) {
      if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return;
      throwErrno("openat2", o.record.path());
    }
    retire(o, parent.get(), name, false);
    if (unlinkat(parent.get(), name.c_str(), 0) != 0 && errno != ENOENT && errno != EISDIR && errno != ENOTDIR)
      throwErrno("unlinkat", o.record.path());
    crashPoint("apply.remove.after");
  }

  void rmdir(const Operation& o) {
    const auto [parent, name] = tryOpenParent(root_.get(), o.record.path());
    if (!parent.valid()) {
      if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return;
      throwErrno("openat2", o.record.path());
    }
    if (unlinkat(parent.get(), name.c_str(), AT_REMOVEDIR) != 0) {
      if (errno == ENOTEMPTY || errno == EEXIST) {
        // Contents that are not part of the state live on below it.
        ++result_.notEmpty;
        return;
      }
      if (errno != ENOENT && errno != ENOTDIR) throwErrno("rmdir", o.record.path());
    }
    crashPoint("apply.rmdir.after");
  }

  void mkdir(const Operation& o) {
    if (o.record.path().empty()) return;
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    // 0700 until the metadata comes: never wider than it will be.
    if (mkdirat(parent.get(), name.c_str(), 0700) != 0) {
      if (errno != EEXIST) throwErrno("mkdirat", o.record.path());
      if (statAt(parent.get(), name.c_str()).kind != Kind::kDirectory) throw errnoError(ENOTDIR, "mkdirat", o.record.path());
    }
    crashPoint("apply.mkdir.after");
  }

  void place(const Operation& o, int fromDirectory, const std::string& from, int parent, const std::string& name,
             bool keepOld = true) {
    if (keepOld) retire(o, parent, name, true);
    crashPoint("apply.put.before_rename");
    if (renameOrCopy(fromDirectory, from, parent, name, o.record.path())) {
      // Two names of one file: the rename did nothing (rename(2)).
      (void)unlinkat(fromDirectory, from.c_str(), 0);
    } else if (o.op == kPut) {
      crashPoint("apply.put.copied");
      const std::string done = putName(o.slot);
      if (renameat(fromDirectory, from.c_str(), fromDirectory, done.c_str()) != 0) throwErrno("renameat", done);
    }
    crashPoint("apply.put.after_rename");
  }

  // What the file system will not take is counted; a disk that fails is an error.
  void setMetaCounted(int fd, const RecordView& record) {
    const int failed = setMeta(fd, record);
    if (failed == EIO || failed == EROFS) throw errnoError(failed, "fsetxattr", record.path());
    if (failed != 0) ++result_.xattrsFailed;
  }

  // The regular file or directory at the path of `o`, opened. The kind is looked at first: opening a FIFO waits, opening
  // a device can do anything.
  Fd openKnown(const Operation& o, Kind kind, int flags) {
    const std::string_view path = o.record.path();
    const auto wrong = [&](Kind there) {
      return errnoError(there == Kind::kAbsent ? ENOENT : there == Kind::kDirectory ? EISDIR : EINVAL, "openat2", path);
    };
    if (path.empty()) {
      if (kind != Kind::kDirectory) throw wrong(Kind::kDirectory);
      return openBeneath(root_.get(), path, flags);
    }
    const auto [parent, name] = openParent(root_.get(), path);
    const Kind there = statAt(parent.get(), name.c_str()).kind;
    if (there != kind) throw wrong(there);
    Fd fd = openBeneath(parent.get(), name, flags | O_NOFOLLOW | O_NONBLOCK);
    const Kind opened = statFd(fd.get()).kind;
    if (opened != kind) throw wrong(opened);
    return fd;
  }

  void put(const Operation& o) {
    const std::string slot = slotName(o.slot);
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    Fd fd = tryOpenBeneath(slots_.get(), slot, O_RDONLY | O_NOFOLLOW);
    const bool waiting = fd.valid();
    if (!waiting) {
      if (errno != ENOENT) throwErrno("openat2", slot);
      const Fd copied = tryOpenBeneath(slots_.get(), putName(o.slot), O_RDONLY | O_NOFOLLOW);
      if (copied.valid()) {
        // By a run before this one, which kept what was there before. Is it still there?
        const Stat there = statAt(parent.get(), name.c_str());
        if (!isPut(there, o.record) || !sameContent(copied.get(), openKnown(o, Kind::kFile, O_RDONLY).get()))
          copyAcross(slots_.get(), putName(o.slot), parent.get(), name, o.record.path());
      }
      fd = openKnown(o, Kind::kFile, O_RDONLY);
      if (!isPut(statFd(fd.get()), o.record)) throw errnoError(ENOENT, "openat2", slot);
    }
    // What stands there may be this very content, of a run that was cut off right after it was copied: no old version.
    bool old = true;
    if (waiting && o.keepOld && retired_.valid() && isPut(statAt(parent.get(), name.c_str()), o.record))
      old = !sameContent(fd.get(), openKnown(o, Kind::kFile, O_RDONLY).get());
    setMetaCounted(fd.get(), o.record);
    // Its slot is on the disk since the plan is: a long seed must not push everything else out of memory.
    if (o.record.kind() == Kind::kFile && o.record.size() > kDropBytes)
      (void)posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    if (waiting) place(o, slots_.get(), slot, parent.get(), name, old);
  }

  void symlink(const Operation& o) {
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    const Stat there = statAt(parent.get(), name.c_str());
    if (there.kind != Kind::kSymlink || readLinkAt(parent.get(), name.c_str()) != o.record.target()) {
      const std::string temporary = "tmp-link";
      (void)unlinkat(slots_.get(), temporary.c_str(), 0);
      if (symlinkat(std::string(o.record.target()).c_str(), slots_.get(), temporary.c_str()) != 0)
        throwErrno("symlinkat", o.record.path());
      place(o, slots_.get(), temporary, parent.get(), name);
    }
    setLinkMeta(parent.get(), name.c_str(), o.record);
  }

  void link(const Operation& o) {
    const auto [fromParent, fromName] = openParent(root_.get(), o.arg);
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    const Stat from = statAt(fromParent.get(), fromName.c_str());
    if (from.kind != Kind::kFile) throw errnoError(ENOENT, "linkat", o.arg);
    const Stat there = statAt(parent.get(), name.c_str());
    if (there.present() && there.ino == from.ino) return;
    std::string temporary = "tmp-hard";
    int folder = slots_.get();
    (void)unlinkat(folder, temporary.c_str(), 0);
    if (linkat(fromParent.get(), fromName.c_str(), folder, temporary.c_str(), 0) != 0) {
      if (errno != EXDEV) throwErrno("linkat", o.record.path());
      folder = parent.get();
      temporary = kCrossingName;
      (void)unlinkat(folder, temporary.c_str(), 0);
      if (linkat(fromParent.get(), fromName.c_str(), folder, temporary.c_str(), 0) != 0) throwErrno("linkat", o.record.path());
    }
    place(o, folder, temporary, parent.get(), name);
  }

  // Writes the runs of a patch slot into `out` and sets the size.
  void writeRuns(const Operation& o, int out) {
    const std::string slot = slotName(o.slot);
    const Fd patch = openBeneath(slots_.get(), slot, O_RDONLY | O_NOFOLLOW);
    char magic[kPackHead];
    if (preadFull(patch.get(), magic, sizeof magic, 0) < sizeof magic || std::string_view(magic, sizeof magic) != packHead())
      invalid("a patch slot that is no patch");
    const std::uint64_t size = o.record.size();
    // Shrink first: what is written later must not be cut; grow at the end by the same call.
    if (statFd(out).size > size && ftruncate(out, static_cast<off_t>(size)) != 0) throwErrno("ftruncate", o.record.path());
    std::vector<char> buffer(kPackPiece);
    std::uint64_t at = kPackHead;
    bool middle = false;
    for (;;) {
      char head[kPackRecordHead];
      if (preadFull(patch.get(), head, sizeof head, at) < sizeof head) invalid("a patch slot is cut short");
      at += sizeof head;
      std::uint32_t ordinal;
      std::uint32_t field;
      std::uint64_t offset;
      std::memcpy(&ordinal, head, 4);
      std::memcpy(&field, head + 4, 4);
      std::memcpy(&offset, head + 8, 8);
      if (ordinal == kPackEnd) break;
      const std::uint32_t length = field & ~kZeroRun;
      if (offset > size || length > size - offset) invalid("a patch leaves its file");
      if ((field & kZeroRun) != 0) {
        zero(out, offset, length);
      } else {
        if (length > buffer.size() || preadFull(patch.get(), buffer.data(), length, at) < length)
          invalid("a patch slot is cut short");
        pwriteFull(out, buffer.data(), length, offset);
        at += length;
        result_.bytesWritten += length;
      }
      if (!middle) crashPoint("apply.patch.mid");
      middle = true;
    }
    if (ftruncate(out, static_cast<off_t>(size)) != 0) throwErrno("ftruncate", o.record.path());
  }

  static void zero(int fd, std::uint64_t offset, std::uint64_t length) {
    // Beyond the end there is nothing to do: the size that is set last makes it a hole.
    const std::uint64_t size = statFd(fd).size;
    if (offset >= size) return;
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(length)) == 0)
      return;
    const std::vector<char> zeros(64 * 1024);
    while (length > 0) {
      const std::size_t n = static_cast<std::size_t>(std::min<std::uint64_t>(length, zeros.size()));
      pwriteFull(fd, zeros.data(), n, offset);
      offset += n;
      length -= n;
    }
  }

  void patch(const Operation& o) {
    const Fd fd = openKnown(o, Kind::kFile, O_RDWR);
    writeRuns(o, fd.get());
    setMetaCounted(fd.get(), o.record);
    crashPoint("apply.patch.after");
  }

  void patchCopy(const Operation& o) {
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    const std::string done = slotName(o.slot) + ".new";
    // The copy is renamed over the file, so when a redo finds the file patched it patches the patched: the same bytes.
    const Fd old = openKnown(o, Kind::kFile, O_RDONLY);
    const Stat stat = statFd(old.get());
    (void)unlinkat(slots_.get(), done.c_str(), 0);
    const Fd copy(openat(slots_.get(), done.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!copy.valid()) throwErrno("openat", done);
    result_.bytesWritten += copyContents(old.get(), copy.get(), stat.size, o.record.path()).value_or(0);
    writeRuns(o, copy.get());
    setMetaCounted(copy.get(), o.record);
    // The rename must not reach the disk before the data: a redo would patch a file of zeros.
    if (fdatasync(copy.get()) != 0) throwErrno("fdatasync", done);
    place(o, slots_.get(), done, parent.get(), name);
  }

  void meta(const Operation& o) {
    if (o.record.kind() == Kind::kSymlink) {
      const auto [parent, name] = openParent(root_.get(), o.record.path());
      if (statAt(parent.get(), name.c_str()).kind != Kind::kSymlink) throw errnoError(EINVAL, "fchownat", o.record.path());
      setLinkMeta(parent.get(), name.c_str(), o.record);
    } else {
      if (o.record.kind() != Kind::kFile && o.record.kind() != Kind::kDirectory) invalid("metadata of an unknown kind");
      const Fd fd = openKnown(o, o.record.kind(), O_RDONLY);
      setMetaCounted(fd.get(), o.record);
    }
    crashPoint("apply.meta.after");
  }

  // What stands at the paths now that everything is done: the identities for the index.
  void writeOut() {
    const Fd out(open(options_.out.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!out.valid()) throwErrno("open", options_.out);
    std::string buffer;
    forEach(options_.ops, [&](const Operation& o) {
      if (o.op == kTake || o.op == kRemove) return;
      const Stat stat = statBeneath(root_.get(), o.record.path());
      if (o.op == kRmdir && stat.kind != Kind::kDirectory) return;
      if (!stat.present()) throw errnoError(ENOENT, "statx", o.record.path());
      {
        ItemWriter w(buffer);
        w.u8(o.op == kRmdir ? 1 : 0);
        w.zeros(3);
        w.u32(static_cast<std::uint32_t>(o.record.path().size()));
        w.u64(stat.kind == Kind::kDirectory ? 0 : stat.size);
        w.i64(stat.mtimeNs);
        w.u64(stat.ino);
        w.i64(stat.ctimeNs);
        w.raw(o.record.path());
      }
      if (buffer.size() > 256 * 1024) {
        writeFull(out.get(), buffer.data(), buffer.size());
        buffer.clear();
      }
    });
    writeFull(out.get(), buffer.data(), buffer.size());
  }

  const ApplyOptions& options_;
  Fd root_;
  Fd slots_;
  Fd retired_;
  bool leaves_ = false;   // what is retired leaves the project of the tree
  bool crossed_ = false;  // a take was copied, or may have been
  ApplyResult result_;
};

}  // namespace

ApplyResult apply(const ApplyOptions& options) { return Applier(options).run(); }

}  // namespace sv
