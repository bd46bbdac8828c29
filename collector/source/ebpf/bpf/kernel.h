/* What BPF programs need of the kernel, written by hand so that neither its headers nor libbpf's
 * are needed: helpers by their numbers (include/uapi/linux/bpf.h), map definitions as loaders read
 * them from BTF, the registers of a probed call, and of kernel structures the few fields that are
 * read, relocated when loaded (CO-RE). */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef int s32;
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define KERNEL __attribute__((preserve_access_index))

#define UINT(name, value) int(*name)[value]
#define TYPE(name, type) typeof(type) *name
enum { MAP_HASH = 1, MAP_ARRAY = 2, MAP_PERCPU_ARRAY = 6, MAP_LRU_HASH = 9, MAP_RINGBUF = 27 };
enum { BPF_ANY = 0, BPF_NOEXIST = 1 };

static void *(*const map_lookup)(void *map, const void *key) = (void *)1;
static long (*const map_update)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*const map_delete)(void *map, const void *key) = (void *)3;
static u64 (*const ktime_ns)(void) = (void *)5;
static u64 (*const pid_tgid)(void) = (void *)14;
static long (*const read_user)(void *dst, u32 size, const void *from) = (void *)112;
static long (*const read_kernel)(void *dst, u32 size, const void *from) = (void *)113;
static void *(*const ringbuf_reserve)(void *ring, u64 size, u64 flags) = (void *)131;
static void (*const ringbuf_submit)(void *data, u64 flags) = (void *)132;
static u64 (*const attach_cookie)(void *ctx) = (void *)174;

/* READ reads a field of a kernel structure, relocated. */
#define READ(dst, from) read_kernel(&(dst), sizeof(dst), __builtin_preserve_access_index(&(from)))

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	u64 r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, orig_rax, rip, cs, eflags, rsp, ss;
};
#define SP(ctx) ((ctx)->rsp)
#define RESULT(ctx) ((ctx)->rax)

/* stack_word reads one of the words above the return address. */
INLINE u64 stack_word(struct pt_regs *ctx, u32 i)
{
	u64 w = 0;
	read_user(&w, sizeof w, (void *)(ctx->rsp + 8 + 8 * i));
	return w;
}

INLINE u64 arg(struct pt_regs *ctx, u32 i)
{
	switch (i) {
	case 0: return ctx->rdi;
	case 1: return ctx->rsi;
	case 2: return ctx->rdx;
	case 3: return ctx->rcx;
	case 4: return ctx->r8;
	case 5: return ctx->r9;
	}
	return stack_word(ctx, (i - 6) & 7);
}
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
	u64 regs[31], sp, pc, pstate;
};
#define SP(ctx) ((ctx)->sp)
#define RESULT(ctx) ((ctx)->regs[0])

INLINE u64 arg(struct pt_regs *ctx, u32 i)
{
	switch (i) {
	case 0: return ctx->regs[0];
	case 1: return ctx->regs[1];
	case 2: return ctx->regs[2];
	case 3: return ctx->regs[3];
	case 4: return ctx->regs[4];
	case 5: return ctx->regs[5];
	case 6: return ctx->regs[6];
	}
	return ctx->regs[7];
}
#else
#error "no calling convention is known for this machine"
#endif
