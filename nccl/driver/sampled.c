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
