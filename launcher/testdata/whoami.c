#define _GNU_SOURCE 1 /* gethostname */
#include "lockstep_launcher.h"
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	struct lockstep_who w;
	lockstep_whoami(&w);
	if (w.rank < 0)
		w.rank = 0, w.world_size = 1;
	if (!w.node[0])
		gethostname(w.node, sizeof w.node - 1);
	printf("%s %s %d %d %d %u\n", w.job[0] ? w.job : "job", w.node, w.rank, w.world_size, w.local_rank, w.attempt);
	return 0;
}
