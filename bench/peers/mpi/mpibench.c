/*
 * mpibench: times MPI collectives the way nccl-tests times NCCL's.
 *
 *   mpirun -np N mpibench COLL MIN MAX FACTOR BLOCKS BLOCK_MS
 *
 * COLL is allreduce, reduce_scatter, allgather, broadcast, alltoall or
 * sendrecv; elements are float32 and the operator is sum, out of place. A size
 * is counted by nccl-tests' convention: bytes of the larger of the two buffers
 * of a rank (sendrecv: bytes sent by a rank, to its next, while it receives as
 * many from the one before).
 *
 * For every size: warm-up, from which the iterations of a block follow (about
 * BLOCK_MS milliseconds, the same on all ranks); then BLOCKS times a barrier
 * and a block of back-to-back operations. A block's time is the mean over ranks
 * of elapsed / iterations, as nccl-tests has it. One line a size, in microseconds:
 *
 *   COLL RANKS BYTES ITERATIONS MIN MEDIAN
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BLOCKS = 101, MIN_ITERS = 2, MAX_ITERS = 100000 };

struct bench {
	const char *name;
	int per_rank; /* the size is split over ranks */
	void (*run)(struct bench *b);
	float *send, *recv;
	int count; /* elements of one call: of the buffer, or of one rank's part */
	int rank, ranks;
};

static void allreduce(struct bench *b)
{
	MPI_Allreduce(b->send, b->recv, b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void reduce_scatter(struct bench *b)
{
	MPI_Reduce_scatter_block(b->send, b->recv, b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void allgather(struct bench *b)
{
	MPI_Allgather(b->send, b->count, MPI_FLOAT, b->recv, b->count, MPI_FLOAT, MPI_COMM_WORLD);
}

static void broadcast(struct bench *b)
{
	/* NCCL's Broadcast is out of place at the root; MPI's is not. */
	MPI_Bcast(b->recv, b->count, MPI_FLOAT, 0, MPI_COMM_WORLD);
}

static void alltoall(struct bench *b)
{
	MPI_Alltoall(b->send, b->count, MPI_FLOAT, b->recv, b->count, MPI_FLOAT, MPI_COMM_WORLD);
}

static void sendrecv(struct bench *b)
{
	int next = (b->rank + 1) % b->ranks, prev = (b->rank + b->ranks - 1) % b->ranks;
	MPI_Sendrecv(b->send, b->count, MPI_FLOAT, next, 0, b->recv, b->count, MPI_FLOAT, prev, 0,
	             MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static struct bench benches[] = {
	{ .name = "allreduce", .run = allreduce },
	{ .name = "reduce_scatter", .run = reduce_scatter, .per_rank = 1 },
	{ .name = "allgather", .run = allgather, .per_rank = 1 },
	{ .name = "broadcast", .run = broadcast },
	{ .name = "alltoall", .run = alltoall, .per_rank = 1 },
	{ .name = "sendrecv", .run = sendrecv },
};

/* block returns the mean over ranks of the seconds that one operation took. */
static double block(struct bench *b, int iters)
{
	double t, sum;
	MPI_Barrier(MPI_COMM_WORLD);
	t = MPI_Wtime();
	for (int i = 0; i < iters; i++)
		b->run(b);
	t = (MPI_Wtime() - t) / iters;
	MPI_Allreduce(&t, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	return sum / b->ranks;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static float *filled(size_t bytes)
{
	float *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
	if (!p) {
		fprintf(stderr, "mpibench: no memory for %zu bytes\n", bytes);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	for (size_t i = 0; i < bytes / sizeof *p; i++)
		p[i] = 1;
	return p;
}

int main(int argc, char **argv)
{
	struct bench *b = NULL;
	double times[MAX_BLOCKS];

	MPI_Init(&argc, &argv);
	for (size_t i = 0; argc == 7 && i < sizeof benches / sizeof *benches; i++)
		if (!strcmp(argv[1], benches[i].name))
			b = &benches[i];
	if (!b) {
		fprintf(stderr, "usage: mpibench COLL MIN MAX FACTOR BLOCKS BLOCK_MS\n");
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	size_t least = strtoull(argv[2], NULL, 10), most = strtoull(argv[3], NULL, 10);
	size_t factor = strtoull(argv[4], NULL, 10);
	int blocks = atoi(argv[5]);
	double seconds = atof(argv[6]) / 1e3;
	if (least < sizeof(float) || factor < 2 || blocks < 1 || blocks > MAX_BLOCKS) {
		fprintf(stderr, "mpibench: MIN below 4, FACTOR below 2, or BLOCKS not in 1..%d\n", MAX_BLOCKS);
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	MPI_Comm_rank(MPI_COMM_WORLD, &b->rank);
	MPI_Comm_size(MPI_COMM_WORLD, &b->ranks);
	b->send = filled(most);
	b->recv = filled(most);

	for (size_t size = least; size <= most; size *= factor) {
		size_t count = size / sizeof(float);
		if (b->per_rank) {
			if (count % b->ranks)
				continue; /* too small to split evenly */
			count /= b->ranks;
		}
		b->count = (int)count;
		block(b, MIN_ITERS);
		int iters = (int)(seconds / block(b, MIN_ITERS)) + 1;
		iters = iters > 100 ? 100 : iters;
		iters = (int)(seconds / block(b, iters)) + 1; /* once warm, the estimate is better */
		iters = iters < MIN_ITERS ? MIN_ITERS : iters > MAX_ITERS ? MAX_ITERS : iters;
		MPI_Bcast(&iters, 1, MPI_INT, 0, MPI_COMM_WORLD);
		for (int i = 0; i < blocks; i++)
			times[i] = block(b, iters);
		qsort(times, blocks, sizeof *times, ascending);
		if (b->rank == 0) {
			printf("%s %d %zu %d %.3f %.3f\n", b->name, b->ranks, size, iters, times[0] * 1e6,
			       times[blocks / 2] * 1e6);
			fflush(stdout);
		}
	}
	free(b->send);
	free(b->recv);
	MPI_Finalize();
	return 0;
}
