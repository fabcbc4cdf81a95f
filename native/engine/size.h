// The size of a volume: a tree that its file system counts apart from all else, and holds to a limit. btrfs does that
// for subvolumes (qgroups), XFS and ext4 for directories with a project id.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

struct statfs;

namespace sv {

// Makes the directory `path` (its parent exists) as a tree that can be counted, where the file system can: a subvolume
// on btrfs, a project of its own on XFS and ext4, else a plain directory. A directory that is there stays as it is.
// Needs no privilege beyond that of making a directory. Returns whether it was made now.
bool makeTree(std::string_view path, mode_t mode);

// Lets what is made below `directory` from now on count as part of `tree`. XFS and ext4 rename nothing into a tree from
// outside its project (EXDEV); elsewhere this does nothing.
void joinTree(std::string_view directory, std::string_view tree);

struct SizeLimit {
  bool enforced = false;
  // Why it is not, as a sentence without a full stop. Empty when it is, or when there is no limit.
  std::string reason;
  // What counts, bytes. Meaningful while it is enforced. btrfs brings it up to date with each commit (30 s).
  std::uint64_t used = 0;
};

// Sets the limit of a tree, bytes; 0: none. Needs CAP_SYS_ADMIN. A limit below what is there stops writing and removes
// nothing. On btrfs quotas are switched on if they are off; on XFS and ext4 that is an option of the mount, which is left
// alone. Whatever hinders it comes back as the reason; only a tree that cannot be opened throws.
// `others`: trees on the same disk; one with the same project id must not be limited along, so then nothing is.
SizeLimit limitTree(std::string_view tree, std::uint64_t bytes, const std::vector<std::string>& others);

// Whether a tree has a project id, which what is moved out of it keeps.
bool inProject(int fd) noexcept;
// Takes a file or directory out of its project: it stays on the disk and is no longer the volume's.
void leaveTree(int fd) noexcept;

// The calls that a test replaces: not every kernel has project quotas.
struct SizeCalls {
  int (*ioctl)(int fd, unsigned long request, void* argument);
  long (*quotactl)(int fd, unsigned command, std::uint32_t id, void* argument);  // quotactl_fd, Linux 5.14
  int (*statfs)(int fd, struct statfs* out);
};
SizeCalls& sizeCalls();

}  // namespace sv
