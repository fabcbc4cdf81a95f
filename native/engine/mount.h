// The mounts that the CSI node service makes. Paths are absolute and are resolved by the kernel as mount(2) does; the
// caller has checked them.
#pragma once

#include <string_view>
#include <vector>

namespace sv {

// Throws EINVAL for an option that a mount of its own cannot have; allowed are ro, nosuid, nodev, noexec, noatime,
// nodiratime, relatime, strictatime, nosymfollow.
unsigned long mountFlags(const std::vector<std::string_view>& options);

void bindMount(std::string_view source, std::string_view target);
// Gives this one mount these flags and no others (MS_REMOUNT | MS_BIND).
void remountBind(std::string_view target, unsigned long flags);
// Covers a directory with an empty read-only tmpfs, which the mount table shows under `name`.
void coverMount(std::string_view name, std::string_view target);
// Takes the mount on top away, never lazily; EBUSY while it is in use, EINVAL when nothing is mounted there.
void unmount(std::string_view target);

}  // namespace sv
