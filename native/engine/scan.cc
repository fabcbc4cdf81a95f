#include "engine/scan.h"

#include <dirent.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace sv {

namespace {

struct Dirent64 {
  std::uint64_t ino;
  std::int64_t offset;
  std::uint16_t length;
  std::uint8_t type;
  char name[1];
};

}  // namespace

Scanner::Scanner(std::string_view root, std::string_view directory, std::shared_ptr<const Filter> filter, bool deep)
    : root_(openRoot(root)), start_(directory), filter_(std::move(filter)), deep_(deep) {
  const Stat stat = statFd(root_.get());
  mountId_ = stat.mountId;
  dev_ = stat.dev;
}

std::string Scanner::below(const std::string& parent, std::string_view name) const {
  std::string path;
  path.reserve(parent.size() + name.size() + 1);
  if (!parent.empty()) path.append(parent).push_back('/');
  path.append(name);
  return path;
}

void Scanner::describe(RecordWriter& out, const Stat& stat, std::string_view path) const {
  Record record;
  stat.describe(record);
  record.path = path;
  out.append(record);
}

void Scanner::unreadable(RecordWriter& out, std::string_view path, int err) {
  Record record;
  record.kind = Kind::kUnreadable;
  record.uid = static_cast<std::uint32_t>(err);
  record.path = path;
  out.append(record);
}

// Reads the names of a directory and puts it on the stack. Gone in between: nothing below, no error.
void Scanner::enter(std::string path, Filter::Cursor cursor) {
  Fd fd = tryOpenBeneath(root_.get(), path, O_RDONLY | O_DIRECTORY | O_NOATIME);
  if (!fd.valid() && errno == EPERM) fd = tryOpenBeneath(root_.get(), path, O_RDONLY | O_DIRECTORY);
  if (!fd.valid()) return;
  Level level{std::move(path), std::move(cursor), {}};
  std::vector<char> buffer(64 * 1024);
  for (;;) {
    const long n = syscall(SYS_getdents64, fd.get(), buffer.data(), buffer.size());
    if (n < 0) {
      if (errno == ENOENT) break;
      throwErrno("getdents64", level.path);
    }
    if (n == 0) break;
    for (long at = 0; at < n;) {
      const auto* entry = reinterpret_cast<const Dirent64*>(buffer.data() + at);
      at += entry->length;
      const std::string_view name = entry->name;
      if (name == "." || name == "..") continue;
      bool directory = entry->type == DT_DIR;
      if (entry->type == DT_UNKNOWN) directory = statAt(fd.get(), entry->name).kind == Kind::kDirectory;
      Filter::Cursor child;
      const Verdict verdict = filter_->step(level.cursor, name, directory, directory ? &child : nullptr);
      if (verdict == Verdict::kNone) continue;
      level.items.push_back({std::string(name), directory});
      if (directory && deep_ && child.reaches) level.items.push_back({std::string(name) + '/', true});
    }
  }
  std::sort(level.items.begin(), level.items.end(), [](const Item& a, const Item& b) {
    return std::string_view(b.name) < std::string_view(a.name);
  });
  levels_.push_back(std::move(level));
  directory_ = std::move(fd);
  directoryLevel_ = levels_.size();
}

bool Scanner::next(std::size_t maxBytes, std::string& out) {
  const std::size_t limit = out.size() + maxBytes;
  RecordWriter writer(out);
  if (!started_) {
    started_ = true;
    const Stat stat = statBeneath(root_.get(), start_);
    if (!stat.present()) return false;
    if (filter_->match(start_, stat.kind == Kind::kDirectory) == Verdict::kNone && !start_.empty()) return false;
    Filter::Cursor cursor;
    if (stat.kind == Kind::kDirectory && filter_->reaches(start_, &cursor)) {
      const Fd fd = tryOpenBeneath(root_.get(), start_, O_RDONLY | O_DIRECTORY);
      if (!fd.valid()) {
        unreadable(writer, start_, errno);
        return true;
      }
      describe(writer, stat, start_);
      enter(start_, std::move(cursor));
    } else {
      describe(writer, stat, start_);
    }
  }
  while (!levels_.empty() && out.size() < limit) {
    Level& level = levels_.back();
    if (level.items.empty()) {
      levels_.pop_back();
      continue;
    }
    const Item item = std::move(level.items.back());
    level.items.pop_back();
    if (item.name.back() == '/') {
      const std::string_view name = std::string_view(item.name).substr(0, item.name.size() - 1);
      std::string path = below(level.path, name);
      const Stat stat = statBeneath(root_.get(), path);
      if (stat.kind != Kind::kDirectory || (mountId_ != 0 ? stat.mountId != mountId_ : stat.dev != dev_)) continue;
      Filter::Cursor child;
      (void)filter_->step(level.cursor, name, true, &child);
      enter(std::move(path), std::move(child));
      continue;
    }
    if (directoryLevel_ != levels_.size()) {
      directory_ = tryOpenBeneath(root_.get(), level.path, O_PATH | O_DIRECTORY);
      directoryLevel_ = directory_.valid() ? levels_.size() : 0;
      if (!directory_.valid()) {
        level.items.clear();
        continue;
      }
    }
    const std::string path = below(level.path, item.name);
    const Stat stat = statAt(directory_.get(), item.name.c_str());
    if (!stat.present()) continue;
    if (mountId_ != 0 ? stat.mountId != mountId_ : (stat.kind == Kind::kDirectory && stat.dev != dev_)) {
      unreadable(writer, path, EXDEV);
      continue;
    }
    if (stat.kind == Kind::kDirectory) {
      // Whether it can be read is said in its place, not when its contents come.
      const Fd fd(openat(directory_.get(), item.name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!fd.valid() && errno != ENOENT && errno != ENOTDIR && errno != ELOOP) {
        unreadable(writer, path, errno);
        continue;
      }
    }
    describe(writer, stat, path);
  }
  return !levels_.empty() || out.size() + maxBytes > limit;
}

std::string statPaths(std::string_view root, std::string_view paths) {
  const Fd top = openRoot(root);
  std::string out;
  RecordWriter writer(out);
  for (ByteReader in(paths); !in.empty();) {
    const std::string_view path = in.sized();
    Record record;
    record.path = path;
    try {
      const Stat stat = statBeneath(top.get(), path);
      stat.describe(record);
      if (stat.kind == Kind::kSymlink) {
        const auto [parent, name] = openParent(top.get(), path);
        record.target = readLinkAt(parent.get(), name.c_str());
        record.size = record.target.size();
      } else if (stat.kind == Kind::kFile || stat.kind == Kind::kDirectory) {
        const Fd fd = openBeneath(top.get(), path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
        record.xattrs = readXattrs(fd.get());
      }
    } catch (const Error& error) {
      record = Record();
      record.path = path;
      // Removed or replaced between two calls: it is gone now. Else it is there and we can't read it.
      if (error.err != ENOENT && error.err != ENOTDIR && error.err != ELOOP && error.err != EINVAL) {
        record.kind = Kind::kUnreadable;
        record.uid = static_cast<std::uint32_t>(error.err);
      }
    }
    writer.append(record);
  }
  return out;
}

}  // namespace sv
