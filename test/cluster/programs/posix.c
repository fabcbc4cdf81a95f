/**
 * What a program may expect of a local file system, one line a point: its name and what came of it. Run in a volume and
 * beside it, both must say the same.
 *
 *     posix check FOLDER   all points
 *     posix hold FILE      takes an exclusive flock(2), says so and keeps it until it is killed
 *     posix try FILE       says whether it got that lock
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { RENAMES = 400, CONTENT = 8192, APPENDS = 500, LINE = 100 };

/** "ok", or what errno says. */
static const char *came(int result) { return result < 0 ? strerrorname_np(errno) : "ok"; }

static void tell(const char *point, const char *result) { printf("%s: %s\n", point, result); }

static int put(const char *name, const char *text) {
  int fd = open(name, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (fd < 0) return -1;
  ssize_t length = (ssize_t)strlen(text);
  int result = write(fd, text, (size_t)length) == length ? fsync(fd) : -1;
  close(fd);
  return result;
}

/** Exit status of a process that runs `body`. */
static int child(int (*body)(void)) {
  pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/** One process replaces a file again and again, another one must always find one whole content. */
static void atomic_rename(void) {
  static char content[CONTENT + 1];
  memset(content, 'A', CONTENT);
  put("saved", content);
  pid_t writer = fork();
  if (writer == 0) {
    for (int i = 0; i < RENAMES; i++) {
      memset(content, 'A' + i % 26, CONTENT);
      int fd = open("saved.new", O_CREAT | O_TRUNC | O_WRONLY, 0644);
      if (fd < 0 || write(fd, content, CONTENT) != CONTENT) _exit(1);
      if (i % 50 == 0 && fsync(fd) < 0) _exit(2);
      close(fd);
      if (rename("saved.new", "saved") < 0) _exit(3);
    }
    _exit(0);
  }
  const char *found = "whole each time";
  int status = 0;
  long reads = 0;
  do {
    char text[CONTENT + 1];
    int fd = open("saved", O_RDONLY);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text);
    if (fd >= 0) close(fd);
    reads++;
    if (got != CONTENT) found = "missing or short";
    for (ssize_t i = 1; i < got; i++)
      if (text[i] != text[0]) found = "mixed";
  } while (waitpid(writer, &status, WNOHANG) == 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) found = "the writer failed";
  tell("atomic rename", reads > 0 ? found : "never read");
}

static int second_flock(void) {
  int fd = open("lock", O_RDWR);
  return flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
}

static int second_range(void) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 10};
  int fd = open("lock", O_RDWR);
  return fcntl(fd, F_SETLK, &lock) == 0 ? 0 : errno;
}

static void locks(void) {
  int fd = open("lock", O_CREAT | O_RDWR, 0644);
  flock(fd, LOCK_EX);
  tell("flock of a second process", child(second_flock) == EWOULDBLOCK ? "refused" : "given");
  flock(fd, LOCK_UN);
  tell("flock after the first ended", child(second_flock) == 0 ? "given" : "refused");
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 15};
  fcntl(fd, F_SETLK, &lock);
  int range = child(second_range);
  tell("record lock that overlaps", range == EAGAIN || range == EACCES ? "refused" : "given");
  lock.l_len = 10;
  lock.l_type = F_UNLCK;
  lock.l_start = 10;
  fcntl(fd, F_SETLK, &lock);
  tell("record lock beside it", child(second_range) == 0 ? "given" : "refused");
  close(fd);
}

static int append_lines(void) {
  char line[LINE + 1];
  memset(line, 'a' + getpid() % 26, LINE - 1);
  line[LINE - 1] = '\n';
  int fd = open("appended", O_WRONLY | O_APPEND);
  for (int i = 0; i < APPENDS; i++)
    if (write(fd, line, LINE) != LINE) return 1;
  return 0;
}

static void appends(void) {
  put("appended", "");
  pid_t pid = fork();
  if (pid == 0) _exit(append_lines());
  append_lines();
  waitpid(pid, NULL, 0);
  int fd = open("appended", O_RDONLY);
  char line[LINE];
  int whole = 0;
  while (read(fd, line, LINE) == LINE) {
    int same = line[LINE - 1] == '\n';
    for (int i = 1; i < LINE - 1; i++) same = same && line[i] == line[0];
    whole += same;
  }
  close(fd);
  tell("appends of two processes", whole == 2 * APPENDS ? "none torn, none lost" : "torn or lost");
}

