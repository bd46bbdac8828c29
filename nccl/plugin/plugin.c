/*
 * What NCCL calls, and the life of the plugin: the recorder opens with the first
 * communicator and stays until the process ends (the library is never unloaded), one
 * helper thread runs, a forked child begins anew with a recorder of its own.
 */
#include "plugin.h"

#include <signal.h>

#define HELPER_NS (50 * MS)
#define IDLE_NS (5000 * MS)
#define CONTROL_NS (250 * MS)
#define ANCHOR_NS (5000 * MS)

HIDDEN struct plugin plugin; /* all zero: its pages are taken as they are used */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of init, finalize, fork and the helper */
static pthread_cond_t wake;
static int control = -1; /* file descriptor */

/* The events of a set, as the version has them. Operations are always among them: their numbers must agree on all ranks. */
static int mask_of(int set, int version)
{
	int mask = NCCL_COLL | NCCL_P2P | NCCL_KERNEL_CH;
	if (set == LOCKSTEP_EVENTS_DEFAULT)
		set = LOCKSTEP_EVENTS_NET;
	if (version >= 5)
		mask |= NCCL_GROUP_API | NCCL_COLL_API | NCCL_P2P_API;
	if (version >= 6)
		mask |= NCCL_CE_COLL;
	if (set >= LOCKSTEP_EVENTS_NET)
		mask |= NCCL_PROXY_OP | NCCL_PROXY_STEP;
	if (set >= LOCKSTEP_EVENTS_ALL)
		mask |= NCCL_NET_PLUGIN | (version >= 5 ? NCCL_KERNEL_LAUNCH : 0);
	return mask;
}

/* What is left of the default set between samples: the calls, and transfers where there is a network. */
static int quiet_mask(int version)
{
	int mask = NCCL_GROUP_API | NCCL_COLL_API | NCCL_P2P_API | (version >= 6 ? NCCL_CE_COLL : 0);
	return PEEK(&plugin.sampling.network) ? mask | NCCL_PROXY_OP | NCCL_PROXY_STEP : mask;
}

/* ---- the helper ---- */

/* NCCL reads its mask at each group's start. Callers write it too, without the lock, and that of each other library in the
 * process: who does holds sampling.turning, which forget_mask waits for. */
HIDDEN void set_masks(int quiet)
{
	uint32_t n = LOAD(&plugin.nmasks);
	for (uint32_t i = 0; i < n; i++) {
		int version = PEEK(&plugin.masks[i].version);
		SET(PEEK(&plugin.masks[i].mask), quiet && version >= 5 ? quiet_mask(version) : mask_of(PEEK(&plugin.set), version));
	}
}

static void use_events(int set)
{
	SET(&plugin.set, set);
	if (plugin.nmasks)
		SET(&plugin.w.hdr->event_mask, (uint64_t)mask_of(set, plugin.masks[0].version));
	sample_reset();
}

/* What the agent asks for. It is read, not mapped: a file that somebody cuts short hurts nobody. */
static void look_at_control(void)
{
	struct lockstep_control c;
	if (control < 0 || pread(control, &c, sizeof c, 0) != sizeof c ||
		memcmp(c.magic, LOCKSTEP_CONTROL_MAGIC, sizeof c.magic) || c.version != LOCKSTEP_CONTROL_VERSION || c.events > LOCKSTEP_EVENTS_ALL)
		return;
	int set = c.events == LOCKSTEP_EVENTS_DEFAULT ? plugin.chosen : (int)c.events;
	if (set != plugin.set)
		use_events(set);
}

static void look_at_comms(int64_t now)
{
	uint32_t used = LOAD(&plugin.used);
	for (uint32_t i = 0; i < used; i++) {
		struct comm *c = &plugin.comms[i];
		uint32_t gen = LOAD(&c->gen);
		if (gen & 1 && PEEK(&c->called) != PEEK(&c->finished))
			settle(c, gen, now, 1);
	}
}

