/* File systems that lack something, as a library to preload. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* FAULT="call=errno,..." and FAULT_PATH: these calls fail with errno below that path; fsync on folders,
   rename over a file that is there, modes=1 has all files open to all. */
static int wanted(const char *call) {
    const char *faults = getenv("FAULT"), *found = faults ? strstr(faults, call) : NULL;
    size_t length = strlen(call);
    return found && found[length] == '=' ? atoi(found + length + 1) : 0;
}
static int below(const char *path) {
    const char *root = getenv("FAULT_PATH");
    char real[4096];
    if (!root || !path) return 0;
    if (path[0] != '/' && realpath(path, real)) path = real;
    return strncmp(path, root, strlen(root)) == 0;
}
static int opened(int fd, int folders) {
    char link[64], path[4096];
    struct stat st;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0 || (folders && (fstat(fd, &st) || !S_ISDIR(st.st_mode)))) return 0;
    path[n] = 0;
    return below(path);
}
#define REAL(name) ((int (*)())dlsym(RTLD_NEXT, name))
int flock(int fd, int how) {
    int code = wanted("flock");
    if (code && opened(fd, 0)) { errno = code; return -1; }
    return REAL("flock")(fd, how);
}
int fsync(int fd) {
    int code = wanted("fsync");
    if (code && opened(fd, 1)) { errno = code; return -1; }
    return REAL("fsync")(fd);
}
int rename(const char *from, const char *to) {
    int code = wanted("rename");
    if (code && below(to) && !access(to, F_OK)) { errno = code; return -1; }
    return REAL("rename")(from, to);
}
static int open_to_all(int result, int here, struct stat *found) {
    if (!result && here && wanted("modes")) found->st_mode |= 0777;
    return result;
}
int stat(const char *path, struct stat *found) {
    return open_to_all(REAL("stat")(path, found), below(path), found);
}
int fstat(int fd, struct stat *found) {
    static int busy; /* `opened` asks too */
    int result = REAL("fstat")(fd, found), here = 0;
    if (!busy) { busy = 1; here = opened(fd, 0); busy = 0; }
    return open_to_all(result, here, found);
}
int stat64(const char *path, struct stat64 *found) { return stat(path, (struct stat *)found); }
int fstat64(int fd, struct stat64 *found) { return fstat(fd, (struct stat *)found); }
