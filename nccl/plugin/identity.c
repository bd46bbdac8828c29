/* Who this process is, by the variables of launchers (package launcher has the table), and what it is to tell. */
#include "plugin.h"

#include <dirent.h>

#include "lockstep_launcher.h"

HIDDEN void identify(struct lockstep_options *o, int32_t rank, int32_t ranks, char job[64], char node[64])
{
	struct lockstep_who who;
	lockstep_whoami(&who);
	snprintf(job, 64, "%s", who.job[0] ? who.job : "job");
	snprintf(node, 64, "%s", who.node);
	if (!node[0] && gethostname(node, 63))
		snprintf(node, 64, "node");
	node[63] = 0;
	o->job = job, o->node = node;
	o->rank = who.rank, o->world_size = who.world_size, o->local_rank = who.local_rank, o->attempt = who.attempt;
	if (o->rank >= 0 && !o->world_size) /* Kubernetes tells none */
		o->world_size = ranks > o->rank ? ranks : o->rank + 1;
	if (o->rank < 0 || o->rank >= o->world_size) /* no launcher that is known: the first communicator is the world */
		o->rank = rank, o->world_size = ranks;
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
