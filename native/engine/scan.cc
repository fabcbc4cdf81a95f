#include "engine/scan.h"

#include <dirent.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace sv {
namespace {

// Directories kept open on the way down; a deeper walk opens the upper ones again on the way back.
constexpr std::size_t kOpenLevels = 48;
constexpr std::size_t kReadBytes = 64 * 1024;

std::string joined(std::string_view directory, std::string_view name) {
  std::string path;
  path.reserve(directory.size() + 1 + name.size());
  path = directory;
  if (!path.empty()) path.push_back('/');
  path += name;
  return path;
}

bool gone(int err) { return err == ENOENT || err == ENOTDIR || err == ELOOP; }

// memcmp order of `a` and `b` + '/'.
bool nameBeforeBelow(std::string_view a, std::string_view b) {
  const std::size_t common = std::min(a.size(), b.size());
  const int order = std::memcmp(a.data(), b.data(), common);
  if (order != 0) return order < 0;
  if (a.size() <= b.size()) return true;
  return static_cast<unsigned char>(a[b.size()]) < static_cast<unsigned char>('/');
}

// memcmp order of `a` + '/' and `b` + '/'.
bool belowBeforeBelow(std::string_view a, std::string_view b) {
  const std::size_t common = std::min(a.size(), b.size());
  const int order = std::memcmp(a.data(), b.data(), common);
  if (order != 0) return order < 0;
  if (a.size() == b.size()) return false;
  const auto slash = static_cast<unsigned char>('/');
  return a.size() < b.size() ? slash < static_cast<unsigned char>(b[a.size()])
                             : static_cast<unsigned char>(a[b.size()]) < slash;
}

}  // namespace

Listing readListing(int directory, bool directoriesOnly) {
  // linux_dirent64 of getdents64(2): u64 inode, i64 offset, u16 length, u8 type, name.
  constexpr std::size_t kLengthAt = 16;
  constexpr std::size_t kTypeAt = 18;
  constexpr std::size_t kNameAt = 19;
  Listing out;
  const std::unique_ptr<char[]> buffer(new char[kReadBytes]);
  for (;;) {
    const long got = syscall(SYS_getdents64, directory, buffer.get(), kReadBytes);
    if (got < 0) {
      if (errno == EINTR) continue;
      throwErrno("getdents64");
    }
    if (got == 0) return out;
    for (long at = 0; at < got;) {
      const char* const entry = buffer.get() + at;
      std::uint16_t length;
      std::memcpy(&length, entry + kLengthAt, sizeof length);
      const auto type = static_cast<std::uint8_t>(entry[kTypeAt]);
      const char* const name = entry + kNameAt;
      const std::size_t nameLength = strnlen(name, length - kNameAt);
      at += length;
      if (nameLength == 0 || nameLength > 255) continue;
      if (name[0] == '.' && (nameLength == 1 || (nameLength == 2 && name[1] == '.'))) continue;
      if (directoriesOnly && type != DT_DIR && type != DT_UNKNOWN) continue;
      out.entries.push_back({static_cast<std::uint32_t>(out.names.size()), static_cast<std::uint8_t>(nameLength), type});
      out.names.append(name, nameLength + 1);
    }
  }
}

Scanner::Scanner(std::string_view root, std::string_view directory, std::shared_ptr<const Filter> filter, bool deep)
    : root_(openRoot(root)), directory_(directory), filter_(std::move(filter)), deep_(deep) {
  mount_ = statFd(root_.get()).mountId;
}

void Scanner::append(std::string& out, std::string_view path, const Stat& stat) const {
  Record record;
  stat.describe(record);
  record.path = path;
  RecordWriter(out).append(record);
}

void Scanner::appendUnreadable(std::string& out, std::string_view path, int err) const {
  Record record;
  record.kind = Kind::kUnreadable;
  record.uid = static_cast<std::uint32_t>(err);
  record.path = path;
  RecordWriter(out).append(record);
}

