// Real mounts in a mount namespace of this test's own process, so that nothing is left behind whatever happens.
#include "engine/mount.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "engine/error.h"

namespace sv {
namespace {

namespace fs = std::filesystem;

// Runs the body in a child with a mount namespace of its own: 0 is well, 77 is "may not", else the line that failed.
int inNamespace(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) _exit(77);
    int line = 76;
    try {
      line = body();
    } catch (...) {
    }
    _exit(line);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 75;
  return WEXITSTATUS(status);
}

#define CHECK(condition) \
  if (!(condition)) return __LINE__ % 70 + 1

std::string codeOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code;
  }
  return "";
}

class MountTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "sv-mount-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    top = name;
    fs::create_directory(top + "/source");
    fs::create_directory(top + "/target");
    std::ofstream(top + "/source/file") << "x";
  }
  void TearDown() override { fs::remove_all(top); }
  std::string top;
};

TEST_F(MountTest, ABindMountShowsTheSourceUntilItIsUnmounted) {
  const int result = inNamespace([&] {
    bindMount(top + "/source", top + "/target");
    CHECK(fs::exists(top + "/target/file"));
    unmount(top + "/target");
    CHECK(!fs::exists(top + "/target/file"));
    return 0;
  });
  if (result == 77) GTEST_SKIP() << "no mount namespaces here";
  EXPECT_EQ(result, 0);
}

TEST_F(MountTest, OptionsAreThoseOfThisMountAlone) {
  const int result = inNamespace([&] {
    bindMount(top + "/source", top + "/target");
    remountBind(top + "/target", mountFlags({"ro", "nosuid", "nodev"}));
    struct statvfs target {};
    struct statvfs source {};
    CHECK(statvfs((top + "/target").c_str(), &target) == 0 && statvfs((top + "/source").c_str(), &source) == 0);
    CHECK((target.f_flag & ST_RDONLY) != 0 && (target.f_flag & ST_NOSUID) != 0 && (target.f_flag & ST_NODEV) != 0);
    CHECK((source.f_flag & ST_RDONLY) == 0);
    CHECK(!std::ofstream(top + "/target/new").is_open());
    CHECK(std::ofstream(top + "/source/new").is_open());
    return 0;
  });
  if (result == 77) GTEST_SKIP() << "no mount namespaces here";
  EXPECT_EQ(result, 0);
}

TEST_F(MountTest, ACoverIsEmptyAndCannotBeWritten) {
  const int result = inNamespace([&] {
    bindMount(top + "/source", top + "/target");
    coverMount("moved", top + "/target");
    CHECK(fs::is_empty(top + "/target"));
    CHECK(!std::ofstream(top + "/target/new").is_open());
    unmount(top + "/target");
    CHECK(fs::exists(top + "/target/file"));
    unmount(top + "/target");
    CHECK(codeOf([&] { unmount(top + "/target"); }) == "EINVAL");
    return 0;
  });
  if (result == 77) GTEST_SKIP() << "no mount namespaces here";
  EXPECT_EQ(result, 0);
}

TEST_F(MountTest, WhatIsInUseIsNotTakenAway) {
  const int result = inNamespace([&] {
    bindMount(top + "/source", top + "/target");
    const std::ifstream open(top + "/target/file");
    CHECK(codeOf([&] { unmount(top + "/target"); }) == "EBUSY");
    CHECK(fs::exists(top + "/target/file"));
    return 0;
  });
  if (result == 77) GTEST_SKIP() << "no mount namespaces here";
  EXPECT_EQ(result, 0);
}

TEST_F(MountTest, AnUnmountFollowsNoLink) {
  const int result = inNamespace([&] {
    bindMount(top + "/source", top + "/target");
    fs::create_directory_symlink(top + "/target", top + "/link");
    CHECK(codeOf([&] { unmount(top + "/link"); }) == "EINVAL");
    CHECK(fs::exists(top + "/target/file"));
    return 0;
  });
  if (result == 77) GTEST_SKIP() << "no mount namespaces here";
  EXPECT_EQ(result, 0);
}

TEST_F(MountTest, ErrorsNameTheTarget) {
  try {
    bindMount(top + "/missing", top + "/target");
    FAIL();
  } catch (const Error& error) {
    EXPECT_TRUE(error.code == "ENOENT" || error.code == "EPERM") << error.code;
    EXPECT_EQ(error.path, top + "/target");
  }
  EXPECT_EQ(codeOf([] { (void)mountFlags({"ro", "uid=0"}); }), "EINVAL");
  EXPECT_EQ(mountFlags({}), 0U);
}

}  // namespace
}  // namespace sv
