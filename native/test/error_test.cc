#include "engine/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>

namespace sv {
namespace {

TEST(Error, CarriesErrnoSyscallAndThePathAsBytes) {
  const std::string path("a\xff\n", 3);
  try {
    errno = ENOSPC;
    throwErrno("openat2", path);
  } catch (const Error& error) {
    EXPECT_EQ(error.code, "ENOSPC");
    EXPECT_EQ(error.err, ENOSPC);
    EXPECT_EQ(error.syscall, "openat2");
    EXPECT_EQ(error.path, path);
    EXPECT_EQ(std::string(error.what()), "ENOSPC: No space left on device, openat2 'a\\xff\\x0a'");
    return;
  }
  FAIL() << "throwErrno did not throw";
}

TEST(Error, NamesAnUnknownErrnoByItsNumber) { EXPECT_EQ(errnoName(54321), "E54321"); }

TEST(Error, LeavesThePathOutWhereThereIsNone) {
  EXPECT_EQ(std::string(errnoError(EMFILE, "inotify_init1").what()), "EMFILE: Too many open files, inotify_init1");
}

}  // namespace
}  // namespace sv
