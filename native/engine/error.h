// The one exception type of the engine. The N-API border turns it into a JavaScript Error with the same fields.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace sv {

// The symbolic name of an errno ("ENOSPC"); "E<number>" for one that the C library does not know.
inline std::string errnoName(int err) {
  const char* name = strerrorname_np(err);  // glibc 2.32
  return name != nullptr ? std::string(name) : "E" + std::to_string(err);
}

// A path as it may appear in a message: names are bytes, so control characters, quotes, backslashes and
// everything beyond ASCII are shown as \xNN.
inline std::string printablePath(std::string_view path) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  out.reserve(path.size() + 2);
  out.push_back('\'');
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '\'' || c == '\\') {
      out += "\\x";
      out.push_back(kHex[byte >> 4]);
      out.push_back(kHex[byte & 15]);
    } else {
      out.push_back(c);
    }
  }
  out.push_back('\'');
  return out;
}

// An operation that failed. `code` is an errno name ("ENOSPC") or an engine code ("BAD_RECORD"); `err` is the
// errno or 0; `syscall` and `path` (bytes, as the caller named it) may be empty.
struct Error : std::runtime_error {
  std::string code;
  int err;
  std::string syscall;
  std::string path;

  Error(std::string errorCode, const std::string& message, int errorNumber = 0, std::string call = {},
        std::string where = {})
      : std::runtime_error(message),
        code(std::move(errorCode)),
        err(errorNumber),
        syscall(std::move(call)),
        path(std::move(where)) {}
};

// The Error of a failed system call, with a given errno.
inline Error errnoError(int err, std::string_view syscall, std::string_view path = {}) {
  std::string code = errnoName(err);
  const char* text = strerrordesc_np(err);  // glibc 2.32, safe with threads
  std::string message = code + ": " + (text != nullptr ? text : "unknown error") + ", " + std::string(syscall);
  if (!path.empty()) message += " " + printablePath(path);
  return Error(std::move(code), message, err, std::string(syscall), std::string(path));
}

// Throws the Error of the system call that has just failed (reads errno first of all).
[[noreturn]] inline void throwErrno(std::string_view syscall, std::string_view path = {}) {
  const int err = errno;
  throw errnoError(err, syscall, path);
}

}  // namespace sv
