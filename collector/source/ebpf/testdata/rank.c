/* A rank that does what it is told on standard input, a line at a time, and answers each with one:
 *   init SEED        a communicator of all ranks; its unique id begins with SEED
 *   split COLOR      of the last one
 *   shrink RANK      of the last one, without that rank
 *   all N            ncclCommInitAll
 *   call NAME N      N calls on the last communicator
 *   group N          a group of N all-reduces and a send and a receive
 *   train US         an all-reduce every US microseconds, at most two ahead of the slowest rank
 *   stop             no more of that
 *   time N           N all-reduces: the answer is the nanoseconds of CPU that one took
 *   leave, abort     the last communicator
 *   asleep MS        in uninterruptible sleep (vfork(2)), or until the last byte of the shared file is 1; "child MS": in a child
 *   starve MS        three busy threads named as NCCL's, on one CPU
 *   connect ADDRESS  that does not answer
 *   exit CODE
 * Arguments: rank, size, and a file that ranks share. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef void *comm_t;
int ncclCommInitRank(comm_t *, int, ncclUniqueId, int);
int ncclCommSplit(comm_t, int, int, comm_t *, void *);
int ncclCommShrink(comm_t, int *, int, comm_t *, void *, int);
int ncclCommInitAll(comm_t *, int, const int *);
int ncclCommDestroy(comm_t);
int ncclCommAbort(comm_t);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *, void *, size_t, int, int, comm_t, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, comm_t, void *);
int ncclBcast(void *, size_t, int, int, comm_t, void *);
int ncclAllGather(const void *, void *, size_t, int, comm_t, void *);
int ncclSend(const void *, size_t, int, int, comm_t, void *);
int ncclRecv(void *, size_t, int, int, comm_t, void *);

static int rank, size;
static volatile long *step; /* by rank */
static comm_t comms[16];
static int ncomms;
static volatile int training;
static char buf[64];

static comm_t last(void) { return ncomms ? comms[ncomms - 1] : NULL; }
static void all_reduce(void) { ncclAllReduce(buf, buf + 32, 1000, 7, 0, last(), NULL); }

static void *train(void *us)
{
	while (training) {
		all_reduce();
		long mine = ++step[rank];
		for (int r = 0; r < size; r++)
			while (training && step[r] + 2 < mine)
				usleep(1000);
		usleep((long)us);
	}
	return NULL;
}

static __attribute__((noinline)) void doze(long ms)
{
	for (; ms > 0 && !((volatile char *)step)[4095]; ms -= 10)
		usleep(10000);
}

static void asleep(long ms)
{
	if (vfork() == 0) {
		doze(ms);
		_exit(0);
	}
}

static void *busy(void *ms)
{
	struct timespec now;
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(0, &one);
	sched_setaffinity(0, sizeof one, &one);
	prctl(PR_SET_NAME, "NCCL Progress 0");
	clock_gettime(CLOCK_MONOTONIC, &now);
	for (long end = now.tv_sec * 1000 + now.tv_nsec / 1000000 + (long)ms; now.tv_sec * 1000 + now.tv_nsec / 1000000 < end;)
		clock_gettime(CLOCK_MONOTONIC, &now);
	return NULL;
}

static void call(const char *name, long n)
{
	for (long i = 0; i < n; i++) {
		if (!strcmp(name, "AllReduce")) all_reduce();
		if (!strcmp(name, "Reduce")) ncclReduce(buf, buf + 32, 10, 4, 2, 3, last(), (void *)0x77);
		if (!strcmp(name, "Bcast")) ncclBcast(buf, 20, 1, 2, last(), NULL);
		if (!strcmp(name, "AllGather")) ncclAllGather(buf, buf, 100, 7, last(), NULL);
		if (!strcmp(name, "Send")) ncclSend(buf, 5, 1, 0, last(), NULL);
	}
}

int main(int argc, char **argv)
{
	char line[256], word[64], arg[64];
	pthread_t thread;
	if (argc < 4)
		return 2;
	rank = atoi(argv[1]), size = atoi(argv[2]);
	int fd = open(argv[3], O_RDWR | O_CREAT, 0600);
	if (fd < 0 || ftruncate(fd, 4096))
		return 3;
	step = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof line, stdin)) {
		long n = 0, took = 0;
		word[0] = arg[0] = 0;
		sscanf(line, "%63s %63s %ld", word, arg, &n);
		if (!strcmp(word, "init")) {
			ncclUniqueId id;
			memset(&id, 7, sizeof id);
			strncpy(id.internal, arg, 64);
			if (ncclCommInitRank(&comms[ncomms], size, id, rank))
				return 4;
			ncomms++;
		} else if (!strcmp(word, "split")) {
			ncclCommSplit(last(), atoi(arg), rank, &comms[ncomms], NULL);
			if (comms[ncomms])
				ncomms++;
		} else if (!strcmp(word, "shrink")) {
			int without[2] = {atoi(arg), 0};
			if (rank != without[0] && ncclCommShrink(last(), without, 1, &comms[ncomms], NULL, 0) == 0)
				ncomms++;
		} else if (!strcmp(word, "all")) {
			ncclCommInitAll(&comms[ncomms], atoi(arg), NULL);
			ncomms += atoi(arg);
		} else if (!strcmp(word, "call")) {
			call(arg, n);
		} else if (!strcmp(word, "group")) {
			ncclGroupStart();
			ncclGroupStart();
			call("AllReduce", atol(arg));
			ncclSend(buf, 5, 1, 0, last(), NULL);
			ncclRecv(buf, 5, 1, 0, last(), NULL);
			ncclGroupEnd();
			ncclGroupEnd();
		} else if (!strcmp(word, "train")) {
			training = 1;
			pthread_create(&thread, NULL, train, (void *)atol(arg));
		} else if (!strcmp(word, "stop")) {
			training = 0;
			pthread_join(thread, NULL);
		} else if (!strcmp(word, "time")) {
			struct timespec a, b;
			long m = atol(arg);
			clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
			for (long i = 0; i < m; i++)
				all_reduce();
			clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
			took = ((b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec) / m;
		} else if (!strcmp(word, "leave")) {
			ncclCommDestroy(last());
			ncomms--;
		} else if (!strcmp(word, "abort")) {
			ncclCommAbort(last());
			ncomms--;
		} else if (!strcmp(word, "asleep")) {
			asleep(atol(arg));
		} else if (!strcmp(word, "child")) {
			if (fork() == 0) {
				asleep(atol(arg));
				_exit(0);
			}
		} else if (!strcmp(word, "starve")) {
			for (int i = 0; i < 3; i++)
				pthread_create(&thread, NULL, busy, (void *)atol(arg));
		} else if (!strcmp(word, "connect")) {
			struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9)};
			inet_pton(AF_INET, arg, &to.sin_addr);
			connect(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), (void *)&to, sizeof to);
		} else if (!strcmp(word, "exit")) {
			return atoi(arg);
		}
		printf("%ld\n", took);
	}
	return 0;
}
