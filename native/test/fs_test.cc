#include "engine/fs.h"

#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/xattr.h>

#include "test/support.h"

namespace sv {
namespace {

using test::codeOf;
using test::Scratch;

TEST(OpenBeneath, F7_NeverLeavesTheRootAndFollowsNoLink) {
  const Scratch s;
  s.write("outside/secret", "x");
  s.dir("root/dir");
  ASSERT_EQ(symlink("../outside", s.at("root/link").c_str()), 0);
  ASSERT_EQ(symlink("/etc", s.at("root/absolute").c_str()), 0);
  const Fd root = openRoot(s.at("root"));
  for (const char* path : {"link/secret", "../outside/secret", "absolute/passwd", "dir/../../outside/secret", "/etc/passwd"})
    EXPECT_NE(codeOf([&] { (void)openBeneath(root.get(), path, O_RDONLY); }), "") << path;
  EXPECT_EQ(codeOf([&] { (void)openBeneath(root.get(), "dir", O_RDONLY | O_DIRECTORY); }), "");
  EXPECT_EQ(codeOf([&] { (void)openBeneath(root.get(), "", O_RDONLY | O_DIRECTORY); }), "");
}

TEST(Stat, TellsEveryKindAndAbsence) {
  const Scratch s;
  s.write("file", "hello");
  s.dir("dir");
  ASSERT_EQ(symlink("file", s.at("link").c_str()), 0);
  ASSERT_EQ(mkfifo(s.at("fifo").c_str(), 0600), 0);
  const Fd root = openRoot(s.path());
  EXPECT_EQ(statBeneath(root.get(), "file").kind, Kind::kFile);
  EXPECT_EQ(statBeneath(root.get(), "dir").kind, Kind::kDirectory);
  EXPECT_EQ(statBeneath(root.get(), "link").kind, Kind::kSymlink);
  EXPECT_EQ(statBeneath(root.get(), "fifo").kind, Kind::kSpecial);
  EXPECT_EQ(statBeneath(root.get(), "none").kind, Kind::kAbsent);
  EXPECT_EQ(statBeneath(root.get(), "file/below").kind, Kind::kAbsent);
  EXPECT_EQ(statBeneath(root.get(), std::string(300, 'n')).kind, Kind::kAbsent);
  EXPECT_EQ(statBeneath(root.get(), "").kind, Kind::kDirectory);
  EXPECT_EQ(codeOf([&] { (void)openRoot(s.at("none")); }), "ENOENT");
}

TEST(Meta, D17_OwnerModeAndTimesAreSetInAnOrderThatKeepsSetuid) {
  if (!test::isRoot()) GTEST_SKIP() << "needs root to change owners";
  const Scratch s;
  s.write("f", "x");
  Record r;
  r.kind = Kind::kFile;
  r.mode = 04755;
  r.uid = 1234;
  r.gid = 4321;
  r.mtimeNs = -123456789;
  const std::string bytes = test::packed(r);
  const Fd fd(open(s.at("f").c_str(), O_RDONLY));
  EXPECT_EQ(setMeta(fd.get(), RecordView::parse(bytes)), 0);
  const Stat stat = statFd(fd.get());
  EXPECT_EQ(stat.mode, 04755);
  EXPECT_EQ(stat.uid, 1234U);
  EXPECT_EQ(stat.gid, 4321U);
  EXPECT_EQ(stat.mtimeNs, -123456789);
}

TEST(Xattrs, D18_AreMadeExactlyTheGivenOnes) {
  const Scratch s;
  s.write("a", "x");
  s.write("b", "x");
  if (setxattr(s.at("a").c_str(), "user.one", "1", 1, 0) != 0) GTEST_SKIP() << "no user attributes here";
  ASSERT_EQ(setxattr(s.at("a").c_str(), "user.long", std::string(3000, 'v').c_str(), 3000, 0), 0);
  ASSERT_EQ(setxattr(s.at("b").c_str(), "user.extra", "2", 1, 0), 0);
  const Fd a(open(s.at("a").c_str(), O_RDONLY));
  const Fd b(open(s.at("b").c_str(), O_RDONLY));
  const std::string packed = readXattrs(a.get());
  EXPECT_EQ(writeXattrs(b.get(), packed), 0);
  EXPECT_EQ(readXattrs(b.get()), packed);
  std::string foreign;
  ByteWriter w(foreign);
  w.u16(16);
  w.u32(1);
  w.raw("security.selinuxx");
  EXPECT_EQ(codeOf([&] { (void)writeXattrs(b.get(), foreign); }), "FORMAT_INVALID");
}

class CopyRange : public ::testing::Test {
 protected:
  void SetUp() override { saved_ = systemCalls(); }
  void TearDown() override { systemCalls() = saved_; }
  std::uint64_t copy(const Scratch& s, std::uint64_t size) {
    const Fd in(open(s.at("in").c_str(), O_RDONLY));
    const Fd out(open(s.at("out").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
    return copyRange(in.get(), out.get(), 0, size);
  }
  SystemCalls saved_;
};

TEST_F(CopyRange, G13_ZeroBeforeTheEndIsNotTheEnd) {
  const Scratch s;
  const std::string data = test::noise(3'000'000, 1);
  s.write("in", data);
  systemCalls().copyFileRange = [](int, off64_t*, int, off64_t*, std::size_t, unsigned) -> ssize_t { return 0; };
  EXPECT_EQ(copy(s, data.size()), data.size());
  EXPECT_EQ(s.read("out"), data);
}

TEST_F(CopyRange, D11_ShortCopiesAreContinuedAndRefusalsReadInstead) {
  const Scratch s;
  const std::string data = test::noise(500'000, 2);
  s.write("in", data);
  systemCalls().copyFileRange = [](int in, off64_t* i, int out, off64_t* o, std::size_t n, unsigned f) -> ssize_t {
    return copy_file_range(in, i, out, o, std::min<std::size_t>(n, 1000), f);
  };
  EXPECT_EQ(copy(s, data.size()), data.size());
  EXPECT_EQ(s.read("out"), data);
  for (const int err : {ENOSYS, EOPNOTSUPP, EINVAL, EXDEV, EPERM}) {
    static int next;
    next = err;
    systemCalls().copyFileRange = [](int, off64_t*, int, off64_t*, std::size_t, unsigned) -> ssize_t {
      errno = next;
      return -1;
    };
    EXPECT_EQ(copy(s, data.size()), data.size()) << err;
    EXPECT_EQ(s.read("out"), data) << err;
  }
  systemCalls().copyFileRange = [](int, off64_t*, int, off64_t*, std::size_t, unsigned) -> ssize_t {
    errno = ENOSPC;
    return -1;
  };
  EXPECT_EQ(codeOf([&] { (void)copy(s, data.size()); }), "ENOSPC");
}

// The kernel's copy says EIO for either side; reading and writing say whose it is.
TEST_F(CopyRange, D11_AnErrorIsToldByTheSideThatHasIt) {
  const Scratch s;
  const std::string data = test::noise(3'000'000, 3);
  s.write("in", data);
  systemCalls().copyFileRange = [](int in, off64_t* i, int out, off64_t* o, std::size_t, unsigned f) -> ssize_t {
    if (*i < 1'000'000) return copy_file_range(in, i, out, o, 1'000'000, f);
    errno = EIO;
    return -1;
  };
  EXPECT_EQ(copy(s, data.size()), data.size());
  EXPECT_EQ(s.read("out"), data);
  systemCalls().pread = [](int, void*, std::size_t, off64_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  try {
    (void)copy(s, data.size());
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, "EIO");
    EXPECT_EQ(error.syscall, "pread");
  }
}

TEST_F(CopyRange, D11_OfAFileThatIsCutMeanwhileIsShort) {
  const Scratch s;
  s.write("in", test::noise(3'000'000, 4));
  static std::string path;
  path = s.at("in");
  systemCalls().copyFileRange = [](int in, off64_t* i, int out, off64_t* o, std::size_t, unsigned f) -> ssize_t {
    if (*i > 0 && truncate(path.c_str(), 1'500'000) != 0) abort();
    return copy_file_range(in, i, out, o, 1'000'000, f);
  };
  EXPECT_EQ(copy(s, 3'000'000), 1'500'000U);
}

TEST_F(CopyRange, TheEndOfTheSourceEndsTheCopy) {
  const Scratch s;
  s.write("in", "0123456789");
  EXPECT_EQ(copy(s, 100), 10U);
}

TEST_F(CopyRange, G14_HolesAreNotBelievedOnAnUnknownFileSystem) {
  const Scratch s;
  s.write("in", std::string(100'000, 'x'));
  systemCalls().seek = [](int, off64_t, int) -> off64_t {
    errno = ENXIO;
    return -1;
  };
  const Fd in(open(s.at("in").c_str(), O_RDONLY));
  systemCalls().statfs = [](int, struct statfs* out) {
    out->f_type = 0x2fc12fc1;
    return 0;
  };
  EXPECT_EQ(nextData(in.get(), 0, 100'000), (std::pair<std::uint64_t, std::uint64_t>{0, 100'000}));
}

TEST(RemoveTree, RemovesEverythingBelowAndNothingBehindALink) {
  const Scratch s;
  s.write("outside/keep", "x");
  s.write("root/a/b/c/f", "x");
  s.write("root/a/g", "x");
  ASSERT_EQ(symlink("../../outside", s.at("root/a/link").c_str()), 0);
  const Fd root = openRoot(s.at("root"));
  EXPECT_EQ(removeTree(root.get(), "a"), 6U);
  EXPECT_FALSE(s.has("root/a"));
  EXPECT_TRUE(s.has("outside/keep"));
  EXPECT_EQ(removeTree(root.get(), "a"), 0U);
  EXPECT_EQ(removeTree(root.get(), "a/b"), 0U);
  EXPECT_EQ(codeOf([&] { (void)removeTree(root.get(), ""); }), "EINVAL");
}

TEST(RemoveTree, GoesDeeperThanThereAreDescriptors) {
  const Scratch s;
  constexpr int kDepth = 700;
  {
    Fd at(open(s.dir("root/a").c_str(), O_RDONLY | O_DIRECTORY));
    for (int i = 0; i < kDepth; ++i) {
      ASSERT_EQ(mkdirat(at.get(), "d", 0755), 0);
      const Fd file(openat(at.get(), "f", O_WRONLY | O_CREAT, 0644));
      at = Fd(openat(at.get(), "d", O_RDONLY | O_DIRECTORY));
      ASSERT_TRUE(at.valid());
    }
  }
  // A name as it is made for what is moved up must not be in the way.
  s.dir("root/a/.simple-volume-removed-1/x");
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  const rlimit few{150, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const Fd root = openRoot(s.at("root"));
  std::uint64_t removed = 0;
  EXPECT_EQ(codeOf([&] { removed = removeTree(root.get(), "a"); }), "");
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_EQ(removed, 1U + 2 * kDepth + 2);
  EXPECT_FALSE(s.has("root/a"));
}

TEST(RemoveTree, AnImmutableFileIsReportedAsWhatItIs) {
  const Scratch s;
  const Fd file(open(s.write("root/a/f", "x").c_str(), O_RDONLY));
  int flags = FS_IMMUTABLE_FL;
  if (ioctl(file.get(), FS_IOC_SETFLAGS, &flags) != 0) GTEST_SKIP() << "needs root and a file system with file flags";
  const Fd root = openRoot(s.at("root"));
  EXPECT_EQ(codeOf([&] { (void)removeTree(root.get(), "a"); }), "EPERM");
  EXPECT_EQ(codeOf([&] { (void)removeTree(root.get(), "a/f"); }), "EPERM");
  flags = 0;
  ASSERT_EQ(ioctl(file.get(), FS_IOC_SETFLAGS, &flags), 0);
  EXPECT_EQ(removeTree(root.get(), "a"), 2U);
}

TEST(RemoveTree, WhatIsMountedInsideIsNotEmptied) {
  const Scratch s;
  s.dir("root/a/b/mounted");
  if (mount("none", s.at("root/a/b/mounted").c_str(), "tmpfs", 0, "size=64k") != 0) GTEST_SKIP() << "needs root to mount";
  s.write("root/a/b/mounted/keep", "x");
  const Fd root = openRoot(s.at("root"));
  EXPECT_EQ(codeOf([&] { (void)removeTree(root.get(), "a"); }), "EXDEV");
  EXPECT_TRUE(s.has("root/a/b/mounted/keep"));
  ASSERT_EQ(umount(s.at("root/a/b/mounted").c_str()), 0);
}

TEST(Meta, F6_OfALinkIsItsOwnAndNotThatOfItsTarget) {
  if (!test::isRoot()) GTEST_SKIP() << "needs root to change owners";
  const Scratch s;
  s.write("key", "secret");
  ASSERT_EQ(chmod(s.at("key").c_str(), 0600), 0);
  ASSERT_EQ(symlink("key", s.at("link").c_str()), 0);
  const Fd root = openRoot(s.path());
  const Stat before = statBeneath(root.get(), "key");
  Record r;
  r.kind = Kind::kSymlink;
  r.mode = 0777;
  r.uid = 12345;
  r.gid = 12345;
  r.mtimeNs = 1'000'000'007;
  const std::string bytes = test::packed(r);
  setLinkMeta(root.get(), "link", RecordView::parse(bytes));
  const Stat link = statBeneath(root.get(), "link");
  EXPECT_EQ(link.uid, 12345U);
  EXPECT_EQ(link.mtimeNs, 1'000'000'007);
  const Stat key = statBeneath(root.get(), "key");
  EXPECT_TRUE(key.sameAs(before));
  EXPECT_EQ(key.mode, 0600);
  EXPECT_EQ(key.uid, before.uid);
}

TEST(MakeParents, MakesWhatIsMissingAndNothingBehindALink) {
  const Scratch s;
  s.dir("outside");
  s.dir("root");
  ASSERT_EQ(symlink("../outside", s.at("root/link").c_str()), 0);
  const Fd root = openRoot(s.at("root"));
  makeParents(root.get(), "a/b/c/file");
  makeParents(root.get(), "a/b/c/other");
  makeParents(root.get(), "file");
  EXPECT_EQ(statBeneath(root.get(), "a/b/c").mode, 0700);
  EXPECT_FALSE(s.has("root/a/b/c/file"));
  EXPECT_NE(codeOf([&] { makeParents(root.get(), "link/b/file"); }), "");
  EXPECT_FALSE(s.has("outside/b"));
}

TEST(Helpers, SlotNamesProbeClocksAndSync) {
  EXPECT_EQ(slotName(0x1234abcd), "000000001234abcd");
  const Scratch s;
  s.write("f", "x");
  EXPECT_FALSE(probe(s.path()).type.empty());
  EXPECT_EQ(codeOf([&] { (void)probe(s.at("none")); }), "ENOENT");
  EXPECT_GT(bootMs(), 0);
  syncFile(s.at("f"));
  syncFile(s.path());
  syncFile(s.at("none"));
  syncFs(s.path());
  EXPECT_EQ(codeOf([&] { syncFs(s.at("none")); }), "ENOENT");
}

}  // namespace
}  // namespace sv
