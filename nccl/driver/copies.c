/* Two copies of NCCL in one process, of which one goes. */
#include "driver.h"

#include <sys/mman.h>

static int *mask_of_copy(void)
{
	void *data = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (data == MAP_FAILED)
		exit(2);
	return data;
}

static void *init(int *mask, uint64_t id)
{
	void *ctx = NULL;
	if (nccl.version == 4)
		nccl.v4->init(&ctx, mask, "copy", id, 1, 4, 1, NULL);
	else
		nccl.v5->init(&ctx, id, mask, "copy", 1, 4, 1, NULL);
	return ctx;
}

/* Each copy has a mask in its own data, which is unmapped when it is closed: after its last communicator, while others live. */
void copies(void)
{
	struct comm c;
	comm_init(&c, 0x10f, "stays", 4, 1);
	for (int i = 0; i < 40; i++) {
		int *mask = mask_of_copy();
		void *a = init(mask, 0x900 + (uint64_t)i), *b = init(mask, 0xa00 + (uint64_t)i);
		nccl.finalize(a);
		*mask = 0;
		void *again = init(mask, 0xb00 + (uint64_t)i);
		if (*mask != nccl.mask)
			printf("copy %d: mask %x, and the other's is %x\n", i, (unsigned)*mask, (unsigned)nccl.mask);
		nccl.finalize(again);
		nccl.finalize(b);
		munmap(mask, 4096);
		for (int n = 0; n < 20; n++)
			collective(&c, "AllReduce", 64, 2, 500);
	}
	usleep(300000); /* the plugin's own thread turns masks, too */
	told(&c, "mixed");
	comm_finalize(&c);
}