static void mapping(void) {
  long page = sysconf(_SC_PAGESIZE);
  int fd = open("mapped", O_CREAT | O_TRUNC | O_RDWR, 0644);
  if (ftruncate(fd, page * 4) < 0) return tell("mmap", came(-1));
  char *memory = mmap(NULL, (size_t)page * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return tell("mmap", came(-1));
  memcpy(memory + page * 2, "through the mapping", 20);
  tell("msync", came(msync(memory, (size_t)page * 4, MS_SYNC)));
  char text[20] = "";
  tell("mmap is read", pread(fd, text, 20, page * 2) == 20 && strcmp(text, "through the mapping") == 0 ? "yes" : "no");
  if (pwrite(fd, "through write", 14, page * 3) != 14) tell("pwrite", came(-1));
  tell("write is mapped", strcmp(memory + page * 3, "through write") == 0 ? "yes" : "no");
  munmap(memory, (size_t)page * 4);
  close(fd);
}

static void names(void) {
  put("one", "1");
  put("two", "2");
  tell("rename, not over another", came(renameat2(AT_FDCWD, "one", AT_FDCWD, "two", RENAME_NOREPLACE)));
  tell("rename, exchange", came(renameat2(AT_FDCWD, "one", AT_FDCWD, "two", RENAME_EXCHANGE)));
  tell("hard link", came(link("one", "three")));
  struct stat info;
  stat("one", &info);
  tell("names of it", info.st_nlink == 2 ? "2" : "another number");
  tell("symbolic link", came(symlink("one", "symbolic")));
  tell("pipe", came(mkfifo("pipe", 0600)));
  struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "socket"};
  tell("socket", came(bind(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr *)&address, sizeof address)));
  char longest[256];
  memset(longest, 'n', 255);
  longest[255] = 0;
  tell("name of 255 bytes", came(put(longest, "")));
  tell("name that is no UTF-8", came(put("\xff\xfe", "")));
  mkdir("folder", 0755);
  put("folder/file", "");
  tell("rename of a folder", came(rename("folder", "moved")));
  tell("its file", came(access("moved/file", F_OK)));
  tell("rmdir, not empty", came(rmdir("moved")));
}

static void contents(void) {
  int fd = open(".", O_TMPFILE | O_RDWR, 0644);
  tell("file without a name", came(fd));
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  tell("its first name", came(linkat(AT_FDCWD, path, AT_FDCWD, "named", AT_SYMLINK_FOLLOW)));
  close(fd);
  fd = open("unlinked", O_CREAT | O_RDWR, 0644);
  unlink("unlinked");
  char byte = 'x';
  tell("write without a name", write(fd, &byte, 1) == 1 && pread(fd, &byte, 1, 0) == 1 ? "ok" : came(-1));
  close(fd);
  fd = open("sparse", O_CREAT | O_RDWR, 0644);
  tell("size of 8 GiB", came(ftruncate(fd, 8LL << 30)));
  struct stat info;
  fstat(fd, &info);
  tell("it takes", info.st_blocks == 0 ? "nothing" : "room");
  tell("fallocate", came(fallocate(fd, 0, 0, 1 << 20)));
  tell("hole", came(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 8192)));
  tell("fdatasync", came(fdatasync(fd)));
  close(fd);
  void *block = NULL;
  if (posix_memalign(&block, 4096, 4096) != 0) return tell("memory", "none");
  memset(block, 'd', 4096);
  fd = open("direct", O_CREAT | O_RDWR | O_DIRECT | O_DSYNC, 0644);
  tell("O_DIRECT and O_DSYNC", fd < 0 || write(fd, block, 4096) != 4096 ? came(-1) : "ok");
  close(fd);
  tell("extended attribute", came(setxattr("direct", "user.key", "value", 5, 0)));
  struct timespec times[2] = {{1, 123456789}, {2, 987654321}};
  utimensat(AT_FDCWD, "direct", times, 0);
  stat("direct", &info);
  tell("times", info.st_mtim.tv_sec == 2 && info.st_mtim.tv_nsec == 987654321 ? "to the nanosecond" : "coarse");
  chmod("direct", 06755);
  stat("direct", &info);
  tell("modes", (info.st_mode & 07777) == 06755 ? "all bits" : "lost");
  fd = open(".", O_RDONLY | O_DIRECTORY);
  tell("fsync of a folder", came(fsync(fd)));
  close(fd);
}

int main(int count, char **words) {
  if (count != 3) return 2;
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (strcmp(words[1], "check") == 0) {
    if (chdir(words[2]) < 0) return perror(words[2]), 1;
    fflush(stdout);
    atomic_rename();
    locks();
    appends();
    mapping();
    names();
    contents();
    return 0;
  }
  int fd = open(words[2], O_CREAT | O_RDWR, 0644);
  int result = flock(fd, LOCK_EX | LOCK_NB);
  puts(result == 0 ? "locked" : came(result));
  if (strcmp(words[1], "hold") == 0)
    for (;;) pause();
  return 0;
}
