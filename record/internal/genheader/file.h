/* ---- the file ---- */

/* Pairs MONOTONIC and REALTIME anew. One thread calls it, at least every 10 s. */
static inline void lockstep_anchor(struct lockstep_writer *w)
{
	if (!w->hdr)
		return;
	int64_t mono = 0, real = 0, width = INT64_MAX;
	for (int i = 0; i < 4; i++) { /* the tightest: preemption between the reads is the only error */
		struct timespec t;
		int64_t before = lockstep_now();
		clock_gettime(CLOCK_REALTIME, &t);
		int64_t d = lockstep_now() - before;
		if (d < width) {
			width = d, mono = before + d / 2;
			real = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
		}
	}
	/* The slot not in use is filled and then made current: dying between leaves the old one. */
	uint64_t n = w->hdr->anchor_count + 1;
	LOCKSTEP_SET(&w->hdr->anchors[n & 1].mono, mono);
	LOCKSTEP_SET(&w->hdr->anchors[n & 1].real, real);
	LOCKSTEP_STORE(&w->hdr->anchor_count, n);
}

/* Reads a small file as a string; -1 and errno when it cannot. */
static inline int lockstep_slurp(const char *path, char *buf, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t n = read(fd, buf, size - 1);
	int saved = errno;
	close(fd);
	errno = saved;
	buf[n > 0 ? n : 0] = 0;
	return n > 0 ? 0 : -1;
}

/* Field 22 of /proc/self/stat. */
static inline int lockstep_start_time(uint64_t *start)
{
	char buf[1024], *p;
	if (lockstep_slurp("/proc/self/stat", buf, sizeof buf))
		return -1;
	p = strrchr(buf, ')'); /* the command name may hold anything */
	for (int field = 2; p && field < 22; field++)
		p = strchr(p + 1, ' ');
	if (!p) {
		errno = EBADMSG;
		return -1;
	}
	*start = strtoull(p + 1, NULL, 10);
	return 0;
}

static inline int lockstep_boot_id(uint8_t id[16])
{
	char buf[64];
	int digits = 0;
	if (lockstep_slurp("/proc/sys/kernel/random/boot_id", buf, sizeof buf))
		return -1;
	for (const char *p = buf; *p && digits < 32; p++) {
		char c = *p;
		int v = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
		if (v < 0)
			continue;
		id[digits / 2] = (uint8_t)(id[digits / 2] << 4 | v);
		digits++;
	}
	if (digits == 32)
		return 0;
	errno = EBADMSG;
	return -1;
}

static inline uint32_t lockstep_slots(uint32_t n, uint32_t dflt, uint32_t max)
{
	n = n ? n : dflt;
	return n < max ? n : max;
}

/* lockstep_use_dir makes dir when it is missing, and refuses one in which another user
 * could put or swap files, and a symbolic link. */