std::unique_ptr<Scanner::Level> Scanner::open(Fd fd, std::string path, Filter::Cursor cursor, int& failure) {
  auto level = std::make_unique<Level>();
  try {
    level->listing = readListing(fd.get(), false);
    level->ino = statFd(fd.get()).ino;
  } catch (const Error& error) {
    failure = error.err != 0 ? error.err : EIO;
    return nullptr;
  }
  level->fd = std::move(fd);
  level->path = std::move(path);
  level->cursor = std::move(cursor);
  const Listing& listing = level->listing;
  level->byName.resize(listing.entries.size());
  for (std::uint32_t i = 0; i < listing.entries.size(); ++i) {
    level->byName[i] = i;
    const std::uint8_t type = listing.entries[i].type;
    if (deep_ && (type == DT_DIR || type == DT_UNKNOWN)) level->byBelow.push_back(i);
  }
  std::sort(level->byName.begin(), level->byName.end(), [&](std::uint32_t a, std::uint32_t b) {
    return listing.name(listing.entries[a]) < listing.name(listing.entries[b]);
  });
  std::sort(level->byBelow.begin(), level->byBelow.end(), [&](std::uint32_t a, std::uint32_t b) {
    return belowBeforeBelow(listing.name(listing.entries[a]), listing.name(listing.entries[b]));
  });
  return level;
}

bool Scanner::start(std::string& out) {
  started_ = true;
  const Verdict verdict = filter_->match(directory_, true);
  Stat stat;
  try {
    stat = statBeneath(root_.get(), directory_);
  } catch (const Error& error) {
    if (verdict != Verdict::kNone) appendUnreadable(out, directory_, error.err);
    return false;
  }
  if (!stat.present()) return false;
  if (stat.kind != Kind::kDirectory) {
    if (filter_->match(directory_, false) != Verdict::kNone) append(out, directory_, stat);
    return false;
  }
  if (verdict == Verdict::kNone) return false;
  if (stat.mountId != mount_) {
    appendUnreadable(out, directory_, EXDEV);
    return false;
  }
  Filter::Cursor cursor;
  if (!filter_->reaches(directory_, &cursor)) {
    append(out, directory_, stat);
    return false;
  }
  Fd fd = tryOpenBeneath(root_.get(), directory_, O_RDONLY | O_DIRECTORY, 0, true);
  int failure = fd.valid() ? 0 : errno;
  std::unique_ptr<Level> level;
  if (fd.valid()) level = open(std::move(fd), directory_, std::move(cursor), failure);
  if (level == nullptr) {
    if (!gone(failure)) appendUnreadable(out, directory_, failure);
    return false;
  }
  append(out, directory_, stat);
  levels_.push_back(std::move(level));
  return true;
}

int Scanner::levelFd(std::size_t index) {
  Level& level = *levels_[index];
  if (!level.fd.valid()) {
    level.fd = openBeneath(root_.get(), level.path, O_RDONLY | O_DIRECTORY, 0, true);
    if (statFd(level.fd.get()).ino != level.ino) throw errnoError(ESTALE, "openat2", level.path);
  }
  return level.fd.get();
}

// One child of the level: its record, and for a directory its names, read ahead.
void Scanner::report(Level& level, Listing::Entry& entry, std::string& out) {
  const std::string_view name = level.listing.name(entry);
  const char* const text = level.listing.text(entry);
  if (entry.type != DT_UNKNOWN &&
      filter_->step(level.cursor, name, entry.type == DT_DIR, nullptr) == Verdict::kNone) {
    return;
  }
  std::string path = joined(level.path, name);
  if (path.size() > kMaxPathBytes) {
    appendUnreadable(out, path, ENAMETOOLONG);
    return;
  }
  const int parent = level.fd.get();
  Stat stat;
  try {
    stat = statAt(parent, text);
  } catch (const Error& error) {
    appendUnreadable(out, path, error.err);
    return;
  }
  if (!stat.present()) return;
  const bool directory = stat.kind == Kind::kDirectory;
  Filter::Cursor below;
  if (filter_->step(level.cursor, name, directory, directory ? &below : nullptr) == Verdict::kNone) return;
  if (stat.mountId != mount_) {
    appendUnreadable(out, path, EXDEV);
    return;
  }
  if (!directory || !deep_ || !below.reaches) {
    append(out, path, stat);
    return;
  }
  Fd fd = tryOpenBeneath(parent, name, O_RDONLY | O_DIRECTORY, 0, true);
  int failure = fd.valid() ? 0 : errno;
  std::unique_ptr<Level> ahead;
  if (fd.valid()) ahead = open(std::move(fd), path, std::move(below), failure);
  if (ahead == nullptr) {
    if (!gone(failure)) appendUnreadable(out, path, failure);
    return;
  }
  append(out, path, stat);
  entry.directory = true;
  ahead_ = std::move(ahead);
  aheadOf_ = &entry;
}

