// The table of watched directories: 32 bytes and the name for each, linked by parent, so that renaming a directory
// renames one node and the paths below it are right at once. Not thread-safe; the watcher locks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sv {

inline constexpr std::uint32_t kNoNode = 0xffffffff;

struct Node {
  std::uint32_t parent = kNoNode;
  std::uint32_t first = kNoNode;  // child
  std::uint32_t next = kNoNode;   // sibling
  std::uint32_t previous = kNoNode;
  std::uint32_t nameAt = 0;
  std::int32_t wd = -1;
  std::uint16_t volume = 0;
  std::uint16_t epoch = 0;  // differs when the number was given to another directory
  std::uint8_t nameLength = 0;
  bool used : 1 = false;
  bool root : 1 = false;
  bool queued : 1 = false;     // a scan of it is waiting
  bool unwatched : 1 = false;  // has no watch although it should
  bool subtree : 1 = false;    // is marked with all below
  bool arrived : 1 = false;    // came to its place by a rename
};
static_assert(sizeof(Node) == 32);

// A node that may have gone since it was noted down.
struct NodeRef {
  std::uint32_t id = kNoNode;
  std::uint16_t epoch = 0;
};

class Tree {
 public:
  // Reference stays valid until the next make().
  Node& operator[](std::uint32_t id) { return nodes_[id]; }
  const Node& operator[](std::uint32_t id) const { return nodes_[id]; }

  std::uint32_t make(std::uint32_t parent, std::string_view name, std::uint16_t volume);
  NodeRef ref(std::uint32_t id) const { return {id, nodes_[id].epoch}; }
  bool alive(NodeRef ref) const {
    return ref.id < nodes_.size() && nodes_[ref.id].used && nodes_[ref.id].epoch == ref.epoch;
  }
  std::string_view name(std::uint32_t id) const { return {names_.data() + nodes_[id].nameAt, nodes_[id].nameLength}; }
  std::uint32_t child(std::uint32_t parent, std::string_view name) const;
  std::uint32_t byWd(std::int32_t wd) const;
  // wd -1: no watch.
  void setWd(std::uint32_t id, std::int32_t wd);

  // Takes a node with all below out of its place; it keeps its children and has no path until link().
  void detach(std::uint32_t id);
  void link(std::uint32_t id, std::uint32_t parent, std::string_view name);
  // Gives the number of a detached or leaf node free.
  void release(std::uint32_t id);

  // Path relative to the volume's root; false for a node that hangs on no root.
  bool path(std::uint32_t id, std::string& out) const;
  // Whether the node hangs on a root, and whether one above it (or itself) is marked with all below.
  bool attached(std::uint32_t id, bool* underSubtree = nullptr) const;

  // Differs whenever a node was made, moved or released.
  std::uint64_t version() const { return version_; }
  std::size_t watches() const { return byWd_.count; }
  std::size_t size() const { return used_; }
  // Bytes of memory held.
  std::size_t memory() const;

 private:
  // Open addressing over node numbers; what is compared stays in the nodes.
  struct Table {
    std::vector<std::uint32_t> slots;
    std::size_t count = 0;
  };
  template <typename HashOf>
  static void insert(Table& table, std::uint32_t id, HashOf hashOf);
  template <typename HashOf>
  static void erase(Table& table, std::uint32_t id, HashOf hashOf);
  std::uint64_t nameHash(std::uint32_t id) const;
  std::uint64_t wdHash(std::uint32_t id) const;
  std::uint32_t store(std::string_view name);
  void compactNames();

  std::vector<Node> nodes_;
  std::vector<std::uint32_t> free_;
  std::size_t used_ = 0;
  std::uint64_t version_ = 0;
  std::string names_;
  std::size_t garbage_ = 0;
  Table byName_;
  Table byWd_;
};

}  // namespace sv
