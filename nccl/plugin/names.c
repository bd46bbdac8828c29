/* NCCL's names of functions, types, algorithms and protocols. */
#include "plugin.h"

#include <strings.h>

static int is(const char *a, const char *b) { return strcasecmp(a, b) == 0; }

HIDDEN uint8_t coll_of(const char *f)
{
	if (!f)
		return LOCKSTEP_COLL_NONE;
	switch (f[0]) {
	case 'A':
		if (is(f, "AllReduce"))
			return LOCKSTEP_COLL_ALLREDUCE;
		if (is(f, "AllGather"))
			return LOCKSTEP_COLL_ALLGATHER;
		return is(f, "AlltoAll") ? LOCKSTEP_COLL_ALLTOALL : LOCKSTEP_COLL_NONE;
	case 'B':
		return is(f, "Broadcast") ? LOCKSTEP_COLL_BROADCAST : LOCKSTEP_COLL_NONE;
	case 'G':
		return is(f, "Gather") ? LOCKSTEP_COLL_GATHER : LOCKSTEP_COLL_NONE;
	case 'R':
		if (is(f, "ReduceScatter"))
			return LOCKSTEP_COLL_REDUCESCATTER;
		if (is(f, "Reduce"))
			return LOCKSTEP_COLL_REDUCE;
		return is(f, "Recv") ? LOCKSTEP_COLL_RECV : LOCKSTEP_COLL_NONE;
	case 'S':
		if (is(f, "Send"))
			return LOCKSTEP_COLL_SEND;
		if (is(f, "Scatter"))
			return LOCKSTEP_COLL_SCATTER;
		return is(f, "SendRecv") ? LOCKSTEP_COLL_GROUP : LOCKSTEP_COLL_NONE;
	}
	return LOCKSTEP_COLL_NONE;
}

HIDDEN uint8_t dtype_of(const char *t, uint32_t *size)
{
	static const struct { const char *name; uint8_t type, size; } types[] = {
		{"Float32", LOCKSTEP_DTYPE_FLOAT32, 4}, {"Bfloat16", LOCKSTEP_DTYPE_BFLOAT16, 2}, {"Int8", LOCKSTEP_DTYPE_INT8, 1},
		{"Float16", LOCKSTEP_DTYPE_FLOAT16, 2}, {"Uint8", LOCKSTEP_DTYPE_UINT8, 1}, {"Int64", LOCKSTEP_DTYPE_INT64, 8},
		{"Int32", LOCKSTEP_DTYPE_INT32, 4}, {"Float64", LOCKSTEP_DTYPE_FLOAT64, 8}, {"Uint32", LOCKSTEP_DTYPE_UINT32, 4},
		{"Uint64", LOCKSTEP_DTYPE_UINT64, 8}, {"Float8e4m3", LOCKSTEP_DTYPE_FLOAT8E4M3, 1}, {"Float8e5m2", LOCKSTEP_DTYPE_FLOAT8E5M2, 1},
		{"Char", LOCKSTEP_DTYPE_INT8, 1}, {"Int", LOCKSTEP_DTYPE_INT32, 4}, {"Half", LOCKSTEP_DTYPE_FLOAT16, 2},
		{"Float", LOCKSTEP_DTYPE_FLOAT32, 4}, {"Double", LOCKSTEP_DTYPE_FLOAT64, 8},
	};
	*size = 1;
	if (!t)
		return LOCKSTEP_DTYPE_UINT8;
	if (!strncasecmp(t, "nccl", 4))
		t += 4;
	for (size_t i = 0; i < sizeof types / sizeof *types; i++)
		if (is(t, types[i].name)) {
			*size = types[i].size;
			return types[i].type;
		}
	return LOCKSTEP_DTYPE_UINT8; /* bytes is what its count then means */
}

HIDDEN uint8_t algo_of(const char *a)
{
	static const struct { const char *name; uint8_t algo; } algos[] = {
		{"RING", LOCKSTEP_ALGO_RING}, {"TREE", LOCKSTEP_ALGO_TREE}, {"NVLS", LOCKSTEP_ALGO_NVLS}, {"NVLS_TREE", LOCKSTEP_ALGO_NVLS_TREE},
		{"NVLSTREE", LOCKSTEP_ALGO_NVLS_TREE}, {"PAT", LOCKSTEP_ALGO_PAT}, {"COLLNET_DIRECT", LOCKSTEP_ALGO_COLL_NET},
		{"COLLNETDIRECT", LOCKSTEP_ALGO_COLL_NET}, {"COLLNET_CHAIN", LOCKSTEP_ALGO_COLL_NET_CHAIN}, {"COLLNETCHAIN", LOCKSTEP_ALGO_COLL_NET_CHAIN},
	};
	for (size_t i = 0; a && i < sizeof algos / sizeof *algos; i++)
		if (is(a, algos[i].name))
			return algos[i].algo;
	return LOCKSTEP_ALGO_NONE;
}

HIDDEN uint8_t proto_of(const char *p)
{
	if (!p)
		return LOCKSTEP_PROTO_NONE;
	return is(p, "SIMPLE") ? LOCKSTEP_PROTO_SIMPLE : is(p, "LL") ? LOCKSTEP_PROTO_LL : is(p, "LL128") ? LOCKSTEP_PROTO_LL128 : LOCKSTEP_PROTO_NONE;
}
