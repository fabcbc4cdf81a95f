#include "engine/fs.h"

#include <dirent.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <memory>
#include <vector>

namespace sv {

namespace {

constexpr std::int64_t kNanos = 1'000'000'000;
constexpr std::uint32_t kXfsMagic = 0x58465342;  // "XFSB"; not in the linux/magic.h of older kernels

Stat fromStatx(const struct statx& x) {
  Stat s;
  switch (x.stx_mode & S_IFMT) {
    case S_IFREG: s.kind = Kind::kFile; break;
    case S_IFDIR: s.kind = Kind::kDirectory; break;
    case S_IFLNK: s.kind = Kind::kSymlink; break;
    default: s.kind = Kind::kSpecial; break;
  }
  s.mode = static_cast<std::uint16_t>(x.stx_mode & 07777);
  s.uid = x.stx_uid;
  s.gid = x.stx_gid;
  s.size = x.stx_size;
  s.mtimeNs = x.stx_mtime.tv_sec * kNanos + x.stx_mtime.tv_nsec;
  s.ctimeNs = x.stx_ctime.tv_sec * kNanos + x.stx_ctime.tv_nsec;
  s.ino = x.stx_ino;
  s.dev = (static_cast<std::uint64_t>(x.stx_dev_major) << 32) | x.stx_dev_minor;
  s.nlink = x.stx_nlink;
  s.blocks = x.stx_blocks;
#ifdef STATX_MNT_ID
  if ((x.stx_mask & STATX_MNT_ID) != 0) s.mountId = x.stx_mnt_id;
#endif
  return s;
}

#ifdef STATX_MNT_ID
constexpr unsigned kStatxMask = STATX_BASIC_STATS | STATX_MNT_ID;
#else
constexpr unsigned kStatxMask = STATX_BASIC_STATS;
#endif

Stat statxAt(int directory, const char* name, int flags, std::string_view shown) {
  struct statx x {};
  if (statx(directory, name, flags | AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, kStatxMask, &x) != 0) {
    if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return {};
    throwErrno("statx", shown);
  }
  return fromStatx(x);
}

ssize_t realCopyFileRange(int in, off64_t* inAt, int out, off64_t* outAt, std::size_t length, unsigned flags) {
  return copy_file_range(in, inAt, out, outAt, length, flags);
}
off64_t realSeek(int fd, off64_t offset, int whence) { return lseek64(fd, offset, whence); }
ssize_t realPread(int fd, void* data, std::size_t length, off64_t offset) { return pread64(fd, data, length, offset); }
ssize_t realPwrite(int fd, const void* data, std::size_t length, off64_t offset) {
  return pwrite64(fd, data, length, offset);
}
int realClone(int out, int in) { return ioctl(out, FICLONE, in); }
int realStatfs(int fd, struct statfs* out) { return fstatfs(fd, out); }

bool carried(std::string_view name) {
  return name.starts_with("user.") || name == "system.posix_acl_access" || name == "system.posix_acl_default";
}

}  // namespace

void Fd::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Stat::describe(Record& record) const {
  record.kind = kind;
  record.mode = mode;
  record.uid = uid;
  record.gid = gid;
  record.size = kind == Kind::kDirectory ? 0 : size;
  record.mtimeNs = mtimeNs;
  record.ctimeNs = ctimeNs;
  record.ino = ino;
  record.linkGroup = kind == Kind::kFile && nlink > 1 ? ino : 0;
}

Fd openRoot(std::string_view directory) {
  const std::string path(directory);
  Fd fd(open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) throwErrno("open", directory);
  return fd;
}

Fd tryOpenBeneath(int root, std::string_view path, int flags, mode_t mode, bool sameMount) noexcept {
  try {
    const std::string name = path.empty() ? "." : std::string(path);
    struct open_how how {};
    how.flags = static_cast<std::uint64_t>(flags | O_CLOEXEC | ((flags & O_PATH) != 0 ? 0 : O_NOCTTY));
    how.mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? mode : 0;
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
    if (sameMount) how.resolve |= RESOLVE_NO_XDEV;
    // EAGAIN: a rename somewhere raced with the walk (openat2(2)); it is worth trying again.
    for (int i = 0;; ++i) {
      const long fd = syscall(SYS_openat2, root, name.c_str(), &how, sizeof how);
      if (fd >= 0) return Fd(static_cast<int>(fd));
      if (errno != EINTR && (errno != EAGAIN || i >= 64)) return {};
    }
  } catch (...) {
    errno = ENOMEM;
    return {};
  }
}

Fd openBeneath(int root, std::string_view path, int flags, mode_t mode, bool sameMount) {
  Fd fd = tryOpenBeneath(root, path, flags, mode, sameMount);
  if (!fd.valid()) throwErrno("openat2", path);
  return fd;
}

std::pair<Fd, std::string> tryOpenParent(int root, std::string_view path) noexcept {
  const std::size_t slash = path.rfind('/');
  const std::string_view parent = slash == std::string_view::npos ? std::string_view() : path.substr(0, slash);
  const std::string_view name = slash == std::string_view::npos ? path : path.substr(slash + 1);
  Fd fd = tryOpenBeneath(root, parent, O_PATH | O_DIRECTORY);
  if (!fd.valid()) return {};
  try {
    return {std::move(fd), std::string(name)};
  } catch (...) {
    errno = ENOMEM;
    return {};
  }
}

std::pair<Fd, std::string> openParent(int root, std::string_view path) {
  auto out = tryOpenParent(root, path);
  if (!out.first.valid()) throwErrno("openat2", path);
  return out;
}

Stat statAt(int directory, const char* name) { return statxAt(directory, name, 0, name); }

Stat statBeneath(int root, std::string_view path) {
  if (path.empty()) return statFd(root);
  const auto [parent, name] = tryOpenParent(root, path);
  if (!parent.valid()) {
    if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENAMETOOLONG) return {};
    throwErrno("openat2", path);
  }
  try {
    return statxAt(parent.get(), name.c_str(), 0, path);
  } catch (const Error& error) {
    if (error.err == ENAMETOOLONG) return {};
    throw;
  }
}

