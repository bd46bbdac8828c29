// Part of fake.c: memory, its registration, and mappings of physical memory.

// ---- memory ----

// A range is memory that a GPU may be asked to touch. access has a bit for each GPU.
struct range { ptr at; size_t n; enum { FREE, PLAIN, HOST, REGISTERED, RESERVED, MAPPED } kind; unsigned access; int dev; };
static struct range ranges[4096];

static struct range *find(ptr p, int reserved) {
	for (int i = 0; i < 4096; i++) {
		struct range *r = &ranges[i];
		if (r->kind != FREE && (r->kind == RESERVED) == reserved && p >= r->at && p - r->at < r->n) return r;
	}
	return 0;
}
static struct range *add(ptr at, size_t n, int kind, unsigned access, int dev) {
	for (int i = 0; i < 4096; i++)
		if (ranges[i].kind == FREE) {
			ranges[i] = (struct range){at, n, kind, access, dev};
			return &ranges[i];
		}
	abort();
}
// touchable: whole range known and open to the current GPU. Mappings side by side count as one.
static int touchable(ptr p, size_t n) {
	int ok = 1;
	pthread_mutex_lock(&mu);
	for (ptr at = p; ok && at < p + n;) {
		struct range *r = find(at, 0);
		if (!r || !(r->access >> current->dev & 1)) ok = 0;
		else at = r->at + r->n;
	}
	pthread_mutex_unlock(&mu);
	return ok;
}

static CUresult take(ptr *p, size_t n, int kind, unsigned access) {
	if (!n) return INVALID_VALUE;
	if (n > (size_t)64 << 30) return NO_MEMORY;
	void *m = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m == MAP_FAILED) return NO_MEMORY;
	if (kind == PLAIN && n < (1 << 24)) memset(m, 0xdb, n); // undefined content
	*p = (ptr)m;
	pthread_mutex_lock(&mu);
	add(*p, n, kind, access, current->dev);
	pthread_mutex_unlock(&mu);
	return 0;
}
static CUresult give(ptr p, int kind) {
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	CUresult rc = r && (int)r->kind == kind && r->at == p ? 0 : INVALID_VALUE;
	if (!rc) munmap((void *)p, r->n), r->kind = FREE;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemAlloc_v2(ptr *p, size_t n) { CONTEXT; return take(p, n, PLAIN, 1u << current->dev); }
static void drain(ctx *c);
API CUresult cuMemFree_v2(ptr p) { CONTEXT; drain(current); return give(p, PLAIN); }
API CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags) { CONTEXT; (void)flags; return take((ptr *)p, n, HOST, ~0u); }
API CUresult cuMemFreeHost(void *p) { CONTEXT; return give((ptr)p, HOST); }
// of_file reports whether memory is a mapping of a file.
static int of_file(const void *p) {
	FILE *f = fopen("/proc/self/maps", "r");
	char line[4096];
	int found = 0;
	while (f && !found && fgets(line, sizeof line, f)) {
		unsigned long from, to, inode = 0;
		if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) >= 2) found = from <= (unsigned long)p && (unsigned long)p < to && inode;
	}
	if (f) fclose(f);
	return found;
}
API CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
	CONTEXT;
	if (!p || !n || flags & ~7u) return INVALID_VALUE;
	int refused = faulty("cuMemHostRegister_file"); // as drivers refuse memory of files on disks
	if (refused && of_file(p)) return refused;
	pthread_mutex_lock(&mu);
	CUresult rc = find((ptr)p, 0) ? ALREADY_REGISTERED : 0;
	if (!rc) add((ptr)p, n, REGISTERED, ~0u, current->dev);
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemHostUnregister(void *p) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	struct range *r = find((ptr)p, 0);
	CUresult rc = r && r->kind == REGISTERED && r->at == (ptr)p ? 0 : NOT_REGISTERED;
	if (!rc) r->kind = FREE;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemHostGetDevicePointer_v2(ptr *d, void *p, unsigned flags) {
	CONTEXT;
	(void)flags;
	pthread_mutex_lock(&mu);
	struct range *r = find((ptr)p, 0);
	CUresult rc = r && (r->kind == HOST || r->kind == REGISTERED) ? 0 : INVALID_VALUE;
	pthread_mutex_unlock(&mu);
	*d = (ptr)p;
	return rc;
}
API CUresult cuMemGetAddressRange_v2(ptr *base, size_t *n, ptr p) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	CUresult rc = r && r->kind != REGISTERED ? 0 : NOT_FOUND;
	if (!rc) *base = r->at, *n = r->n;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuPointerGetAttribute(void *out, int a, ptr p) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	CUresult rc = r ? 0 : INVALID_VALUE;
	if (!rc) switch (a) {
		case 2: *(unsigned *)out = r->kind == HOST || r->kind == REGISTERED ? 1 : 2; break;
		case 9: *(int *)out = r->dev; break;
		default: rc = INVALID_VALUE;
		}
	pthread_mutex_unlock(&mu);
	return rc;
}

// ---- virtual memory: physical memory is a memfd, its name says whose ----

struct prop { int type, handles, kind, id; void *win32; unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; };
typedef struct memory { int fd, dev, users; size_t n; int rdma; } memory;
struct mapping { ptr at; memory *m; struct mapping *next; };
static struct mapping *mappings;

static int valid(const struct prop *p) { return p->type == 1 && p->handles == 1 && p->kind == 1 && p->id >= first && p->id < first + gpus && !p->win32; }
static void drop(memory *m) { if (--m->users == 0) close(m->fd), free(m); }

