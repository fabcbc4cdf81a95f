// Reading a tree: records in path order, in pieces, with one open directory and one directory's names in memory.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/filter.h"
#include "engine/fs.h"
#include "engine/record.h"

namespace sv {

// Walks what the filter covers. Not a point in time: what changes meanwhile is seen or not, each entry by itself true.
class Scanner {
 public:
  // `directory` is relative to the root ('' = the root). Shallow: the directory itself and its direct children.
  Scanner(std::string_view root, std::string_view directory, std::shared_ptr<const Filter> filter, bool deep);

  // Appends records (no hash, no attributes, no link text) of about `maxBytes`; false when nothing is left.
  bool next(std::size_t maxBytes, std::string& out);

 private:
  struct Item {
    std::string name;  // with a '/' at the end: what is below the directory
    bool directory;
  };
  struct Level {
    std::string path;
    Filter::Cursor cursor;
    std::vector<Item> items;  // in reverse order: the next one is the last
  };

  void enter(std::string path, Filter::Cursor cursor);
  void describe(RecordWriter& out, const Stat& stat, std::string_view path) const;
  static void unreadable(RecordWriter& out, std::string_view path, int err);
  std::string below(const std::string& parent, std::string_view name) const;

  Fd root_;
  std::string start_;
  std::shared_ptr<const Filter> filter_;
  bool deep_;
  bool started_ = false;
  std::uint64_t mountId_ = 0;
  std::uint64_t dev_ = 0;
  std::vector<Level> levels_;
  Fd directory_;                // of the level whose path is directoryPath_
  std::string directoryPath_;
  std::size_t directoryLevel_ = 0;  // its number + 1, 0: none
};

// One record per path of the list (docs/formats.md), in its order, with attributes and link text; kind absent where
// nothing is.
std::string statPaths(std::string_view root, std::string_view paths);

}  // namespace sv
