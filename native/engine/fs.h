// File system access by descriptors. Every path is relative to an opened root and cannot leave it: openat2 with
// RESOLVE_BENEATH and no symbolic links, whatever somebody swaps in between (Linux 5.6, openat2(2)).
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <sys/vfs.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "engine/record.h"

namespace sv {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

// What statx(2) says, in the terms of a record.
struct Stat {
  Kind kind = Kind::kAbsent;
  std::uint16_t mode = 0;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::uint64_t size = 0;
  std::int64_t mtimeNs = 0;
  std::int64_t ctimeNs = 0;
  std::uint64_t ino = 0;
  std::uint64_t dev = 0;
  std::uint64_t nlink = 0;
  std::uint64_t blocks = 0;   // of 512 bytes
  std::uint64_t mountId = 0;  // 0 where the kernel does not tell (before 5.8)

  bool present() const { return kind != Kind::kAbsent; }
  // Same inode, size and times: nothing was done to the file in between.
  bool sameAs(const Stat& other) const {
    return ino == other.ino && dev == other.dev && size == other.size && mtimeNs == other.mtimeNs &&
           ctimeNs == other.ctimeNs;
  }
  // Copies type, mode, owner, size, times, inode and hard-link group. A directory's size is 0.
  void describe(Record& record) const;
};

// The directory at an absolute path. Throws with the errno of open(2).
Fd openRoot(std::string_view directory);

// Opens `path` (relative, '' = the root itself) beneath `root`. Follows no symbolic link, crosses no mount when
// `sameMount`. -1 is never returned: throws.
Fd openBeneath(int root, std::string_view path, int flags, mode_t mode = 0, bool sameMount = false);
// The same, invalid Fd and errno set instead of an exception.
Fd tryOpenBeneath(int root, std::string_view path, int flags, mode_t mode = 0, bool sameMount = false) noexcept;

// The directory that holds `path`, and the last component. '' gives the root itself and an empty name.
std::pair<Fd, std::string> openParent(int root, std::string_view path);
std::pair<Fd, std::string> tryOpenParent(int root, std::string_view path) noexcept;

// Nothing there (ENOENT, or a parent that is no directory): kind absent. Other errors throw.
Stat statAt(int directory, const char* name);
Stat statBeneath(int root, std::string_view path);
Stat statFd(int fd);

// Link text of a symbolic link.
std::string readLinkAt(int directory, const char* name);

// user.*, system.posix_acl_access and system.posix_acl_default of an opened file or directory, or of `name` in
// `directory` when the file cannot be opened; packed as in a record. Empty where the file system has none.
std::string readXattrs(int fd);
// Makes the carried attributes exactly `packed`. Returns the errno of the first that could not be set, 0 if none.
int writeXattrs(int fd, std::string_view packed);

// Mode (with setuid, setgid, sticky), owner, attributes and mtime of an opened file or directory, in the order that
// keeps all of them: chown clears setuid, chmod rewrites the ACL mask, all touch the ctime.
// Returns the errno of attributes that could not be set, EPERM for a setgid bit that the kernel dropped (reported, not
// fatal); all else throws.
int setMeta(int fd, const RecordView& record);
// Owner and mtime of a symbolic link.
void setLinkMeta(int directory, const char* name, const RecordView& record);

void writeFull(int fd, const void* data, std::size_t length);
void pwriteFull(int fd, const void* data, std::size_t length, std::uint64_t offset);
// Reads until `length` or the end of the file; the number of bytes read.
std::size_t preadFull(int fd, void* data, std::size_t length, std::uint64_t offset);

// The calls that a test replaces to make faults that a healthy disk does not have. Never changed in production.
struct SystemCalls {
  ssize_t (*copyFileRange)(int in, off64_t* inAt, int out, off64_t* outAt, std::size_t length, unsigned flags);
  off64_t (*seek)(int fd, off64_t offset, int whence);
  ssize_t (*pread)(int fd, void* data, std::size_t length, off64_t offset);
  ssize_t (*pwrite)(int fd, const void* data, std::size_t length, off64_t offset);
  int (*clone)(int out, int in);  // FICLONE
  int (*statfs)(int fd, struct statfs* out);
};
SystemCalls& systemCalls();

// Copies [offset, offset + length) from `in` to the same place of `out`: copy_file_range, and read and write where
// that does not work or stops early without a reason. Short only at the end of `in`. Returns the bytes copied.
std::uint64_t copyRange(int in, int out, std::uint64_t offset, std::uint64_t length);

// Whether the file system is one whose holes are true. ZFS has called data that was not yet written a hole
// (openzfs/zfs#15526); what is unknown is not believed either.
bool tellsHoles(int fd);

// The next stretch of data at or after `offset` and before `size`: {begin, end}; begin == size when there is none.
// All data where tellsHoles() is false.
std::pair<std::uint64_t, std::uint64_t> nextData(int fd, std::uint64_t offset, std::uint64_t size);

// Whole-file clone; false where the file system cannot.
bool cloneFile(int in, int out);

// Keeps the page cache of long reads and writes small: call after each piece; `end()` at the end. What was cached
// before we read it is the application's and stays.
class CacheWindow {
 public:
  CacheWindow(int fd, bool written) : fd_(fd), written_(written), keep_(!written && resident(0)) {}
  void advance(std::uint64_t offset);
  void end(std::uint64_t size);