bool Scanner::next(std::size_t maxBytes, std::string& out) {
  const std::size_t before = out.size();
  const auto full = [&] { return out.size() - before >= maxBytes; };
  if (!started_ && !start(out)) return out.size() > before;
  while (!levels_.empty() && !full()) {
    if (cancelled_.load(std::memory_order_relaxed)) throw Error("CANCELLED", "CANCELLED: the scan was closed");
    Level& level = *levels_.back();
    (void)levelFd(levels_.size() - 1);
    auto& entries = level.listing.entries;
    const bool names = level.atName < level.byName.size();
    const bool belows = level.atBelow < level.byBelow.size();
    if (!names && !belows) {
      levels_.pop_back();
      continue;
    }
    if (names && (!belows || nameBeforeBelow(level.listing.name(entries[level.byName[level.atName]]),
                                             level.listing.name(entries[level.byBelow[level.atBelow]])))) {
      ahead_.reset();
      aheadOf_ = nullptr;
      report(level, entries[level.byName[level.atName++]], out);
      continue;
    }
    const Listing::Entry& entry = entries[level.byBelow[level.atBelow++]];
    if (!entry.directory) continue;
    if (aheadOf_ == &entry) {
      levels_.push_back(std::move(ahead_));
      aheadOf_ = nullptr;
    } else {
      // Its name was reported some siblings ago (`a`, `a-b`, `a/x` is the order of paths).
      const std::string_view name = level.listing.name(entry);
      std::string path = joined(level.path, name);
      Filter::Cursor below;
      (void)filter_->step(level.cursor, name, true, &below);
      Fd fd = tryOpenBeneath(level.fd.get(), name, O_RDONLY | O_DIRECTORY, 0, true);
      int failure = fd.valid() ? 0 : errno;
      std::unique_ptr<Level> next;
      if (fd.valid()) next = open(std::move(fd), path, std::move(below), failure);
      if (next == nullptr) {
        if (gone(failure)) continue;
        throw errnoError(failure, "getdents64", path);
      }
      levels_.push_back(std::move(next));
    }
    if (levels_.size() > kOpenLevels) levels_[levels_.size() - 1 - kOpenLevels]->fd.reset();
  }
  return out.size() > before || !levels_.empty();
}

std::string statPaths(std::string_view root, std::string_view paths) {
  const Fd top = openRoot(root);
  const std::uint64_t mount = statFd(top.get()).mountId;
  std::string out;
  for (ByteReader in(paths); !in.empty();) {
    Record record;
    record.path = in.sized();
    try {
      Stat stat = statBeneath(top.get(), record.path);
      if (stat.kind == Kind::kFile || stat.kind == Kind::kDirectory) {
        // What is opened is described: the name may already stand for something else.
        const Fd fd = tryOpenBeneath(top.get(), record.path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
        if (fd.valid()) {
          stat = statFd(fd.get());
          if (stat.kind == Kind::kFile || stat.kind == Kind::kDirectory) record.xattrs = readXattrs(fd.get());
        } else if (gone(errno)) {
          stat = {};
        }
      } else if (stat.kind == Kind::kSymlink) {
        const auto [parent, name] = openParent(top.get(), record.path);
        record.target = readLinkAt(parent.get(), name.c_str());
        stat.size = record.target.size();
      }
      if (stat.present() && stat.mountId != mount) throw errnoError(EXDEV, "statx", record.path);
      stat.describe(record);
    } catch (const Error& error) {
      std::string path = std::move(record.path);
      record = {};
      record.path = std::move(path);
      const bool missing = gone(error.err) || error.err == EINVAL;  // EINVAL: no symbolic link any more
      record.kind = missing ? Kind::kAbsent : Kind::kUnreadable;
      if (!missing) record.uid = static_cast<std::uint32_t>(error.err);
    }
    RecordWriter(out).append(record);
  }
  return out;
}

}  // namespace sv
