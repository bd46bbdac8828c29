/* Who this process is, by the variables of launchers; docs/design/nccl.md has the table. */
#include "plugin.h"

#include <dirent.h>
#include <limits.h>

/* The first variable of a list, ended by NULL, that is a number; else dflt. */
static int32_t number(int32_t dflt, const char *const *names)
{
	for (; *names; names++) {
		const char *v = getenv(*names);
		char *end;
		if (!v || !*v)
			continue;
		errno = 0;
		long n = strtol(v, &end, 10);
		if (!errno && !*end && n >= 0 && n <= INT32_MAX)
			return (int32_t)n;
	}
	return dflt;
}
#define NUMBER(dflt, ...) number(dflt, (const char *const[]){__VA_ARGS__, NULL})

HIDDEN void identify(struct lockstep_options *o, int32_t rank, int32_t ranks, char job[64], char node[64])
{
	static const char *const jobs[] = {"LOCKSTEP_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"};
	snprintf(job, 64, "job");
	for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
		const char *v = getenv(jobs[i]);
		if (v && *v && strcmp(v, "none")) {
			snprintf(job, 64, "%s", v);
			break;
		}
	}
	const char *n = getenv("LOCKSTEP_NODE");
	node[0] = node[63] = 0;
	if (n && *n)
		snprintf(node, 64, "%s", n);
	else if (gethostname(node, 63))
		snprintf(node, 64, "node");
	o->job = job, o->node = node;

	int32_t r = NUMBER(-1, "LOCKSTEP_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK");
	int32_t size = NUMBER(-1, "LOCKSTEP_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE");
	if (r < 0 || r >= size) /* no launcher that is known: the first communicator is the world */
		r = rank, size = ranks;
	o->rank = r, o->world_size = size;
	o->local_rank = NUMBER(0, "LOCKSTEP_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID");
	o->attempt = (uint32_t)NUMBER(0, "LOCKSTEP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT");
}

/* The set of events to start with, -1 for a recorder that is off. */
HIDDEN int chosen_events(void)
{
	const char *v = getenv("LOCKSTEP_RECORDER");
	if (v && !strcmp(v, "off"))
		return -1;
	v = getenv("LOCKSTEP_NCCL_EVENTS");
	if (!v || !*v || !strcmp(v, "default"))
		return LOCKSTEP_EVENTS_DEFAULT;
	if (!strcmp(v, "net"))
		return LOCKSTEP_EVENTS_NET;
	if (!strcmp(v, "ops"))
		return LOCKSTEP_EVENTS_OPS;
	if (!strcmp(v, "all"))
		return LOCKSTEP_EVENTS_ALL;
	if (!strcmp(v, "off"))
		return -1;
	fprintf(stderr, "lockstep: LOCKSTEP_NCCL_EVENTS is \"%s\", want off, ops, net, default or all: taken as default\n", v);
	return LOCKSTEP_EVENTS_DEFAULT;
}

/* What NCCL's own network is: InfiniBand or RoCE where there is any that it may use. */
HIDDEN enum lockstep_transport network(void)
{
	const char *v = getenv("NCCL_NET");
	if (v && !strcasecmp(v, "socket"))
		return LOCKSTEP_TRANSPORT_TCP;
	v = getenv("NCCL_IB_DISABLE");
	if (v && atoi(v))
		return LOCKSTEP_TRANSPORT_TCP;
	enum lockstep_transport t = LOCKSTEP_TRANSPORT_TCP;
	DIR *d = opendir("/sys/class/infiniband");
	for (struct dirent *e; d && (e = readdir(d));)
		if (e->d_name[0] != '.')
			t = LOCKSTEP_TRANSPORT_RDMA;
	if (d)
		closedir(d);
	return t;
}