 private:
  static constexpr std::uint64_t kWindow = 8 * 1024 * 1024;
  bool resident(std::uint64_t offset) const;
  int fd_;
  bool written_;
  bool keep_;
  std::uint64_t started_ = 0;  // up to here write-back was started
  std::uint64_t dropped_ = 0;
};
// From this size on a file is read and written through a CacheWindow.
inline constexpr std::uint64_t kWindowBytes = 4 * 1024 * 1024;

// Makes `out`, an empty file, what `in` is, of which `size` bytes count: a clone, else a copy that keeps the holes and
// leaves little in the page cache. Not durable. Returns the bytes copied, nothing when it was cloned.
std::optional<std::uint64_t> copyContents(int in, int out, std::uint64_t size, std::string_view shown);
// From this size on the pages of a file that was copied whole are dropped once they are on the disk: few calls for most
// of the memory.
inline constexpr std::uint64_t kDropBytes = 64 * 1024;

// Name of a slot: 16 hexadecimal digits.
std::string slotName(std::uint64_t slot);

void syncFs(std::string_view path);
// fdatasync of a file or fsync of a directory; a missing file is no error.
void syncFile(std::string_view path);

// Removes what is at `path` beneath `root` and everything below it, following nothing, at any depth. Returns how many
// entries. A file that must not be removed (EPERM) or something mounted in there (EXDEV, EBUSY) ends it with an error.
std::uint64_t removeTree(int root, std::string_view path);

// Gives a file or symbolic link a second name where no link can reach: a copy, as a clone where that works, with mode,
// owner, attributes and mtime. It is whole and, if it is no clone, durable before it takes the name `to`, at once and
// over whatever file is there, by a rename of a name of ours beside it. Of anything else nothing is copied.
void copyAcross(int fromDirectory, const std::string& from, int toDirectory, const std::string& to, std::string_view shown);
// rename(2), and where two directories are of one disk and nothing can be renamed between them (EXDEV: btrfs
// subvolumes, XFS and ext4 projects) copyAcross(). The old name stays then, and false is returned. Never into or out of
// a mount.
bool renameOrCopy(int fromDirectory, const std::string& from, int toDirectory, const std::string& to, std::string_view shown);
// The name of ours: a crash can leave it, and the next call in that directory begins by removing it.
extern const char* const kCrossingName;

// Makes the directories above `path` beneath `root` where they are missing (mode 0700).
void makeParents(int root, std::string_view path);

struct Probe {
  std::string type;
  bool reflink = false;
  bool xattrs = false;
  std::uint64_t dev = 0;
};
Probe probe(std::string_view directory);

// CLOCK_BOOTTIME, milliseconds.
double bootMs();
std::int64_t realtimeNs();

}  // namespace sv