static void *help(void *arg)
{
	(void)arg;
	int64_t anchored = lockstep_now(), looked = 0;
	pthread_mutex_lock(&lock);
	for (;;) {
		int64_t now = lockstep_now(), until = now + (plugin.alive ? HELPER_NS : IDLE_NS);
		struct timespec t = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
		pthread_cond_timedwait(&wake, &lock, &t);
		now = lockstep_now();
		SET(&plugin.tick, now);
		if (now - anchored >= ANCHOR_NS) {
			lockstep_anchor(&plugin.w);
			anchored = now;
		}
		if (now - looked >= CONTROL_NS) {
			look_at_control();
			looked = now;
		}
		look_at_comms(now);
		sample_rest(now);
	}
	return NULL;
}

static int create_helper(pthread_t *t, size_t stack)
{
	pthread_attr_t attr;
	if (pthread_attr_init(&attr))
		return -1;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	if (stack)
		pthread_attr_setstacksize(&attr, stack);
	int err = pthread_create(t, &attr, help, NULL);
	pthread_attr_destroy(&attr);
	return err;
}

/* A process that has no thread for it goes without: what NCCL tells of is recorded all the same. A program's thread-local
 * variables lie on each thread's stack: where they are larger than the small one, it gets one of the usual size. */
static void start_helper(void)
{
	pthread_condattr_t cond;
	pthread_t t;
	sigset_t all, before;
	if (plugin.helping)
		return;
	pthread_condattr_init(&cond);
	pthread_condattr_setclock(&cond, CLOCK_MONOTONIC);
	pthread_cond_init(&wake, &cond);
	pthread_condattr_destroy(&cond);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's */
	plugin.helping = !create_helper(&t, 128 << 10) || !create_helper(&t, 0);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (plugin.helping)
		pthread_setname_np(t, "lockstep-nccl");
}

/* ---- fork and exit ---- */

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

/* The child has none of the parent's communicators, and must not write into its recorder. */
static void in_child(void)
{
	for (uint32_t i = 0; i < plugin.used; i++) {
		struct comm *c = &plugin.comms[i];
		c->gen += c->gen & 1; /* what the parent gave out means nothing here */
		c->rec = NULL, c->left = 0, c->busy = c->dirty = 0;
	}
	plugin.used = plugin.alive = plugin.nmasks = 0;
	plugin.first_left = plugin.last_left = NULL;
	STORE(&plugin.opened, 0);
	plugin.helping = 0;
	if (plugin.live)
		SET(plugin.live, 0);
	if (control >= 0)
		close(control);
	control = -1;
	if (plugin.w.hdr)
		munmap((void *)plugin.w.hdr, plugin.w.hdr->file_size);
	memset(&plugin.w, 0, sizeof plugin.w);
	memset(plugin.conns, 0, sizeof plugin.conns);
	plugin.conns_busy = 0;
	plugin.gpu_end = 0;
	memset(&plugin.sampling, 0, sizeof plugin.sampling);
	pthread_mutex_unlock(&lock);
}

/* A child that was made without the library's fork: nobody has told it what it is. It begins anew before it takes the lock, which
 * may be held by a thread that it does not have; its own threads wait for the first of them. */
static void begin_anew(void)
{
	uint32_t none = 0, *begun;
	if (LOAD(&plugin.opened) != 1 || is_live())
		return;
	begun = plugin.live + 1; /* of the page that is wiped: 0 in such a child only */
	if (CAS(begun, &none, (uint32_t)1)) {
		pthread_mutex_init(&lock, NULL);
		pthread_mutex_lock(&lock);
		in_child();
		STORE(begun, (uint32_t)2);
	}
	for (int i = 0; i < 10000 && LOAD(begun) == 1; i++)
		usleep(100);
}

/* A clean end closes the recorder: status 0, or communicators all destroyed. It stays mapped: threads may still run. */
static void at_exit(int status, void *arg)
{
	(void)arg;
	if (is_live() && plugin.w.hdr && (status == 0 || PEEK(&plugin.alive) == 0))
		STORE(&plugin.w.hdr->closed, (uint64_t)1);
}

/* ---- opening ---- */

static void say(const char *fmt, ...)
{
	char text[512];
	va_list args;
	va_start(args, fmt);
	vsnprintf(text, sizeof text, fmt, args);
	va_end(args);
	fprintf(stderr, "lockstep: %s\n", text);
	if (plugin.log)
		plugin.log(2 /* WARN */, ~0UL, __FILE__, __LINE__, "%s", text);
}