Stat statFd(int fd) { return statxAt(fd, "", AT_EMPTY_PATH, {}); }

std::string readLinkAt(int directory, const char* name) {
  std::string text(4096, '\0');
  const ssize_t n = readlinkat(directory, name, text.data(), text.size());
  if (n < 0) throwErrno("readlinkat", name);
  text.resize(static_cast<std::size_t>(n));
  return text;
}

std::string readXattrs(int fd) {
  std::string names(1024, '\0');
  for (;;) {
    const ssize_t n = flistxattr(fd, names.data(), names.size());
    if (n >= 0) {
      names.resize(static_cast<std::size_t>(n));
      break;
    }
    if (errno == ENOTSUP || errno == EBADF) return {};
    if (errno != ERANGE || names.size() >= 1 << 20) throwErrno("flistxattr");
    names.resize(names.size() * 8);
  }
  std::vector<std::string> wanted;
  for (std::size_t at = 0; at < names.size();) {
    const char* name = names.data() + at;
    const std::size_t length = strnlen(name, names.size() - at);
    if (carried({name, length})) wanted.emplace_back(name, length);
    at += length + 1;
  }
  std::sort(wanted.begin(), wanted.end());
  std::string packed;
  for (const std::string& name : wanted) {
    std::string value(256, '\0');
    ssize_t n;
    while ((n = fgetxattr(fd, name.c_str(), value.data(), value.size())) < 0 && errno == ERANGE) {
      if (value.size() > 65536) break;
      value.resize(value.size() * 4);
    }
    if (n < 0) {
      if (errno == ENODATA || errno == ENOTSUP) continue;  // removed in between
      throwErrno("fgetxattr", name);
    }
    ByteWriter out(packed);
    out.u16(static_cast<std::uint16_t>(name.size()));
    out.u32(static_cast<std::uint32_t>(n));
    out.raw(name);
    out.raw({value.data(), static_cast<std::size_t>(n)});
  }
  return packed;
}

