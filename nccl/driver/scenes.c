/* Sequences of calls as NCCL makes them, the odd ones above all. */
#include "driver.h"

#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define N 20

static struct comm c;

static void begin(uint64_t id, const char *name) { comm_init(&c, id, name, 4, 1); }
static void pause_ms(int ms) { usleep((useconds_t)ms * 1000); }

/* Collectives of every kind, each with its own size and length. */
static void basic(void)
{
	static const char *const funcs[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"};
	begin(0x100, "basic");
	for (int i = 0; i < N; i++)
		collective(&c, funcs[i % 5], 1000 + (size_t)i, 1 + i % 8, 5000 + 100 * (uint64_t)i);
	told(&c, "exact");
}

/* Several collectives of one group go into one kernel, in another order, with its stamps. */
static void fused(void)
{
	begin(0x101, "fused");
	for (int i = 0; i < N; i++) {
		struct played p, part[3];
		api_begin(&p, &c, 0);
		for (int k = 0; k < 3; k++) {
			part[k] = p;
			api_coll(&part[k], "AllReduce", 100 * (size_t)(k + 1));
		}
		plan_begin(&p);
		for (int k = 2; k >= 0; k--) { /* the largest first */
			part[k].group = p.group;
			part[k].tasks = 0;
			plan_coll(&part[k], "AllReduce", 100 * (size_t)(k + 1), 2);
		}
		int64_t at = mono();
		for (int k = 0; k < 3; k++)
			kernel_begin(&part[k], 2, at + GPU_OFFSET);
		until(at + 5000);
		for (int k = 2; k >= 0; k--)
			kernel_end(&part[k], 2, at + 5000 + GPU_OFFSET);
		for (int k = 0; k < 3; k++)
			if (part[k].task[0])
				nccl.stop(part[k].task[0]); /* after the kernel: threads run as they like */
		if (p.group)
			nccl.stop(p.group);
		api_end(&p);
		c.numbered += 3;
	}
	told(&c, "exact");
}

/* Sends and receives of one group: one operation, and only one of each pair is told of. */
static void p2p(void)
{
	begin(0x102, "p2p");
	for (int i = 0; i < N; i++) {
		struct played p;
		void *api[6];
		int n = i % 2 ? 1 : 6;
		api_begin(&p, &c, 0);
		for (int k = 0; k < n; k++)
			api_p2p(&p, k % 2 ? "Recv" : "Send", 512, k / 2 * 2, &api[k]);
		plan_begin(&p);
		for (int k = 0; k < n; k++)
			plan_p2p(&p, k % 2 ? "Recv" : "Send", 512, k / 2 * 2, 2, api[k]);
		plan_end(&p);
		api_end(&p);
		int64_t at = mono();
		kernel_begin(&p, 2, at + GPU_OFFSET);
		until(at + 4000);
		kernel_end(&p, 2, at + 4000 + GPU_OFFSET);
		c.numbered++;
	}
	pause_ms(200); /* the last one's end is inferred from silence */
	told(&c, "exact");
}

/* A graph: the calls are captured once, what runs is told at each replay. */
static void graph(void)
{
	begin(0x103, "graph");
	struct played p;
	api_begin(&p, &c, 1);
	api_coll(&p, "AllReduce", 64);
	api_end(&p);
	p.group_api = NULL;
	for (int i = 0; i < N; i++) {
		plan_begin(&p);
		plan_coll(&p, "AllReduce", 64, 2);
		plan_end(&p);
		int64_t at = mono();
		kernel_begin(&p, 2, at + GPU_OFFSET);
		until(at + 4000);
		kernel_end(&p, 2, at + 4000 + GPU_OFFSET);
		c.numbered++;
	}
	told(&c, "exact replay");
}

/* Kernels over symmetric memory: only the call is told of. */
static void symmetric(void)
{
	begin(0x104, "symmetric");
	for (int i = 0; i < N && nccl.version >= 5; i++) {
		struct played p;
		api_begin(&p, &c, 0);
		api_coll(&p, "AllReduce", 64);
		if (nccl.version >= 6 && i % 2) {
			struct nccl_event e = {.type = NCCL_CE_COLL, .parent = p.api};
			void *h = NULL;
			e.u.ce_coll.func = "AllGather", e.u.ce_coll.datatype = "ncclInt8";
			nccl.start(c.ctx, &h, &e);
			if (h)
				nccl.stop(h);
		}
		api_end(&p);
		c.numbered++;
	}
	pause_ms(400);
	told(&c, "unseen");
}

/* Stops that never come, channels that never start, stamps of a younger operation. */
static void lost(void)
{
	begin(0x105, "lost");
	for (int i = 0; i < N; i++) {
		struct played p;
		api_begin(&p, &c, 0);
		api_coll(&p, "AllReduce", 64);
		plan_begin(&p);
		plan_coll(&p, "AllReduce", 64, 4);
		plan_end(&p);
		api_end(&p);
		int64_t at = mono();
		kernel_begin(&p, i % 4 == 2 ? 2 : 4, at + GPU_OFFSET);
		until(at + 3000);
		if (i % 4 == 3)
			kernel_end(&p, 4, at - 500000 + GPU_OFFSET); /* before it began */
		else if (i % 4 != 1)
			kernel_end(&p, i % 4 == 2 ? 2 : 4, at + 3000 + GPU_OFFSET);
		if (i % 4 == 0 && p.kernel[0]) { /* and some of them twice */
			union nccl_state_args a = {.timer = 1};
			nccl.state(p.kernel[0], NCCL_KERNEL_CH_STOP, &a);
			nccl.stop(p.kernel[0]);
			nccl.stop(p.task[0]);
			nccl.stop(p.group_api);
		}
		c.numbered++;
		if (i % 4 == 1)
			pause_ms(30);
	}
	collective(&c, "AllReduce", 64, 4, 3000);
	pause_ms(200);
	told(&c, "mixed");
}

/* Groups whose end nobody tells: one of a call that gets no kernel, with calls behind it, and more than are kept at a time. */
static void endless(void)
{
	struct played p;
	struct comm d;
	begin(0x113, "endless");
	if (nccl.version < 5)
		return;
	api_begin(&p, &c, 0);
	api_coll(&p, "AllReduce", 64);
	c.numbered++;
	for (int i = 0; i < N; i++)
		collective(&c, "AllReduce", 64, 2, 3000);
	pause_ms(100);
	comm_init(&d, 0x114, "gone", 4, 1);
	for (int i = 0; i < 3000; i++)
		api_begin(&p, &d, 0);
	if (getenv("STAYS"))
		pause_ms(100);
	else
		comm_finalize(&d);
	int without = 0;
	for (int i = 0; i < N; i++) {
		api_begin(&p, &c, 0);
		without += !p.group_api;
		api_end(&p);
	}
	printf("without %d\n", without);
	told(&c, "mixed");
}

/* More under way than there is room for: what has no room is counted. */
static void crowd(void)
{
	static struct played p[3000];
	begin(0x106, "crowd");
	for (int i = 0; i < 3000; i++) {
		api_begin(&p[i], &c, 0);
		api_coll(&p[i], "AllReduce", 64);
		plan_begin(&p[i]);
		plan_coll(&p[i], "AllReduce", 64, 1);
		plan_end(&p[i]);
		api_end(&p[i]);
		c.numbered++;
	}
	for (int i = 0; i < 3000; i++) {
		int64_t at = mono();
		kernel_begin(&p[i], 1, at + GPU_OFFSET);
		kernel_end(&p[i], 1, at + 500 + GPU_OFFSET);
	}
	pause_ms(200);
	told(&c, "mixed");
}

/* A collective that does not end, with another one queued behind it; and a call that does not return. */
static void hang(void)
{
	begin(0x108, "hang");
	collective(&c, "AllReduce", 64, 2, 3000);
	struct played p, q;
	api_begin(&p, &c, 0);
	api_coll(&p, "AllReduce", 128);
	plan_begin(&p);
	plan_coll(&p, "AllReduce", 128, 2);
	plan_end(&p);
	api_end(&p);
	kernel_begin(&p, 2, mono() + GPU_OFFSET);
	api_begin(&q, &c, 0);
	api_coll(&q, "AllGather", 256);
	plan_begin(&q);
	plan_coll(&q, "AllGather", 256, 2);
	plan_end(&q);
	api_end(&q);
	c.numbered += 2;
	struct comm d;
	comm_init(&d, 0x109, "connecting", 4, 1);
	if (nccl.version >= 5) {
		api_begin(&p, &d, 0);
		api_coll(&p, "AllReduce", 128); /* and the group does not end */
		d.numbered = 1;
	}
	pause_ms(600);
	told(&c, "hang");
	told(&d, "hang");
}

/* Communicators go while operations are under way, and NCCL goes on about them. */
static void late(void)
{
	struct played p;
	struct comm d;
	begin(0x10a, "late");
	comm_init(&d, 0x10b, "other", 2, 0);
	collective(&d, "AllReduce", 64, 2, 3000);
	api_begin(&p, &c, 0);
	api_coll(&p, "AllReduce", 64);
	plan_begin(&p);
	plan_coll(&p, "AllReduce", 64, 2);
	kernel_begin(&p, 2, mono() + GPU_OFFSET);
	c.numbered++;
	comm_finalize(&c);
	kernel_end(&p, 2, mono() + GPU_OFFSET);
	plan_end(&p);
	api_end(&p);
	comm_finalize(&c);
	transfers(&p, 1, 2, 100, 1, 5);
	uint64_t before = d.numbered;
	collective(&c, "AllReduce", 64, 2, 3000);
	c.numbered--;
	comm_finalize(&d);
	collective(&d, "AllReduce", 64, 2, 3000);
	d.numbered = before;
	told(&c, "late");
	told(&d, "late");
	for (uint64_t x = 1; x; x <<= 1) { /* handles that nobody gave out */
		union nccl_state_args a = {.timer = 5};
		nccl.stop((void *)(uintptr_t)x), nccl.stop((void *)(uintptr_t)~x);
		nccl.state((void *)(uintptr_t)~x, NCCL_KERNEL_CH_STOP, &a);
		nccl.finalize((void *)(uintptr_t)x);
	}
}

static void *thread(void *arg)
{
	struct comm *t = arg;
	for (int i = 0; i < 500; i++)
		collective(t, "AllReduce", 64, 4, 1000);
	return NULL;
}

static void threads(void)
{
	pthread_t t[8];
	static struct comm comms[8];
	for (int i = 0; i < 8; i++) {
		comm_init(&comms[i], 0x200 + (uint64_t)i, "threads", 8, i);
		pthread_create(&t[i], NULL, thread, &comms[i]);
	}
	for (int i = 0; i < 8; i++)
		pthread_join(t[i], NULL);
	for (int i = 0; i < 8; i++)
		told(&comms[i], "exact");
}

/* Callers, and for each its GPU and its proxy: three threads tell of the same operations. */
struct pipe {
	struct comm c;
	struct played queue[64];
	uint64_t queued, ran;
};

static void *pipe_gpu(void *arg)
{
	struct pipe *p = arg;
	for (uint64_t i = 0; i < 1000; i++) {
		while (__atomic_load_n(&p->queued, __ATOMIC_ACQUIRE) == i)
			sched_yield();
		struct played *o = &p->queue[i % 64];
		kernel_begin(o, 3, mono() + GPU_OFFSET);
		transfers(o, 1, 2, 4096, 1, 9);
		kernel_end(o, 3, mono() + GPU_OFFSET);
		__atomic_store_n(&p->ran, i + 1, __ATOMIC_RELEASE);
	}
	return NULL;
}

static void *pipe_caller(void *arg)
{
	struct pipe *p = arg;
	for (uint64_t i = 0; i < 1000; i++) {
		while (i - __atomic_load_n(&p->ran, __ATOMIC_ACQUIRE) >= 64)
			sched_yield();
		struct played *o = &p->queue[i % 64];
		api_begin(o, &p->c, 0);
		api_coll(o, "AllReduce", 64);
		plan_begin(o);
		plan_coll(o, "AllReduce", 64, 3);
		if (i % 2) { /* the kernel may begin before NCCL is done with its events */
			__atomic_store_n(&p->queued, i + 1, __ATOMIC_RELEASE);
			void *group = o->group_api;
			if (group)
				nccl.stop(group);
		} else {
			plan_end(o);
			api_end(o);
			__atomic_store_n(&p->queued, i + 1, __ATOMIC_RELEASE);
		}
		p->c.numbered++;
	}
	return NULL;
}

static void pipes(void)
{
	static struct pipe p[3];
	pthread_t t[6];
	for (int i = 0; i < 3; i++) {
		comm_init(&p[i].c, 0x600 + (uint64_t)i, "pipes", 4, i);
		pthread_create(&t[2 * i], NULL, pipe_gpu, &p[i]);
		pthread_create(&t[2 * i + 1], NULL, pipe_caller, &p[i]);
	}
	for (int i = 0; i < 6; i++)
		pthread_join(t[i], NULL);
	for (int i = 0; i < 3; i++) {
		told(&p[i].c, "exact");
		comm_finalize(&p[i].c);
	}
}

/* Thousands at once, and thousands one after the other. */
static void many(void)
{
	static struct comm comms[5000];
	uint64_t numbered = 0;
	for (int i = 0; i < 5000; i++) {
		comm_init(&comms[i], 0x10000 + (uint64_t)i, "many", 2, 0);
		if (i % 100 == 0)
			collective(&comms[i], "AllReduce", 64, 1, 500);
	}
	for (int i = 4999; i >= 0; i--)
		comm_finalize(&comms[i]);
	for (int i = 0; i < 5000; i++)
		numbered += comms[i].numbered;
	printf("total numbered=%" PRIu64 "\n", numbered);
}

/* A child must not write into its parent's recorder, and may begin anew. */
static void children(pid_t (*make)(void))
{
	begin(0x10c, "parent");
	collective(&c, "AllReduce", 64, 2, 3000);
	fflush(stdout);
	pid_t pid = make();
	if (!pid) {
		struct comm d;
		for (int i = 0; i < 10; i++)
			collective(&c, "AllReduce", 64, 2, 500); /* what it inherited */
		comm_init(&d, 0x10d, "child", 2, 0);
		collective(&d, "AllReduce", 64, 2, 3000);
		comm_finalize(&d);
		exit(0);
	}
	int status;
	waitpid(pid, &status, 0);
	printf("child %d status %d\n", pid, status);
	collective(&c, "AllReduce", 64, 2, 3000);
	told(&c, "exact");
}

static void forks(void) { children(fork); }

/* Of a child that is made without the library's fork no handler is told. */
static pid_t raw_clone(void) { return (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL); }
static void clones(void) { children(raw_clone); }

/* Waits until the agent has asked for other events. */
static void control(void)
{
	begin(0x10e, "control");
	collective(&c, "AllReduce", 64, 2, 3000);
	printf("mask %d\n", nccl.mask);
	fflush(stdout);
	for (int before = nccl.mask, i = 0; i < 3000 && __atomic_load_n(&nccl.mask, __ATOMIC_RELAXED) == before; i++)
		pause_ms(10);
	printf("mask %d\n", __atomic_load_n(&nccl.mask, __ATOMIC_RELAXED));
	collective(&c, "AllReduce", 64, 2, 3000);
	told(&c, "exact");
}

int scene(const char *name)
{
	static const struct { const char *name; void (*play)(void); } scenes[] = {
		{"basic", basic}, {"fused", fused}, {"p2p", p2p}, {"graph", graph}, {"symmetric", symmetric}, {"lost", lost}, {"endless", endless}, {"crowd", crowd},
		{"net", net}, {"hang", hang}, {"late", late}, {"threads", threads}, {"pipes", pipes}, {"peers", peers}, {"many", many}, {"churn", churn}, {"forks", forks}, {"clones", clones}, {"control", control}, {"copies", copies},
		{"twice", twice}, {"stale", stale}, {"tight", tight}, {"waking", waking}, {"stuck", stuck}, {"blind", blind}, {"selves", selves}, {"selfish", selfish},
	};
	for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++)
		if (!strcmp(name, scenes[i].name)) {
			scenes[i].play();
			printf("done\n");
			fflush(stdout);
			return 0;
		}
	fprintf(stderr, "no scene %s\n", name);
	return 2;
}
