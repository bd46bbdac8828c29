/* What the threads of ranks, and of their children, do when they do not run: sleep, wait for storage
 * (state D), or wait for a CPU; and which TCP connections send segments again. */
#include "kernel.h"

char license_of_this[] SEC("license") = "Dual BSD/GPL";

#define TASK_UNINTERRUPTIBLE 2
#define TASK_NOLOAD 0x400 /* an idle kernel thread's kind of D */

struct task_struct {
	s32 pid;
	s32 tgid;
	u32 __state;
	char comm[16];
} KERNEL;
struct task_struct___before_5_14 {
	long state;
} KERNEL;

struct in6_addr {
	u8 bytes[16];
};
struct sock_common {
	u32 skc_daddr;
	u32 skc_rcv_saddr;
	u16 skc_dport; /* big-endian */
	u16 skc_num;
	u16 skc_family;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} KERNEL;
struct sock {
	struct sock_common __sk_common;
} KERNEL;

/* Threads of a rank: NCCL's own, its others, and those of its children. */
enum class { OTHERS, NCCLS, CHILDREN };
enum off { OFF_RUNNABLE, OFF_SLEEP, OFF_DISK };

/* watched is a process that is looked at: a rank, or one of its children. */
struct watched {
	u32 rank; /* its pid */
	u32 child;
};

/* away is a thread that does not run. */
struct away {
	u64 at;
	u64 woken; /* 0 while it is not */
	u32 rank;
	u8 class;
	u8 off;
	u8 pad[2];
};

struct sum_key {
	u32 rank;
	u32 class;
};

struct sum {
	u64 runnable_ns;
	u64 sleep_ns;
	u64 disk_ns;
};

struct connection {
	u8 local[16]; /* of IPv4 the first four */
	u8 remote[16];
	u16 local_port;
	u16 remote_port;
	u16 family;
	u16 zero;
};

struct {
	UINT(type, MAP_HASH);
	UINT(max_entries, 4096);
	TYPE(key, u32);
	TYPE(value, struct watched);
} watching SEC(".maps");

struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 16384);
	TYPE(key, u32);
	TYPE(value, struct away);
} threads_away SEC(".maps");

struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 4096);
	TYPE(key, struct sum_key);
	TYPE(value, struct sum);
} sums SEC(".maps");

struct {
	UINT(type, MAP_LRU_HASH);
	UINT(max_entries, 4096);
	TYPE(key, struct connection);
	TYPE(value, u64);
} resent SEC(".maps");

INLINE u32 state_of(struct task_struct *t)
{
	struct task_struct___before_5_14 *old = (void *)t;
	if (__builtin_preserve_field_info(old->state, 2 /* exists */))
		return old->state;
	return t->__state;
}

INLINE void add(u32 rank, u32 class, enum off off, u64 ns)
{
	struct sum_key k = {rank, class};
	struct sum *s = map_lookup(&sums, &k);
	if (!s) {
		struct sum zero = {};
		map_update(&sums, &k, &zero, BPF_NOEXIST);
		if (!(s = map_lookup(&sums, &k)))
			return;
	}
	__sync_fetch_and_add(off == OFF_DISK ? &s->disk_ns : off == OFF_SLEEP ? &s->sleep_ns : &s->runnable_ns, ns);
}

SEC("tp_btf/sched_switch")
int switched(u64 *ctx)
{
	int preempted = ctx[0];
	struct task_struct *prev = (void *)ctx[1], *next = (void *)ctx[2];
	u32 tgid = prev->tgid, tid = prev->pid;
	u64 now = 0;
	struct watched *w = map_lookup(&watching, &tgid);
	if (w) {
		u32 state = preempted ? 0 : state_of(prev);
		struct away a = {.at = now = ktime_ns(), .rank = w->rank};
		a.class = w->child ? CHILDREN : prev->comm[0] == 'N' && prev->comm[1] == 'C' && prev->comm[2] == 'C' && prev->comm[3] == 'L' ? NCCLS : OTHERS;
		a.off = !state ? OFF_RUNNABLE : state & TASK_UNINTERRUPTIBLE && !(state & TASK_NOLOAD) ? OFF_DISK : OFF_SLEEP;
		map_update(&threads_away, &tid, &a, BPF_ANY);
	}
	tgid = next->tgid;
	tid = next->pid;
	if (!map_lookup(&watching, &tgid))
		return 0;
	struct away *a = map_lookup(&threads_away, &tid);
	if (!a || !a->at)
		return 0;
	if (!now)
		now = ktime_ns();
	u64 woken = a->off == OFF_RUNNABLE ? a->at : a->woken ? a->woken : now;
	if (woken > a->at)
		add(a->rank, a->class, a->off, woken - a->at);
	if (now > woken)
		add(a->rank, a->class, OFF_RUNNABLE, now - woken);
	a->at = 0;
	return 0;
}

SEC("tp_btf/sched_wakeup")
int woken(u64 *ctx)
{
	struct task_struct *t = (void *)ctx[0];
	u32 tgid = t->tgid, tid = t->pid;
	if (!map_lookup(&watching, &tgid))
		return 0;
	struct away *a = map_lookup(&threads_away, &tid);
	if (a && a->at && !a->woken)
		a->woken = ktime_ns();
	return 0;
}

SEC("tp_btf/tcp_retransmit_skb")
int retransmitted(u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	struct connection c = {};
	c.family = sk->__sk_common.skc_family;
	c.local_port = sk->__sk_common.skc_num;
	c.remote_port = __builtin_bswap16(sk->__sk_common.skc_dport);
	if (c.family == 10 /* AF_INET6 */) {
		read_kernel(c.local, 16, __builtin_preserve_access_index(&sk->__sk_common.skc_v6_rcv_saddr));
		read_kernel(c.remote, 16, __builtin_preserve_access_index(&sk->__sk_common.skc_v6_daddr));
	} else {
		*(u32 *)c.local = sk->__sk_common.skc_rcv_saddr;
		*(u32 *)c.remote = sk->__sk_common.skc_daddr;
	}
	u64 one = 1, *n = map_lookup(&resent, &c);
	if (n)
		__sync_fetch_and_add(n, 1);
	else
		map_update(&resent, &c, &one, BPF_ANY);
	return 0;
}
