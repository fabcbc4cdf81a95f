#include "engine/apply.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "engine/crash_point.h"
#include "engine/fs.h"
#include "engine/pack.h"
#include "engine/record.h"

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
    if (length < 20 || length > kMaxOp || !need(length)) throw Error("OPS_INVALID", "OPS_INVALID: the plan is cut short");
    ByteReader in(std::string_view(buffer).substr(begin + 4, length - 4));
    Operation o;
    o.op = static_cast<Op>(in.u8());
    o.keepOld = (in.u8() & kKeepOld) != 0;
    in.skip(2);
    const std::uint32_t argLength = in.u32();
    o.slot = in.u64();
    o.arg = in.bytes(argLength);
    o.record = RecordView::parse(in.rest());
    if (o.op < kTake || o.op > kMeta) throw Error("OPS_INVALID", "OPS_INVALID: an unknown operation");
    body(o);
    begin += length;
  }
  if (buffer.size() != begin) throw Error("OPS_INVALID", "OPS_INVALID: the plan is cut short");
}

class Applier {
 public:
  explicit Applier(const ApplyOptions& options)
      : options_(options), root_(openRoot(options.root)), slots_(openRoot(options.slots)) {
    if (!options.retired.empty()) retired_ = openRoot(options.retired);
  }

  ApplyResult run() {
    if (options_.phase == 1) {
      forEach(options_.ops, [&](const Operation& o) {
        if (o.op != kTake) return;
        take(o);
        ++result_.operations;
        crashPoint("apply.take.after");
      });
      return result_;
    }
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

  // The old file at `name` is moved to (or, if it stays in use, linked into) the retired folder.
  void retire(const Operation& o, int parent, const std::string& name, bool livesOn) {
    if (!o.keepOld || !retired_.valid()) return;
    const Stat old = statAt(parent, name.c_str());
    if (!old.present() || old.kind == Kind::kDirectory) return;
    makeParents(retired_.get(), o.record.path());
    const auto [folder, base] = openParent(retired_.get(), o.record.path());
    // Kept already: by the first run of a redo, or by an operation before this one. The first is the right one.
    if (statAt(folder.get(), base.c_str()).present()) return;
    const int failed = livesOn ? linkat(parent, name.c_str(), folder.get(), base.c_str(), 0)
                               : renameat(parent, name.c_str(), folder.get(), base.c_str());
    if (failed != 0) throwErrno(livesOn ? "linkat" : "renameat", o.record.path());
    crashPoint("apply.retire.after");
  }

  void take(const Operation& o) {
    const std::string slot = slotName(o.slot);
    if (statAt(slots_.get(), slot.c_str()).present()) return;
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    crashPoint("apply.take.before");
    retire(o, parent.get(), name, true);
    if (renameat(parent.get(), name.c_str(), slots_.get(), slot.c_str()) != 0) throwErrno("renameat", o.record.path());
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
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    // 0700 until the metadata comes: never wider than it will be.
    if (mkdirat(parent.get(), name.c_str(), 0700) != 0) {
      if (errno != EEXIST) throwErrno("mkdirat", o.record.path());
      if (statAt(parent.get(), name.c_str()).kind != Kind::kDirectory) throw errnoError(ENOTDIR, "mkdirat", o.record.path());
    }
    crashPoint("apply.mkdir.after");
  }

  void place(const Operation& o, int fromDirectory, const std::string& from, int parent, const std::string& name) {
    retire(o, parent, name, false);
    crashPoint("apply.put.before_rename");
    if (renameat(fromDirectory, from.c_str(), parent, name.c_str()) != 0) throwErrno("renameat", o.record.path());
    crashPoint("apply.put.after_rename");
  }

  void setMetaCounted(int fd, const RecordView& record) {
    if (setMeta(fd, record) != 0) ++result_.xattrsFailed;
  }

  void put(const Operation& o) {
    const std::string slot = slotName(o.slot);
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    Fd fd = tryOpenBeneath(slots_.get(), slot, O_RDONLY | O_NOFOLLOW);
    const bool waiting = fd.valid();
    if (!waiting) {
      if (errno != ENOENT) throwErrno("openat2", slot);
      fd = openBeneath(parent.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
      const Stat there = statFd(fd.get());
      if (there.kind != Kind::kFile || there.size != o.record.size()) throw errnoError(ENOENT, "openat2", o.record.path());
    }
    setMetaCounted(fd.get(), o.record);
    if (waiting) place(o, slots_.get(), slot, parent.get(), name);
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
    const std::string temporary = "tmp-hard";
    (void)unlinkat(slots_.get(), temporary.c_str(), 0);
    if (linkat(fromParent.get(), fromName.c_str(), slots_.get(), temporary.c_str(), 0) != 0)
      throwErrno("linkat", o.record.path());
    place(o, slots_.get(), temporary, parent.get(), name);
  }

  // Writes the runs of a patch slot into `out` and sets the size.
  void writeRuns(const Operation& o, int out) {
    const std::string slot = slotName(o.slot);
    const Fd patch = openBeneath(slots_.get(), slot, O_RDONLY | O_NOFOLLOW);
    const std::uint64_t size = o.record.size();
    // Shrink first: what is written later must not be cut; grow at the end by the same call.
    if (statFd(out).size > size && ftruncate(out, static_cast<off_t>(size)) != 0) throwErrno("ftruncate", o.record.path());
    std::vector<char> buffer(kPackPiece);
    std::uint64_t at = kPackHead;
    bool middle = false;
    for (;;) {
      char head[kPackRecordHead];
      if (preadFull(patch.get(), head, sizeof head, at) < sizeof head) throw Error("OPS_INVALID", "OPS_INVALID: a patch slot is cut short");
      at += sizeof head;
      std::uint32_t ordinal;
      std::uint32_t field;
      std::uint64_t offset;
      std::memcpy(&ordinal, head, 4);
      std::memcpy(&field, head + 4, 4);
      std::memcpy(&offset, head + 8, 8);
      if (ordinal == kPackEnd) break;
      const std::uint32_t length = field & ~kZeroRun;
      if (offset > size || length > size - offset) throw Error("OPS_INVALID", "OPS_INVALID: a patch leaves its file");
      if ((field & kZeroRun) != 0) {
        zero(out, offset, length);
      } else {
        if (length > buffer.size() || preadFull(patch.get(), buffer.data(), length, at) < length)
          throw Error("OPS_INVALID", "OPS_INVALID: a patch slot is cut short");
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
    const Fd fd = openBeneath(root_.get(), o.record.path(), O_RDWR | O_NOFOLLOW | O_NONBLOCK);
    if (statFd(fd.get()).kind != Kind::kFile) throw errnoError(EINVAL, "openat2", o.record.path());
    writeRuns(o, fd.get());
    setMetaCounted(fd.get(), o.record);
    crashPoint("apply.patch.after");
  }

  void patchCopy(const Operation& o) {
    const auto [parent, name] = openParent(root_.get(), o.record.path());
    const std::string done = slotName(o.slot) + ".new";
    // The copy is renamed over the file, so when a redo finds the file patched it patches the patched: the same bytes.
    const Fd old = openBeneath(parent.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    const Stat stat = statFd(old.get());
    if (stat.kind != Kind::kFile) throw errnoError(EINVAL, "openat2", o.record.path());
    (void)unlinkat(slots_.get(), done.c_str(), 0);
    const Fd copy(openat(slots_.get(), done.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!copy.valid()) throwErrno("openat", done);
    if (!cloneFile(old.get(), copy.get())) {
      CacheWindow window(copy.get(), true);
      for (std::uint64_t at = 0; at < stat.size;) {
        const auto [begin, end] = nextData(old.get(), at, stat.size);
        for (at = begin; at < end;) {
          const std::uint64_t n = copyRange(old.get(), copy.get(), at, std::min<std::uint64_t>(end - at, 4 << 20));
          if (n == 0) throw errnoError(EIO, "copy_file_range", o.record.path());
          at += n;
          result_.bytesWritten += n;
          if (stat.size > kWindowBytes) window.advance(at);
        }
      }
      if (ftruncate(copy.get(), static_cast<off_t>(stat.size)) != 0) throwErrno("ftruncate", done);
    }
    writeRuns(o, copy.get());
    setMetaCounted(copy.get(), o.record);
    if (fdatasync(copy.get()) != 0) throwErrno("fdatasync", done);
    place(o, slots_.get(), done, parent.get(), name);
  }

  void meta(const Operation& o) {
    if (o.record.kind() == Kind::kSymlink) {
      const auto [parent, name] = openParent(root_.get(), o.record.path());
      setLinkMeta(parent.get(), name.c_str(), o.record);
    } else {
      const Fd fd = openBeneath(root_.get(), o.record.path(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
      const Stat there = statFd(fd.get());
      if (there.kind != o.record.kind()) throw errnoError(EINVAL, "openat2", o.record.path());
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
  ApplyResult result_;
};

}  // namespace

ApplyResult apply(const ApplyOptions& options) { return Applier(options).run(); }

}  // namespace sv
