/* What is told twice, and too late. */
#include "driver.h"

static void again(void *kernel, uint64_t timer)
{
	union nccl_state_args a = {.timer = timer};
	if (kernel)
		nccl.state(kernel, NCCL_KERNEL_CH_STOP, &a);
}

/* Channels whose stops are told twice while others run: of collectives, and of groups of sends and receives, each of which starts its own. */
void twice(void)
{
	struct comm c;
	comm_init(&c, 0x115, "twice", 4, 1);
	for (int i = 0; i < 40; i++) {
		struct played p, q;
		void *api[2];
		int p2p = i % 4 == 3;
		api_begin(&p, &c, 0);
		if (p2p)
			api_p2p(&p, "Send", 512, 0, &api[0]), api_p2p(&p, "Recv", 512, 0, &api[1]);
		else
			api_coll(&p, "AllReduce", 64);
		plan_begin(&p);
		if (p2p)
			plan_p2p(&p, "Send", 512, 0, 4, api[0]), plan_p2p(&p, "Recv", 512, 0, 4, api[1]);
		else
			plan_coll(&p, "AllReduce", 64, 4);
		plan_end(&p);
		api_end(&p);
		q = p;
		q.task[0] = p.task[1]; /* of its channels NCCL tells apart */
		int64_t at = mono() + GPU_OFFSET;
		kernel_begin(&p, 4, at);
		if (p2p)
			kernel_begin(&q, 4, at);
		for (int k = 0; k < 4; k++)
			again(p.kernel[0], (uint64_t)at + 1000);
		usleep(2000);
		kernel_end(&p, 4, at + 7000);
		if (p2p)
			kernel_end(&q, 4, at + 7000);
		c.numbered++;
	}
	usleep(200000);
	told(&c, "exact");
}

/* A thread that tells of stops long past, on a communicator whose slots are used again soon. */
static void *stopped;
static int over;

static void *late_teller(void *arg)
{
	while (!__atomic_load_n(&over, __ATOMIC_RELAXED))
		again(__atomic_load_n(&stopped, __ATOMIC_ACQUIRE), UINT64_C(1) << 62);
	return arg;
}

void stale(void)
{
	static struct comm comms[257];
	pthread_t t;
	for (int i = 0; i < 257; i++)
		comm_init(&comms[i], 0x800 + (uint64_t)i, "stale", 4, 1);
	struct comm *c = &comms[256];
	pthread_create(&t, NULL, late_teller, NULL);
	for (int64_t begin = mono(); mono() - begin < 1500000000;) {
		struct played p;
		union nccl_state_args a;
		api_begin(&p, c, 0);
		api_coll(&p, "AllReduce", 64);
		plan_begin(&p);
		plan_coll(&p, "AllReduce", 64, 2);
		plan_end(&p);
		api_end(&p);
		int64_t gpu = mono() + GPU_OFFSET;
		kernel_begin(&p, 2, gpu);
		a.timer = (uint64_t)gpu + 50;
		nccl.state(p.kernel[0], NCCL_KERNEL_CH_STOP, &a);
		__atomic_store_n(&stopped, p.kernel[0], __ATOMIC_RELEASE);
		a.timer = (uint64_t)gpu + 100;
		nccl.state(p.kernel[1], NCCL_KERNEL_CH_STOP, &a);
		c->numbered++;
	}
	__atomic_store_n(&over, 1, __ATOMIC_RELAXED);
	pthread_join(t, NULL);
	told(c, "stale");
}
