// btrfs is tested for real on a loop device. Project quotas are scripted: not every kernel that the tests run on has
// them, and what matters is which calls are made with which numbers. What XFS does to renames needs no quotas: for real.
#include "engine/size.h"

#include <gtest/gtest.h>
#include <linux/dqblk_xfs.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/quota.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>

#include <map>
#include <optional>

#include "engine/fs.h"
#include "test/support.h"
#include "test/transfer_support.h"

namespace sv {
namespace {

using test::noise;
using test::Scratch;

constexpr std::uint64_t MiB = 1024 * 1024;

// A file system of its own, gone when it goes.
class Disk {
 public:
  Disk(const std::string& make, std::uint64_t mebibytes, const std::string& options = "") : at_(s_.dir("disk")) {
    const std::string image = s_.at("image");
    const std::string command = "PATH=$PATH:/usr/sbin:/sbin; truncate -s " + std::to_string(mebibytes) + "M " + image + " && " + make + ' ' +
                                image + " >/dev/null 2>&1 && mount -o loop" + options + ' ' + image + ' ' + at_ + " 2>/dev/null";
    mounted_ = test::isRoot() && system(command.c_str()) == 0;
  }
  ~Disk() {
    if (mounted_ && umount2(at_.c_str(), MNT_DETACH) != 0) ADD_FAILURE() << "still mounted: " << at_;
  }
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;
  bool mounted() const { return mounted_; }
  const std::string& path() const { return at_; }
  std::string at(const std::string& name) const { return at_ + '/' + name; }

