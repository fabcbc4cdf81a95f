// Named places at which a test can end the process as a power cut would: SIMPLE_VOLUME_CRASH_AT=<name>[:<n>] ends it
// at the n-th time (default 1) that the place is reached. Off, it costs one load and a branch.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace sv {

class CrashPoints {
 public:
  static void reached(std::string_view name) {
    static const CrashPoints points;
    if (points.name_ == nullptr) return;
    if (name != std::string_view(points.name_, points.length_)) return;
    if (points.left_.fetch_sub(1) == 1) _exit(137);
  }

 private:
  CrashPoints() : name_(getenv("SIMPLE_VOLUME_CRASH_AT")) {
    if (name_ == nullptr) return;
    const char* colon = strrchr(name_, ':');
    length_ = colon == nullptr ? strlen(name_) : static_cast<std::size_t>(colon - name_);
    left_ = colon == nullptr ? 1 : atol(colon + 1);
  }
  const char* name_;
  std::size_t length_ = 0;
  mutable std::atomic<long> left_{1};
};

inline void crashPoint(std::string_view name) { CrashPoints::reached(name); }

}  // namespace sv