static void make_control(void)
{
	char path[sizeof plugin.w.path];
	size_t n = strlen(plugin.w.path);
	struct lockstep_control c = {.version = LOCKSTEP_CONTROL_VERSION, .size = sizeof c, .events = LOCKSTEP_EVENTS_DEFAULT};
	memcpy(c.magic, LOCKSTEP_CONTROL_MAGIC, sizeof c.magic);
	snprintf(path, sizeof path, "%.*s.ctl", (int)(n - 4), plugin.w.path);
	unlink(path); /* of a dead process of this number */
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd >= 0 && write(fd, &c, sizeof c) != sizeof c) {
		close(fd);
		unlink(path);
		fd = -1;
	}
	control = fd;
}

static void open_plugin(int version, int32_t rank, int32_t ranks)
{
	static int once;
	char job[64], node[64];
	struct lockstep_options o = {
		.comm_slots = MAX_COMMS, .conn_slots = MAX_CONNS, .ring_slots = RING_SLOTS,
		.source = LOCKSTEP_SOURCE_NCCL_PLUGIN, .source_version = (uint32_t)version,
	};
	STORE(&plugin.opened, -1);
	if ((plugin.chosen = chosen_events()) < 0)
		return;
	if (!plugin.live) {
		void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (page == MAP_FAILED) {
			say("no memory for the profiler plugin, nothing is recorded: %s", strerror(errno));
			return;
		}
		(void)madvise(page, 4096, MADV_WIPEONFORK); /* where the kernel cannot, pthread_atfork does */
		plugin.live = page;
	}
	identify(&o, rank, ranks, job, node);
	sweep(&o);
	if (pools_init() || lockstep_create(&plugin.w, &o)) {
		say("no flight recorder, so nobody sees what rank %d does: %s; make room or set LOCKSTEP_RUNTIME_DIR, or LOCKSTEP_RECORDER=off", o.rank, strerror(errno));
		return;
	}
	make_control();
	plugin.transport = network();
	plugin.salt = (uint32_t)(plugin.w.hdr->start_time * 2654435761u) ^ (uint32_t)getpid() << 8 ^ 0x4c530000;
	if (!once) {
		once = 1;
		pthread_atfork(before_fork, after_fork, in_child);
		on_exit(at_exit, NULL);
	}
	SET(plugin.live, 1);
	STORE(&plugin.opened, 1);
	plugin.set = plugin.chosen;
}

/* ---- what NCCL calls ---- */

/* A communicator more has this mask. Returns it, or NULL when it is not kept. */
static int *keep_mask(int *mask, int version)
{
	uint32_t i = 0;
	while (i < plugin.nmasks && plugin.masks[i].mask != mask)
		i++;
	if (i == sizeof plugin.masks / sizeof *plugin.masks)
		return NULL;
	if (i == plugin.nmasks) {
		SET(&plugin.masks[i].mask, mask);
		SET(&plugin.masks[i].version, version);
		plugin.masks[i].comms = 0;
		STORE(&plugin.nmasks, i + 1);
	}
	plugin.masks[i].comms++;
	return mask;
}

/* A communicator less has this mask. After its last one the library may go, and the mask with it, while others stay. */
static void forget_mask(const int *mask)
{
	uint32_t i = 0, last = plugin.nmasks - 1;
	while (i < plugin.nmasks && plugin.masks[i].mask != mask)
		i++;
	if (i == plugin.nmasks || --plugin.masks[i].comms)
		return;
	int mine = !take_turn(&plugin.sampling.turning);
	SET(&plugin.masks[i].mask, plugin.masks[last].mask);
	SET(&plugin.masks[i].version, plugin.masks[last].version);
	plugin.masks[i].comms = plugin.masks[last].comms;
	STORE(&plugin.nmasks, last);
	if (mine)
		STORE(&plugin.sampling.turning, (uint32_t)0);
}

