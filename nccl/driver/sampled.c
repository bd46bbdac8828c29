/* Calls so often that NCCL is asked for the kernels of some of them only. */
#include "driver.h"

/* Calls so close that only some kernels are asked for: two communicators, groups and sends among them. */
void tight(void)
{
	struct comm c, d;
	comm_init(&c, 0x10f, "tight", 4, 1);
	comm_init(&d, 0x110, "beside", 4, 1);
	for (int i = 0; i < 6000; i++) {
		struct played p;
		void *api;
		collective(&c, "AllReduce", 64, 2, 500);
		if (i % 4)
			continue;
		collective(&d, "AllGather", 64, 1, 500);
		api_begin(&p, &d, 0);
		api_p2p(&p, "Send", 512, 0, &api);
		plan_begin(&p);
		plan_p2p(&p, "Send", 512, 0, 1, api);
		plan_end(&p);
		api_end(&p);
		int64_t at = mono();
		kernel_begin(&p, 1, at + GPU_OFFSET);
		kernel_end(&p, 1, at + 500 + GPU_OFFSET);
		d.numbered++;
	}
	usleep(100000); /* calls come less often: the second one is timed again, and tells of those before it */
	for (int i = 0; i < 2; i++)
		collective(&c, "AllReduce", 64, 2, 500);
	collective(&d, "AllReduce", 64, 2, 500);
	told(&c, "sampled");
	told(&d, "sampled");
}

/* 4,000 calls a second. One that is timed takes its caller 20 µs longer: NCCL wakes its proxy. */
void waking(void)
{
	struct comm c;
	nccl.waking = 20000;
	comm_init(&c, 0x112, "waking", 4, 1);
	int64_t at = mono();
	for (int i = 0; i < 10000; i++) {
		collective(&c, "AllReduce", 64, 2, 500);
		until(at += 250000);
	}
	nccl.waking = 0;
	usleep(100000); /* what comes after a rest is timed, and tells of those before it */
	for (int i = 0; i < 2; i++)
		collective(&c, "AllReduce", 64, 2, 500);
	told(&c, "sampled");
}

/* As tight, and then a collective that does not end while calls go on, until CUDA's queue is nearly full: the GPU gets to none of them. */
void stuck(void)
{
	static struct played p[1000];
	struct comm c;
	comm_init(&c, 0x111, "stuck", 4, 1);
	for (int i = 0; i < 3000; i++)
		collective(&c, "AllReduce", 64, 2, 500);
	uint64_t before = c.numbered;
	for (int i = 0; i < 1000; i++) {
		api_begin(&p[i], &c, 0);
		api_coll(&p[i], "AllReduce", 64);
		plan_begin(&p[i]);
		plan_coll(&p[i], "AllReduce", 64, 2);
		plan_end(&p[i]);
		api_end(&p[i]);
		c.numbered++;
	}
	usleep(1500000);
	printf("stuck after %" PRIu64 "\n", before);
	told(&c, "hang");
}

/*
 * A graph that is captured while only some kernels are asked for: NCCL tells of a captured call's replays what it was asked for
 * when it was captured. Environment: NET=1: there are transfers; ONE=1: it is of one call, not of three; REST=1: there was a rest, after which kernels are asked for again.
 */
void blind(void)
{
	struct comm c;
	struct played p[3];
	int calls = getenv("ONE") ? 1 : 3;
	comm_init(&c, 0x116, "blind", 4, 1);
	if (getenv("NET")) {
		api_begin(&p[0], &c, 0);
		api_coll(&p[0], "AllReduce", 64);
		plan_begin(&p[0]);
		plan_coll(&p[0], "AllReduce", 64, 2);
		plan_end(&p[0]);
		api_end(&p[0]);
		kernel_begin(&p[0], 2, mono() + GPU_OFFSET);
		transfers(&p[0], 2, 1, 100, 1, 5);
		kernel_end(&p[0], 2, mono() + GPU_OFFSET);
		c.numbered++;
	}
	for (int i = 0; i < 2000 || (i < 20000 && __atomic_load_n(&nccl.mask, __ATOMIC_RELAXED) & NCCL_KERNEL_CH); i++)
		collective(&c, "AllReduce", 64, 2, 500);
	if (getenv("REST"))
		usleep(200000);
	for (int k = 0; k < calls; k++) {
		api_begin(&p[k], &c, 1);
		api_coll(&p[k], "AllReduce", 64);
		api_end(&p[k]);
		p[k].group_api = NULL;
	}
	printf("untold %d\n", !asks(&p[0], NCCL_KERNEL_CH | NCCL_PROXY_OP));
	for (int i = 0; i < 20; i++)
		for (int k = 0; k < calls; k++) {
			plan_begin(&p[k]);
			plan_coll(&p[k], "AllReduce", 64, 2);
			plan_end(&p[k]);
			int64_t at = mono();
			kernel_begin(&p[k], 2, at + GPU_OFFSET);
			until(at + 4000);
			kernel_end(&p[k], 2, at + 4000 + GPU_OFFSET);
			c.numbered++;
		}
	usleep(500000);
	told(&c, "sampled");
}
