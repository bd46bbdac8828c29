/* Transfers over the network, and the connections that they make. */
#include "driver.h"

/* Transfers to one peer by queue pairs of two devices, then to another by one that is numbered alike: each connection counts
 * its own devices. */
void net(void)
{
	struct comm c;
	comm_init(&c, 0x107, "net", 4, 1);
	for (int i = 0; i < 100; i++) {
		struct played p;
		api_begin(&p, &c, 0);
		api_coll(&p, "AllReduce", 1 << 18);
		plan_begin(&p);
		plan_coll(&p, "AllReduce", 1 << 18, 2);
		plan_end(&p);
		api_end(&p);
		int64_t at = mono();
		kernel_begin(&p, 2, at + GPU_OFFSET);
		if (i < 80)
			transfers(&p, 2, 4, 65536, i / 2 % 2, 77 + i % 2); /* two devices may number their queue pairs alike */
		else
			transfers(&p, 3, 4, 65536, 0, 77);
		at = mono();
		kernel_end(&p, 2, at + GPU_OFFSET);
		c.numbered++;
	}
	told(&c, "exact");
}

/* The first transfers of eight communicators to all their peers, all at once. */
static uint64_t refused;
static pthread_barrier_t together;

static void *first_transfers(void *arg)
{
	struct comm *t = arg;
	struct played p;
	pthread_barrier_wait(&together);
	api_begin(&p, t, 0);
	api_coll(&p, "AllReduce", 64);
	plan_begin(&p);
	plan_coll(&p, "AllReduce", 64, 1);
	plan_end(&p);
	api_end(&p);
	kernel_begin(&p, 1, mono() + GPU_OFFSET);
	for (int peer = 0; peer < 64; peer++) {
		struct flow f;
		flow_begin(&f, &p, peer, peer, 100);
		__atomic_fetch_add(&refused, (uint64_t)!f.send + !f.recv, __ATOMIC_RELAXED);
		flow_post(&f);
		flow_sent(&f);
		flow_received(&f);
	}
	kernel_end(&p, 1, mono() + GPU_OFFSET);
	t->numbered++;
	return NULL;
}

void peers(void)
{
	pthread_t t[8];
	static struct comm comms[8];
	pthread_barrier_init(&together, NULL, 8);
	for (int i = 0; i < 8; i++) {
		comm_init(&comms[i], 0x700 + (uint64_t)i, "peers", 64, i);
		pthread_create(&t[i], NULL, first_transfers, &comms[i]);
	}
	for (int i = 0; i < 8; i++)
		pthread_join(t[i], NULL);
	printf("refused %" PRIu64 "\n", refused);
	for (int i = 0; i < 8; i++)
		told(&comms[i], "exact");
}

/* Communicators come and go, more than there are slots, each with a connection. */
void churn(void)
{
	uint64_t numbered = 0;
	for (int round = 0; round < 30; round++) {
		static struct comm comms[200];
		for (int i = 0; i < 200; i++) {
			struct played p;
			comm_init(&comms[i], 0x20000 + (uint64_t)(round * 200 + i), "churn", 4, 0);
			api_begin(&p, &comms[i], 0);
			api_coll(&p, "AllReduce", 64);
			plan_begin(&p);
			plan_coll(&p, "AllReduce", 64, 1);
			plan_end(&p);
			api_end(&p);
			kernel_begin(&p, 1, mono() + GPU_OFFSET);
			transfers(&p, 1 + i % 3, 1, 100, 1, 5);
			kernel_end(&p, 1, mono() + GPU_OFFSET);
			numbered++;
		}
		for (int i = 0; i < 200; i++)
			comm_finalize(&comms[i]);
		usleep(5000);
	}
	printf("total numbered=%" PRIu64 "\n", numbered);
}
