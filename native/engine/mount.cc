#include "engine/mount.h"

#include <sys/mount.h>

#include <array>
#include <string>
#include <utility>

#include "engine/error.h"

namespace sv {
namespace {

#ifndef MS_NOSYMFOLLOW
#define MS_NOSYMFOLLOW 256  // linux/mount.h, Linux 5.10
#endif

constexpr std::array<std::pair<std::string_view, unsigned long>, 9> kFlags{{
    {"ro", MS_RDONLY},
    {"nosuid", MS_NOSUID},
    {"nodev", MS_NODEV},
    {"noexec", MS_NOEXEC},
    {"noatime", MS_NOATIME},
    {"nodiratime", MS_NODIRATIME},
    {"relatime", MS_RELATIME},
    {"strictatime", MS_STRICTATIME},
    {"nosymfollow", MS_NOSYMFOLLOW},
}};

void call(const char* source, std::string_view target, const char* type, unsigned long flags, const char* data) {
  const std::string path(target);
  if (::mount(source, path.c_str(), type, flags, data) != 0) throwErrno("mount", target);
}

}  // namespace

unsigned long mountFlags(const std::vector<std::string_view>& options) {
  unsigned long flags = 0;
  for (const std::string_view option : options) {
    unsigned long flag = 0;
    for (const auto& [name, value] : kFlags) {
      if (name == option) flag = value;
    }
    if (flag == 0) throw Error("EINVAL", "EINVAL: no option of a single mount: " + printablePath(option), EINVAL);
    flags |= flag;
  }
  return flags;
}

void bindMount(std::string_view source, std::string_view target) {
  const std::string from(source);
  call(from.c_str(), target, nullptr, MS_BIND, nullptr);
}

void remountBind(std::string_view target, unsigned long flags) {
  call(nullptr, target, nullptr, MS_REMOUNT | MS_BIND | flags, nullptr);
}

void coverMount(std::string_view name, std::string_view target) {
  const std::string from(name);
  call(from.c_str(), target, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,mode=0555");
}

void unmount(std::string_view target) {
  const std::string path(target);
  if (::umount2(path.c_str(), UMOUNT_NOFOLLOW) != 0) throwErrno("umount2", target);
}

}  // namespace sv
