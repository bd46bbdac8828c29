// What Lockstep uses of libibverbs' binary interface, version IBVERBS_1.1, which
// has not changed since 2009 but for additions. Names are those of
// <infiniband/verbs.h> with vb_ for ibv_; a test compares sizes, offsets and
// values with that header where it is installed. A struct that the library
// allocates is declared as far as its last member that is used here.
#ifndef LOCKSTEP_VERBS_ABI_H
#define LOCKSTEP_VERBS_ABI_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { VB_QPT_RC = 2 };
enum { VB_QPS_RESET, VB_QPS_INIT, VB_QPS_RTR, VB_QPS_RTS, VB_QPS_SQD, VB_QPS_SQE, VB_QPS_ERR };
enum { VB_PORT_DOWN = 1, VB_PORT_ACTIVE = 4 };
enum { VB_LINK_LAYER_INFINIBAND = 1, VB_LINK_LAYER_ETHERNET = 2 };
enum { VB_GID_TYPE_IB, VB_GID_TYPE_ROCE_V1, VB_GID_TYPE_ROCE_V2 };
enum { VB_WR_RDMA_WRITE, VB_WR_RDMA_WRITE_WITH_IMM };
enum { VB_SEND_SIGNALED = 1 << 1, VB_SEND_INLINE = 1 << 3 };
enum { VB_ACCESS_LOCAL_WRITE = 1, VB_ACCESS_REMOTE_WRITE = 2, VB_ACCESS_REMOTE_READ = 4, VB_ACCESS_REMOTE_ATOMIC = 8, VB_ACCESS_RELAXED_ORDERING = 1 << 20 };
#define VB_ACCESS_OPTIONAL_RANGE 0x3ff00000u
enum { VB_WC_SUCCESS = 0, VB_WC_LOC_PROT_ERR = 4, VB_WC_WR_FLUSH_ERR = 5, VB_WC_REM_ACCESS_ERR = 10, VB_WC_RETRY_EXC_ERR = 12, VB_WC_RNR_RETRY_EXC_ERR = 13 };
enum { VB_WC_RDMA_WRITE = 1, VB_WC_RECV = 1 << 7, VB_WC_RECV_RDMA_WITH_IMM };
enum { VB_WC_WITH_IMM = 1 << 1 };
enum {
	VB_EVENT_CQ_ERR, VB_EVENT_QP_FATAL, VB_EVENT_QP_REQ_ERR, VB_EVENT_QP_ACCESS_ERR, VB_EVENT_COMM_EST, VB_EVENT_SQ_DRAINED, VB_EVENT_PATH_MIG,
	VB_EVENT_PATH_MIG_ERR, VB_EVENT_DEVICE_FATAL, VB_EVENT_PORT_ACTIVE, VB_EVENT_PORT_ERR, VB_EVENT_LID_CHANGE, VB_EVENT_PKEY_CHANGE,
	VB_EVENT_SM_CHANGE, VB_EVENT_SRQ_ERR, VB_EVENT_SRQ_LIMIT_REACHED, VB_EVENT_QP_LAST_WQE_REACHED, VB_EVENT_CLIENT_REREGISTER, VB_EVENT_GID_CHANGE,
};
enum {
	VB_QP_STATE = 1 << 0, VB_QP_ACCESS_FLAGS = 1 << 3, VB_QP_PKEY_INDEX = 1 << 4, VB_QP_PORT = 1 << 5, VB_QP_AV = 1 << 7, VB_QP_PATH_MTU = 1 << 8,
	VB_QP_TIMEOUT = 1 << 9, VB_QP_RETRY_CNT = 1 << 10, VB_QP_RNR_RETRY = 1 << 11, VB_QP_RQ_PSN = 1 << 12, VB_QP_MAX_QP_RD_ATOMIC = 1 << 13,
	VB_QP_MIN_RNR_TIMER = 1 << 15, VB_QP_SQ_PSN = 1 << 16, VB_QP_MAX_DEST_RD_ATOMIC = 1 << 17, VB_QP_DEST_QPN = 1 << 20,
};

union vb_gid {
	uint8_t raw[16];
	uint64_t align[2];
};

struct vb_gid_entry {
	union vb_gid gid;
	uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};

struct vb_device;

