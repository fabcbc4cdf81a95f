#include "engine/size.h"

#include <linux/btrfs.h>
#include <linux/btrfs_tree.h>
#include <linux/dqblk_xfs.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/quota.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "engine/error.h"
#include "engine/fs.h"

namespace sv {

namespace {

constexpr std::uint32_t kXfsMagic = 0x58465342;  // "XFSB"
#ifndef SYS_quotactl_fd
constexpr long SYS_quotactl_fd = 443;
#endif
constexpr std::uint64_t kSimpleMode = 1ULL << 3;  // BTRFS_QGROUP_STATUS_FLAG_SIMPLE_MODE, Linux 6.7

int realIoctl(int fd, unsigned long request, void* argument) { return ioctl(fd, request, argument); }
long realQuotactl(int fd, unsigned command, std::uint32_t id, void* argument) {
  return syscall(SYS_quotactl_fd, fd, command, id, argument);
}
int realStatfs(int fd, struct statfs* out) { return fstatfs(fd, out); }

std::uint32_t fileSystem(int fd) {
  struct statfs s {};
  return sizeCalls().statfs(fd, &s) == 0 ? static_cast<std::uint32_t>(s.f_type) : 0;
}

bool hasProjects(std::uint32_t type) { return type == kXfsMagic || type == EXT4_SUPER_MAGIC; }

bool isSubvolume(int fd) { return statFd(fd).ino == BTRFS_FIRST_FREE_OBJECTID; }

Fd openDirectory(std::string_view path) {
  const std::string name(path);
  Fd fd(open(name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) throwErrno("open", path);
  return fd;
}

// What failed, for a reason.
std::string failed(std::string_view what) {
  const int err = errno;
  const char* text = strerrordesc_np(err);
  return std::string(what) + ": " + errnoName(err) + (text != nullptr ? std::string(" (") + text + ")" : "");
}

SizeLimit refused(std::string reason) { return {false, std::move(reason), 0}; }

// ---- btrfs

// One item of the quota tree (CAP_SYS_ADMIN); nullopt with errno: ENOENT where quotas are off or it is not there.
template <typename Item>
std::optional<Item> quotaItem(int fd, std::uint32_t type, std::uint64_t offset) {
  btrfs_ioctl_search_args search{};
  search.key.tree_id = BTRFS_QUOTA_TREE_OBJECTID;
  search.key.min_type = search.key.max_type = type;
  search.key.min_offset = search.key.max_offset = offset;
  search.key.max_transid = UINT64_MAX;
  search.key.nr_items = 1;
  if (sizeCalls().ioctl(fd, BTRFS_IOC_TREE_SEARCH, &search) != 0) return std::nullopt;
  btrfs_ioctl_search_header header{};
  Item item{};
  std::memcpy(&header, search.buf, sizeof header);
  if (search.key.nr_items != 1 || header.len < sizeof item) {
    errno = ENOENT;
    return std::nullopt;
  }
  std::memcpy(&item, search.buf + sizeof header, sizeof item);
  return item;
}

SizeLimit limitSubvolume(int fd, std::uint64_t bytes) {
  if (!isSubvolume(fd))
    return refused(bytes == 0 ? "" : "the tree is a plain directory, btrfs counts subvolumes only: it was made before, or by hand");
  const auto status = [&] { return quotaItem<btrfs_qgroup_status_item>(fd, BTRFS_QGROUP_STATUS_KEY, 0); };
  auto now = status();
  if (!now && errno != ENOENT) return refused(failed("the state of btrfs quotas cannot be read"));
  if (!now || (now->flags & BTRFS_QGROUP_STATUS_FLAG_ON) == 0) {
    if (bytes == 0) return {};
    btrfs_ioctl_quota_ctl_args enable{};
    enable.cmd = BTRFS_QUOTA_CTL_ENABLE;
    if (sizeCalls().ioctl(fd, BTRFS_IOC_QUOTA_CTL, &enable) != 0) return refused(failed("btrfs quotas cannot be switched on"));
    now = status();
    if (!now) return refused(failed("the state of btrfs quotas cannot be read"));
  }
  if ((now->flags & kSimpleMode) != 0 && bytes != 0)
    return refused("btrfs has simple quotas here, which do not count what a copy shares with other trees; full ones would");
  // After a crash at a bad moment the numbers can be wrong; only counting anew mends that.
  if ((now->flags & BTRFS_QGROUP_STATUS_FLAG_INCONSISTENT) != 0 && (now->flags & BTRFS_QGROUP_STATUS_FLAG_RESCAN) == 0) {
    btrfs_ioctl_quota_rescan_args rescan{};
    (void)sizeCalls().ioctl(fd, BTRFS_IOC_QUOTA_RESCAN, &rescan);
  }
  btrfs_ioctl_ino_lookup_args lookup{};
  lookup.objectid = BTRFS_FIRST_FREE_OBJECTID;
  if (sizeCalls().ioctl(fd, BTRFS_IOC_INO_LOOKUP, &lookup) != 0) return refused(failed("the subvolume's number cannot be read"));

  const auto used = [&] {
    return quotaItem<btrfs_qgroup_info_item>(fd, BTRFS_QGROUP_INFO_KEY, lookup.treeid).value_or(btrfs_qgroup_info_item{}).rfer;
  };
  const auto set = quotaItem<btrfs_qgroup_limit_item>(fd, BTRFS_QGROUP_LIMIT_KEY, lookup.treeid);
  const bool limited = set && (set->flags & BTRFS_QGROUP_LIMIT_MAX_RFER) != 0;
  if (bytes == 0 && set && !limited) return {};
  if (bytes != 0 && limited && set->max_rfer == bytes) return {true, "", used()};

  // Asked on the directory above: a call on a tree that is over its limit is itself denied by it (EDQUOT).
  const Fd above(openat(fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!above.valid()) return refused(failed("the directory above the subvolume cannot be opened"));
  btrfs_ioctl_qgroup_limit_args limit{};
  limit.qgroupid = lookup.treeid;
  limit.lim.flags = BTRFS_QGROUP_LIMIT_MAX_RFER;
  limit.lim.max_rfer = bytes == 0 ? UINT64_MAX : bytes;  // all ones: no limit
  if (sizeCalls().ioctl(above.get(), BTRFS_IOC_QGROUP_LIMIT, &limit) != 0) {
    if (errno == ENOENT && bytes == 0) return {};
    // Made while quotas were being switched on: it has no group of its own yet.
    btrfs_ioctl_qgroup_create_args create{};
    create.create = 1;
    create.qgroupid = lookup.treeid;
    if (errno != ENOENT || sizeCalls().ioctl(above.get(), BTRFS_IOC_QGROUP_CREATE, &create) != 0 ||
        sizeCalls().ioctl(above.get(), BTRFS_IOC_QGROUP_LIMIT, &limit) != 0)
      return refused(failed("btrfs does not take the limit"));
  }
  if (bytes == 0) return {};
  return {true, "", used()};
}

// ---- XFS and ext4

// Project ids are of this half, away from the small ones that people and other programs count up from 1.
constexpr std::uint32_t kProjectBase = 0x40000000;
constexpr std::uint32_t kProjectMask = 0x3fffffff;

std::optional<struct fsxattr> attributes(int fd) {
  struct fsxattr x {};
  if (sizeCalls().ioctl(fd, FS_IOC_FSGETXATTR, &x) != 0) return std::nullopt;
  return x;
}

bool setProject(int fd, std::uint32_t id, bool inherit) {
  auto x = attributes(fd);
  if (!x) return false;
  const std::uint32_t flags = inherit ? x->fsx_xflags | FS_XFLAG_PROJINHERIT : x->fsx_xflags & ~std::uint32_t{FS_XFLAG_PROJINHERIT};
  if (x->fsx_projid == id && x->fsx_xflags == flags) return true;
  x->fsx_projid = id;
  x->fsx_xflags = flags;
  return sizeCalls().ioctl(fd, FS_IOC_FSSETXATTR, &*x) == 0;
}

// 0: none.
std::uint32_t projectOf(int fd) {
  const auto x = attributes(fd);
  return x && (x->fsx_xflags & FS_XFLAG_PROJINHERIT) != 0 ? x->fsx_projid : 0;
}

SizeLimit limitProject(int fd, std::uint64_t bytes, const std::vector<std::string>& others) {
  const std::uint32_t id = projectOf(fd);
  if (id == 0)
    return refused(bytes == 0 ? "" : "the tree has no project id: it was made before, by hand, or on a file system without project ids");
  struct fs_quota_statv state {};
  state.qs_version = FS_QSTATV_VERSION1;
  if (sizeCalls().quotactl(fd, QCMD(Q_XGETQSTATV, PRJQUOTA), 0, &state) != 0 ||
      (state.qs_flags & FS_QUOTA_PDQ_ENFD) == 0)
    return refused(bytes == 0 ? "" : "project quotas are off (mount option prjquota) or this kernel has none, from 5.14 on");
  if (bytes != 0) {
    const Stat mine = statFd(fd);
    for (const std::string& other : others) {
      const Fd there(open(other.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!there.valid()) continue;
      const Stat stat = statFd(there.get());
      if (stat.dev == mine.dev && stat.ino != mine.ino && projectOf(there.get()) == id)
        return refused("another tree has the same project id: " + printablePath(other));
    }
  }
  struct if_dqblk quota {};
  quota.dqb_valid = QIF_BLIMITS;
  quota.dqb_bhardlimit = (bytes + 1023) / 1024;  // QIF_DQBLKSIZE
  if (sizeCalls().quotactl(fd, QCMD(Q_SETQUOTA, PRJQUOTA), id, &quota) != 0) {
    if (bytes == 0 && errno == ENOENT) return {};
    return refused(failed("the file system does not take the limit"));
  }
  if (bytes == 0) return {};
  struct if_dqblk now {};
  const bool known = sizeCalls().quotactl(fd, QCMD(Q_GETQUOTA, PRJQUOTA), id, &now) == 0;
  return {true, "", known ? now.dqb_curspace : 0};
}

}  // namespace

SizeCalls& sizeCalls() {
  static SizeCalls calls{realIoctl, realQuotactl, realStatfs};
  return calls;
}

bool makeTree(std::string_view path, mode_t mode) {
  const std::string whole(path);
  const std::size_t slash = whole.rfind('/');
  const std::string above = slash == 0 || slash == std::string::npos ? "/" : whole.substr(0, slash);
  const std::string name = slash == std::string::npos ? whole : whole.substr(slash + 1);
  const Fd parent(open(above.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!parent.valid()) throwErrno("open", above);
  const std::uint32_t type = fileSystem(parent.get());
  const Kind there = statAt(parent.get(), name.c_str()).kind;
  if (there == Kind::kDirectory) return false;
  if (there != Kind::kAbsent) throw errnoError(EEXIST, "mkdirat", path);

  bool made = false;
  if (type == BTRFS_SUPER_MAGIC && name.size() <= 255) {
    btrfs_ioctl_vol_args create{};
    std::memcpy(create.name, name.data(), name.size());
    made = sizeCalls().ioctl(parent.get(), BTRFS_IOC_SUBVOL_CREATE, &create) == 0;
    if (!made && (errno == EEXIST || errno == ENOSPC || errno == EDQUOT || errno == EROFS || errno == EIO)) throwErrno("subvolume", path);
  }
  if (!made && mkdirat(parent.get(), name.c_str(), mode) != 0) throwErrno("mkdirat", path);
  const Fd tree = openBeneath(parent.get(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (made && fchmod(tree.get(), mode) != 0) throwErrno("fchmod", path);
  // The inode's number makes the id: no two directories of one disk have the same, and nothing has to be kept. Those of
  // more than 30 bits can meet; limitTree looks for that.
  if (hasProjects(type)) {
    const auto ino = static_cast<std::uint32_t>(statFd(tree.get()).ino & kProjectMask);
    (void)setProject(tree.get(), kProjectBase | ino, true);
  }
  return true;
}

void joinTree(std::string_view directory, std::string_view tree) {
  const Fd from = openDirectory(tree);
  if (!hasProjects(fileSystem(from.get()))) return;
  const std::uint32_t id = projectOf(from.get());
  const Fd to = openDirectory(directory);
  (void)setProject(to.get(), id, id != 0);
}

bool inProject(int fd) noexcept {
  try {
    return projectOf(fd) != 0;
  } catch (...) {
    return false;
  }
}

void leaveTree(int fd) noexcept {
  try {
    const auto x = attributes(fd);
    if (x && x->fsx_projid != 0) (void)setProject(fd, 0, false);
  } catch (...) {
  }
}

SizeLimit limitTree(std::string_view tree, std::uint64_t bytes, const std::vector<std::string>& others) {
  const Fd fd = openDirectory(tree);
  const std::uint32_t type = fileSystem(fd.get());
  if (type == BTRFS_SUPER_MAGIC) return limitSubvolume(fd.get(), bytes);
  if (hasProjects(type)) return limitProject(fd.get(), bytes, others);
  return refused(bytes == 0 ? "" : "the pool's file system has no quotas that can be used: btrfs, XFS and ext4 have");
}

}  // namespace sv