static inline int lockstep_use_dir(const char *dir)
{
	struct stat st;
	int fd, bad;

	if (mkdir(dir, 0700) && errno != EEXIST)
		return -1;
	if ((fd = open(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0)
		return -1;
	bad = fstat(fd, &st);
	close(fd);
	if (bad)
		return -1;
	if ((st.st_mode & S_ISVTX) && (!st.st_uid || st.st_uid == geteuid()))
		return 0; /* as /dev/shm itself */
	if (st.st_uid != geteuid() || (st.st_mode & 022)) {
		errno = EPERM;
		return -1;
	}
	return 0;
}

/* lockstep_find_dir writes the user's runtime directory into dir: as record.Dir does in
 * Go, which says why. */
static inline int lockstep_find_dir(const char *given, char *dir, size_t size)
{
	struct stat st;
	const char *named = given ? given : getenv("LOCKSTEP_RUNTIME_DIR");
	const char *form = "%s-%u";
	char base[384];
	int set = named && *named;
	size_t n;

	if (!set)
		named = "/dev/shm/lockstep";
	for (n = strlen(named); n > 1 && named[n - 1] == '/';) /* a slash at the end follows a symbolic link */
		n--;
	if (n + 12 > size || n >= sizeof base) {
		errno = ENAMETOOLONG;
		return -1;
	}
	memcpy(base, named, n);
	base[n] = 0;
	if (!given && !stat(base, &st) && S_ISDIR(st.st_mode) && (st.st_mode & S_ISVTX) && (st.st_mode & 02) && (!st.st_uid || st.st_uid == geteuid())) {
		form = "%s/%u"; /* root has made it for everybody */
	} else if (set && !lockstep_use_dir(base)) {
		snprintf(dir, size, "%s", base);
		return 0;
	}
	if (given)
		return -1;
	snprintf(dir, size, form, base, (unsigned)geteuid());
	return lockstep_use_dir(dir);
}

/* Gives a file its size and its memory, a piece at a time: kernels that a signal interrupts begin a piece all over, and
 * a program that is profiled gets one every millisecond. Returns 0, or an error's number. */
static inline int lockstep_reserve(int fd, uint64_t size)
{
	const uint64_t piece = 64 << 10;
	for (uint64_t at = 0; at < size; at += piece) {
		int err = EINTR;
		for (int i = 0; i < 1000 && err == EINTR; i++)
			err = posix_fallocate(fd, (off_t)at, (off_t)(size - at < piece ? size - at : piece));
		if (err)
			return err;
	}
	return 0;
}

/*
 * Makes a recorder file <job>.<rank>.<pid>.rec, mode 0600. It appears under its
 * name only when its header is complete, and its memory is reserved first.
 * Returns 0, or -1 with errno and w turned off: the program can go on without.
 */
static inline int lockstep_create(struct lockstep_writer *w, const struct lockstep_options *o)
{
	char tmp[sizeof w->path], job[LOCKSTEP_NAME_SIZE] = "job";
	struct lockstep_header h;
	int fd = -1, saved, n;
	char *mem = (char *)MAP_FAILED;
	char dir[384];

	memset(w, 0, sizeof *w);
	memset(&h, 0, sizeof h);
	memcpy(h.magic, LOCKSTEP_MAGIC, sizeof h.magic);
	h.version = LOCKSTEP_LAYOUT_VERSION;
	h.header_size = LOCKSTEP_HEADER_SIZE;
	h.comm_slots = lockstep_slots(o->comm_slots, LOCKSTEP_DEFAULT_COMM_SLOTS, LOCKSTEP_MAX_COMM_SLOTS);
	h.conn_slots = lockstep_slots(o->conn_slots, LOCKSTEP_DEFAULT_CONN_SLOTS, LOCKSTEP_MAX_CONN_SLOTS - 1);
	uint32_t want = lockstep_slots(o->ring_slots, LOCKSTEP_DEFAULT_RING_SLOTS, LOCKSTEP_MAX_RING_SLOTS);
	if (o->marks_only) {
		h.comm_slots = h.conn_slots = 0;
		want = LOCKSTEP_MARKS_RING_SLOTS;
	}
	for (h.ring_slots = 1; h.ring_slots < want;)
		h.ring_slots *= 2;
	uint64_t comms = LOCKSTEP_HEADER_SIZE;
	uint64_t conns = comms + (uint64_t)h.comm_slots * LOCKSTEP_COMM_ENTRY_SIZE;
	uint64_t ring = conns + (uint64_t)h.conn_slots * LOCKSTEP_CONN_ENTRY_SIZE; /* no tables of a GPU in between */
	h.file_size = ring + (uint64_t)h.ring_slots * LOCKSTEP_RECORD_SIZE;

	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	h.created = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
	h.pid = (int32_t)getpid();
	h.rank = o->rank, h.world_size = o->world_size, h.local_rank = o->local_rank, h.attempt = o->attempt;
	h.source = o->source, h.source_version = o->source_version;
	lockstep_put_name(h.job, o->job);
	lockstep_put_name(h.node, o->node);
	if (lockstep_start_time(&h.start_time) || lockstep_boot_id(h.boot_id))
		return -1;

	if (lockstep_find_dir(o->dir, dir, sizeof dir))
		return -1;
	if (h.job[0])
		memcpy(job, h.job, sizeof job);
	for (char *p = job; *p; p++)
		if (!((*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || (*p >= '0' && *p <= '9') || *p == '-'))
			*p = '_';
	if (snprintf(tmp, sizeof tmp, "%s/.new-XXXXXX", dir) >= (int)sizeof tmp) {
		errno = ENAMETOOLONG;
		return -1;
	}
	if ((fd = mkostemp(tmp, O_CLOEXEC)) < 0) /* O_EXCL, 0600 */
		return -1;
	struct rlimit most; /* beyond it the kernel sends SIGXFSZ, which ends a program that does not expect it */
	if (!getrlimit(RLIMIT_FSIZE, &most) && most.rlim_cur != RLIM_INFINITY && most.rlim_cur < h.file_size) {
		errno = EFBIG;
		goto fail;
	}
	if ((errno = lockstep_reserve(fd, h.file_size)))
		goto fail;
	mem = (char *)mmap(NULL, h.file_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mem == (char *)MAP_FAILED)
		goto fail;
	memcpy(mem, &h, sizeof h);
	w->hdr = (struct lockstep_header *)(void *)mem;
	w->comms = (struct lockstep_comm *)(void *)(mem + comms);
	w->conns = (struct lockstep_conn *)(void *)(mem + conns);
	w->ring = (struct lockstep_record *)(void *)(mem + ring);
	w->mask = h.ring_slots - 1;
	lockstep_anchor(w);

	n = snprintf(w->path, sizeof w->path, "%s/%s.%d.%d.rec", dir, job, h.rank, h.pid);
	for (int i = 2; link(tmp, w->path); i++) { /* taken: a second recorder of this process, or a dead one's */
		if (errno != EEXIST || i > 100)
			goto fail;
		n = snprintf(w->path, sizeof w->path, "%s/%s.%d.%d-%d.rec", dir, job, h.rank, h.pid, i);
	}
	if (n >= (int)sizeof w->path) {
		errno = ENAMETOOLONG;
		goto fail;
	}
	unlink(tmp);
	close(fd);
	return 0;
fail:
	saved = errno;
	if (mem != (char *)MAP_FAILED)
		munmap(mem, h.file_size);
	unlink(tmp);
	close(fd);
	memset(w, 0, sizeof *w);
	errno = saved;
	return -1;
}

/* Marks the file as left in good order and unmaps it. No other thread may use
 * w or its slots any more. The file stays, for readers to finish. */
static inline void lockstep_close(struct lockstep_writer *w)
{
	if (!w->hdr)
		return;
	uint64_t size = w->hdr->file_size;
	LOCKSTEP_STORE(&w->hdr->closed, (uint64_t)1);
	munmap((void *)w->hdr, size);
	memset(w, 0, sizeof *w);
}