 private:
  Scratch s_;
  std::string at_;
  bool mounted_ = false;
};

// errno of writing `bytes` to a new file and fsync, 0 if it went well.
int fill(const std::string& file, std::uint64_t bytes) {
  const Fd fd(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644));
  if (!fd.valid()) return errno;
  const std::string piece = noise(MiB, 7);
  for (std::uint64_t done = 0; done < bytes;) {
    const ssize_t n = write(fd.get(), piece.data(), piece.size());
    if (n < 0) return errno;
    done += static_cast<std::uint64_t>(n);
  }
  return fsync(fd.get()) == 0 ? 0 : errno;
}

#define BTRFS_OR_SKIP(disk)                                                                                 \
  const Disk disk("mkfs.btrfs -q", 400);                                                                    \
  if (!disk.mounted()) GTEST_SKIP() << "needs root, a loop device and btrfs-progs"

TEST(SizeOnBtrfs, FullIsAnErrorForThisTreeAlone) {
  BTRFS_OR_SKIP(disk);
  EXPECT_TRUE(makeTree(disk.at("one"), 0777));
  EXPECT_TRUE(makeTree(disk.at("two"), 0700));
  struct stat s {};
  EXPECT_EQ(stat(disk.at("one").c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 07777U, 0777U) << "whatever the umask is";
  const SizeLimit set = limitTree(disk.at("one"), 20 * MiB, {});
  EXPECT_TRUE(set.enforced) << set.reason;
  EXPECT_EQ(fill(disk.at("one/a"), 30 * MiB), EDQUOT);
  EXPECT_EQ(fill(disk.at("two/a"), 60 * MiB), 0);
  EXPECT_EQ(fill(disk.at("beside"), 30 * MiB), 0);
  // Larger: at once.
  EXPECT_TRUE(limitTree(disk.at("one"), 60 * MiB, {}).enforced);
  EXPECT_EQ(fill(disk.at("one/b"), 30 * MiB), 0);
  syncFs(disk.at("one"));
  EXPECT_GT(limitTree(disk.at("one"), 60 * MiB, {}).used, 30 * MiB);
  EXPECT_EQ(fill(disk.at("one/c"), 30 * MiB), EDQUOT);
  // None.
  EXPECT_FALSE(limitTree(disk.at("one"), 0, {}).enforced);
  EXPECT_EQ(fill(disk.at("one/c"), 30 * MiB), 0);
}

TEST(SizeOnBtrfs, ALimitBelowWhatIsThereKeepsTheDataAndTheWayOut) {
  BTRFS_OR_SKIP(disk);
  (void)makeTree(disk.at("one"), 0755);
  ASSERT_EQ(fill(disk.at("one/a"), 30 * MiB), 0);
  const std::string before = Scratch::readAbsolute(disk.at("one/a"));
  const SizeLimit set = limitTree(disk.at("one"), 10 * MiB, {});
  EXPECT_TRUE(set.enforced) << set.reason;
  // Quotas were off until now: btrfs counts what there is on its own time.
  int filled = 0;
  for (int i = 0; i < 100 && filled == 0; ++i) {
    filled = fill(disk.at("one/b"), MiB);
    if (filled == 0) usleep(100'000);
  }
  EXPECT_EQ(filled, EDQUOT);
  EXPECT_EQ(Scratch::readAbsolute(disk.at("one/a")), before);
  // Over its limit, and the limit can still be changed.
  syncFs(disk.at("one"));
  EXPECT_TRUE(limitTree(disk.at("one"), 200 * MiB, {}).enforced);
  EXPECT_EQ(fill(disk.at("one/b"), MiB), 0);
  EXPECT_TRUE(limitTree(disk.at("one"), 10 * MiB, {}).enforced);
  EXPECT_EQ(fill(disk.at("one/b"), MiB), EDQUOT);
  EXPECT_EQ(unlink(disk.at("one/a").c_str()), 0) << "what is full can be emptied";
  EXPECT_EQ(unlink(disk.at("one/b").c_str()), 0);
  syncFs(disk.at("one"));
  EXPECT_EQ(fill(disk.at("one/c"), 4 * MiB), 0);
}

TEST(SizeOnBtrfs, SaysWhyNot) {
  BTRFS_OR_SKIP(disk);
  std::filesystem::create_directory(disk.at("plain"));
  EXPECT_FALSE(makeTree(disk.at("plain"), 0755)) << "what is there stays as it is";
  const SizeLimit plain = limitTree(disk.at("plain"), MiB, {});
  EXPECT_FALSE(plain.enforced);
  EXPECT_NE(plain.reason.find("plain directory"), std::string::npos) << plain.reason;
  EXPECT_EQ(limitTree(disk.at("plain"), 0, {}).reason, "");
  (void)makeTree(disk.at("tree"), 0755);
  if (system(("PATH=$PATH:/usr/sbin:/sbin; mount -o remount,ro " + disk.path()).c_str()) == 0) {
    const SizeLimit closed = limitTree(disk.at("tree"), MiB, {});
    EXPECT_FALSE(closed.enforced);
    EXPECT_NE(closed.reason.find("EROFS"), std::string::npos) << closed.reason;
  }
}

TEST(SizeOnBtrfs, TreesAreMadeMovedAndRemovedWithoutPrivilege) {
  BTRFS_OR_SKIP(disk);
  std::filesystem::create_directory(disk.at("a"));
  std::filesystem::create_directory(disk.at("b"));
  ASSERT_EQ(chown(disk.at("a").c_str(), 1000, 1000), 0);
  ASSERT_EQ(chown(disk.at("b").c_str(), 1000, 1000), 0);
  ASSERT_EQ(chmod(disk.path().c_str(), 0755), 0);
  std::string way = disk.path();
  while ((way = std::filesystem::path(way).parent_path()).size() > 4) ASSERT_EQ(chmod(way.c_str(), 0755), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(1000) != 0 || setuid(1000) != 0) _exit(1);
    try {
      if (!makeTree(disk.at("a/tree"), 0755)) _exit(2);
      if (fill(disk.at("a/tree/f"), MiB) != 0) _exit(3);
      if (limitTree(disk.at("a/tree"), MiB, {}).enforced) _exit(4);
      if (rename(disk.at("a/tree").c_str(), disk.at("b/tree").c_str()) != 0) _exit(5);
      if (removeTree(openRoot(disk.at("b")).get(), "tree") != 2) _exit(6);
    } catch (...) {
      _exit(7);
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// All that holds for plans on one tree, crashes at every point included, holds where nothing can be renamed into it.
TEST(SizeOnBtrfs, PlansAreCarriedOutAcrossSubvolumes) {
  const Disk disk("mkfs.btrfs -q", 1024);
  if (!disk.mounted()) GTEST_SKIP() << "needs root, a loop device and btrfs-progs";
  const pid_t child = fork();
  if (child == 0) {
    setenv("SIMPLE_VOLUME_TEST_APART", disk.path().c_str(), 1);
    execl("/proc/self/exe", "engine_tests", "--gtest_filter=Apply.*:ApplyCrash.*", "--gtest_brief=1", "--gtest_output=", nullptr);
    _exit(99);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// ---- projects

struct fsxattr attributesOf(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct fsxattr x {};
  EXPECT_EQ(ioctl(fd.get(), FS_IOC_FSGETXATTR, &x), 0);
  return x;
}

TEST(SizeOnXfs, WhatIsMovedInIsOfTheTreeOrACopy) {
  const Disk disk("mkfs.xfs -q", 400);
  if (!disk.mounted()) GTEST_SKIP() << "needs root, a loop device and xfsprogs";
  EXPECT_TRUE(makeTree(disk.at("tree"), 0755));
  const std::uint32_t id = attributesOf(disk.at("tree")).fsx_projid;
  EXPECT_GE(id, 0x40000000U);
  EXPECT_NE(attributesOf(disk.at("tree")).fsx_xflags & FS_XFLAG_PROJINHERIT, 0U);
  std::filesystem::create_directory(disk.at("slots"));
  ASSERT_EQ(fill(disk.at("slots/before"), MiB), 0);
  joinTree(disk.at("slots"), disk.at("tree"));
  ASSERT_EQ(fill(disk.at("slots/after"), MiB), 0);
  ASSERT_EQ(setxattr(disk.at("slots/before").c_str(), "user.k", "v", 1, 0), 0);
  const Fd slots = openRoot(disk.at("slots"));
  const Fd tree = openRoot(disk.at("tree"));
  // The kernel renames nothing into a project from outside it.
  EXPECT_NE(renameat(slots.get(), "before", tree.get(), "a"), 0);
  EXPECT_EQ(errno, EXDEV);
  EXPECT_TRUE(renameOrCopy(slots.get(), "after", tree.get(), "b", "b"));
  EXPECT_FALSE(renameOrCopy(slots.get(), "before", tree.get(), "a", "a"));
  EXPECT_EQ(Scratch::readAbsolute(disk.at("tree/a")), Scratch::readAbsolute(disk.at("slots/before")));
  char value = 0;
  EXPECT_EQ(getxattr(disk.at("tree/a").c_str(), "user.k", &value, 1), 1);
  EXPECT_EQ(statAt(tree.get(), "a").mtimeNs, statAt(slots.get(), "before").mtimeNs);
  EXPECT_EQ(attributesOf(disk.at("tree/a")).fsx_projid, id);
  EXPECT_EQ(attributesOf(disk.at("tree/b")).fsx_projid, id);
  EXPECT_FALSE(statAt(tree.get(), kCrossingName).present());
  // What goes to the backups is not the volume's any more.
  const Fd a(open(disk.at("tree/a").c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(inProject(openBeneath(tree.get(), "", O_RDONLY | O_DIRECTORY).get()));
  leaveTree(a.get());
  EXPECT_EQ(attributesOf(disk.at("tree/a")).fsx_projid, 0U);
  // This disk was mounted without quotas, and is left as it is.
  const SizeLimit limit = limitTree(disk.at("tree"), MiB, {});
  EXPECT_FALSE(limit.enforced);
  EXPECT_NE(limit.reason.find("prjquota"), std::string::npos) << limit.reason;
}

// A file system with project quotas, as far as its system calls go.
struct Script {
  std::uint32_t type = XFS;
  std::uint16_t state = FS_QUOTA_PDQ_ACCT | FS_QUOTA_PDQ_ENFD;
  int setFails = 0;
  std::map<std::uint64_t, std::pair<std::uint32_t, std::uint32_t>> projects;  // inode -> id, flags
  std::map<std::uint32_t, std::uint64_t> hard;                                // id -> KiB
  std::vector<unsigned> commands;
  static constexpr std::uint32_t XFS = 0x58465342;
};
Script script;

class SizeOfProjects : public ::testing::Test {
 protected:
  SizeOfProjects() : before_(sizeCalls()) {
    script = {};
    sizeCalls().statfs = [](int, struct statfs* out) {
      out->f_type = static_cast<__fsword_t>(script.type);
      return 0;
    };
    sizeCalls().ioctl = [](int fd, unsigned long request, void* argument) {
      auto* x = static_cast<struct fsxattr*>(argument);
      auto& [id, flags] = script.projects[statFd(fd).ino];
      if (request == FS_IOC_FSGETXATTR) {
        x->fsx_projid = id;
        x->fsx_xflags = flags;
      } else if (request == FS_IOC_FSSETXATTR) {
        id = x->fsx_projid;
        flags = x->fsx_xflags;
      } else {
        errno = ENOTTY;
        return -1;
      }
      return 0;
    };
    sizeCalls().quotactl = [](int, unsigned command, std::uint32_t id, void* argument) -> long {
      script.commands.push_back(command);
      if (command == static_cast<unsigned>(QCMD(Q_XGETQSTATV, PRJQUOTA))) {
        auto* state = static_cast<struct fs_quota_statv*>(argument);
        if (state->qs_version != FS_QSTATV_VERSION1 || script.state == 0) {
          errno = script.state == 0 ? ENOSYS : EINVAL;
          return -1;
        }
        state->qs_flags = script.state;
        return 0;
      }
      auto* quota = static_cast<struct if_dqblk*>(argument);
      if (command == static_cast<unsigned>(QCMD(Q_SETQUOTA, PRJQUOTA))) {
        if (script.setFails != 0 || quota->dqb_valid != QIF_BLIMITS) {
          errno = script.setFails != 0 ? script.setFails : EINVAL;
          return -1;
        }
        script.hard[id] = quota->dqb_bhardlimit;
        return 0;
      }
      if (command == static_cast<unsigned>(QCMD(Q_GETQUOTA, PRJQUOTA))) {
        quota->dqb_curspace = 4096;
        return 0;
      }
      errno = EINVAL;
      return -1;
    };
  }
  ~SizeOfProjects() override { sizeCalls() = before_; }
  std::uint32_t projectOf(const std::string& name) { return script.projects[statFd(openRoot(s.at(name)).get()).ino].first; }

  Scratch s;

 private:
  SizeCalls before_;
};

TEST_F(SizeOfProjects, EachTreeHasItsOwnIdAndLimit) {
  for (const std::uint32_t type : {Script::XFS, static_cast<std::uint32_t>(EXT4_SUPER_MAGIC)}) {
    script.type = type;
    const std::string one = "one" + std::to_string(type);
    const std::string two = "two" + std::to_string(type);
    EXPECT_TRUE(makeTree(s.at(one), 0755));
    EXPECT_TRUE(makeTree(s.at(two), 0755));
    EXPECT_NE(projectOf(one), projectOf(two));
    const SizeLimit set = limitTree(s.at(one), 20 * MiB + 1, {s.at(one), s.at(two)});
    EXPECT_TRUE(set.enforced) << set.reason;
    EXPECT_EQ(set.used, 4096U);
    EXPECT_EQ(script.hard[projectOf(one)], 20 * 1024 + 1) << "KiB, never less than was asked for";
    EXPECT_EQ(script.hard.count(projectOf(two)), 0U);
    EXPECT_TRUE(limitTree(s.at(one), 40 * MiB, {}).enforced);
    EXPECT_EQ(script.hard[projectOf(one)], 40 * 1024U);
    EXPECT_FALSE(limitTree(s.at(one), 0, {}).enforced);
    EXPECT_EQ(script.hard[projectOf(one)], 0U) << "0 is no limit";
  }
}

TEST_F(SizeOfProjects, IdsThatMeetLimitNobody) {
  (void)makeTree(s.at("one"), 0755);
  (void)makeTree(s.at("two"), 0755);
  script.projects[statFd(openRoot(s.at("two")).get()).ino].first = projectOf("one");
  const SizeLimit set = limitTree(s.at("one"), MiB, {s.at("gone"), s.at("one"), s.at("two")});
  EXPECT_FALSE(set.enforced);
  EXPECT_NE(set.reason.find("same project id"), std::string::npos) << set.reason;
  EXPECT_TRUE(script.hard.empty());
}

TEST_F(SizeOfProjects, OnlyEnforcedQuotasCount) {
  (void)makeTree(s.at("one"), 0755);
  for (const int state : {0, static_cast<int>(FS_QUOTA_PDQ_ACCT), static_cast<int>(FS_QUOTA_UDQ_ENFD)}) {
    script.state = static_cast<std::uint16_t>(state);
    const SizeLimit set = limitTree(s.at("one"), MiB, {});
    EXPECT_FALSE(set.enforced);
    EXPECT_NE(set.reason.find("prjquota"), std::string::npos) << set.reason;
    EXPECT_EQ(limitTree(s.at("one"), 0, {}).reason, "") << "no limit is what there is";
  }
  for (const unsigned command : script.commands) EXPECT_EQ(command, static_cast<unsigned>(QCMD(Q_XGETQSTATV, PRJQUOTA)));
}

TEST_F(SizeOfProjects, WhatHindersIsTheReason) {
  (void)makeTree(s.at("one"), 0755);
  script.setFails = EPERM;
  EXPECT_NE(limitTree(s.at("one"), MiB, {}).reason.find("EPERM"), std::string::npos);
  s.dir("plain");
  EXPECT_NE(limitTree(s.at("plain"), MiB, {}).reason.find("no project id"), std::string::npos);
  script.type = TMPFS_MAGIC;
  EXPECT_NE(limitTree(s.at("one"), MiB, {}).reason.find("btrfs, XFS and ext4"), std::string::npos);
  EXPECT_THROW((void)limitTree(s.at("missing"), MiB, {}), Error);
}

TEST_F(SizeOfProjects, AFolderJoinsAndLeavesWithItsTree) {
  (void)makeTree(s.at("one"), 0755);
  s.dir("incoming");
  joinTree(s.at("incoming"), s.at("one"));
  EXPECT_EQ(projectOf("incoming"), projectOf("one"));
  s.dir("plain");
  joinTree(s.at("incoming"), s.at("plain"));
  EXPECT_EQ(projectOf("incoming"), 0U);
}

TEST_F(SizeOfProjects, ATreeIsMadeOnceAndOverNothing) {
  EXPECT_TRUE(makeTree(s.at("one"), 0700));
  EXPECT_FALSE(makeTree(s.at("one"), 0755));
  s.write("file", "x");
  EXPECT_THROW((void)makeTree(s.at("file"), 0755), Error);
  EXPECT_THROW((void)makeTree(s.at("no/parent"), 0755), Error);
}

}  // namespace
}  // namespace sv