int writeXattrs(int fd, std::string_view packed) {
  if (readXattrs(fd) == packed) return 0;
  int failed = 0;
  std::vector<std::string> keep;
  for (ByteReader in(packed); !in.empty();) {
    const std::uint16_t nameLen = in.u16();
    const std::uint32_t valueLen = in.u32();
    const std::string name(in.bytes(nameLen));
    const std::string_view value = in.bytes(valueLen);
    if (!carried(name)) throwFormat("an extended attribute that is not carried");
    keep.push_back(name);
    if (fsetxattr(fd, name.c_str(), value.data(), value.size(), 0) != 0 && failed == 0) failed = errno;
  }
  const std::string now = readXattrs(fd);
  for (ByteReader in(now); !in.empty();) {
    const std::uint16_t nameLen = in.u16();
    const std::uint32_t valueLen = in.u32();
    const std::string name(in.bytes(nameLen));
    in.skip(valueLen);
    if (std::find(keep.begin(), keep.end(), name) == keep.end() && fremovexattr(fd, name.c_str()) != 0 && failed == 0)
      failed = errno;
  }
  return failed;
}

namespace {
timespec toTimespec(std::int64_t ns) {
  std::int64_t seconds = ns / kNanos;
  std::int64_t rest = ns % kNanos;
  if (rest < 0) {
    rest += kNanos;
    --seconds;
  }
  return {static_cast<time_t>(seconds), static_cast<long>(rest)};
}
}  // namespace

int setMeta(int fd, const RecordView& record) {
  const Stat now = statFd(fd);
  if (now.uid != record.uid() || now.gid != record.gid()) {
    if (fchown(fd, record.uid(), record.gid()) != 0) throwErrno("fchown", record.path());
  }
  int failed = writeXattrs(fd, record.xattrs());
  // After chown (it clears setuid) and after the ACL (it sets the group bits).
  if (statFd(fd).mode != record.mode() && fchmod(fd, record.mode()) != 0) throwErrno("fchmod", record.path());
  // Without CAP_FSETID the kernel drops setgid for a group that is not ours, and says nothing (chmod(2)).
  if (failed == 0 && statFd(fd).mode != record.mode()) failed = EPERM;
  const timespec times[2] = {{0, UTIME_OMIT}, toTimespec(record.mtimeNs())};
  if (futimens(fd, times) != 0) throwErrno("futimens", record.path());
  return failed;
}

void setLinkMeta(int directory, const char* name, const RecordView& record) {
  if (fchownat(directory, name, record.uid(), record.gid(), AT_SYMLINK_NOFOLLOW) != 0)
    throwErrno("fchownat", record.path());
  const timespec times[2] = {{0, UTIME_OMIT}, toTimespec(record.mtimeNs())};
  if (utimensat(directory, name, times, AT_SYMLINK_NOFOLLOW) != 0) throwErrno("utimensat", record.path());
}

void writeFull(int fd, const void* data, std::size_t length) {
  const char* at = static_cast<const char*>(data);
  while (length > 0) {
    const ssize_t n = write(fd, at, length);
    if (n < 0) {
      if (errno == EINTR) continue;
      throwErrno("write");
    }
    at += n;
    length -= static_cast<std::size_t>(n);
  }
}

void pwriteFull(int fd, const void* data, std::size_t length, std::uint64_t offset) {
  const char* at = static_cast<const char*>(data);
  while (length > 0) {
    const ssize_t n = systemCalls().pwrite(fd, at, length, static_cast<off64_t>(offset));
    if (n < 0) {
      if (errno == EINTR) continue;
      throwErrno("pwrite");
    }
    if (n == 0) throw errnoError(ENOSPC, "pwrite");
    at += n;
    offset += static_cast<std::uint64_t>(n);
    length -= static_cast<std::size_t>(n);
  }
}