static int init(int version, void **context, uint64_t id, int *mask, const char *name, int ranks, int rank, nccl_logger log)
{
	if (!context || !mask)
		return 0;
	*context = NULL;
	begin_anew();
	pthread_mutex_lock(&lock);
	if (log)
		plugin.log = log;
	if (!plugin.opened)
		open_plugin(version, rank, ranks);
	if (plugin.opened != 1) {
		SET(mask, 0);
	} else {
		SET(&plugin.tick, lockstep_now());
		struct comm *c = place_comm(version, id, name ? name : "", rank, ranks);
		SET(mask, mask_of(plugin.set, version)); /* of one without room operations are told, too, and counted */
		if (c) {
			*context = make_context(c);
			c->events = keep_mask(mask, version);
			plugin.alive++;
		}
		use_events(plugin.set);
		start_helper();
		if (plugin.helping)
			pthread_cond_signal(&wake);
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

static inline int start(void *context, void **handle, const struct nccl_event *e, int v4)
{
	if (!handle)
		return 0;
	*handle = NULL;
	if (!e || !is_live())
		return 0;
	uint32_t type = v4 ? *(const uint8_t *)&e->type : (uint32_t)e->type;
	uint64_t h = type & (NCCL_PROXY_OP | NCCL_PROXY_STEP | NCCL_NET_PLUGIN) ? net_event(context, e, type) : op_event(context, e, type, v4);
	*handle = (void *)(uintptr_t)h;
	return 0;
}

static int start_v4(void *context, void **handle, struct nccl_event *e) { return start(context, handle, e, 1); }
static int start_v5(void *context, void **handle, struct nccl_event *e) { return start(context, handle, e, 0); }

static int stop(void *handle)
{
	uint64_t h = (uint64_t)(uintptr_t)handle;
	if (!h || !is_live())
		return 0;
	if (handle_kind(h) >= H_PROXY)
		net_stop(h);
	else
		op_stop(h);
	return 0;
}

static int state(void *handle, int what, union nccl_state_args *args)
{
	uint64_t h = (uint64_t)(uintptr_t)handle;
	if (!h || !is_live())
		return 0;
	if (handle_kind(h) == H_STEP)
		net_state(h, what, args);
	else if (handle_kind(h) == H_KERNEL && what == NCCL_KERNEL_CH_STOP && args)
		kernel_stop(h, args->timer);
	return 0;
}

static int finalize(void *context)
{
	uint32_t gen;
	if (!is_live())
		return 0;
	pthread_mutex_lock(&lock);
	struct comm *c = comm_of_context(context, &gen);
	if (c) {
		int64_t now = lockstep_now();
		int mine = !take_turn(&c->busy), running = 0;
		if (mine)
			running = settle_last(c, now);
		else
			ADD(&plugin.w.hdr->ops_lost, PEEK(&c->called) - PEEK(&c->finished));
		c->left = now;
		leave_comm(c);
		STORE(&c->gen, gen + 1);
		if (running)
			lockstep_comm_aborted(c->rec, LOCKSTEP_RESULT_ABORTED, -1);
		else
			lockstep_comm_set_state(c->rec, LOCKSTEP_COMM_LEFT);
		if (mine)
			STORE(&c->busy, 0);
		plugin.alive--;
		forget_mask(c->events);
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

#define EXPORTED __attribute__((visibility("default")))

static int init_v4(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank, nccl_logger log)
{
	(void)nodes;
	return init(4, context, id, mask, name, ranks, rank, log);
}

#define VERSION(n) \
	static int init_v##n(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, nccl_logger log) \
	{ \
		(void)nodes; \
		return init(n, context, id, mask, name, ranks, rank, log); \
	} \
	EXPORTED const struct nccl_profiler_v5 ncclProfiler_v##n = {"lockstep", init_v##n, start_v5, stop, state, finalize}

EXPORTED const struct nccl_profiler_v4 ncclProfiler_v4 = {"lockstep", init_v4, start_v4, stop, state, finalize};
VERSION(5);
VERSION(6);
VERSION(7);

EXPORTED int lockstep_nccl_mark(uint32_t code, uint32_t begin, uint64_t value)
{
	if (!is_live() || code == LOCKSTEP_MARK_NONE || code > LOCKSTEP_MARK_DATA_LOADING)
		return -1;
	struct lockstep_record r = {.mono = lockstep_now(), .kind = LOCKSTEP_KIND_MARK, .flags = begin ? LOCKSTEP_FLAG_BEGIN : 0, .comm = LOCKSTEP_NO_COMM};
	r.body.value.code = (uint8_t)code;
	r.body.value.value = value;
	lockstep_append(&plugin.w, &r);
	return 0;
}

EXPORTED const char *lockstep_nccl_recorder(void) { return is_live() ? plugin.w.path : ""; }
