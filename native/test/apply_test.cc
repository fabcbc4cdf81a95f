#include "engine/apply.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <sstream>

#include "engine/unpack.h"
#include "test/transfer_support.h"

namespace sv {
namespace {

using test::absent;
using test::codeOf;
using test::describe;
using test::fileRecord;
using test::noise;
using test::Op;
using test::operation;
using test::Scratch;
using test::snapshot;

constexpr std::int64_t kTime = 1'700'000'000'987'654'321;

Record directory(const std::string& path, std::uint16_t mode = 0755, std::int64_t mtime = kTime) {
  Record r;
  r.kind = Kind::kDirectory;
  r.path = path;
  r.mode = mode;
  r.mtimeNs = mtime;
  return r;
}
Record link(const std::string& path, const std::string& target) {
  Record r;
  r.kind = Kind::kSymlink;
  r.path = path;
  r.mode = 0777;
  r.target = target;
  r.size = target.size();
  r.mtimeNs = kTime;
  return r;
}

struct Applied {
  std::uint8_t status;
  std::string path;
  std::uint64_t size;
  std::int64_t mtimeNs;
  std::uint64_t ino;
  std::int64_t ctimeNs;
};

class Apply : public ::testing::Test {
 protected:
  Apply() {
    root = s.dir("tree");
    slots = s.dir("slots");
  }
  ApplyOptions options(int phase) const {
    return {root, slots, s.has("retired") ? s.at("retired") : "", s.at("ops"), phase == 2 ? s.at("out") : "", phase};
  }
  // Both phases of a plan.
  ApplyResult run(const std::string& plan) {
    s.write("ops", plan);
    (void)apply(options(1));
    return apply(options(2));
  }
  // The plan again, as after a crash at its end; nothing may change.
  void redo() {
    const std::string before = unfinished(snapshot(root));
    (void)apply(options(2));
    EXPECT_EQ(unfinished(snapshot(root)), before);
  }
  // Where files are copied in, a redo does it again. That touches directories whose times these plans do not set.
  static std::string unfinished(const std::string& snapshot) {
    if (test::apart() == nullptr) return snapshot;
    std::istringstream lines(snapshot);
    std::string out;
    for (std::string line; std::getline(lines, line);) {
      const std::size_t time = line.rfind(" mtime ");
      if (line.find(" kind 2 ") != std::string::npos && time != std::string::npos)
        line.erase(time, line.find(' ', time + 7) - time);
      out += line + "\n";
    }
    return out;
  }
  // Slots that were renamed are gone; those that had to be copied are the caller's until all is on the disk.
  void slotsAreUsedUp() const {
    if (test::apart() == nullptr) {
      EXPECT_EQ(s.count("slots"), 0U);
    }
  }
  std::string slot(std::uint64_t n, std::string_view content) {
    s.write("slots/" + slotName(n), content);
    EXPECT_EQ(chmod(s.at("slots/" + slotName(n)).c_str(), 0600), 0);
    return slotName(n);
  }
  std::string put(const std::string& path, std::uint64_t n, std::string_view content, bool keepOld = false) {
    slot(n, content);
    return operation(Op::kPut, fileRecord(path, content), n, {}, keepOld);
  }
  std::string patchSlot(std::uint64_t n, const std::vector<std::pair<std::uint64_t, std::string>>& runs, std::uint64_t zerosAt = 0,
                        std::uint32_t zeros = 0) {
    test::PackText text;
    for (const auto& [offset, bytes] : runs) text.data(0, offset, bytes);
    if (zeros != 0) text.zeros(0, zerosAt, zeros);
    return slot(n, text.end());
  }
  std::vector<Applied> out() const {
    std::vector<Applied> list;
    const std::string bytes = s.read("out");
    for (ByteReader all(bytes); !all.empty();) {
      ByteReader in = all.item();
      Applied a;
      a.status = in.u8();
      in.skip(3);
      const std::uint32_t length = in.u32();
      a.size = in.u64();
      a.mtimeNs = in.i64();
      a.ino = in.u64();
      a.ctimeNs = in.i64();
      a.path = in.bytes(length);
      EXPECT_TRUE(in.empty());
      list.push_back(std::move(a));
    }
    return list;
  }
  std::string read(const std::string& path) const { return s.read("tree/" + path); }

