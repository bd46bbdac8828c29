/*
 * Launchers other than lockstep run clear nothing away: a rank that is started again
 * removes what its former processes have left, once nobody can want to read it. That is
 * a recorder of this job and rank, of this user, of a process that is not there and
 * has not anchored its clock for ten minutes (it may be another container's, whose
 * processes are not seen here). Of other jobs, which have names of their own as a rule, so
 * that nobody comes back for what they left, it is a day: until then somebody may look at it.
 */
#include "plugin.h"

#include <dirent.h>
#include <signal.h>

#define STALE_NS (600000 * MS)
#define OTHERS_NS (86400000 * MS)

static int is_stale(const char *path, const struct lockstep_options *o)
{
	struct lockstep_header h;
	struct stat st;
	struct timespec now;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0)
		return 0;
	int whole = !fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_uid == geteuid() && pread(fd, &h, sizeof h, 0) == sizeof h;
	close(fd);
	if (!whole || memcmp(h.magic, LOCKSTEP_MAGIC, sizeof h.magic) || h.rank != o->rank || h.job[sizeof h.job - 1])
		return 0;
	int others = strcmp((char *)h.job, o->job) != 0;
	clock_gettime(CLOCK_REALTIME, &now);
	int64_t age = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - h.anchors[h.anchor_count & 1].real;
	return age > (others ? OTHERS_NS : STALE_NS) && h.pid > 0 && kill(h.pid, 0) && errno == ESRCH;
}

HIDDEN void sweep(const struct lockstep_options *o)
{
	char path[512], rank[32], dir[384];
	DIR *d = lockstep_find_dir(o->dir, dir, sizeof dir) ? NULL : opendir(dir);
	if (!d)
		return;
	snprintf(rank, sizeof rank, ".%d.", o->rank);
	struct dirent *e;
	for (int i = 0; i < 10000 && (e = readdir(d)); i++) {
		size_t n = strlen(e->d_name);
		if (n < 5 || strcmp(e->d_name + n - 4, ".rec") || !strstr(e->d_name, rank) ||
			snprintf(path, sizeof path, "%s/%s", dir, e->d_name) >= (int)sizeof path || !is_stale(path, o))
			continue;
		unlink(path);
		memcpy(path + strlen(path) - 4, ".ctl", 4);
		unlink(path);
	}
	closedir(d);
}