struct vb_device_attr {
	char fw_ver[64];
	uint64_t node_guid, sys_image_guid; // big endian
	uint64_t max_mr_size, page_size_cap;
	uint32_t vendor_id, vendor_part_id, hw_ver;
	int max_qp, max_qp_wr;
	unsigned device_cap_flags;
	int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
	int unused[20]; // max_qp_rd_atom to max_srq_sge
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct vb_port_attr {
	uint32_t state, max_mtu, active_mtu;
	int gid_tbl_len;
	uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
	uint16_t pkey_tbl_len, lid, sm_lid;
	uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags;
	uint16_t port_cap_flags2;
	uint32_t active_speed_ex; // since 2025; 0 from older libraries
};

struct vb_wc {
	uint64_t wr_id;
	uint32_t status, opcode, vendor_err, byte_len;
	uint32_t imm_data; // big endian
	uint32_t qp_num, src_qp, wc_flags;
	uint16_t pkey_index, slid;
	uint8_t sl, dlid_path_bits;
};

struct vb_sge {
	uint64_t addr;
	uint32_t length, lkey;
};

struct vb_send_wr {
	uint64_t wr_id;
	struct vb_send_wr *next;
	struct vb_sge *sg_list;
	int num_sge;
	uint32_t opcode, send_flags;
	uint32_t imm_data; // big endian
	struct {
		uint64_t remote_addr;
		uint32_t rkey;
	} rdma;
	uint64_t unused[9]; // the rest of the union, XRC, memory windows, TSO
};

struct vb_recv_wr {
	uint64_t wr_id;
	struct vb_recv_wr *next;
	struct vb_sge *sg_list;
	int num_sge;
};

struct vb_context;
struct vb_cq;
struct vb_qp;

struct vb_context_ops {
	void *unused0[11];
	int (*poll_cq)(struct vb_cq *, int, struct vb_wc *);
	int (*req_notify_cq)(struct vb_cq *, int solicited_only);
	void *unused1[12];
	int (*post_send)(struct vb_qp *, struct vb_send_wr *, struct vb_send_wr **bad);
	int (*post_recv)(struct vb_qp *, struct vb_recv_wr *, struct vb_recv_wr **bad);
	void *unused2[5];
};

struct vb_context {
	struct vb_device *device;
	struct vb_context_ops ops;
	int cmd_fd, async_fd, num_comp_vectors;
	pthread_mutex_t mutex;
	void *abi_compat; // VB_ABI_EXTENDED: the context lies within a vb_verbs_context
};
#define VB_ABI_EXTENDED ((void *)UINTPTR_MAX)

// Newer libraries add members in front, and count them in sz.
struct vb_verbs_context {
	int (*query_port)(struct vb_context *, uint8_t, struct vb_port_attr *, size_t);
	void *unused[37];
	uint64_t placeholder;
	size_t sz;
	struct vb_context context;
};

struct vb_pd {
	struct vb_context *context;
	uint32_t handle;
};

struct vb_mr {
	struct vb_context *context;
	struct vb_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
};

struct vb_comp_channel {
	struct vb_context *context;
	int fd, refcnt;
};

struct vb_cq {
	struct vb_context *context;
	struct vb_comp_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
};

struct vb_qp_cap {
	uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct vb_qp_init_attr {
	void *qp_context;
	struct vb_cq *send_cq, *recv_cq;
	void *srq;
	struct vb_qp_cap cap;
	uint32_t qp_type;
	int sq_sig_all;
};

struct vb_ah_attr {
	struct {
		union vb_gid dgid;
		uint32_t flow_label;
		uint8_t sgid_index, hop_limit, traffic_class;
	} grh;
	uint16_t dlid;
	uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct vb_qp_attr {
	uint32_t qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags;
	struct vb_qp_cap cap;
	struct vb_ah_attr ah_attr, alt_ah_attr;
	uint16_t pkey_index, alt_pkey_index;
	uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
	uint32_t rate_limit;
};

struct vb_qp {
	struct vb_context *context;
	void *qp_context;
	struct vb_pd *pd;
	struct vb_cq *send_cq, *recv_cq;
	void *srq;
	uint32_t handle, qp_num, state, qp_type;
};

struct vb_async_event {
	union {
		struct vb_cq *cq;
		struct vb_qp *qp;
		int port_num;
	} element;
	uint32_t event_type;
};

#endif
