// A scratch folder and shorthand for the tests of file code.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "engine/fs.h"
#include "engine/record.h"
#include "engine/size.h"

namespace sv::test {

// A folder on a disk whose trees are apart, or null: then the folder "tree" of each Scratch is one, and nothing can be
// renamed or linked into it from outside.
inline const char* apart() { return getenv("SIMPLE_VOLUME_TEST_APART"); }

class Scratch {
 public:
  Scratch() {
    std::string name = std::string(apart() == nullptr ? "/tmp" : apart()) + "/sv-test-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) abort();
    path_ = name;
    if (apart() != nullptr) (void)makeTree(at("tree"), 0755);
  }
  explicit Scratch(std::string path) : path_(std::move(path)), own_(false) {}
  ~Scratch() {
    std::error_code ignored;
    if (own_) std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::string& path() const { return path_; }
  std::string at(const std::string& name) const { return path_ + '/' + name; }
  std::string dir(const std::string& name) const {
    std::filesystem::create_directories(at(name));
    return at(name);
  }
  std::string write(const std::string& name, std::string_view data) const {
    const std::string file = at(name);
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    const Fd fd(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644));
    if (!fd.valid()) abort();
    writeFull(fd.get(), data.data(), data.size());
    return file;
  }
  std::string read(const std::string& name) const { return readAbsolute(at(name)); }
  static std::string readAbsolute(const std::string& file) {
    const Fd fd(open(file.c_str(), O_RDONLY));
    if (!fd.valid()) return "(missing)";
    std::string out(static_cast<std::size_t>(statFd(fd.get()).size), '\0');
    out.resize(preadFull(fd.get(), out.data(), out.size(), 0));
    return out;
  }
  bool has(const std::string& name) const {
    struct stat s {};
    return lstat(at(name).c_str(), &s) == 0;
  }
  std::size_t count(const std::string& folder) const {
    std::size_t n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(at(folder))) ++n;
    return n;
  }

 private:
  std::string path_;
  bool own_ = true;
};

// Deterministic bytes without a pattern.
inline std::string noise(std::size_t size, std::uint32_t seed) {
  std::string out(size, '\0');
  for (char& c : out) {
    seed = seed * 1664525U + 1013904223U;
    c = static_cast<char>(seed >> 24);
  }
  return out;
}

inline std::string packed(const Record& record) {
  std::string out;
  RecordWriter(out).append(record);
  return out;
}

// Code of the Error that `body` throws; "" when it throws none.
template <typename Body>
std::string codeOf(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code;
  }
  return "";
}

inline bool isRoot() { return geteuid() == 0; }

}  // namespace sv::test