API CUresult cuMemGetAllocationGranularity(size_t *n, const struct prop *p, int option) {
	CONTEXT;
	if (!valid(p) || option < 0 || option > 1) return INVALID_VALUE;
	*n = GRANULARITY;
	return 0;
}
API CUresult cuMemCreate(memory **h, size_t n, const struct prop *p, uint64_t flags) {
	CONTEXT;
	if (!valid(p) || flags || !n || n % GRANULARITY) return INVALID_VALUE;
	if (n > (size_t)64 << 30) return NO_MEMORY;
	char name[32];
	snprintf(name, sizeof name, "fakegpu%d", p->id);
	int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, n)) { if (fd >= 0) close(fd); return NO_MEMORY; }
	*h = malloc(sizeof **h);
	**h = (memory){fd, p->id, 1, n, p->rdma};
	return 0;
}
API CUresult cuMemRelease(memory *m) {
	CONTEXT;
	pthread_mutex_lock(&mu);
	drop(m);
	pthread_mutex_unlock(&mu);
	return 0;
}
API CUresult cuMemExportToShareableHandle(int *fd, memory *m, int type, uint64_t flags) {
	CONTEXT;
	if (type != 1 || flags) return INVALID_VALUE;
	*fd = dup(m->fd);
	return *fd < 0 ? NO_MEMORY : 0;
}
API CUresult cuMemImportFromShareableHandle(memory **h, void *os, int type) {
	CONTEXT;
	char path[64], name[64] = "";
	int fd = (int)(intptr_t)os, dev;
	struct stat st;
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	if (type != 1 || readlink(path, name, sizeof name - 1) < 0 || sscanf(name, "/memfd:fakegpu%d", &dev) != 1 || fstat(fd, &st)) return INVALID_VALUE;
	*h = malloc(sizeof **h);
	**h = (memory){dup(fd), dev, 1, st.st_size, 0};
	return 0;
}
API CUresult cuMemAddressReserve(ptr *p, size_t n, size_t align, ptr want, uint64_t flags) {
	CONTEXT;
	(void)want;
	if (!n || n % GRANULARITY || align & (align - 1) || flags) return INVALID_VALUE;
	if (align < GRANULARITY) align = GRANULARITY;
	char *m = mmap(0, n + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m == MAP_FAILED) return NO_MEMORY;
	char *a = (char *)(((uintptr_t)m + align - 1) & ~(uintptr_t)(align - 1));
	if (a > m) munmap(m, a - m);
	munmap(a + n, align - (a - m));
	*p = (ptr)a;
	pthread_mutex_lock(&mu);
	add(*p, n, RESERVED, 0, current->dev);
	pthread_mutex_unlock(&mu);
	return 0;
}
API CUresult cuMemAddressFree(ptr p, size_t n) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 1);
	int busy = 0;
	for (struct mapping *m = mappings; m; m = m->next) busy |= m->at >= p && m->at - p < n;
	if (r && r->at == p && r->n == n && !busy) r->kind = FREE, munmap((void *)p, n), rc = 0;
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemMap(ptr p, size_t n, size_t offset, memory *m, uint64_t flags) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 1);
	if (r && p - r->at + n <= r->n && !(p % GRANULARITY) && !offset && !flags && n == m->n && !find(p, 0) &&
	    mmap((void *)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, m->fd, 0) != MAP_FAILED) {
		add(p, n, MAPPED, 0, m->dev);
		struct mapping *e = malloc(sizeof *e);
		*e = (struct mapping){p, m, mappings};
		mappings = e, m->users++, rc = 0;
	}
	pthread_mutex_unlock(&mu);
	return rc;
}
API CUresult cuMemUnmap(ptr p, size_t n) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	if (r && r->kind == MAPPED && r->at == p && r->n == n) {
		mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		r->kind = FREE, rc = 0;
		for (struct mapping **e = &mappings; *e; e = &(*e)->next)
			if ((*e)->at == p) {
				struct mapping *gone = *e;
				*e = gone->next;
				drop(gone->m), free(gone);
				break;
			}
	}
	pthread_mutex_unlock(&mu);
	return rc;
}
struct access { int kind, id, flags; };
API CUresult cuMemSetAccess(ptr p, size_t n, const struct access *d, size_t count) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	struct range *r = find(p, 0);
	if (r && r->kind == MAPPED && r->at == p && r->n == n && count == 1 && d->kind == 1 && d->flags == 3 && d->id >= first && d->id < first + gpus) {
		rc = apart[d->id] >> r->dev & 1 ? PEER_UNSUPPORTED : 0;
		if (!rc) mprotect((void *)p, n, PROT_READ | PROT_WRITE), r->access |= 1u << d->id;
	}
	pthread_mutex_unlock(&mu);
	return rc;
}

// A DMA buffer is the memfd itself, so a range has to begin where a mapping does.
API CUresult cuMemGetHandleForAddressRange(void *handle, ptr p, size_t n, int type, uint64_t flags) {
	CONTEXT;
	CUresult rc = INVALID_VALUE;
	pthread_mutex_lock(&mu);
	for (struct mapping *e = mappings; e && type == 1 && !flags; e = e->next)
		if (e->at == p && n && !(n % 4096) && n <= e->m->n && e->m->rdma) {
			*(int *)handle = fcntl(e->m->fd, F_DUPFD_CLOEXEC, 0);
			rc = 0;
			break;
		}
	pthread_mutex_unlock(&mu);
	return rc;
}