std::size_t preadFull(int fd, void* data, std::size_t length, std::uint64_t offset) {
  char* at = static_cast<char*>(data);
  std::size_t done = 0;
  while (done < length) {
    const ssize_t n = systemCalls().pread(fd, at + done, length - done, static_cast<off64_t>(offset + done));
    if (n < 0) {
      if (errno == EINTR) continue;
      throwErrno("pread");
    }
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  return done;
}

SystemCalls& systemCalls() {
  static SystemCalls calls{realCopyFileRange, realSeek, realPread, realPwrite, realClone, realStatfs};
  return calls;
}

std::uint64_t copyRange(int in, int out, std::uint64_t offset, std::uint64_t length) {
  std::uint64_t done = 0;
  bool useKernel = true;
  std::vector<char> buffer;
  while (done < length) {
    if (useKernel) {
      off64_t from = static_cast<off64_t>(offset + done);
      off64_t to = from;
      const std::size_t want = static_cast<std::size_t>(std::min<std::uint64_t>(length - done, 1U << 30));
      const ssize_t n = systemCalls().copyFileRange(in, &from, out, &to, want, 0);
      if (n > 0) {
        done += static_cast<std::uint64_t>(n);
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      // Zero before the end: some kernels and file systems stop without a word (golang/go#44272), so reading decides.
      // After an error too, were it EIO: reading and writing tell which of the two files has it. A full disk is one.
      if (n < 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) throwErrno("copy_file_range");
      useKernel = false;
      buffer.resize(1 << 20);
    }
    const std::size_t want = static_cast<std::size_t>(std::min<std::uint64_t>(length - done, buffer.size()));
    const std::size_t n = preadFull(in, buffer.data(), want, offset + done);
    if (n == 0) break;
    pwriteFull(out, buffer.data(), n, offset + done);
    done += n;
  }
  return done;
}

bool tellsHoles(int fd) {
  struct statfs fs {};
  if (systemCalls().statfs(fd, &fs) != 0) return false;
  const auto type = static_cast<std::uint32_t>(fs.f_type);
  return type == EXT4_SUPER_MAGIC || type == kXfsMagic || type == BTRFS_SUPER_MAGIC || type == TMPFS_MAGIC;
}

std::pair<std::uint64_t, std::uint64_t> nextData(int fd, std::uint64_t offset, std::uint64_t size) {
  if (offset >= size) return {size, size};
  if (!tellsHoles(fd)) return {offset, size};
  const off64_t begin = systemCalls().seek(fd, static_cast<off64_t>(offset), SEEK_DATA);
  if (begin < 0) return errno == ENXIO ? std::pair{size, size} : std::pair{offset, size};
  if (static_cast<std::uint64_t>(begin) >= size) return {size, size};
  const off64_t end = systemCalls().seek(fd, begin, SEEK_HOLE);
  if (end <= begin) return {static_cast<std::uint64_t>(begin), size};
  return {static_cast<std::uint64_t>(begin), std::min(static_cast<std::uint64_t>(end), size)};
}

bool cloneFile(int in, int out) { return systemCalls().clone(out, in) == 0; }

bool CacheWindow::resident(std::uint64_t offset) const {
  char byte;
  iovec piece{&byte, 1};
  return preadv2(fd_, &piece, 1, static_cast<off_t>(offset), RWF_NOWAIT) == 1;
}

void CacheWindow::advance(std::uint64_t offset) {
  if (offset < started_ + kWindow) return;
  if (!written_) {
    if (!keep_)
      (void)posix_fadvise(fd_, static_cast<off_t>(dropped_), static_cast<off_t>(offset - dropped_), POSIX_FADV_DONTNEED);
    dropped_ = started_ = offset;
    keep_ = resident(offset);
    return;
  }
  // Start this window, wait for the one before, then drop that: dirty pages cannot be dropped.
  (void)sync_file_range(fd_, static_cast<off64_t>(started_), static_cast<off64_t>(offset - started_), SYNC_FILE_RANGE_WRITE);
  if (started_ > dropped_) {
    (void)sync_file_range(fd_, static_cast<off64_t>(dropped_), static_cast<off64_t>(started_ - dropped_),
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    (void)posix_fadvise(fd_, static_cast<off_t>(dropped_), static_cast<off_t>(started_ - dropped_), POSIX_FADV_DONTNEED);
    dropped_ = started_;
  }
  started_ = offset;
}

void CacheWindow::end(std::uint64_t size) {
  if (size <= dropped_) return;
  if (written_)
    (void)sync_file_range(fd_, static_cast<off64_t>(dropped_), static_cast<off64_t>(size - dropped_),
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  if (!keep_) (void)posix_fadvise(fd_, static_cast<off_t>(dropped_), 0, POSIX_FADV_DONTNEED);
  dropped_ = started_ = size;
}

std::string slotName(std::uint64_t slot) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string name(16, '0');
  for (std::size_t i = 16; i-- > 0; slot >>= 4) name[i] = kHex[slot & 15];
  return name;
}

void syncFs(std::string_view path) {
  const std::string name(path);
  const Fd fd(open(name.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) throwErrno("open", path);
  if (syncfs(fd.get()) != 0) throwErrno("syncfs", path);
}

void syncFile(std::string_view path) {
  const std::string name(path);
  const Fd fd(open(name.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) {
    if (errno == ENOENT) return;
    throwErrno("open", path);
  }
  const bool directory = statFd(fd.get()).kind == Kind::kDirectory;
  if ((directory ? fsync(fd.get()) : fdatasync(fd.get())) != 0) throwErrno(directory ? "fsync" : "fdatasync", path);
}

namespace {

struct CloseDir {
  void operator()(DIR* directory) const { closedir(directory); }
};

// Takes away the name `name` in `directory` if it is no directory: 0 done, EISDIR for a directory, or what went wrong.
int removeName(int directory, const char* name) {
  if (unlinkat(directory, name, 0) == 0) return 0;
  if (errno != EPERM) return errno;
  // Either a directory (POSIX allows EPERM for it) or a file that must not be removed (immutable).
  return statAt(directory, name).kind == Kind::kDirectory ? EISDIR : EPERM;
}

// Removes what `top` (a readable directory) holds. At most kOpenLevels directories are open: one that lies deeper is
// moved up into `top` first, so neither the C stack nor the number of descriptors bounds the depth.
std::uint64_t emptyDirectory(Fd top, std::string_view shown) {
  constexpr std::size_t kOpenLevels = 64;
  struct Level {
    std::unique_ptr<DIR, CloseDir> directory;
    std::string name;  // in the level above
  };
  std::uint64_t removed = 0;
  std::uint64_t moves = 0;
  bool moved = false;  // into `top` since it was read from its start
  std::vector<Level> levels;
  const auto push = [&](Fd fd, std::string name) {
    DIR* directory = fdopendir(fd.get());
    if (directory == nullptr) throwErrno("fdopendir", shown);
    fd.release();
    levels.push_back({std::unique_ptr<DIR, CloseDir>(directory), std::move(name)});
  };
  push(std::move(top), "");
  while (!levels.empty()) {
    DIR* directory = levels.back().directory.get();
    errno = 0;
    const dirent* entry = readdir(directory);
    if (entry == nullptr) {
      if (errno != 0) throwErrno("readdir", shown);
      if (levels.size() == 1 && moved) {
        moved = false;
        rewinddir(directory);
        continue;
      }
      const std::string name = std::move(levels.back().name);
      levels.pop_back();
      if (!levels.empty()) {
        if (unlinkat(dirfd(levels.back().directory.get()), name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT)
          throwErrno("rmdir", shown);
        ++removed;
      }
      continue;
    }
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    const int err = removeName(dirfd(directory), name.c_str());
    if (err == 0) ++removed;
    if (err == 0 || err == ENOENT) continue;
    if (err != EISDIR) throw errnoError(err, "unlinkat", shown);
    if (levels.size() >= kOpenLevels) {
      const int above = dirfd(levels.front().directory.get());
      const std::string place = ".simple-volume-removed-" + std::to_string(++moves);
      if (renameat2(dirfd(directory), name.c_str(), above, place.c_str(), RENAME_NOREPLACE) == 0)
        moved = true;
      else if (errno == EEXIST)
        rewinddir(directory);  // the name is taken: see this directory again, with the next number
      else if (errno != ENOENT)
        throwErrno("renameat2", shown);
      continue;
    }
    // What is mounted here belongs to somebody else: EXDEV.
    Fd below = tryOpenBeneath(dirfd(directory), name, O_RDONLY | O_DIRECTORY, 0, true);
    if (!below.valid()) throwErrno("openat2", shown);
    push(std::move(below), name);
  }
  return removed;
}

}  // namespace

std::uint64_t removeTree(int root, std::string_view path) {
  if (path.empty()) throw errnoError(EINVAL, "removeTree", path);
  const auto [parent, name] = tryOpenParent(root, path);
  if (!parent.valid()) {
    if (errno == ENOENT || errno == ENOTDIR) return 0;
    throwErrno("openat2", path);
  }
  const int err = removeName(parent.get(), name.c_str());
  if (err == 0) return 1;
  if (err == ENOENT) return 0;
  if (err != EISDIR) throw errnoError(err, "unlinkat", path);
  Fd directory = openBeneath(parent.get(), name, O_RDONLY | O_DIRECTORY, 0, true);
  const std::uint64_t below = emptyDirectory(std::move(directory), path);
  if (unlinkat(parent.get(), name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) throwErrno("rmdir", path);
  return below + 1;
}

std::optional<std::uint64_t> copyContents(int in, int out, std::uint64_t size, std::string_view shown) {
  if (cloneFile(in, out)) return std::nullopt;
  std::uint64_t copied = 0;
  CacheWindow window(out, true);
  for (std::uint64_t at = 0; at < size;) {
    const auto [begin, end] = nextData(in, at, size);
    for (at = begin; at < end;) {
      const std::uint64_t n = copyRange(in, out, at, std::min<std::uint64_t>(end - at, 4 << 20));
      if (n == 0) throw errnoError(EIO, "copy_file_range", shown);  // shorter than a moment ago
      at += n;
      copied += n;
      if (size > kWindowBytes) window.advance(at);
    }
  }
  if (ftruncate(out, static_cast<off_t>(size)) != 0) throwErrno("ftruncate", shown);
  return copied;
}

const char* const kCrossingName = ".simple-volume-crossing-7d1f6ac09b5e4e23";

namespace {

// The copy under the name of ours.
void copyBeside(int fromDirectory, const std::string& from, const Stat& stat, int toDirectory, std::string_view shown) {
  Record record;
  stat.describe(record);
  record.path = std::string(shown);
  std::string packed;
  if (stat.kind == Kind::kSymlink) {
    record.target = readLinkAt(fromDirectory, from.c_str());
    RecordWriter(packed).append(record);
    if (symlinkat(record.target.c_str(), toDirectory, kCrossingName) != 0) throwErrno("symlinkat", shown);
    setLinkMeta(toDirectory, kCrossingName, RecordView::parse(packed));
    return;
  }
  const Fd in = openBeneath(fromDirectory, from, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  const Fd out(openat(toDirectory, kCrossingName, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!out.valid()) throwErrno("openat", shown);
  // The rename must not reach the disk before the data.
  if (copyContents(in.get(), out.get(), stat.size, shown) && fdatasync(out.get()) != 0) throwErrno("fdatasync", shown);
  record.xattrs = readXattrs(in.get());
  RecordWriter(packed).append(record);
  // What the file system does not take of this one, it did not take of the first either.
  (void)setMeta(out.get(), RecordView::parse(packed));
}

}  // namespace

void copyAcross(int fromDirectory, const std::string& from, int toDirectory, const std::string& to, std::string_view shown) {
  const Stat stat = statAt(fromDirectory, from.c_str());
  if (!stat.present()) throw errnoError(ENOENT, "renameat", shown);
  if (stat.kind != Kind::kFile && stat.kind != Kind::kSymlink) return;
  // Of a crash in the middle of this.
  if (unlinkat(toDirectory, kCrossingName, 0) != 0 && errno != ENOENT) throwErrno("unlinkat", shown);
  try {
    copyBeside(fromDirectory, from, stat, toDirectory, shown);
    if (renameat(toDirectory, kCrossingName, toDirectory, to.c_str()) != 0) throwErrno("renameat", shown);
  } catch (...) {
    (void)unlinkat(toDirectory, kCrossingName, 0);
    throw;
  }
}

bool renameOrCopy(int fromDirectory, const std::string& from, int toDirectory, const std::string& to,
                  std::string_view shown) {
  if (renameat(fromDirectory, from.c_str(), toDirectory, to.c_str()) == 0) return true;
  if (errno != EXDEV) throwErrno("renameat", shown);
  // Something is mounted on the way: that is somebody else's.
  if (statFd(fromDirectory).mountId != statFd(toDirectory).mountId) throw errnoError(EXDEV, "renameat", shown);
  copyAcross(fromDirectory, from, toDirectory, to, shown);
  return false;
}

void makeParents(int root, std::string_view path) {
  for (std::size_t slash = path.find('/'); slash != std::string_view::npos; slash = path.find('/', slash + 1)) {
    const auto [parent, name] = openParent(root, path.substr(0, slash));
    if (mkdirat(parent.get(), name.c_str(), 0700) != 0 && errno != EEXIST) throwErrno("mkdirat", path.substr(0, slash));
  }
}

Probe probe(std::string_view directory) {
  const std::string path(directory);
  const Fd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) throwErrno("open", directory);
  Probe out;
  struct statfs s {};
  if (fstatfs(fd.get(), &s) != 0) throwErrno("fstatfs", directory);
  switch (static_cast<std::uint32_t>(s.f_type)) {
    case EXT4_SUPER_MAGIC: out.type = "ext4"; break;
    case kXfsMagic: out.type = "xfs"; break;
    case BTRFS_SUPER_MAGIC: out.type = "btrfs"; break;
    case TMPFS_MAGIC: out.type = "tmpfs"; break;
    case OVERLAYFS_SUPER_MAGIC: out.type = "overlayfs"; break;
    case 0x2fc12fc1: out.type = "zfs"; break;
    default: {
      out.type = "0x";
      static constexpr char kHex[] = "0123456789abcdef";
      for (int shift = 28; shift >= 0; shift -= 4) out.type += kHex[(static_cast<std::uint32_t>(s.f_type) >> shift) & 15];
    }
  }
  out.dev = statFd(fd.get()).dev;
  const Fd a(openat(fd.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  const Fd b(openat(fd.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (a.valid() && b.valid()) {
    // Something to clone; a full disk does not change what the file system can do.
    const std::array<char, 4096> block{};
    (void)!pwrite(a.get(), block.data(), block.size(), 0);
    out.reflink = cloneFile(a.get(), b.get());
    out.xattrs = fsetxattr(a.get(), "user.simple-volume-probe", "1", 1, 0) == 0;
  }
  return out;
}

double bootMs() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

std::int64_t realtimeNs() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * kNanos + now.tv_nsec;
}

}  // namespace sv