  Scratch s;
  std::string root;
  std::string slots;
};

TEST_F(Apply, MakesATreeOfEveryKindWithAllItsMetadata) {
  Record file = fileRecord("d/f", "content");
  file.mode = 04755;  // D17
  file.uid = 1000;
  file.gid = 2000;
  ByteWriter x(file.xattrs);
  x.u16(9);
  x.u32(3);
  x.raw("user.nameabc");
  Record top = directory("", 01777, kTime + 5);
  Record d = directory("d", 02770, kTime + 7);  // E3: setgid
  d.gid = 2000;
  Record l = link("d/l", "nowhere");
  l.uid = 1000;
  slot(1, "content");
  slot(2, "");
  const auto result = run(operation(Op::kMkdir, d) + operation(Op::kMkdir, directory("empty")) + operation(Op::kPut, file, 1) +
                          operation(Op::kPut, fileRecord("zero", ""), 2) + operation(Op::kSymlink, l) +
                          operation(Op::kLink, fileRecord("hard", "content"), 0, "d/f") + operation(Op::kMeta, d) +
                          operation(Op::kMeta, directory("empty", 0711)) + operation(Op::kMeta, top));
  EXPECT_EQ(result.operations, 9U);
  EXPECT_EQ(result.xattrsFailed, 0U);
  Record now = describe(root, "d/f");
  EXPECT_EQ(now.mode, 04755);
  EXPECT_EQ(now.uid, 1000U);
  EXPECT_EQ(now.gid, 2000U);
  EXPECT_EQ(now.mtimeNs, file.mtimeNs);  // D19: to the nanosecond
  EXPECT_EQ(now.xattrs, file.xattrs);
  EXPECT_EQ(now.hash, file.hash);
  now = describe(root, "d");
  EXPECT_EQ(now.mode, 02770);
  EXPECT_EQ(now.gid, 2000U);
  EXPECT_EQ(now.mtimeNs, kTime + 7);
  now = describe(root, "");
  EXPECT_EQ(now.mode, 01777);
  EXPECT_EQ(now.mtimeNs, kTime + 5);
  now = describe(root, "d/l");
  EXPECT_EQ(now.target, "nowhere");
  EXPECT_EQ(now.uid, 1000U);
  EXPECT_EQ(now.mtimeNs, kTime);
  EXPECT_EQ(describe(root, "hard").ino, describe(root, "d/f").ino);
  EXPECT_EQ(describe(root, "zero").size, 0U);  // D20
  EXPECT_EQ(describe(root, "empty").mode, 0711);
  slotsAreUsedUp();
  redo();
}

TEST_F(Apply, OutFileTellsTheIdentitiesAfterEverything) {
  slot(1, "content");
  run(operation(Op::kMkdir, directory("d")) + put("d/f", 1, "content") + operation(Op::kMeta, directory("d")));
  const auto list = out();
  ASSERT_EQ(list.size(), 3U);
  for (const Applied& a : list) {
    const Record now = describe(root, a.path);
    EXPECT_EQ(a.status, 0);
    EXPECT_EQ(a.size, now.size);
    EXPECT_EQ(a.mtimeNs, now.mtimeNs);
    EXPECT_EQ(a.ino, now.ino);
    EXPECT_EQ(a.ctimeNs, now.ctimeNs);
  }
  EXPECT_EQ(list[1].path, "d/f");
}

// C4: a path changes its type, every way round; and the plan can be repeated.
TEST_F(Apply, C4TypeChanges) {
  const std::vector<std::string> kinds{"file", "directory", "symlink"};
  for (const std::string& from : kinds) {
    for (const std::string& to : kinds) {
      SCOPED_TRACE(from + " -> " + to);
      std::filesystem::remove_all(root);
      s.dir("tree");
      std::string plan;
      if (from == "file") s.write("tree/x", "old");
      if (from == "symlink") std::filesystem::create_symlink("old", s.at("tree/x"));
      if (from == "directory") {
        s.write("tree/x/below/f", "old");
        if (to != "directory")
          plan += operation(Op::kRemove, absent("x/below/f")) + operation(Op::kRmdir, absent("x/below")) + operation(Op::kRmdir, absent("x"));
      } else if (to == "directory") {
        plan += operation(Op::kRemove, absent("x"));
      }
      if (to == "file") plan += put("x", 1, "new");
      if (to == "symlink") plan += operation(Op::kSymlink, link("x", "new"));
      if (to == "directory") plan += operation(Op::kMkdir, directory("x")) + put("x/f", 2, "new") + operation(Op::kMeta, directory("x"));
      EXPECT_NO_THROW(run(plan));
      if (to == "file") {
        EXPECT_EQ(read("x"), "new");
      }
      if (to == "symlink") {
        EXPECT_EQ(describe(root, "x").target, "new");
      }
      if (to == "directory") {
        EXPECT_EQ(read("x/f"), "new");
      }
      redo();
    }
  }
}

TEST_F(Apply, FilesSwapNamesThroughSlots) {
  s.write("tree/a", "A");
  s.write("tree/b", "B");
  const std::uint64_t inodeOfA = describe(root, "a").ino;
  run(operation(Op::kTake, fileRecord("a", "A"), 1) + operation(Op::kTake, fileRecord("b", "B"), 2) +
      operation(Op::kPut, fileRecord("a", "B"), 2) + operation(Op::kPut, fileRecord("b", "A"), 1));
  EXPECT_EQ(read("a"), "B");
  EXPECT_EQ(read("b"), "A");
  if (test::apart() == nullptr) {
    EXPECT_EQ(describe(root, "b").ino, inodeOfA);  // moved, not copied
  }
  redo();
}

TEST_F(Apply, TakesNothingUnlessEverythingCanBeTaken) {
  s.write("tree/a", "A");
  s.write("ops", operation(Op::kTake, fileRecord("a", "A"), 1) + operation(Op::kTake, fileRecord("gone", "G"), 2));
  EXPECT_EQ(codeOf([&] { (void)apply(options(1)); }), "ENOENT");
  EXPECT_EQ(read("a"), "A");
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Apply, D12HardLinksAreMadeJoinedAndSplit) {
  s.write("tree/a", "one");
  s.write("tree/b", "two");
  run(operation(Op::kLink, fileRecord("b", "one"), 0, "a") + operation(Op::kLink, fileRecord("c", "one"), 0, "a"));
  EXPECT_EQ(describe(root, "b").ino, describe(root, "a").ino);
  EXPECT_EQ(describe(root, "c").ino, describe(root, "a").ino);
  redo();
  run(put("b", 1, "split"));
  EXPECT_EQ(read("a"), "one");
  EXPECT_EQ(read("b"), "split");
  EXPECT_EQ(read("c"), "one");
}

TEST_F(Apply, MovedFileMeetsItsOwnHardLink) {
  s.write("tree/a", "one");
  std::filesystem::create_hard_link(s.at("tree/a"), s.at("tree/b"));
  // rename(2) does nothing between two names of one file; the slot must not be left behind.
  run(operation(Op::kTake, fileRecord("a", "one"), 1) + operation(Op::kPut, fileRecord("b", "one"), 1));
  EXPECT_FALSE(s.has("tree/a"));
  EXPECT_EQ(read("b"), "one");
  slotsAreUsedUp();
}

TEST_F(Apply, A30DirectoryKeepsExcludedContentAndSaysSo) {
  s.write("tree/save/world", "x");
  s.write("tree/save/cache/precious", "keep me");
  const auto result = run(operation(Op::kRemove, absent("save/world")) + operation(Op::kRmdir, absent("save")));
  EXPECT_EQ(result.notEmpty, 1U);
  EXPECT_FALSE(s.has("tree/save/world"));
  EXPECT_EQ(read("save/cache/precious"), "keep me");
  const auto list = out();
  ASSERT_EQ(list.size(), 1U);
  EXPECT_EQ(list[0].status, 1);
  EXPECT_EQ(list[0].path, "save");
  redo();
}

TEST_F(Apply, PreservedContentWhereAFileMustGoStopsThePlanBeforeItBegins) {
  s.write("tree/save/world", "x");
  s.write("tree/save/cache/precious", "keep me");
  s.write("tree/other", "x");
  const std::string before = snapshot(root);
  const std::string plan = operation(Op::kRemove, absent("other")) + operation(Op::kRemove, absent("save/world")) +
                           operation(Op::kRmdir, absent("save"));
  for (const std::string& last : {put("save", 1, "now a file"), operation(Op::kSymlink, link("save", "x")),
                                  operation(Op::kLink, fileRecord("save", "x"), 0, "other")}) {
    s.write("ops", plan + last);
    try {
      (void)apply(options(2));
      FAIL() << "must not be done";
    } catch (const Error& error) {
      EXPECT_EQ(error.code, "ENOTEMPTY");
      EXPECT_EQ(error.path, "save/cache");
    }
    EXPECT_EQ(snapshot(root), before);
  }
  s.write("ops", put("save", 1, "now a file"));  // nobody planned to remove it
  EXPECT_EQ(codeOf([&] { (void)apply(options(2)); }), "EISDIR");
  s.write("ops", operation(Op::kRemove, absent("save/world")) + operation(Op::kMkdir, directory("other")));
  EXPECT_EQ(codeOf([&] { (void)apply(options(2)); }), "EEXIST");
  EXPECT_EQ(snapshot(root), before);
}

// F7, D14: where the replica has a symbolic link that the source has replaced by a directory.
TEST_F(Apply, F7StaleLinkLetsNothingOut) {
  s.write("outside/f", "theirs");
  s.write("outside/sub/g", "theirs");
  std::filesystem::create_symlink(s.at("outside"), s.at("tree/evil"));
  const std::string before = snapshot(s.at("outside"));
  const std::string here = snapshot(root);
  Record meta = fileRecord("evil/f", "theirs");
  meta.mode = 0777;
  meta.uid = 12345;
  patchSlot(7, {{0, "X"}});
  for (const std::string& plan :
       {put("evil/f", 1, "ours"), operation(Op::kMkdir, directory("evil/new")), operation(Op::kSymlink, link("evil/f", "x")),
        operation(Op::kPatch, meta, 7), operation(Op::kPatchCopy, meta, 7), operation(Op::kMeta, meta),
        operation(Op::kMeta, directory("evil", 0777)), operation(Op::kMeta, directory("evil/sub", 0777)),
        operation(Op::kLink, fileRecord("stolen", "theirs"), 0, "evil/f")}) {
    s.write("ops", plan);
    EXPECT_NE(codeOf([&] { (void)apply(options(2)); }), "");
  }
  s.write("ops", operation(Op::kTake, fileRecord("evil/f", "theirs"), 3));
  EXPECT_NE(codeOf([&] { (void)apply(options(1)); }), "");
  // Removing what is not there (any more) is no error, and removes nothing elsewhere.
  run(operation(Op::kRemove, absent("evil/f")) + operation(Op::kRemove, absent("evil/sub/g")) + operation(Op::kRmdir, absent("evil/sub")) +
      operation(Op::kRmdir, absent("evil")));
  EXPECT_EQ(snapshot(s.at("outside")), before);
  EXPECT_EQ(snapshot(root), here);
  // The plan that replaces the link by a directory works.
  run(operation(Op::kRemove, absent("evil")) + operation(Op::kMkdir, directory("evil")) + put("evil/f", 9, "ours"));
  EXPECT_EQ(read("evil/f"), "ours");
  EXPECT_EQ(snapshot(s.at("outside")), before);
}

// F6: metadata never goes through a link.
TEST_F(Apply, F6OwnerOfALinkIsNotTheOwnerOfItsTarget) {
  s.write("secret", "theirs");
  ASSERT_EQ(chmod(s.at("secret").c_str(), 0600), 0);
  const Record before = describe(s.path(), "secret");
  Record l = link("l", s.at("secret"));
  l.uid = 12345;
  l.gid = 12345;
  run(operation(Op::kSymlink, l) + operation(Op::kMeta, l));
  EXPECT_EQ(describe(root, "l").uid, 12345U);
  const Record after = describe(s.path(), "secret");
  EXPECT_EQ(after.mode, before.mode);
  EXPECT_EQ(after.uid, before.uid);
  EXPECT_EQ(after.mtimeNs, before.mtimeNs);
  Record asFile = fileRecord("l", "theirs");
  s.write("ops", operation(Op::kMeta, asFile));
  EXPECT_EQ(codeOf([&] { (void)apply(options(2)); }), "EINVAL");
}

TEST_F(Apply, D13LinkTextsAreKeptByteForByte) {
  std::string plan;
  const std::vector<std::string> targets{"nope", "/etc/passwd", "l2", "../../../etc", std::string(4000, 'x'), "bad-\xff\xfe", " "};
  for (std::size_t i = 0; i < targets.size(); ++i) plan += operation(Op::kSymlink, link("l" + std::to_string(i), targets[i]));
  run(plan);
  for (std::size_t i = 0; i < targets.size(); ++i) EXPECT_EQ(describe(root, "l" + std::to_string(i)).target, targets[i]);
  redo();
  run(operation(Op::kSymlink, link("l0", "elsewhere")) + operation(Op::kSymlink, link("l1", "x")));
  EXPECT_EQ(describe(root, "l0").target, "elsewhere");
}

TEST_F(Apply, D18AttributesThatTheFileSystemWillNotTakeAreCounted) {
  if (!test::isRoot()) GTEST_SKIP() << "mounts a file system without attributes";
  const std::string plain = s.dir("plain");
  ASSERT_EQ(mount("none", plain.c_str(), "ramfs", 0, nullptr), 0);
  std::filesystem::create_directories(plain + "/tree");
  std::filesystem::create_directories(plain + "/slots");
  {
    const Scratch p(plain);
    p.write("slots/" + slotName(1), "x");
    Record file = fileRecord("f", "x");
    ByteWriter x(file.xattrs);
    x.u16(6);
    x.u32(1);
    x.raw("user.av");
    p.write("ops", operation(Op::kPut, file, 1));
    const ApplyOptions o{plain + "/tree", plain + "/slots", "", plain + "/ops", "", 2};
    EXPECT_EQ(apply(o).xattrsFailed, 1U);
    EXPECT_EQ(p.read("tree/f"), "x");
  }
  ASSERT_EQ(umount(plain.c_str()), 0);
}

TEST_F(Apply, AttributesAndListsAreTakenAwayToo) {
  s.write("tree/f", "x");
  if (setxattr(s.at("tree/f").c_str(), "user.old", "1", 1, 0) != 0) GTEST_SKIP() << "no attributes here";
  run(operation(Op::kMeta, fileRecord("f", "x")));
  EXPECT_EQ(describe(root, "f").xattrs, "");
}

TEST_F(Apply, D20TruncationToNothing) {
  s.write("tree/f", noise(1 << 20, 1));
  run(put("f", 1, ""));
  EXPECT_EQ(describe(root, "f").size, 0U);
}

TEST_F(Apply, PatchInPlaceChangesGrowsShrinksAndPunches) {
  std::string content = noise(3 << 20, 1);
  s.write("tree/db", content);
  const std::uint64_t inode = describe(root, "db").ino;
  content.replace(5000, 3, "abc");
  content.replace(1 << 20, 1 << 20, std::string(1 << 20, '\0'));
  content += "grown";
  Record record = fileRecord("db", content);
  record.mode = 04751;
  patchSlot(1, {{5000, "abc"}}, 1 << 20, 1 << 20);
  patchSlot(2, {{5000, "abc"}, {3 << 20, "grown"}});
  run(operation(Op::kPatch, record, 1));
  record.mtimeNs += 1;
  run(operation(Op::kPatch, record, 2));
  Record now = describe(root, "db");
  EXPECT_EQ(now.hash, record.hash);
  EXPECT_EQ(now.ino, inode);
  EXPECT_EQ(now.mode, 04751);  // writing clears setuid, so it is set afterwards
  EXPECT_EQ(now.mtimeNs, record.mtimeNs);
  struct stat st {};
  ASSERT_EQ(stat(s.at("tree/db").c_str(), &st), 0);
  EXPECT_LT(st.st_blocks * 512, (2 << 20) + (256 << 10));  // zeros became a hole
  redo();
  // Shorter, and the part that was cut is zeros when it grows again.
  record = fileRecord("db", content.substr(0, 1'500'000));
  patchSlot(3, {});
  run(operation(Op::kPatch, record, 3));
  EXPECT_EQ(describe(root, "db").hash, record.hash);
  redo();
  record = fileRecord("db", content.substr(0, 1'500'000) + std::string(1'000'000, '\0'));
  patchSlot(4, {}, 1'500'000, 1'000'000);
  run(operation(Op::kPatch, record, 4));
  EXPECT_EQ(describe(root, "db").hash, record.hash);
  redo();
}

TEST_F(Apply, D16PatchesAndPutsWhereNobodyMayReadOrWrite) {
  s.write("tree/dir/db", noise(1 << 20, 1));
  ASSERT_EQ(chmod(s.at("tree/dir/db").c_str(), 0), 0);
  ASSERT_EQ(chmod(s.at("tree/dir").c_str(), 0), 0);
  std::string content = noise(1 << 20, 1);
  content[0] = 'X';
  Record record = fileRecord("dir/db", content);
  record.mode = 0;
  Record file = fileRecord("dir/f", "x");
  file.mode = 0;
  slot(1, "x");
  patchSlot(2, {{0, "X"}});
  run(operation(Op::kPut, file, 1) + operation(Op::kPatch, record, 2) + operation(Op::kMeta, directory("dir", 0)));
  EXPECT_EQ(describe(root, "dir/db").hash, record.hash);
  EXPECT_EQ(describe(root, "dir/db").mode, 0);
  EXPECT_EQ(describe(root, "dir").mode, 0);
  redo();
}

TEST_F(Apply, D12PatchOfACopyLeavesReadersAndOtherNamesAlone) {
  s.dir("retired");
  const std::string old = noise(1 << 20, 1);
  s.write("tree/d/db", old);
  if (test::apart() == nullptr)
    std::filesystem::create_hard_link(s.at("tree/d/db"), s.at("older generation"));
  else
    s.write("older generation", old);
  const Fd reader(open(s.at("tree/d/db").c_str(), O_RDONLY));
  std::string content = old;
  content.replace(70'000, 4, "NEWS");
  patchSlot(1, {{70'000, "NEWS"}});
  run(operation(Op::kPatchCopy, fileRecord("d/db", content), 1, {}, true) + operation(Op::kMeta, directory("d")));
  EXPECT_TRUE(read("d/db") == content);
  EXPECT_TRUE(s.read("older generation") == old);
  EXPECT_TRUE(s.read("retired/d/db") == old);
  std::string seen(old.size(), '\0');
  EXPECT_EQ(preadFull(reader.get(), seen.data(), seen.size(), 0), old.size());
  EXPECT_TRUE(seen == old);
  if (test::apart() == nullptr) {
    EXPECT_EQ(s.count("slots"), 1U);  // the patch itself, until the caller has synced
  }
  redo();
  EXPECT_TRUE(s.read("retired/d/db") == old);
}

TEST_F(Apply, D10PatchOfACopyKeepsHoles) {
  s.write("tree/f", "begin");
  ASSERT_EQ(truncate(s.at("tree/f").c_str(), 1L << 30), 0);
  Record record = describe(root, "f");
  patchSlot(1, {{500U << 20, "middle"}});
  run(operation(Op::kPatchCopy, record, 1));
  struct stat st {};
  ASSERT_EQ(stat(s.at("tree/f").c_str(), &st), 0);
  EXPECT_EQ(st.st_size, 1L << 30);
  EXPECT_LT(st.st_blocks, 64);
  const Fd fd(open(s.at("tree/f").c_str(), O_RDONLY));
  char middle[8] = {};
  EXPECT_EQ(preadFull(fd.get(), middle, 7, 500U << 20), 7U);
  EXPECT_STREQ(middle, "middle");
}

TEST_F(Apply, OldVersionsAreKeptUnderTheirPaths) {
  s.dir("retired");
  s.write("tree/replaced", "old 1");
  s.write("tree/sub/removed", "old 2");
  s.write("tree/moved", "old 3");
  s.write("tree/untouched", "old 4");
  std::filesystem::create_symlink("old", s.at("tree/l"));
  run(operation(Op::kTake, fileRecord("moved", "old 3"), 1, {}, true) + operation(Op::kRemove, absent("sub/removed"), 0, {}, true) +
      put("replaced", 2, "new 1", true) + operation(Op::kPut, fileRecord("there", "old 3"), 1) +
      operation(Op::kSymlink, link("l", "new"), 0, {}, true) + put("untouched", 3, "new 4"));
  EXPECT_EQ(s.read("retired/replaced"), "old 1");
  EXPECT_EQ(s.read("retired/sub/removed"), "old 2");
  EXPECT_EQ(s.read("retired/moved"), "old 3");
  EXPECT_EQ(describe(s.at("retired"), "l").target, "old");
  EXPECT_FALSE(s.has("retired/untouched"));
  EXPECT_EQ(read("there"), "old 3");
  EXPECT_EQ(read("replaced"), "new 1");
  EXPECT_FALSE(s.has("tree/sub/removed"));
  redo();
  EXPECT_EQ(s.read("retired/replaced"), "old 1");
}

TEST_F(Apply, LostSlotNeverPassesOffTheOldFileAsTheNewOne) {
  s.write("tree/f", "old");
  s.write("ops", operation(Op::kRemove, absent("g")) + operation(Op::kPut, fileRecord("f", "new"), 1));
  s.write("tree/g", "x");
  EXPECT_EQ(codeOf([&] { (void)apply(options(2)); }), "ENOENT");
  EXPECT_TRUE(s.has("tree/g"));  // found out before anything was done
}

TEST_F(Apply, HostilePlansAreRefusedAndChangeNothing) {
  s.write("outside/f", "theirs");
  s.write("tree/d/f", "x");
  s.write("slots/" + slotName(1), "x");
  const auto code = [&](const std::string& plan) {
    s.write("ops", plan);
    const std::string result = codeOf([&] {
      (void)apply(options(1));
      (void)apply(options(2));
    });
    std::filesystem::remove(s.at("ops"));
    std::filesystem::remove(s.at("out"));
    return result;
  };
  const timespec times[2] = {{1, 0}, {1, 0}};
  const auto settle = [&] { (void)utimensat(AT_FDCWD, s.path().c_str(), times, 0); };
  settle();
  const std::string settled = snapshot(s.path());
  for (const char* bad : {"../outside/f", "..", ".", "d/..", "d/../../outside/f", "/etc/passwd", "d//f", "d/", ""}) {
    SCOPED_TRACE(bad);
    for (const Op op : {Op::kTake, Op::kRemove, Op::kRmdir, Op::kPut, Op::kSymlink, Op::kLink, Op::kPatch, Op::kPatchCopy}) {
      Record record = fileRecord(bad, "x");
      if (op == Op::kSymlink) record = link(bad, "x");
      EXPECT_EQ(code(operation(op, record, 1, op == Op::kLink ? "d/f" : "")), "OPS_INVALID") << static_cast<int>(op);
    }
    EXPECT_EQ(code(operation(Op::kLink, fileRecord("new", "x"), 0, bad)), "OPS_INVALID");
    if (*bad != '\0') {
      EXPECT_EQ(code(operation(Op::kMeta, link(bad, "x"))), "OPS_INVALID");
    }
  }
  EXPECT_EQ(code(operation(Op::kRemove, absent(std::string("d\0f", 3)))), "OPS_INVALID");
  EXPECT_EQ(code(operation(Op::kRemove, absent(std::string(256, 'x')))), "OPS_INVALID");
  EXPECT_EQ(code(operation(Op::kSymlink, link("l", std::string("a\0b", 3)))), "OPS_INVALID");
  EXPECT_EQ(code(operation(Op::kSymlink, link("l", ""))), "OPS_INVALID");
  EXPECT_EQ(code(operation(static_cast<Op>(11), absent("d/f"))), "OPS_INVALID");
  EXPECT_EQ(code(operation(static_cast<Op>(0), absent("d/f"))), "OPS_INVALID");
  const std::string good = operation(Op::kRemove, absent("d/f"));
  for (std::size_t n = 1; n < good.size(); ++n) EXPECT_NE(code(good + good.substr(0, n)), "") << n;
  // An order that a redo could not repeat.
  EXPECT_EQ(code(operation(Op::kPut, fileRecord("d/f", "x"), 1) + operation(Op::kRemove, absent("d/f"))), "OPS_INVALID");
  EXPECT_EQ(code(operation(Op::kRemove, absent("d/f")) + operation(Op::kPut, fileRecord("d/f", "x"), 1)), "OPS_INVALID");
  settle();
  EXPECT_EQ(snapshot(s.path()), settled);
}

TEST_F(Apply, PlanOfManyOperationsIsStreamed) {
  std::string plan;
  for (int i = 0; i < 500; ++i) plan += operation(Op::kMkdir, directory("d" + std::to_string(i)));
  for (int i = 0; i < 500; ++i) plan += put("d" + std::to_string(i) + "/" + std::string(200, 'n'), static_cast<std::uint64_t>(i), "x");
  EXPECT_EQ(run(plan).operations, 1000U);
  EXPECT_EQ(out().size(), 1000U);
  redo();
}

// ---- crashes: the process ends at every point that apply can be interrupted at, then the plan is done again ----

// A plan with everything in it. Returns the ops; makes the tree and the slots that it starts from.
std::string everything(const Scratch& s) {
  s.dir("retired");
  s.dir("slots");
  s.write("tree/removed", "old");
  s.write("tree/gone/below/f", "old");
  s.write("tree/dir-to-file/f", "old");
  s.write("tree/file-to-dir", "old");
  std::filesystem::create_symlink("x", s.at("tree/link-to-dir"));
  s.write("tree/replaced", "old");
  s.write("tree/a", "content of a");
  s.write("tree/b", "content of b");
  s.write("tree/moved", "moved");
  s.write("tree/kept/excluded", "keep");
  s.write("tree/leader", "shared");
  s.write("tree/joins", "alone");
  const std::string big = noise(1'300'000, 1);
  s.write("tree/db", big);
  s.write("tree/db2", big);
  std::error_code apart;
  std::filesystem::create_hard_link(s.at("tree/db2"), s.at("db2 of an older generation"), apart);
  if (apart) std::filesystem::copy_file(s.at("tree/db2"), s.at("db2 of an older generation"));
  const auto slot = [&](std::uint64_t n, std::string_view content) { s.write("slots/" + slotName(n), content); };
  slot(10, "new");
  slot(11, "in a directory");
  slot(12, "was a directory");
  slot(13, "");
  std::string next = big;
  next.replace(10, 3, "abc");
  next.replace(900'000, 2, "zz");
  const std::string shorter = next.substr(0, 1'200'000);
  const std::string patch = test::PackText().data(0, 10, "abc").data(0, 900'000, "zz").end();
  slot(14, patch);
  slot(15, patch);
  Record setuid = fileRecord("replaced", "new");
  setuid.mode = 06755;
  setuid.uid = 1000;
  const auto take = [](const std::string& path, std::uint64_t n) { return operation(Op::kTake, fileRecord(path, ""), n, {}, true); };
  return take("a", 1) + take("b", 2) + take("moved", 3) +
         operation(Op::kRemove, absent("removed"), 0, {}, true) + operation(Op::kRemove, absent("link-to-dir"), 0, {}, true) +
         operation(Op::kRmdir, absent("kept")) + operation(Op::kRemove, absent("gone/below/f")) + operation(Op::kRmdir, absent("gone/below")) +
         operation(Op::kRmdir, absent("gone")) + operation(Op::kRemove, absent("file-to-dir"), 0, {}, true) +
         operation(Op::kRemove, absent("dir-to-file/f"), 0, {}, true) + operation(Op::kRmdir, absent("dir-to-file")) +
         operation(Op::kMkdir, directory("file-to-dir")) + operation(Op::kMkdir, directory("link-to-dir")) +
         operation(Op::kPut, fileRecord("a", "content of b"), 2) + operation(Op::kPut, fileRecord("b", "content of a"), 1) +
         operation(Op::kPut, fileRecord("dir-to-file", "was a directory"), 12, {}, true) +
         operation(Op::kPut, fileRecord("empty", ""), 13, {}, true) +
         operation(Op::kPut, fileRecord("file-to-dir/f", "in a directory"), 11) +
         operation(Op::kPut, fileRecord("link-to-dir/moved", "moved"), 3) + operation(Op::kPut, setuid, 10, {}, true) +
         operation(Op::kSymlink, link("sym", "somewhere"), 0, {}, true) +
         operation(Op::kLink, fileRecord("joins", "shared"), 0, "leader", true) +
         operation(Op::kPatch, fileRecord("db", shorter), 14) +
         operation(Op::kPatchCopy, fileRecord("db2", next), 15, {}, true) +
         operation(Op::kMeta, directory("file-to-dir", 0700)) + operation(Op::kMeta, directory("kept", 0750)) +
         operation(Op::kMeta, directory("link-to-dir", 02770)) + operation(Op::kMeta, directory("", 0711));
}

ApplyOptions in(const std::string& folder, int phase) {
  return {folder + "/tree", folder + "/slots", folder + "/retired", folder + "/ops", phase == 2 ? folder + "/out" : "", phase};
}

// Not a test of its own: the process that is to crash. CrashPoints reads its environment once, so it is a new one.
TEST(ApplyCrashChild, Run) {
  const char* folder = getenv("SIMPLE_VOLUME_TEST_CRASH_FOLDER");
  if (folder == nullptr) GTEST_SKIP() << "started by ApplyCrash";
  if (access((std::string(folder) + "/phase1-done").c_str(), F_OK) != 0) {
    (void)apply(in(folder, 1));
    const Fd mark(open((std::string(folder) + "/phase1-done").c_str(), O_WRONLY | O_CREAT, 0600));
    ASSERT_TRUE(mark.valid());
  }
  (void)apply(in(folder, 2));
}

// Exit code of a process that applies the plan in `folder` and ends at `point`.
int crashAt(const std::string& folder, const std::string& point) {
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("SIMPLE_VOLUME_TEST_CRASH_FOLDER", folder.c_str(), 1);
    setenv("SIMPLE_VOLUME_CRASH_AT", point.c_str(), 1);
    const Fd null(open("/dev/null", O_WRONLY));
    dup2(null.get(), 1);
    execl("/proc/self/exe", "engine_tests", "--gtest_filter=ApplyCrashChild.Run", nullptr);
    _exit(99);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Tree, retired files and the older generation's file: all that must come out the same. The out file holds inode
// numbers and ctimes and so differs between runs.
std::string outcome(const Scratch& s) {
  return snapshot(s.at("tree")) + "retired\n" + [&] {
    std::string names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(s.at("retired"))) {
      const std::string path = entry.path().string().substr(s.at("retired").size() + 1);
      const Record r = describe(s.at("retired"), path);
      names += path + " " + std::to_string(static_cast<int>(r.kind)) + " " + std::to_string(r.size) + "\n";
    }
    std::vector<std::string> lines;
    for (std::size_t at = 0; at < names.size();) {
      const std::size_t end = names.find('\n', at);
      lines.push_back(names.substr(at, end - at));
      at = end + 1;
    }
    std::sort(lines.begin(), lines.end());
    std::string sorted;
    for (const std::string& line : lines) sorted += line + "\n";
    return sorted;
  }() + blake3(s.read("db2 of an older generation"));
}

// The old contents keep their own times, which differ between runs; so all old files get one.
void steady(const Scratch& s) {
  const timespec times[2] = {{1'600'000'000, 0}, {1'600'000'000, 0}};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(s.at("tree")))
    (void)utimensat(AT_FDCWD, entry.path().c_str(), times, AT_SYMLINK_NOFOLLOW);
}

const char* const kPoints[] = {"apply.take.before",  "apply.take.after",       "apply.phase2.begin",     "apply.retire.after",
                               "apply.remove.after", "apply.rmdir.after",      "apply.mkdir.after",      "apply.put.before_rename",
                               "apply.put.after_rename", "apply.patch.mid",    "apply.patch.after",      "apply.meta.after",
                               "apply.before_out",   "apply.end"};

TEST(ApplyCrash, RedoAfterACrashAnywhereGivesTheSameTree) {
  std::string expected;
  {
    const Scratch s;
    s.write("ops", everything(s));
    steady(s);
    (void)apply(in(s.path(), 1));
    (void)apply(in(s.path(), 2));
    expected = outcome(s);
  }
  ASSERT_NE(expected.find("dir-to-file kind 1"), std::string::npos);
  std::size_t crashes = 0;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kAtMost = 2;  // a process a crash; the sanitizers make them slow, and look at the same code each time
#else
  constexpr int kAtMost = 100;
#endif
  std::vector<const char*> points(std::begin(kPoints), std::end(kPoints));
  if (test::apart() != nullptr) points.insert(points.end(), {"apply.take.copied", "apply.put.copied"});
  for (const char* point : points) {
    for (int n = 1; n <= kAtMost; ++n) {
      const std::string at = std::string(point) + ":" + std::to_string(n);
      SCOPED_TRACE(at);
      const Scratch s;
      s.write("ops", everything(s));
      steady(s);
      const int code = crashAt(s.path(), at);
      if (code == 0) {
        EXPECT_GT(n, 1) << "the point is never reached";
        EXPECT_EQ(outcome(s), expected);
        break;
      }
      ASSERT_EQ(code, 137);
      ++crashes;
      // The redo crashes as well, at the first point of another kind, before it gets through.
      if (n == 1) (void)crashAt(s.path(), "apply.put.before_rename:2");
      ASSERT_EQ(crashAt(s.path(), "none"), 0);
      ASSERT_EQ(outcome(s), expected);
    }
  }
  EXPECT_GT(crashes, kAtMost > 2 ? 50U : 15U);
}

}  // namespace
}  // namespace sv
