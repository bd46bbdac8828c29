/*
 * Test program of the C writer.
 *   producers DIR THREADS RECORDS   THREADS threads append RECORDS records each, and every kind once
 *   producers DIR bench RECORDS     prints ns per append of one thread
 * Prints the recorder's path first.
 */
#ifdef INTERRUPTED
#define posix_fallocate interrupted_fallocate
#endif
#include "lockstep_record.h"

#include <inttypes.h>
#include <pthread.h>

#ifdef INTERRUPTED
/* A file system on which a signal interrupts whatever takes long, and every second call besides. */
int interrupted_fallocate(int fd, off_t at, off_t size)
{
	static int calls;
	if (size > 1 << 20 || calls++ % 2 == 0)
		return EINTR;
	return ftruncate(fd, at + size) ? errno : 0;
}
#endif

static struct lockstep_writer writer;
static uint64_t records;

static void *produce(void *arg)
{
	uint32_t thread = (uint32_t)(uintptr_t)arg;
	for (uint64_t i = 1; i <= records; i++) {
		struct lockstep_record r = {0};
		r.mono = (int64_t)i;
		r.kind = LOCKSTEP_KIND_MARK;
		r.thread = thread;
		r.op_seq = i;
		r.body.value.code = LOCKSTEP_MARK_STEP;
		r.body.value.value = i * 2654435761u + thread;
		lockstep_append(&writer, &r);
	}
	return NULL;
}

static void every_kind(void)
{
	struct lockstep_record r = {0};
	r.mono = 100, r.flags = LOCKSTEP_FLAG_IN_PLACE, r.comm = 3, r.thread = 7, r.op_seq = 9;

	r.kind = LOCKSTEP_KIND_ENQUEUE;
	r.body.enqueue = (struct lockstep_body_enqueue){.coll = LOCKSTEP_COLL_ALLREDUCE, .dtype = LOCKSTEP_DTYPE_BFLOAT16, .op = LOCKSTEP_OP_AVG, .root = -1, .bytes = UINT64_C(1) << 40, .stream = 5};
	lockstep_append(&writer, &r);
	r.kind = LOCKSTEP_KIND_START;
	r.body.run = (struct lockstep_body_run){.coll = LOCKSTEP_COLL_ALLREDUCE, .algo = LOCKSTEP_ALGO_RING, .proto = LOCKSTEP_PROTO_SIMPLE, .clock = LOCKSTEP_CLOCK_GPU, .chans = 16, .stamp = 200, .slot = 4};
	lockstep_append(&writer, &r);
	r.kind = LOCKSTEP_KIND_PHASE;
	r.body.phase = (struct lockstep_body_phase){.code = LOCKSTEP_PHASE_TRANSFER, .index = 1, .clock = LOCKSTEP_CLOCK_HOST, .peer = 6, .stamp = 300, .dur = 50};
	lockstep_append(&writer, &r);
	r.kind = LOCKSTEP_KIND_END;
	r.body.run = (struct lockstep_body_run){.coll = LOCKSTEP_COLL_ALLREDUCE, .code = LOCKSTEP_RESULT_PEER_LOST, .stamp = 400};
	lockstep_append(&writer, &r);
	r.kind = LOCKSTEP_KIND_WINDOW;
	r.body.conn = (struct lockstep_body_conn){.peer = 2, .conn = 8, .code = LOCKSTEP_CAUSE_NETWORK, .bytes = 4096, .wrs = 8, .back = 3, .span = lockstep_pack_span(1000, 5000), .last = 5000};
	lockstep_append(&writer, &r);
	r.kind = LOCKSTEP_KIND_LINK;
	r.body.conn = (struct lockstep_body_conn){.peer = 2, .conn = 8, .code = LOCKSTEP_LINK_DOWN};
	lockstep_append(&writer, &r);
	r.kind = LOCKSTEP_KIND_COMM;
	r.body.value = (struct lockstep_body_value){.code = LOCKSTEP_COMM_ABORTED, .result = LOCKSTEP_RESULT_PEER_LOST, .peer = 3, .value = 0xabcdef};
	lockstep_append(&writer, &r);
	r.kind = LOCKSTEP_KIND_WHOLE;
	r.body.whole = (struct lockstep_body_whole){.coll = LOCKSTEP_COLL_REDUCE, .elem = LOCKSTEP_DTYPE_FLOAT8E5M2 | LOCKSTEP_OP_AVG << 4, .path = LOCKSTEP_ALGO_TREE | LOCKSTEP_PROTO_SIMPLE << 4, .root = 2, .bytes = UINT64_C(1) << 33, .stream = 8, .peer = 3, .dur = lockstep_pack_span(10, 100), .wait = lockstep_pack_span(10, 50)};
	lockstep_append(&writer, &r);

	uint16_t comm;
	struct lockstep_comm *c = lockstep_add_comm(&writer, 0xabcdef, "dp", 1, 4, 0x123, LOCKSTEP_COMM_JOINING, &comm);
	lockstep_comm_set_state(c, LOCKSTEP_COMM_JOINED);
	lockstep_comm_aborted(c, LOCKSTEP_RESULT_MISMATCH, 2);
	lockstep_comm_enqueued(c, 12, 1200, LOCKSTEP_COLL_REDUCESCATTER, 4096);
	lockstep_comm_started(c, 11, 1100);
	lockstep_comm_finished(c, 10, 1000);
	lockstep_comm_add_phases(c, 5, 6, 7, 64);
	lockstep_comm_add_phases(c, 1, 1, 1, 64);
	uint32_t conn;
	struct lockstep_conn *k = lockstep_add_conn(&writer, comm, 3, LOCKSTEP_TRANSPORT_RDMA, 2, 77, "mlx5_0:77", &conn);
	lockstep_conn_posted(k, 900, 90);
	lockstep_conn_completed(k, 800, 80);
	lockstep_conn_tx_blocked(k, 85);
	lockstep_conn_received(k, 700, 70);
	lockstep_conn_rx_waiting(k, 75);
	lockstep_conn_window(k, 1000000, LOCKSTEP_CAUSE_RECEIVER_NOT_READY, 88);
	lockstep_conn_slow(k, 4);
	lockstep_conn_windows(k, 9);
	lockstep_conn_latency(k, 123);
	lockstep_conn_link(k, LOCKSTEP_LINK_SWITCHED, 91);
	lockstep_conn_switched(k, 2, 4096);
	lockstep_conn_renamed(k, 78);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	struct lockstep_options o = {.dir = argv[1], .job = "c job", .node = "n0", .rank = 1, .world_size = 4, .local_rank = 1, .attempt = 2, .comm_slots = 8, .conn_slots = 8, .ring_slots = 1 << 12};
	if (lockstep_create(&writer, &o)) {
		perror("lockstep_create");
		return 1;
	}
	printf("%s\n", writer.path);
	records = strtoull(argv[3], NULL, 10);
	if (!strcmp(argv[2], "bench")) {
		int64_t start = lockstep_now();
		produce(NULL);
		printf("%.3f\n", (double)(lockstep_now() - start) / (double)records);
	} else {
		fflush(stdout);
		getchar(); /* the test is reading now */
		every_kind();
		pthread_t threads[64];
		int n = atoi(argv[2]);
		for (int i = 0; i < n; i++)
			pthread_create(&threads[i], NULL, produce, (void *)(uintptr_t)i);
		for (int i = 0; i < n; i++)
			pthread_join(threads[i], NULL);
		lockstep_anchor(&writer);
	}
	lockstep_close(&writer);
	return 0;
}
