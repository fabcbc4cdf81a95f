// Reading the tree: an ordered walk in bounded memory, and the state of single paths.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/filter.h"
#include "engine/fs.h"
#include "engine/record.h"

namespace sv {

// The names of one directory, read with getdents64 in large pieces.
struct Listing {
  struct Entry {
    std::uint32_t at;  // offset of the NUL-terminated name in `names`
    std::uint8_t length;
    std::uint8_t type;  // DT_*
    bool directory = false;  // was reported as a directory by the walk
  };
  std::string names;
  std::vector<Entry> entries;

  std::string_view name(const Entry& entry) const { return {names.data() + entry.at, entry.length}; }
  const char* text(const Entry& entry) const { return names.data() + entry.at; }
};

// Reads all names of an opened directory except '.' and '..'; with `directoriesOnly` those that are surely something
// else are left out. Throws with the errno of getdents64.
Listing readListing(int directory, bool directoriesOnly);

// A walk over what a filter keeps, in memcmp order of whole paths. The names of the directories on the way down are
// in memory, never the whole tree.
//
// What the walk cannot look into is a record of kind unreadable with the errno in `uid`: a directory without
// permission, a name whose path is too long, and EXDEV for what another file system is mounted over (it is not
// entered: it is not part of the volume).
class Scanner {
 public:
  // `directory` is relative to `root` ('' = the root itself) and comes first. Nothing there, or nothing that the filter
  // keeps: an empty walk. Not `deep`: the directory and its direct children only.
  // Throws when the root cannot be opened.
  Scanner(std::string_view root, std::string_view directory, std::shared_ptr<const Filter> filter, bool deep);

  // Appends records until about `maxBytes` of them are in `out`; false when the walk is over and nothing was added.
  // Throws CANCELLED after cancel(), and when a directory that was already reported cannot be read any more: an
  // incomplete walk must never look like a complete one.
  bool next(std::size_t maxBytes, std::string& out);

  // From any thread: the next() that is running, and all later ones, stop.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

 private:
  struct Level {
    Fd fd;  // closed while the walk is far below
    std::uint64_t ino = 0;
    std::string path;
    Filter::Cursor cursor;
    Listing listing;
    std::vector<std::uint32_t> byName;   // all entries, by name
    std::vector<std::uint32_t> byBelow;  // possible directories, by name + '/'
    std::size_t atName = 0;
    std::size_t atBelow = 0;
  };

  bool start(std::string& out);
  // Reads the directory; the errno in `failure` when that does not work.
  std::unique_ptr<Level> open(Fd fd, std::string path, Filter::Cursor cursor, int& failure);
  int levelFd(std::size_t index);
  void report(Level& level, Listing::Entry& entry, std::string& out);
  void append(std::string& out, std::string_view path, const Stat& stat) const;
  void appendUnreadable(std::string& out, std::string_view path, int err) const;

  Fd root_;
  std::string directory_;
  std::shared_ptr<const Filter> filter_;
  bool deep_;
  bool started_ = false;
  std::uint64_t mount_ = 0;
  std::vector<std::unique_ptr<Level>> levels_;
  std::unique_ptr<Level> ahead_;            // the directory reported last, read already
  const Listing::Entry* aheadOf_ = nullptr;
  std::atomic<bool> cancelled_{false};
};

// One record per path of `paths` ({u32 length, bytes}*), same order: kind absent where nothing is (also when a parent is
// missing or no directory), unreadable with the errno in `uid` where looking failed; with attributes and link text.
// Throws when the root cannot be opened.
std::string statPaths(std::string_view root, std::string_view paths);

}  // namespace sv
