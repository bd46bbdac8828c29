/* Many events: for how long, from how many threads, in what disorder, at what cost. */
#include "driver.h"

struct worker {
	struct comm c;
	uint64_t operations;
};

/* The callbacks of one all-reduce by version: with all that NCCL calls around it. */
static uint64_t events_of(int channels) { return (nccl.version >= 5 ? 11 : 5) + 3 * (uint64_t)channels; }

static void quick(struct comm *c, int channels)
{
	struct played p;
	api_begin(&p, c, 0);
	api_coll(&p, "AllReduce", 64);
	plan_begin(&p);
	plan_coll(&p, "AllReduce", 64, channels);
	plan_end(&p);
	api_end(&p);
	int64_t gpu = mono() + GPU_OFFSET;
	kernel_begin(&p, channels, gpu);
	kernel_end(&p, channels, gpu + 100);
	c->numbered++;
}

static long memory_kib(void)
{
	long pages = 0, resident = 0;
	FILE *f = fopen("/proc/self/statm", "r");
	if (f && fscanf(f, "%ld %ld", &pages, &resident) != 2)
		resident = 0;
	if (f)
		fclose(f);
	return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static void *work(void *arg)
{
	struct worker *w = arg;
	for (uint64_t i = 0; i < w->operations; i++)
		quick(&w->c, 2);
	return NULL;
}

/* Events in ten parts, with a look at the memory after each. */
int soak(uint64_t events, int threads)
{
	static struct worker w[16];
	pthread_t t[16];
	if (threads < 1 || threads > 16)
		return 2;
	for (int i = 0; i < threads; i++)
		comm_init(&w[i].c, 0x300 + (uint64_t)i, "soak", 8, i);
	uint64_t each = events / events_of(2) / (uint64_t)threads / 10, numbered = 0;
	for (int part = 0; part < 10; part++) {
		for (int i = 0; i < threads; i++) {
			w[i].operations = each;
			pthread_create(&t[i], NULL, work, &w[i]);
		}
		for (int i = 0; i < threads; i++)
			pthread_join(t[i], NULL);
		struct comm extra; /* communicators come and go meanwhile */
		comm_init(&extra, 0x400 + (uint64_t)part, "extra", 2, 0);
		quick(&extra, 1);
		numbered += extra.numbered;
		comm_finalize(&extra);
		printf("part %d memory_kib=%ld\n", part, memory_kib());
		fflush(stdout);
	}
	usleep(300000);
	for (int i = 0; i < threads; i++) {
		numbered += w[i].c.numbered;
		comm_finalize(&w[i].c);
	}
	printf("total numbered=%" PRIu64 " events=%" PRIu64 "\n", numbered, numbered * events_of(2));
	return 0;
}

static int none(void) { return 0; }
static int none_start(void *c, void **h, struct nccl_event *e) { (void)c, (void)e; *h = (void *)1; return 0; }
static int none_stop(void *h) { (void)h; return none(); }
static int none_state(void *h, int s, union nccl_state_args *a) { (void)h, (void)s, (void)a; return none(); }

static int by_value(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
	return (x > y) - (x < y);
}

/* What the caller of a collective pays, and the proxy thread for its kernel: medians, in ns. */
static void measure(struct comm *c, int channels, double *caller, double *proxy)
{
	enum { BATCH = 64, ROUNDS = 2000 };
	static struct played p[BATCH];
	static int64_t call[ROUNDS], run[ROUNDS];
	for (int r = 0; r < ROUNDS; r++) {
		int64_t at = mono();
		for (int i = 0; i < BATCH; i++) {
			api_begin(&p[i], c, 0);
			api_coll(&p[i], "AllReduce", 64);
			plan_begin(&p[i]);
			plan_coll(&p[i], "AllReduce", 64, channels);
			plan_end(&p[i]);
			api_end(&p[i]);
		}
		call[r] = mono() - at;
		at = mono();
		for (int i = 0; i < BATCH; i++) {
			int64_t gpu = at + GPU_OFFSET + i;
			kernel_begin(&p[i], channels, gpu);
			kernel_end(&p[i], channels, gpu + 100);
		}
		run[r] = mono() - at;
	}
	qsort(call, ROUNDS, sizeof *call, by_value);
	qsort(run, ROUNDS, sizeof *run, by_value);
	*caller = (double)call[ROUNDS / 2] / BATCH, *proxy = (double)run[ROUNDS / 2] / BATCH;
}

/* With the plugin, less the same calls of empty functions. */
int bench(void)
{
	struct comm c;
	struct tables real = {0};
	setenv("LOCKSTEP_NCCL_EVENTS", "net", 0); /* every call with its kernel; `default` has that for one in 32 */
	comm_init(&c, 0x500, "bench", 8, 0);
	for (int channels = 1; channels <= 16; channels *= 4) {
		double call, proxy, no_call, no_proxy;
		measure(&c, channels, &call, &proxy);
		real = nccl;
		nccl.start = none_start, nccl.stop = none_stop, nccl.state = none_state;
		measure(&c, channels, &no_call, &no_proxy);
		nccl = real;
		printf("channels=%d caller_ns=%.1f proxy_ns=%.1f event_ns=%.1f\n", channels, call - no_call, proxy - no_proxy,
			(call - no_call + proxy - no_proxy) / (double)events_of(channels));
	}
	return 0;
}

/* Calls in any order with any words, by the bytes of standard input: nothing may break. */
static unsigned char in[1 << 16];
static size_t in_size, in_at;
static unsigned next_byte(void) { return in_at < in_size ? in[in_at++] : 0; }

int fuzz(void)
{
	static void *contexts[64], *handles[256];
	in_size = fread(in, 1, sizeof in, stdin);
	static const char *const words[] = {"AllReduce", "Send", "Recv", "", "Bogus", NULL, "ncclFloat32", "ncclInt8", "RING", "LL"};
#define BYTE next_byte()
	while (in_at < in_size) {
		unsigned what = BYTE % 8, slot = (uint8_t)BYTE, mine = BYTE;
		struct nccl_event e;
		struct nccl_qp q;
		union nccl_state_args a = {.timer = (uint64_t)BYTE << (BYTE % 64)};
		struct comm c;
		switch (what) {
		case 0:
			comm_init(&c, mine, "fuzz", (int)(slot % 9), (int)(mine % 9));
			contexts[slot % 64] = c.ctx;
			break;
		case 1:
			nccl.finalize(contexts[slot % 64]);
			break;
		case 2:
			nccl.stop(handles[slot]);
			break;
		case 3:
			nccl.state(handles[slot], (int)(BYTE % 26), &a);
			break;
		case 4:
			handles[slot] = (void *)((uintptr_t)handles[mine] ^ (uintptr_t)BYTE << (BYTE % 64));
			break;
		default:
			memset(&e, 0, sizeof e);
			e.type = 1u << (BYTE % 16);
			e.parent = handles[BYTE], e.rank = BYTE;
			switch (e.type) { /* pointers are valid: NCCL's are */
			case NCCL_COLL_API:
				e.u.coll_api.func = words[BYTE % 10], e.u.coll_api.datatype = words[BYTE % 10], e.u.coll_api.count = (uint8_t)BYTE, e.u.coll_api.captured = BYTE & 1;
				break;
			case NCCL_P2P_API:
				e.u.p2p_api.func = words[BYTE % 10], e.u.p2p_api.datatype = words[BYTE % 10], e.u.p2p_api.captured = BYTE & 1;
				break;
			case NCCL_COLL:
				e.u.coll.func = words[BYTE % 10], e.u.coll.datatype = words[BYTE % 10], e.u.coll.algo = words[BYTE % 10], e.u.coll.proto = words[BYTE % 10];
				e.u.coll.channels = (uint8_t)BYTE, e.u.coll.group = handles[BYTE];
				break;
			case NCCL_P2P:
				e.u.p2p.func = words[BYTE % 10], e.u.p2p.datatype = words[BYTE % 10], e.u.p2p.peer = (int)BYTE - 8, e.u.p2p.group = handles[BYTE];
				break;
			case NCCL_PROXY_OP:
				e.u.proxy_op.pid = BYTE & 7 ? getpid() : 1, e.u.proxy_op.peer = (int)BYTE - 8, e.u.proxy_op.is_send = BYTE & 1;
				break;
			case NCCL_NET_PLUGIN:
				memset(&q, BYTE, sizeof q);
				e.u.net.id = (int64_t)(BYTE % 4) << 16 | (BYTE % 3), e.u.net.data = BYTE ? &q : NULL;
				break;
			case NCCL_CE_COLL:
				e.u.ce_coll.func = words[BYTE % 10], e.u.ce_coll.datatype = words[BYTE % 10];
				break;
			case NCCL_KERNEL_CH:
				e.u.kernel_ch.timer = (uint64_t)BYTE << (BYTE % 64);
				break;
			}
			nccl.start(contexts[mine % 64], &handles[slot], &e);
		}
	}
	return 0;
}
